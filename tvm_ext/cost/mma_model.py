"""The performance model of tensor-core tiles: Roller's layers (paper §3.3), with warps as the units of the registers.

Beyond the paper it counts what makes matrix units different: threadblocks that run at the same time share panels in the
device's cache (`grid_group`), and a unit needs several warps to keep its matrix units busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.gemm_form import TileSplit, uses_wmma
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.product_counts import (
    ADDRESS_REGISTERS,
    accumulator_registers,
    factor_registers,
    fragment_bytes,
    grid_group,
    panel_lines,
)
from tvm_ext.devices.gpu import EVEN_PITCHES, FRAGMENT, ODD_PITCHES, REGISTER_BYTES, VECTOR_BYTES, WARP, padded_chunks
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import BlockUse, blocks_per_unit
from tvm_ext.records.rprogram import LayerCost, Prediction
from tvm_ext.support.arithmetic import ceil_div

ACCUMULATOR_BYTES = 4  # of float32, which the matrix units of halves add up in
SPARE_REGISTERS = 8
"""What ptxas may need beyond the plan: 5 blocks of 192 threads leave 64 registers each, not the 68 that are planned."""

WARPS_PER_TEU = 2
"""Warps that a warp scheduler needs to hide one's waiting behind another's work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmShape:
    """Extents of a (batched) product and bytes of its elements."""

    batch: int
    rows: int
    columns: int
    depth: int
    itemsize: int
    output_bytes: float  # written and, by the epilogue, read for each element

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth


def shape_of(product: TensorExpr) -> GemmShape:
    """The shape of a `gemm_form.gemm_expr`."""
    *batch, rows, columns, depth = (axis.extent for axis in product.axes)
    fused = sum(computation.extra_bytes_per_element for computation in (*product.prologue, *product.epilogue))
    return GemmShape(
        batch=prod(batch),
        rows=rows,
        columns=columns,
        depth=depth,
        itemsize=int(product.inputs[0].itemsize_bytes),
        output_bytes=product.output.itemsize_bytes + fused,
    )


def fragment_registers(split: TileSplit, dtype: str, device: DeviceSpec) -> int:
    """32-bit registers of a thread for accumulators and for the fragments of one reduction step (L0's footprint).

    Worked example, a warp tile of 64 x 32 in halves: 64 accumulators, (64 + 32) * 16 * 2 bytes of factors among 32
    lanes are 24: 88. A fragment of wmma has every element twice, 8 registers of a thread in halves; one of A's and all
    of B's are held: 64 + 8 + 2 * 8 = 88.
    """
    lanes = device.teu_lanes
    sums = int(accumulator_registers(split.warp_rows, split.warp_columns, lanes))
    if uses_wmma(device):
        one = 2 * FRAGMENT * FRAGMENT * int(itemsize_bytes(dtype)) // (WARP * REGISTER_BYTES)
        return sums + one * (1 + split.warp_columns // FRAGMENT)
    bytes_held = fragment_bytes(split.warp_rows, split.warp_columns, split.step, int(itemsize_bytes(dtype)))
    return sums + int(factor_registers(bytes_held, lanes))


def thread_registers(split: TileSplit, dtype: str, device: DeviceSpec) -> int:
    """Registers that a thread of the kernel is expected to use, addresses included."""
    return fragment_registers(split, dtype, device) + ADDRESS_REGISTERS


def tile_bytes(split: TileSplit, dtype: str, device: DeviceSpec) -> int:
    """Shared memory of both factors' tiles (L1's footprint), with wmma's padding and staging area."""
    size = (split.rows + split.columns) * split.depth * int(itemsize_bytes(dtype))
    if not uses_wmma(device):
        return size
    chunks = [side * int(itemsize_bytes(dtype)) // VECTOR_BYTES for side in (split.depth, split.rows, split.columns)]
    # whichever axis a factor is contiguous along
    padding = max(padded_chunks(count, pitches) / count for count in chunks for pitches in (ODD_PITCHES, EVEN_PITCHES))
    return int(size * padding) + split.warps * FRAGMENT * FRAGMENT * ACCUMULATOR_BYTES


def resident_blocks(split: TileSplit, dtype: str, device: DeviceSpec) -> int:
    """Threadblocks that one unit runs at a time; at least 1."""
    return max(1, blocks_per_unit(block_use(split, dtype, device), device))


def block_use(split: TileSplit, dtype: str, device: DeviceSpec) -> BlockUse:
    """What a block of ``split`` is expected to take of its unit."""
    return BlockUse(
        threads=split.warps * device.teu_lanes,
        registers=thread_registers(split, dtype, device),
        shared_bytes=tile_bytes(split, dtype, device),
    )


def predict_mma(shape: GemmShape, split: TileSplit, splits: int, dtype: str, device: DeviceSpec) -> Prediction:
    """Predicted time; compute, shared memory and global memory overlap, so that the slowest binds (paper §3.3)."""
    machine = Machine(device)
    tile_rows, tile_columns = ceil_div(shape.rows, split.rows), ceil_div(shape.columns, split.columns)
    blocks = shape.batch * tile_rows * tile_columns * splits
    padded_depth = ceil_div(shape.depth, split.depth * splits) * split.depth
    resident = resident_blocks(split, dtype, device)
    rounds = ceil_div(blocks, device.unit_count)  # blocks that the busiest unit runs
    warps = min(resident, rounds) * split.warps
    filled = min(1.0, warps / (WARPS_PER_TEU * device.teus_per_unit))
    peak = (device.emitted_gflops_of(f"{dtype}_tensor") or float("inf")) * 1e9 / device.unit_count
    compute = rounds * 2.0 * split.rows * split.columns * padded_depth / (peak * filled)
    fragments = split.warps * (split.warp_rows + split.warp_columns)
    read = (fragments + split.rows + split.columns) * padded_depth * shape.itemsize  # fragments, and the copies' writes
    shared = rounds * read / (machine.rate("L1") / device.unit_count * filled)
    loaded = (split.rows + split.columns) * padded_depth * shape.itemsize
    cache = rounds * loaded / (machine.cache_rate / device.unit_count)
    missed = _missed_bytes(shape, split, splits, (tile_rows, tile_columns), resident * device.unit_count)
    written = shape.batch * shape.rows * shape.columns * shape.output_bytes
    launches = 1
    if splits > 1:
        written += 2.0 * splits * shape.batch * shape.rows * shape.columns * ACCUMULATOR_BYTES
        launches = 2
    memory = max(cache, (missed + written) / machine.rate("L2"))
    registers = fragment_registers(split, dtype, device) * REGISTER_BYTES * device.teu_lanes
    costs = (
        LayerCost(layer="L1", footprint_bytes=registers, traffic_bytes=float(read * blocks), time_s=shared),
        LayerCost(
            layer="L2", footprint_bytes=tile_bytes(split, dtype, device), traffic_bytes=missed + written, time_s=memory
        ),
    )
    return machine.bind(compute, costs, launches=launches)


def _missed_bytes(shape: GemmShape, split: TileSplit, splits: int, tiles: tuple[int, int], concurrent: int) -> float:
    """Bytes of the factors that come from memory: each wave of concurrent blocks loads its panels once.

    No factor is loaded less than once.
    """
    per_batch = tiles[0] * tiles[1]
    at_once = max(1, min(concurrent // splits, per_batch))
    group = grid_group(tiles[0], tiles[1], at_once, (split.rows, split.columns))
    panels = float(panel_lines(group, tiles[0], tiles[1], at_once, (split.rows, split.columns)))
    waves = per_batch / at_once
    once = float(shape.rows + shape.columns)
    return shape.batch * max(once, waves * panels) * shape.depth * shape.itemsize
