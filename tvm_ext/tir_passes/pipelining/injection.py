"""A plan carried out: the function's loops with their loads moved ahead, then lowered for the device (ALCOP §3).

What the primitives become as instructions of a target:

====================  ================================  ====================
primitive             cp.async (sm_80 and later)        through registers
====================  ================================  ====================
producer_acquire      a barrier, where what runs before the pipeline used the memory; else nothing
producer_commit       cp.async.commit_group             nothing
consumer_wait n       cp.async.wait_group n; barrier    barrier
consumer_release      nothing: the barrier of the next wait says it
====================  ================================  ====================

Loads by way of a thread's own registers are made one statement (`group_loads`): what fills these belongs to the load.
``AllocBuffer(r); for v: r[v] = A[..]; for e: S[..] = r[e]`` are three statements of a loop's body where a copy takes
one round, and one (a loop over the rounds) where it takes several. Detection asks which statement loads S; here that is
one statement in both cases, held together by an attribute until the function is lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tvm_ext._tvm import AllocBuffer, Buffer, Call, For, PrimFunc, SBlock, Stmt, ir, nodes_in, structural_map, tirx
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.ir.build_ir import rename_apart
from tvm_ext.records.pipelines import PIPELINE_PLAN, PipelinedBuffer, PipelinePlan

from .analyse import REGISTER_LEVEL, SHARED_LEVEL, LoadUse, find_load_use, fuses_with
from .function import Function
from .loops import accesses_of, bytes_per_element, is_register, is_shared, op_name, scope_of, size_of, to_loops
from .lower_bulk import BulkPipeline, lower_bulk_primitives, with_bulk_copies
from .plan import make_loader, move_functions
from .primitives import read_primitive
from .transform import LoadedBuffer, Pipeline, Transformer, loaded_buffer
from .versions import version_elements

TOGETHER = "tvm_ext.loaded_together"
"""Attribute around the statements that were made one."""


def group_loads(body: Stmt) -> Stmt:
    """``body``, its loads by way of registers each one statement."""
    return structural_map(ungroup_loads(body), (tirx.SeqStmt, _grouped))


def ungroup_loads(body: Stmt) -> Stmt:
    """The inverse of `group_loads`."""
    return structural_map(body, (tirx.AttrStmt, lambda node: node.body if node.attr_key == TOGETHER else node))


def _grouped(sequence: Stmt) -> Stmt:
    statements = list(sequence.seq)
    for allocation in list(statements):
        if isinstance(allocation, AllocBuffer) and is_register(allocation.buffer):
            statements = _with_group(statements, allocation)
    if len(statements) == len(sequence.seq):
        return sequence
    return statements[0] if len(statements) == 1 else tirx.stmt_seq(*statements)


def _with_group(statements: list[Stmt], allocation: Stmt) -> list[Stmt]:
    """``statements`` with the ``allocation`` and all that uses it as one, if that is a load of shared memory."""
    register = allocation.buffer
    users = [position for position, statement in enumerate(statements) if _uses(statement, register)]
    if len(users) < 2 or users[-1] - users[0] != len(users) - 1:
        return statements
    members = statements[users[0] : users[-1] + 1]
    if not _is_load(members, register):
        return statements
    zero = tirx.IntImm("int32", 0)
    one = tirx.AttrStmt(zero, TOGETHER, zero, tirx.stmt_seq(allocation, *members))
    rest = [*statements[: users[0]], one, *statements[users[-1] + 1 :]]
    return [statement for statement in rest if not statement.same_as(allocation)]


def _uses(statement: Stmt, register: Buffer) -> bool:
    return any(access.buffer is not None and access.buffer.same_as(register) for access in accesses_of(statement))


def _is_load(statements: list[Stmt], register: Buffer) -> bool:
    """Whether ``statements`` write ``register`` and one buffer in shared memory, and read no shared memory."""
    accesses = [access for statement in statements for access in accesses_of(statement)]
    if any(access.buffer is None or not access.is_known for access in accesses):
        return False
    written = [access.buffer for access in accesses if access.writes and not access.buffer.same_as(register)]
    reads_shared = any(access.reads and is_shared(access.buffer) for access in accesses)
    return bool(written) and not reads_shared and all(is_shared(b) and b.same_as(written[0]) for b in written)


COMMIT, WAIT, BARRIER = "tirx.ptx.cp_async_commit_group", "tirx.ptx.cp_async_wait_group", "tirx.tvm_storage_sync"


def lower_primitives(body: Stmt, asynchronous: dict[int, bool], scopes: dict[int, str]) -> Stmt:
    """``body`` with every primitive lowered; by pipeline number, whether it uses cp.async, and its memory's scope."""

    def visit(statement: Stmt) -> Stmt:
        found = read_primitive(statement)
        if found is None:
            return statement
        kind, number, argument = found
        if kind == "producer_commit" and asynchronous[number]:
            return _ptx(COMMIT, "commit_group")
        if kind == "consumer_wait":
            barrier = _barrier(scopes[number])
            return tirx.stmt_seq(_ptx(WAIT, "wait_group", argument), barrier) if asynchronous[number] else barrier
        if kind == "producer_acquire" and argument:
            return _barrier(scopes[number])
        return tirx.Evaluate(tirx.IntImm("int32", 0))

    return flattened(structural_map(body, (tirx.Evaluate, visit)))


def flattened(body: Stmt) -> Stmt:
    """``body`` without sequences in sequences and without statements that do nothing."""

    def visit(statement: Stmt) -> Stmt:
        kept = [s for s in statement.seq if not (isinstance(s, tirx.Evaluate) and isinstance(s.value, tirx.IntImm))]
        return tirx.stmt_seq(*kept) if len(kept) > 1 else kept[0] if kept else tirx.Evaluate(tirx.IntImm("int32", 0))

    return structural_map(body, (tirx.SeqStmt, visit))


def _barrier(scope: str) -> Stmt:
    return tirx.Evaluate(Call(ir.Op.get(BARRIER), [ir.StringImm(scope)], ret_ty=ir.PrimType("int32")))


def _ptx(name: str, instruction: str, *operands: int) -> Stmt:
    """``cp.async.<instruction>``: TVM's PTX operators take operands, then modifiers, then flags (none here)."""
    words = [ir.StringImm(word) for word in ("async", instruction, "")]
    values = [*(tirx.IntImm("int32", operand) for operand in operands), *words]
    return tirx.Evaluate(Call(ir.Op.get(name), values, ret_ty=ir.PrimType("void")))


def grouped_loops(func: PrimFunc) -> PrimFunc:
    """The form that detection and transformation look at."""
    loops = to_loops(func)
    return loops.with_body(group_loads(loops.body))


def by_bulk_copies(function: Function, plan: PipelinePlan, device: DeviceSpec) -> PipelinePlan:
    """``plan`` by bulk copies in the loops where they are legal; its notes say why not, of the others."""
    function = move_functions(function, plan.moved)
    _, bulk, reasons = with_bulk_copies(_pipelines(function, plan, device), function, device)
    return replace(plan, bulk_copies=bool(bulk), notes=(*plan.notes, *reasons))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How the primitives of each pipeline are lowered, by its number."""

    asynchronous: Mapping[int, bool]
    scopes: Mapping[int, str]
    bulk: Mapping[int, BulkPipeline] = field(default_factory=dict)


def with_primitives(
    func: PrimFunc, plan: PipelinePlan, device: DeviceSpec, loops: PrimFunc | None = None
) -> tuple[PrimFunc, Lowering]:
    """``func`` transformed, synchronised by the four primitives, and how they are to be lowered.

    ``loops`` is what `to_loops` made of it, where that is at hand.
    """
    if loops is None:
        loops = grouped_loops(without_stock_pipelines(func) if plan.replaces_stock else func)
    function = move_functions(Function(loops), plan.moved)
    pipelines = _pipelines(function, plan, device)
    bulk: dict[int, BulkPipeline] = {}
    if plan.bulk_copies:
        pipelines, bulk, _ = with_bulk_copies(pipelines, function, device)
    body = Transformer(pipelines, unroll_hint=device.kind != "rocm").rewrite(function.body)
    staged = function.func.with_body(body).without_attr(PIPELINE_PLAN)
    shared = [p for p in pipelines if p.buffers[0].loader is not None]
    lowering = Lowering(
        asynchronous={p.number: not any(s.loader is not None and s.loader.is_late for s in p.buffers) for p in shared},
        scopes={p.number: str(p.buffers[0].versions.new.ty.storage_scope) for p in shared},
        bulk=bulk,
    )
    return staged, lowering


def lowered(func: PrimFunc, lowering: Lowering) -> PrimFunc:
    """``func`` with its primitives as instructions of the target."""
    body = lower_bulk_primitives(ungroup_loads(func.body), lowering.bulk)
    body = lower_primitives(body, dict(lowering.asynchronous), dict(lowering.scopes))
    return rename_apart(func.with_body(body))


def _pipelines(function: Function, plan: PipelinePlan, device: DeviceSpec) -> list[Pipeline]:
    """One for each loop of shared memory, with the register pipeline that runs on inside it, or beside it."""
    found = [(buffer, _load_use(function, buffer)) for buffer in plan.buffers]
    shared = _by_loop([(planned, use) for planned, use in found if planned.level == SHARED_LEVEL])
    registers = _by_loop([(planned, use) for planned, use in found if planned.level == REGISTER_LEVEL])
    scope = _scope_for(function, plan, device)
    pipelines: list[Pipeline] = []
    fused: list[PlannedLoads] = []
    for members in shared:
        outer = [use for _, use in members]
        inner = next((g for g in registers if fuses_with([use for _, use in g], outer, function) is None), None)
        inner_pipeline = None
        if inner is not None:
            fused.append(inner)
            inner_pipeline = _register_pipeline(len(shared) + len(fused), inner)
        pipelines.append(_shared_pipeline(len(pipelines), members, inner_pipeline, function, device, scope))
    alone = [group for group in registers if not any(group is other for other in fused)]
    pipelines += [_register_pipeline(2 * len(shared) + 1 + position, group) for position, group in enumerate(alone)]
    return pipelines


PlannedLoads = list[tuple[PipelinedBuffer, LoadUse]]


def _load_use(function: Function, planned: PipelinedBuffer) -> LoadUse:
    if planned.name not in function.buffers:
        raise InputError(f"the plan pipelines {planned.name}, which the function does not allocate", "plan it again")
    try:
        return find_load_use(function, planned.name)
    except IllegalRewrite as refusal:
        raise InputError(f"the plan pipelines {planned.name}, but {refusal.problem}", "plan it again") from refusal


def _by_loop(members: PlannedLoads) -> list[PlannedLoads]:
    groups: list[PlannedLoads] = []
    for planned, use in members:
        group = next((g for g in groups if g[0][1].loop.same_as(use.loop)), None)
        if group is None:
            groups.append([(planned, use)])
        else:
            group.append((planned, use))
    return groups


def _shared_pipeline(
    number: int,
    members: PlannedLoads,
    inner: Pipeline | None,
    function: Function,
    device: DeviceSpec,
    scope: str | None,
) -> Pipeline:
    loop = members[0][1].loop
    return Pipeline(
        number=number,
        loop=loop,
        buffers=tuple(_loaded(planned, use, function, device, scope) for planned, use in members),
        inner=inner,
        entry_barrier=function.may_follow_shared(loop),
    )


def _loaded(
    planned: PipelinedBuffer, use: LoadUse, function: Function, device: DeviceSpec, scope: str | None
) -> LoadedBuffer:
    try:
        loader = make_loader(function, use, device)
    except IllegalRewrite as refusal:
        raise InputError(
            f"the plan pipelines {planned.name}, but {refusal.problem}", "plan it for this device"
        ) from refusal
    return loaded_buffer(use, planned.stages, loader, scope)


def _register_pipeline(number: int, members: PlannedLoads) -> Pipeline:
    return Pipeline(
        number=number,
        loop=members[0][1].loop,
        buffers=tuple(loaded_buffer(use, planned.stages) for planned, use in members),
    )


def _scope_for(function: Function, plan: PipelinePlan, device: DeviceSpec) -> str | None:
    """``"shared.dyn"`` where a kernel's static shared memory would not do; None: as it is."""
    static = static_shared_bytes(device)
    if shared_limit_bytes(device) <= static:
        return None
    versions = {buffer.name: buffer.stages for buffer in plan.buffers}
    for launch in function.launches or [function.body]:
        total = 0
        for name, allocation in function.buffers.items():
            buffer = allocation.buffer
            if scope_of(buffer) == "shared" and function.is_in(launch, allocation):
                elements = version_elements(buffer) * versions[name] if name in versions else size_of(buffer) or 0
                total += elements * bytes_per_element(str(buffer.ty.dtype))
        if total > static:
            return "shared.dyn"
    return None


# --- Pipelines that somebody else has put into a kernel: how they show, and a schedule without stock TVM's ------------
LOOP_ANNOTATIONS = ("software_pipeline_stage", "software_pipeline_order", "software_pipeline_async_stages")
BLOCK_ANNOTATIONS = ("double_buffer_scope", "tirx.manifest_shared_memory_local_stage")
"""What dlight writes on a copy to shared memory: two versions, by way of a thread's registers."""


def already_pipelined(func: PrimFunc) -> str | None:
    """What shows that ``func`` (scheduled or not) has been pipelined by someone else; None where nothing does."""
    for node in nodes_in(func.body, (For, tirx.AttrStmt, Call, SBlock), "pre"):
        if isinstance(node, tirx.AttrStmt):
            if str(node.attr_key) in ("async_scope", "async_commit_queue_scope", "async_wait_queue_scope"):
                return "it has asynchronous copies in groups"
        elif isinstance(node, Call):
            if "cp_async" in op_name(node) or "mbarrier" in op_name(node):
                return f"it calls {op_name(node).removeprefix('tirx.')}"
        elif any(key in node.annotations for key in LOOP_ANNOTATIONS):
            what = f"loop {node.loop_var.name}" if isinstance(node, For) else f"block {node.name_hint}"
            return f"{what} has stock TVM's pipeline annotations"
    return None


def without_stock_pipelines(func: PrimFunc) -> PrimFunc:
    """The scheduled ``func`` without stock TVM's pipeline annotations, which are not carried out yet."""

    def loop(node: For) -> Stmt:
        kept = _without(node.annotations, LOOP_ANNOTATIONS)
        if len(kept) == len(node.annotations):
            return node
        return For(node.loop_var, node.min, node.extent, node.kind, node.body, node.thread_binding, kept, node.step)

    def block(node: SBlock) -> Stmt:
        kept = _without(node.annotations, (*LOOP_ANNOTATIONS, *BLOCK_ANNOTATIONS))
        if len(kept) == len(node.annotations):
            return node
        return SBlock(
            node.iter_vars, node.reads, node.writes, node.name_hint, node.body, node.init, node.alloc_buffers,
            node.match_buffers, kept,
        )  # fmt: skip

    return func.with_body(structural_map(func.body, [(For, loop), (SBlock, block)]))


def _without(annotations: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    return {key: annotations[key] for key in annotations.keys() if key not in names}  # noqa: SIM118
