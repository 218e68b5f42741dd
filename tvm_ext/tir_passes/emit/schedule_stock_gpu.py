"""GPU kernels by stock TVM's schedules (dlight), where they leave nothing to the host; else by the stated fallback."""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import (
    AllocBuffer,
    Call,
    DeclBuffer,
    For,
    ForKind,
    IRModule,
    PrimFunc,
    SBlock,
    SBlockRealize,
    Schedule,
    ScheduleError,
    Stmt,
    Target,
    gpu_schedule_rules,
    ir,
    nodes_in,
    s_tir,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.device_code import op_name
from tvm_ext.analysis.predicates import reads_memory, unbounded_reduction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.records.choice import KernelChoice

from ..expressions.exact_floats import keep_floats_outside_reductions, pass_nan_on
from ..expressions.turn_divisions import with_turned_divisions
from .schedule_fallback import data_parallel_loops


def schedule_by_stock(func: PrimFunc, name: str, device: DeviceSpec, reason: str) -> tuple[PrimFunc, KernelChoice]:
    """``func`` by the first of stock TVM's rules whose kernels leave nothing to the host; else by the fallback.

    Raises TargetError where neither makes kernels of it, or it calls what runs on the host alone: as it is, the host
    would reach into the device's memory.
    """
    called = _host_functions(func)
    if called:
        raise TargetError(
            f"operator {name} of {_shapes(func)} calls {called[0]}, a function of the host, which cannot reach the "
            f"memory of {device.name}.",
            "build it for a CPU",
        )
    func = func.with_body(keep_floats_outside_reductions(func.body))
    target = Target.current(allow_none=True) or Target(dict(device.target))
    for rule in gpu_schedule_rules():
        schedule = _apply(rule, func, target)
        if schedule is None or not runs_on_device(schedule.mod["main"]) or _launches_nothing(schedule.mod["main"]):
            continue
        scheduled = _exact(schedule.mod["main"])
        if not unbounded_reduction(scheduled) and not _computes_twice(scheduled) and _can_be_lowered(scheduled):
            notes = (reason, f"stock TVM's dlight.gpu.{type(rule).__name__}")
            return scheduled, KernelChoice(operator=name, path="stock", notes=notes, device=device.name)
    try:
        scheduled, note = schedule_gpu_fallback(func)
    except IllegalRewrite as refusal:
        problem = f"operator {name} of {_shapes(func)} has no kernel for {device.name}: {reason}; none of stock TVM's "
        problem += f"schedules takes it, and the fallback does not: {refusal.problem}."
        raise TargetError(problem, "build it for a CPU") from refusal
    choice = KernelChoice(operator=name, path="fallback", notes=(reason, note), device=device.name)
    return _exact(scheduled), choice


def _exact(func: PrimFunc) -> PrimFunc:
    """``func``, scheduled, with what stock TVM's lowering gets wrong in other words."""
    return with_turned_divisions(func.with_body(pass_nan_on(func.body)))


_HOST_CALLS = ("tirx.tvm_call_packed", "tirx.tvm_call_cpacked", "tirx.tvm_call_packed_lowered")


def _launches_nothing(func: PrimFunc) -> bool:
    """Whether threads are bound to a loop of no turns: TVM's runtime launches one, beyond its tensors."""
    return any(loop.kind == ForKind.THREAD_BINDING and _is_empty(loop) for loop in nodes_in(func.body, For))


def _host_functions(func: PrimFunc) -> list[str]:
    """The packed functions that ``func`` calls: no code of a device calls any."""
    called = [call for call in nodes_in(func.body, Call) if op_name(call) in _HOST_CALLS]
    return [str(getattr(call.args[0], "value", call.args[0])) for call in called]


def _shapes(func: PrimFunc) -> str:
    """The shapes of its parameters, for an error."""
    shapes = [param.ty.shape for param in func.params if hasattr(param.ty, "shape")]
    return ", ".join(f"[{', '.join(str(getattr(size, 'value', size)) for size in shape)}]" for shape in shapes)


def _computes_twice(func: PrimFunc) -> bool:
    """Whether a rule has inlined an epilogue into a sum: stock TVM (0.27) then adds it where it begins, and at a step.

    Worked example: ``matmul + y`` of one step, by dlight's Fallback: ``s = y + 0``, then ``s = y + (s + a * b)``.
    """
    inits: list[Stmt] = []
    structural_walk(func.body, (SBlock, lambda block: inits.append(block.init) if block.init is not None else None))
    return any(map(reads_memory, inits))


def _can_be_lowered(func: PrimFunc) -> bool:
    """Whether stock TVM has a reduction across threads for each that its rule asked for.

    It knows those that begin at finite numbers: none for a maximum that begins at -inf, or passes NaN on, as ours do.
    """
    try:
        s_tir.transform.LowerCrossThreadReduction()(IRModule({"main": func}))
    except (RuntimeError, ValueError):
        return False
    return True


def _apply(rule: Any, func: PrimFunc, target: Target) -> Schedule | None:
    """The rule's schedule of ``func``; None where it does not take it, or cannot carry out what it began."""
    try:
        with target:
            found = rule.apply(func, target, False)
    except (ScheduleError, RuntimeError, ValueError, TypeError, AttributeError, AssertionError):
        return None
    return found[0] if isinstance(found, list) else found


# --- the fallback: a thread for each element of a result --------------------------------------------------------------
THREADS = 128
"""Of a block; assumed, not measured."""


def runs_on_device(func: PrimFunc) -> bool:
    """Whether every block of a scheduled ``func`` lies in threads alone.

    A loop around the threads is one on the host, which launches a kernel for each turn; a block in no thread is
    computed by the host, which cannot reach the device's memory.
    """
    return isinstance(func.body, SBlockRealize) and not _outside_threads(func.body.block.body)


def _outside_threads(statement: Stmt) -> bool:
    """Whether the host has something to do in ``statement``, beyond launching kernels one after the other."""
    if _launches_threads(statement):
        return False
    if isinstance(statement, tirx.SeqStmt):
        return any(_outside_threads(item) for item in statement.seq)
    if isinstance(statement, SBlockRealize):
        return not _launches_threads(statement.block.body)
    if not isinstance(statement, For):
        return True
    if statement.kind == ForKind.THREAD_BINDING or _is_empty(statement):
        return False
    once = isinstance(statement.extent, tirx.IntImm) and int(statement.extent) == 1
    return not once or _outside_threads(statement.body)


def _launches_threads(statement: Stmt) -> bool:
    """Whether ``statement`` is nothing but launches of threads, one after the other: stock TVM's own GPU operators.

    They may lie in loops and conditions of the host (a sort merges longer and longer runs, a launch for each length),
    as long as the host reads no memory for them: what it would read is the device's.
    """
    if isinstance(statement, tirx.SeqStmt):
        # what says something of the launches behind it, and touches no memory: a name, a number, a tensor
        launching = [
            item
            for item in statement.seq
            if not isinstance(item, AllocBuffer | DeclBuffer)
            and not (isinstance(item, tirx.Bind) and not reads_memory(item.value))
        ]
        return bool(launching) and all(_launches_threads(item) for item in launching)
    if isinstance(statement, For):
        return (
            statement.kind == ForKind.SERIAL
            and not reads_memory(statement.extent)
            and _launches_threads(statement.body)
        )
    if isinstance(statement, tirx.IfThenElse):
        other = statement.else_case
        branches = [statement.then_case] if other is None else [statement.then_case, other]
        return not reads_memory(statement.condition) and all(map(_launches_threads, branches))
    if not isinstance(statement, tirx.AttrStmt) or reads_memory(statement.value):
        return False
    inner = statement.body
    if statement.attr_key == "thread_extent" and not (
        isinstance(inner, tirx.AttrStmt) and inner.attr_key == "thread_extent"
    ):
        return True
    return _launches_threads(inner)


def schedule_gpu_fallback(func: PrimFunc) -> tuple[PrimFunc, str]:
    """``func`` with a kernel for each of its blocks, and a sentence that says so.

    Each thread computes one element over the leading data-parallel loops, whatever is below them in order. Blocks that
    launch threads themselves, such as those of stock TVM's scatter_nd, stay as they are, and so do those that have
    nothing to compute.

    Raises IllegalRewrite where the function has no blocks, or blocks that share loops.
    """
    if not isinstance(func.body, SBlockRealize) or not func.attrs.get("s_tir", True):
        raise IllegalRewrite("its body has no blocks to schedule")
    if _launches_threads(func.body.block.body):
        return func, "fallback: launches of its own, as stock TVM wrote them"
    func = func.with_attr("s_tir", True).with_attr("global_symbol", "main")
    # Nodes of its own: stock TVM's Schedule changes loops in place that another function shares.
    schedule = Schedule(ir.load_json(ir.save_json(func)))
    try:
        blocks = schedule.get_child_blocks(schedule.get_sblock("root"))
        for block in blocks:
            is_empty = any(_is_empty(schedule.get(loop)) for loop in schedule.get_loops(block)[:1])
            if not is_empty and not _launches_threads(schedule.get(block).body):
                _bind(schedule, block)
    except (ScheduleError, ValueError, RuntimeError) as error:
        raise IllegalRewrite("stock TVM's schedule does not accept it") from error
    scheduled = schedule.mod["main"].without_attr("global_symbol")
    if not blocks or not runs_on_device(scheduled):
        raise IllegalRewrite("some of its blocks are in no loop that threads can share")
    kernels = f"{len(blocks)} kernel{'s' if len(blocks) > 1 else ''}"
    return scheduled, f"fallback: {kernels} with a thread for each element of a result"


def _is_empty(statement: Stmt) -> bool:
    """Whether ``statement`` is loops of which one has no turns: a split may give a part of no elements."""
    if not isinstance(statement, For):
        return False
    return (isinstance(statement.extent, tirx.IntImm) and int(statement.extent) == 0) or _is_empty(statement.body)


def _bind(schedule: Schedule, block: SBlock) -> None:
    """Blocks and threads over the leading data-parallel loops of ``block``; one thread where it has none."""
    loops, parallel = data_parallel_loops(schedule, block)
    nest = schedule.fuse(*parallel) if parallel else schedule.add_unit_loop(loops[0] if loops else block)
    outer, inner = schedule.split(nest, factors=[None, THREADS])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
