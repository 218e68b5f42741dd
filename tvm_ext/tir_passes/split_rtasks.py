"""Splits scheduled CPU kernels into rTasks (Rammer, §3.1), for co-scheduling with those of other operators.

A kernel is a sequence of loops, the parallel ones outermost. Each parallel loop becomes a step whose iterations are
independent of each other, everything between two of them a step of one iteration; what they pass to each other becomes
a buffer of the schedule. A step's code, its *rKernel*, takes raw data pointers: no tensor is checked at each call, and
the same code serves rTasks of one iteration or of many.

Worked example: ``w = alloc(...); for p in parallel(704): w[...] = ...; for t in parallel(64): out[...] = f(w)`` becomes
two rKernels, ``k0(a, w, begin, end)``: ``for p in range(begin, end)`` and ``k1(w, out, begin, end)``, and a workspace.

What may not be run by another thread or in pieces, or raises errors, stays as it is, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    AllocBuffer,
    Analyzer,
    Buffer,
    Call,
    DeclBuffer,
    Expr,
    For,
    ForKind,
    IRModule,
    PassContext,
    PrimFunc,
    Stmt,
    Var,
    has_effects,
    ir,
    module_pass,
    nodes_in,
    structural_map,
    tirx,
)
from tvm_ext.analysis.computation_exprs import count_operations, itemsize_bytes
from tvm_ext.analysis.computations import dtype_of, mentions, substitute
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import STACK_BYTES, sequence
from tvm_ext.records.choice import CHOICE, FLUSHES_DENORMALS, KernelChoice
from tvm_ext.records.rtask_split import RKERNEL, RTaskSplit, RTaskStep
from tvm_ext.records.serialise import record_of
from tvm_ext.support.kernel_cache import SEALED

from .pipelining.loops import accesses_of, children_of, has_blocks, integer, op_name, to_loops
from .plan.copied_pieces import copied_pieces
from .plan.rkernels import RKernels, check_parameters, with_splits

COUNTER = "int32"
"""The type of the numbers of iterations that rKernels take."""


@module_pass(opt_level=0, name="tvm_ext.SplitRTasks")
class SplitRTasks:
    """Add the rKernels of every scheduled PrimFunc to the module, and tell the function by `RTASKS` of its split.

    Steps of equal structure share an rKernel. The functions themselves stay as they are, for where they are called
    outside a schedule. ``device`` says what an instruction and a core come to.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return with_splits(mod, lambda func, name, kernels: split_rtasks(func, name, self.device, kernels))


def split_rtasks(func: PrimFunc, name: str, device: DeviceSpec, kernels: RKernels) -> RTaskSplit:
    """The steps of ``func``, whose rKernels are added to ``kernels``; or why it is none of rTasks."""
    count = len(func.params)
    try:
        _check(func)
        body = _SteppedBody(to_loops(func) if has_blocks(func.body) else func)
        steps = tuple(body.step(index, name, device, kernels) for index in range(len(body.steps)))
    except IllegalRewrite as refusal:
        return RTaskSplit(param_count=count, refusal=str(refusal))
    if not steps:
        return RTaskSplit(param_count=count, refusal="it computes nothing")
    return RTaskSplit(
        param_count=count,
        steps=steps,
        workspaces=tuple(_size(space.buffer) for space in body.spaces),
        time_s=_core_seconds(func, device),
        pieces=copied_pieces(func),
    )


def _core_seconds(func: PrimFunc, device: DeviceSpec) -> float | None:
    """The model's time of ``func`` on one core, without starting its threads; None where it has none."""
    choice = record_of(func, CHOICE, KernelChoice)
    if choice is None:
        return None
    if choice.expected_s is not None:
        return choice.expected_s * device.unit_count
    return None if choice.program is None else choice.program.work_s()


def _check(func: PrimFunc) -> None:
    """Raise IllegalRewrite with the reason where ``func`` may not be run in pieces by several threads."""
    if func.attrs and func.attrs.get(SEALED):
        raise IllegalRewrite("its code comes from the kernel cache, without loops")
    check_parameters(func)
    for reason in _effects(func.body):
        raise IllegalRewrite(reason)


def _effects(body: Stmt) -> list[str]:
    """What ``body`` does beside computing values."""
    found = ["it checks values at run time, and its error stops the run"] * bool(nodes_in(body, tirx.AssertStmt))
    found += ["it loops until a condition holds"] * bool(nodes_in(body, tirx.While))
    for call in nodes_in(body, Call):
        name = op_name(call)
        if not name or (name not in _HARMLESS and has_effects(call.op)):
            found.append(f"it calls {name or call.op}, of which nothing is known")
    return found


_HARMLESS = {
    "tirx.buffer_data", "tirx.tvm_access_ptr", "tirx.address_of", "tirx.call_llvm_intrin", "tirx.likely",
    "tirx.call_llvm_pure_intrin", "tirx.prefetch",
}  # fmt: skip
"""Calls that look as if they had effects of their own; those of LLVM's intrinsics are instructions."""


# --- a kernel's body --------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _KernelStep:
    """A parallel ``loop``, or the ``statements`` between two of them."""

    statements: list[Stmt]
    loop: For | None = None


class _SteppedBody:
    """A kernel's statements as steps; ``spaces`` are the allocations at its top that become buffers of the schedule."""

    def __init__(self, func: PrimFunc) -> None:
        self.params = list(func.params)
        self.kept = {name: True for name in (FLUSHES_DENORMALS,) if func.attrs and name in func.attrs}
        self.spaces: list[AllocBuffer] = []
        self.preamble: list[Stmt] = []  # names and views, which every step that uses them gets
        self.steps: list[_KernelStep] = []
        for statement in children_of(_at_pointers(func)):
            self._take(statement)
        self._keep_small_spaces()

    def _take(self, statement: Stmt) -> None:
        if isinstance(statement, AllocBuffer):
            self.spaces.append(statement)
        elif isinstance(statement, DeclBuffer):
            self.preamble.append(statement)
        elif isinstance(statement, tirx.Bind):
            if accesses_of(statement.value):
                raise IllegalRewrite("its steps share a value that was read from memory")
            self.preamble.append(statement)
        elif _is_parallel(statement):
            self.steps.append(_KernelStep([statement.body], statement))
        elif not (isinstance(statement, tirx.Evaluate) and integer(statement.value) is not None):
            if not self.steps or self.steps[-1].loop is not None:
                self.steps.append(_KernelStep([]))
            self.steps[-1].statements.append(structural_map(statement, (For, _serial)))

    def _keep_small_spaces(self) -> None:
        """Leave on the stack what only one step of one task uses and fits there."""
        for space in list(self.spaces):
            users = [
                step for step in self.steps if any(buffer.same_as(space.buffer) for buffer, *_ in self._used(step))
            ]
            if not users:
                self.spaces = [other for other in self.spaces if not other.same_as(space)]
            elif len(users) == 1 and users[0].loop is None and _size(space.buffer) < STACK_BYTES:
                users[0].statements.insert(0, space)
                self.spaces = [other for other in self.spaces if not other.same_as(space)]

    @property
    def buffers(self) -> list[Buffer]:
        return [*self.params, *(space.buffer for space in self.spaces)]

    def _used(self, step: _KernelStep) -> list[tuple[Buffer, bool, bool]]:
        """Each buffer that ``step`` accesses, views as what they are views of; whether it reads, whether it writes."""
        found: list[tuple[Buffer, bool, bool]] = []
        for access in accesses_of(sequence(*step.statements)):
            buffer = self._behind(access.buffer)
            for place, (other, reads, writes) in enumerate(found):
                if other.same_as(buffer):
                    found[place] = (other, reads or access.reads, writes or access.writes)
                    break
            else:
                found.append((buffer, access.reads, access.writes))
        return found

    def _behind(self, buffer: Buffer) -> Buffer:
        for statement in self.preamble:
            if isinstance(statement, DeclBuffer) and statement.buffer.same_as(buffer):
                base = statement.data
                if not (isinstance(base, Call) and op_name(base) == "tirx.buffer_data"):
                    raise IllegalRewrite(f"{buffer.name} is a view of something unknown")
                return self._behind(base.args[0])
        return buffer

    def step(self, index: int, name: str, device: DeviceSpec, kernels: RKernels) -> RTaskStep:
        """Step ``index`` of kernel ``name``, its rKernel added to ``kernels``."""
        step = self.steps[index]
        used = self._used(step)
        places, reads, writes = [], [], []
        for position, buffer in enumerate(self.buffers):
            for other, is_read, is_written in used:
                if other.same_as(buffer):
                    places.append(position)
                    reads += [position] if is_read else []
                    writes += [position] if is_written else []
        if not writes:
            raise IllegalRewrite("a step of it writes nothing")
        iterations = 1 if step.loop is None else int(step.loop.extent)
        body = sequence(*step.statements)
        kernel = self._kernel(step, [self.buffers[place] for place in places])
        return RTaskStep(
            kernel=kernels.name_of(kernel, f"{name}_rtask{index}"),
            iterations=iterations,
            buffers=tuple(places),
            reads=tuple(reads),
            writes=tuple(writes),
            alignments=tuple(_alignment(self.buffers[place]) for place in places),
            operations=iterations * _operations_of(body, device.teu_lanes),
        )

    def _kernel(self, step: _KernelStep, buffers: Sequence[Buffer]) -> PrimFunc:
        """The rKernel of ``step`` over ``buffers``: a function of their data pointers and a range of iterations."""
        pointers = [Var(f"{buffer.name}_data", ir.PointerType(ir.PrimType(dtype_of(buffer)))) for buffer in buffers]
        views = [_view(buffer, pointer) for buffer, pointer in zip(buffers, pointers, strict=True)]
        begin, end = Var("begin", COUNTER), Var("end", COUNTER)
        body = sequence(*step.statements)
        if step.loop is not None:
            body = _range_loop(step.loop, begin, end)
        body = sequence(*_needed(self.preamble, body), body)
        declared = [DeclBuffer(view, data=pointer) for view, pointer in zip(views, pointers, strict=True)]
        body = sequence(*declared, substitute(body, list(zip(buffers, views, strict=True))))
        attrs = {"tirx.noalias": True, "s_tir": True, ALREADY_SCHEDULED: True, RKERNEL: True, **self.kept}
        return PrimFunc([*pointers, begin, end], body).with_attrs(attrs)


def _is_parallel(statement: Stmt) -> bool:
    if not isinstance(statement, For) or statement.kind != ForKind.PARALLEL:
        return False
    return integer(statement.min) == 0 and (integer(statement.extent) or 0) > 1


def _serial(loop: For) -> Stmt:
    """``loop``, which lies inside one rTask, on the core that runs it."""
    if loop.kind != ForKind.PARALLEL:
        return loop
    kept = {"annotations": loop.annotations, "step": loop.step}
    return For(loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, loop.body, **kept)


def _range_loop(loop: For, begin: Expr, end: Expr) -> Stmt:
    """Iterations ``begin`` to ``end`` - 1 of the parallel ``loop``, one after another."""
    variable = Var(loop.loop_var.name, COUNTER)
    number = tirx.Cast(dtype_of(loop.loop_var), variable)
    body = substitute(structural_map(loop.body, (For, _serial)), [(loop.loop_var, number)])
    return For(variable, begin, end - begin, ForKind.SERIAL, body)


def _at_pointers(func: PrimFunc) -> Stmt:
    """The body of ``func`` for parameters that begin where their pointers say.

    Stock TVM's scans and sorts take tensors from any element on, whose number is a variable of the tensor's type.
    """
    offsets = [param.ty.elem_offset for param in func.params]
    return substitute(
        func.body, [(offset, tirx.const(0, dtype_of(offset))) for offset in offsets if isinstance(offset, Var)]
    )


def _view(buffer: Buffer, pointer: Var) -> Buffer:
    """``buffer`` as a buffer that is where ``pointer`` says: arguments of a graph may begin at any element."""
    kind = buffer.ty
    return tirx.decl_buffer(
        kind.shape,
        dtype_of(buffer),
        buffer.name,
        data=pointer,
        strides=list(kind.strides) or None,
        data_alignment=_alignment(buffer),
    )


def _alignment(buffer: Buffer) -> int:
    """The multiple of bytes at which an rKernel may expect the buffer to start."""
    return max(int(itemsize_bytes(dtype_of(buffer))), 1)


def _needed(preamble: Sequence[Stmt], body: Stmt) -> list[Stmt]:
    """Those statements of ``preamble`` whose names ``body``, or a later one of them, uses."""
    kept: list[Stmt] = []
    for statement in reversed(preamble):
        name = statement.buffer if isinstance(statement, DeclBuffer) else statement.var
        if mentions([body, *kept], name):
            kept.insert(0, statement)
    return kept


def _size(buffer: Buffer) -> int:
    """Bytes of a buffer of fixed shape; raises IllegalRewrite for another."""
    extents = [integer(extent) for extent in buffer.ty.shape]
    if None in extents or len(buffer.ty.strides):
        raise IllegalRewrite(f"the size of its workspace {buffer.name} is only known at run time")
    return int(itemsize_bytes(dtype_of(buffer)) * prod(extent or 0 for extent in extents))


_UNKNOWN = 1 << 31  # bounds that Analyzer gives for what it knows nothing of lie beyond


def _operations_of(statement: Stmt, lanes: int) -> float:
    """The operations that running ``statement`` takes, ``lanes`` elements of a vectorised loop counting as one.

    Of two branches the longer one counts, of an extent that varies its largest value, of one without a bound 1.
    Worked example: ``for i in range(10): for v in vectorized(32): a[i, v] = b[i, v] + 1`` with 16 lanes has a load and
    an addition 20 times: 40, and what the indices take.
    """
    analyzer = Analyzer()

    def visit(node: Stmt) -> float:
        if isinstance(node, tirx.SeqStmt):
            return sum(visit(part) for part in node.seq)
        if isinstance(node, tirx.IfThenElse):
            other = visit(node.else_case) if node.else_case is not None else 0.0
            return max(visit(node.then_case), other)
        if isinstance(node, For):
            bound = int(analyzer.const_int_bound(node.extent).max_value)
            times = bound if 0 <= bound < _UNKNOWN else 1
            steps = -(-times // lanes) if node.kind == ForKind.VECTORIZED else times
            return steps * visit(node.body)
        if isinstance(node, tirx.AttrStmt | tirx.While):
            return visit(node.body)
        return float(count_operations(node))

    return visit(statement)
