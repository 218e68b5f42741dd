"""What emitters planned of a kernel's launches: what the model of pipelines is told, and what becomes of it by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_ext._tvm import Node, PrimFunc, Stmt, structural_map, structural_walk, tirx
from tvm_ext.cost.mma_model import SPARE_REGISTERS
from tvm_ext.devices.gpu import REGISTER_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.ir.simt_ir import MIN_BLOCKS_PER_UNIT
from tvm_ext.records.choice import GpuPlan
from tvm_ext.records.pipelines import PipelinePlan
from tvm_ext.support.arithmetic import ceil_div

from .analyse import REGISTER_LEVEL, SHARED_LEVEL
from .fragment_functions import APPLIED
from .function import Function
from .loops import allocations_of, buffer_bytes, bytes_per_element, is_shared, size_of


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
    found: list[bool] = []

    def visit(node: Node) -> None:
        if node.same_as(statement):
            found.append(True)

    structural_walk(launch, [(tirx.AttrStmt, visit)], order="pre")
    return bool(found)


def _shared_bytes(launch: Stmt) -> int:
    return sum(buffer_bytes(s.buffer) for s in allocations_of(launch) if is_shared(s.buffer))


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
