"""What ALCOP's model asks of a kernel (paper §4, Table 1), counted in its loops: bytes, operations, trips."""

from __future__ import annotations

from dataclasses import replace

from tvm_ext.cost.pipeline_workload import PipelineWorkload, blocks_per_unit, shared_bytes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import GLOBAL
from tvm_ext.support.arithmetic import ceil_div

from .count_statements import Counts, extent_of
from .detect import LoadGroup
from .function import Function
from .loops import buffer_bytes, is_shared
from .versions import version_bytes


def workload_of(
    function: Function, group: LoadGroup, device: DeviceSpec, planned_registers: int | None = None
) -> PipelineWorkload:
    """What one threadblock does in the loop of ``group``, in the canonical ``function``, and how many blocks there are.

    ``planned_registers`` of a thread are the emitter's; without, they are estimated from the buffers in registers.

    Worked example, tiles of 128 x 128 x 64 in halves by eight warps of 64 x 32, mma.m16n8k16: 32 KiB are loaded in each
    iteration; each of its four inner steps reads 8 * (4 + 2) ldmatrix.x4 of 512 bytes, 24 KiB, and does
    8 * 4 * 4 * 2 * 16 * 8 * 16 = 524288 operations. A loop that a block runs several times counts as often, its output
    divided among the times.

    Raises
    ------
    IllegalRewrite
        where an extent is not known before the kernel runs, or not even one version fits the device.
    """
    counts = Counts(function, group, device, planned_registers)
    staged = [tile.buffer for tile in counts.tiles]
    stage = sum(version_bytes(b) for b in staged)
    shared = sum(buffer_bytes(s.buffer) for s in function.allocations_beside(group.loop) if is_shared(s.buffer))
    workload = PipelineWorkload(
        blocks=counts.blocks,
        warps_per_block=counts.warps,
        other_shared_bytes=shared - sum(map(buffer_bytes, staged)),
        stage_bytes=stage,
        registers_per_thread=counts.registers,
        register_stage_registers=sum(counts.registers_of(register.buffer) for register in group.registers),
        shared_trips=extent_of(group.loop),
        register_trips=counts.register_trips,
        flops_per_register_trip=counts.operations / counts.register_trips,
        bytes_per_shared_trip=sum(map(counts.loaded_bytes, counts.tiles)),
        shared_bytes_per_register_trip=counts.shared_read_bytes / counts.register_trips,
        output_bytes_per_block=counts.output_bytes / counts.loop_repeats,
        workset_bytes=0.0,
        workset_blocks=1,
        throughput=counts.throughput,
    )
    return _with_workset(workload, counts)


def _with_workset(workload: PipelineWorkload, counts: Counts) -> PipelineWorkload:
    """The distinct bytes that the blocks of a batch load: tiles from the same place count once.

    Where the cache holds all that is loaded, memory serves each byte once, whichever batch loads it first.
    """
    device = counts.device
    resident = blocks_per_unit(workload, device, shared_bytes(workload, 1), workload.registers_per_thread)
    blocks = min(workload.blocks, resident * device.unit_count)
    workset = sum(counts.distinct_tiles(tile, blocks) * counts.loaded_bytes(tile) for tile in counts.tiles)
    sources = counts.source_bytes
    if sources is not None and sources <= (device.layer(GLOBAL).cache_bytes or 0):
        iterations = workload.shared_trips * counts.loop_repeats * ceil_div(workload.blocks, blocks)
        workset = min(workset, sources / iterations)
    return replace(workload, workset_bytes=workset, workset_blocks=blocks)
