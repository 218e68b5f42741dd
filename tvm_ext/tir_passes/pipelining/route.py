"""The one way of a GPU kernel to its pipelines, for construction, kernel by kernel, and for the passes of a module.

    plan_pipelines ─► PipelinePlan ─► inject_pipelines ─► recorded

`AutoPipeline` is the first step, `InjectPipelines` the other two; `with_pipelines` is all of them at once, for a kernel
that is under construction. Both hand over what the emitter planned (`GpuPlan`), so that they choose the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_ext._tvm import AllocBuffer, Node, PrimFunc, SBlock, Stmt, Target, nodes_in, structural_map, tirx
from tvm_ext.analysis.computation_exprs import count_operations, tensor_bytes
from tvm_ext.analysis.launches import lower
from tvm_ext.cost.mma_model import SPARE_REGISTERS
from tvm_ext.devices.gpu import REGISTER_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit, shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.ir.simt_ir import MIN_BLOCKS_PER_UNIT
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import GpuPlan, KernelChoice
from tvm_ext.records.pipelines import PIPELINE_PLAN, PipelinePlan, PipelineRefusal
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.limits import check_count

from .analyse import REGISTER_LEVEL, SHARED_LEVEL
from .detect import read_hints
from .fragment_functions import APPLIED
from .function import Function
from .injection import (
    already_pipelined,
    by_bulk_copies,
    grouped_loops,
    lowered,
    with_primitives,
    without_stock_pipelines,
)
from .loops import allocations_of, buffer_bytes, bytes_per_element, is_shared, scope_of, size_of
from .plan import Wishes, decide

PIPELINED = "tvm_ext.pipelined"
"""PrimFunc attribute of a transformed function: the `PipelinePlan` that was carried out, as JSON."""


def wishes_of(options: BuildOptions) -> Wishes:
    """What a build's ``options`` ask for."""
    return Wishes(
        mode="none" if options.enable_pipelining is False else options.pipelining,
        shared_stages=options.shared_stages,
        register_stages=options.register_stages,
        always=options.enable_pipelining is True,
        bulk_copies=options.bulk_copies,
    )


def with_pipelines(
    func: PrimFunc, choice: KernelChoice, device: DeviceSpec, wishes: Wishes
) -> tuple[PrimFunc, KernelChoice]:
    """``func``, a thread-bound PrimFunc, with pipelines where ``wishes`` ask and the rules allow; and its record.

    What stock TVM cannot lower to loops stays as it is, and what fits in no version; the record says why.
    """
    if wishes.mode == "none" or not _has_shared_memory(func):
        return func, without_stages(choice)
    try:
        check_count("pipelined_operations", count_operations(func.body), "operations")
        made, plan = pipelined(func, device, wishes, choice.gpu)
    except IllegalRewrite as refusal:
        return func, without_stages(replace(choice, notes=(*choice.notes, f"not pipelined: {refusal.problem}")))
    return made if plan.buffers else func, recorded(choice, made, plan)


def without_stages(choice: KernelChoice) -> KernelChoice:
    """``choice`` of a kernel that loads nothing ahead."""
    return replace(choice, tile=None if choice.tile is None else _staged(choice.tile, PipelinePlan()))


def plan_pipelines(
    func: PrimFunc, device: DeviceSpec, wishes: Wishes | None = None, planned: Sequence[GpuPlan] = ()
) -> PipelinePlan:
    """The plan for one thread-bound PrimFunc, scheduled or not; raises InputError as `AutoPipeline` does.

    ``planned`` is what an emitter planned of its launches; without, registers are estimated from the buffers in them.
    """
    return _planned(func, device, wishes or Wishes(), planned)[0]


def inject_pipelines(
    func: PrimFunc, plan: PipelinePlan, device: DeviceSpec, planned: Sequence[GpuPlan] = ()
) -> PrimFunc:
    """``func`` with ``plan`` carried out for ``device``; unchanged but for its attributes where nothing is planned."""
    return _injected(func, plan, device, planned, None)


def pipelined(
    func: PrimFunc, device: DeviceSpec, wishes: Wishes, planned: Sequence[GpuPlan] = ()
) -> tuple[PrimFunc, PipelinePlan]:
    """Both steps at once for one function, which is lowered to loops but once."""
    plan, loops = _planned(func, device, wishes, planned)
    return _injected(func, plan, device, planned, loops), plan


def recorded(choice: KernelChoice, made: PrimFunc, plan: PipelinePlan) -> KernelChoice:
    """``choice`` of a kernel that became ``made`` by ``plan``."""
    tile = None if choice.tile is None else _staged(choice.tile, plan)
    if not plan.buffers:
        return replace(choice, pipeline=plan, tile=tile)
    notes = (*choice.notes, f"loaded ahead: {plan}")
    return replace(choice, notes=notes, pipeline=plan, gpu=with_versions(choice.gpu, made, plan), tile=tile)


def _staged(tile: GpuTile, plan: PipelinePlan) -> GpuTile:
    """``tile`` with the versions that its buffers have."""

    def most(level: int) -> int:
        return max((buffer.stages for buffer in plan.buffers if buffer.level == level), default=1)

    shared = most(SHARED_LEVEL)
    return replace(tile, shared_stages=shared, register_stages=most(REGISTER_LEVEL) if shared > 1 else 1)


def _planned(
    func: PrimFunc, device: DeviceSpec, wishes: Wishes, planned: Sequence[GpuPlan]
) -> tuple[PipelinePlan, PrimFunc | None]:
    """The plan, and the function as loops, where it got so far."""
    hints = read_hints(func)
    replaces = False
    done = already_pipelined(func)
    if done is not None and wishes.replace_stock and wishes.mode != "none":
        func, replaces = without_stock_pipelines(func), True
        done = already_pipelined(func)
    if done is not None:
        if hints:
            raise InputError(
                f"{done}, and tvm_ext.pipeline_stages asks for another pipeline of {', '.join(hints)}",
                "remove one of the two, or pass replace_stock=True",
            )
        refusal = PipelineRefusal(buffer="*", scope="", rule="already pipelined", reason=f"{done}: left as it is")
        return PipelinePlan(refusals=(refusal,)), None
    if hints:
        wishes = replace(wishes, by_buffer=hints)
    loops = grouped_loops(func)
    plan = replace(decide(Function(loops), device, wishes, registers_by_launch(planned)), replaces_stock=replaces)
    if wishes.bulk_copies and plan.buffers:
        plan = by_bulk_copies(Function(loops), plan, device)
    return plan, loops


def _injected(
    func: PrimFunc, plan: PipelinePlan, device: DeviceSpec, planned: Sequence[GpuPlan], loops: PrimFunc | None
) -> PrimFunc:
    if not plan.buffers:
        return func.without_attr(PIPELINE_PLAN).with_attr(PIPELINED, to_json(plan))
    staged, lowering = with_primitives(func, plan, device, loops)
    made = lowered(staged, lowering).with_attr(PIPELINED, to_json(plan))
    return with_fewer_blocks(made, with_versions(planned, made, plan), device) if planned else made


def _has_shared_memory(func: PrimFunc) -> bool:
    in_blocks = [buffer for block in nodes_in(func.body, SBlock) for buffer in block.alloc_buffers]
    return any(map(is_shared, (*in_blocks, *(node.buffer for node in nodes_in(func.body, AllocBuffer)))))


# --- What emitters planned of a kernel's launches: what the model of pipelines is told, and what becomes of it by them
def registers_by_launch(plans: Sequence[GpuPlan]) -> tuple[int, ...]:
    """Registers of a thread of each launch, as planned for the largest launch of its group of computations."""
    return tuple(plan.register_count for plan in plans for _ in range(plan.launches))


def with_versions(plans: Sequence[GpuPlan], made: PrimFunc, pipeline: PipelinePlan) -> tuple[GpuPlan, ...]:
    """What the emitters planned, with the memory of all versions; each plan is of as many launches as it says."""
    launches = Function(made).launches
    if sum(plan.launches for plan in plans) != len(launches):
        return tuple(plans)
    found, first = [], 0
    for plan in plans:
        own = launches[first : first + plan.launches]
        first += plan.launches
        shared = max((_shared_bytes(launch) for launch in own), default=0)
        extra = max((_registers(launch, pipeline, plan.threads) for launch in own), default=0)
        found.append(replace(plan, shared_bytes=shared, register_count=plan.register_count + extra))
    return tuple(found)


def with_fewer_blocks(made: PrimFunc, plans: Sequence[GpuPlan], device: DeviceSpec) -> PrimFunc:
    """``made``, telling ptxas for each launch to fit no more blocks into a unit than its versions leave room for.

    Worked example, sm_80: 192 threads of 56 registers were told to be 4 blocks; with 104 registers they are 3, for 4
    would leave 80 registers each, and spill the rest.
    """
    least = [_blocks_that_fit(plan, device) for plan in plans for _ in range(plan.launches)]
    launches = Function(made).launches
    if len(least) != len(launches):
        return made

    def visit(node: Node) -> Stmt:
        if node.attr_key != MIN_BLOCKS_PER_UNIT:
            return node
        own = next((n for n, launch in zip(least, launches, strict=True) if _contains(launch, node)), None)
        blocks = int(node.value) if own is None else min(int(node.value), own)
        return tirx.AttrStmt(node.node, node.attr_key, tirx.const(blocks, "int32"), node.body)

    return made.with_body(structural_map(made.body, (tirx.AttrStmt, visit)))


def _blocks_that_fit(plan: GpuPlan, device: DeviceSpec) -> int:
    registers = plan.register_count + SPARE_REGISTERS
    use = BlockUse(threads=plan.threads, registers=registers, shared_bytes=plan.shared_bytes)
    return max(1, blocks_per_unit(use, device))


def _contains(launch: Stmt, statement: Stmt) -> bool:
    return any(node.same_as(statement) for node in nodes_in(launch, tirx.AttrStmt))


def _shared_bytes(launch: Stmt) -> int:
    return sum(buffer_bytes(s.buffer) for s in allocations_of(launch) if is_shared(s.buffer))


def refuse_too_much_memory(func: PrimFunc, device: DeviceSpec) -> None:
    """Raise IllegalRewrite where a kernel of ``func``, thread-bound, has more shared memory than a block may have.

    LLVM's AMD back end ends the process there. Stock StorageRewrite lets buffers share a place: what would be too much
    for a place each is lowered.
    """
    if _fits(func.body, device):
        return
    for kernel in lower(func, Target.current(allow_none=True) or device):
        if not _fits(kernel.function.body, device):
            raise IllegalRewrite(f"{kernel.name}: its tiles in shared memory exceed a block's share of {device.name}")


def _fits(body: Stmt, device: DeviceSpec) -> bool:
    buffers = [allocation.buffer for allocation in allocations_of(body) if is_shared(allocation.buffer)]
    static = sum(tensor_bytes(buffer) for buffer in buffers if scope_of(buffer) == "shared")
    return static <= static_shared_bytes(device) and sum(map(tensor_bytes, buffers)) <= shared_limit_bytes(device)


def _registers(launch: Stmt, pipeline: PipelinePlan, threads: int) -> int:
    """Registers of a thread beyond one version of each: further fragments, fragments that a function has been applied
    to, and what is on its way to shared memory.
    """
    buffers = [statement.buffer for statement in allocations_of(launch)]
    names = {str(buffer.name) for buffer in buffers}
    applied = [buffer for buffer in buffers if str(buffer.name).endswith(APPLIED)]
    total = sum(
        -(-(size_of(buffer) or 0) * bytes_per_element(str(buffer.ty.dtype)) // REGISTER_BYTES) for buffer in applied
    )
    for planned in pipeline.buffers:
        if planned.name not in names:
            continue
        if planned.level == REGISTER_LEVEL:
            total += (planned.stages - 1) * ceil_div(planned.tile_bytes, REGISTER_BYTES)
        elif planned.level == SHARED_LEVEL and planned.copy_bytes is None:
            total += ceil_div(planned.tile_bytes, threads * REGISTER_BYTES)
    return total
