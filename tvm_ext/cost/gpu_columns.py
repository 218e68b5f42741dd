"""ALCOP's analytical model over many tiles at once, so that tile and stages are ranked together (paper §4, Table 1).

The equations are `pipeline_equations.py`, the counts `product_counts.py`, what a unit holds `devices/occupancy.py`:
here they are given arrays with one entry a candidate. Line by line of Table 1:

| line | here |
|---|---|
| kernel: batches of threadblocks | `kernel_s`, the last batch by its own blocks |
| threadblock: T_init + T_main_loop + T_epilogue | `threadblock_s` |
| pipeline, both levels | `iteration_terms`, `inner_loop` |
| computation, Util | `inner_loop` |
| memory: MAX(T_LLC, T_DRAM), working set | `memory_load`, `workset_of`; panels that concurrent blocks share |
| epilogue | `epilogue_s`; of a reduction that blocks share, a second kernel that adds up (`_added_up_s`) |
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from tvm_ext.devices.capabilities import MMA_SYNC_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import GLOBAL
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.quantities import Floats, Integers, Quantity, largest, whole_quotient

from .mma_model import ACCUMULATOR_BYTES
from .pipeline_equations import bytes_per_s, epilogue_s, inner_loop, iteration_terms, kernel_s, main_loop_s, memory_load
from .pipeline_workload import Counted, LoopCounts, PipelineWorkload, registers_of, resident_of, shared_bytes_of
from .product_counts import (
    ADDRESS_REGISTERS,
    MAX_GROUP,
    accumulator_registers,
    factor_registers,
    fragment_bytes,
    panel_elements,
    panel_lines,
)

STEP_BYTES = 32
"""What one mma.sync adds up of a line: 16 halves, 32 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedProduct:
    """A (batched) matrix product, or the one that a convolution's windows make (im2col).

    ``input_bytes`` are those of the operator's inputs: a convolution's windows read a pixel for each of their taps, a
    cache that holds the inputs reads it from memory once. ``output_itemsize``: bytes that are written and, by what is
    fused, read for each element of the result.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    dtype: str
    itemsize: int
    output_itemsize: float
    input_bytes: int

    def __post_init__(self) -> None:
        sizes = self.batch, self.rows, self.columns, self.depth, self.itemsize, self.output_itemsize, self.input_bytes
        if min(sizes) < 1:
            raise ValueError(f"a product of {self.batch} x {self.rows} x {self.columns} x {self.depth} has no elements")

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth


@dataclass(frozen=True, kw_only=True, slots=True)
class TileColumns:
    """`GpuTile`s for matrix units by column."""

    rows: Integers
    columns: Integers
    depth: Integers
    warp_rows: Integers
    warp_columns: Integers
    splits: Integers
    shared_stages: Integers
    register_stages: Integers

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> GpuTile:
        rows, columns, depth, *others = (int(getattr(self, item.name)[index]) for item in fields(self))
        warp_rows, warp_columns, splits, shared, register = others
        return GpuTile(
            matrix=True,
            inner=(warp_rows, warp_columns),
            block=(rows, columns, depth),
            splits=splits,
            shared_stages=shared,
            register_stages=register,
        )

    @property
    def warps(self) -> Integers:
        return (self.rows // self.warp_rows) * (self.columns // self.warp_columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopColumns(LoopCounts[Integers, Floats]):
    """`PipelineWorkload`s by column, and of each the blocks that a unit runs at a time (0: it does not fit)."""

    resident: Integers

    def workload(self, index: int) -> PipelineWorkload:
        """One of them, for the model of one kernel."""
        names = [item.name for item in fields(PipelineWorkload) if item.name != "throughput"]
        return PipelineWorkload(
            throughput=self.throughput, **{name: getattr(self, name)[index].item() for name in names}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TilePredictions:
    """Seconds by candidate, infinite where it does not fit the device."""

    loops: LoopColumns
    time_s: Floats

    @property
    def ranking(self) -> Integers:
        """Places of those that fit, best predicted first."""
        order = np.argsort(self.time_s, kind="stable")
        return np.asarray(order[np.isfinite(self.time_s)[order]])


def fragment_step(product: TunedProduct, device: DeviceSpec) -> int:
    """Products that one instruction adds up, 32 bytes of them; IllegalRewrite for devices without mma.sync."""
    if not has(device, MMA_SYNC_SINCE):
        raise IllegalRewrite(f"{device.name} has no mma.sync, for which these tiles are counted")
    return STEP_BYTES // product.itemsize


def predict_tiles(product: TunedProduct, tiles: TileColumns, device: DeviceSpec) -> TilePredictions:
    """What Table 1 says of each of ``tiles``."""
    loops = count_loops(product, tiles, device)
    fits = loops.resident > 0
    concurrent = np.maximum(loops.resident, 1) * device.unit_count
    full, rest = loops.blocks // concurrent, loops.blocks % concurrent
    first = np.where(full > 0, concurrent, rest)
    shared, register = tiles.shared_stages, tiles.register_stages
    first_s = threadblock_s(loops, device, shared, register, first)
    last_s = threadblock_s(loops, device, shared, register, np.maximum(rest, 1))
    time_s = np.asarray(kernel_s(full, rest, first_s, last_s), dtype=np.float64) + _added_up_s(product, tiles, device)
    return TilePredictions(loops=loops, time_s=np.where(fits, time_s, np.inf))


def threadblock_s(
    counts: Counted, device: DeviceSpec, shared_stages: Quantity, register_stages: Quantity, blocks: Quantity
) -> Quantity:
    """T_threadblk in a batch of ``blocks``, which the units share evenly."""
    memory = memory_load(counts, device, blocks)
    inner = inner_loop(counts, device, register_stages, whole_quotient(blocks, device.unit_count))
    waits = iteration_terms(counts, shared_stages, register_stages, memory, inner)
    main = main_loop_s(counts, largest(inner.use_s, *waits.values()), inner)
    return memory.load_s + inner.load_s + main + epilogue_s(counts, device, blocks)


def _added_up_s(product: TunedProduct, tiles: TileColumns, device: DeviceSpec) -> Floats:
    """The second kernel where blocks share a reduction: its launch, and reading all partial sums."""
    results = product.batch * product.rows * product.columns
    read = results * (tiles.splits * ACCUMULATOR_BYTES + product.output_itemsize)
    seconds = Machine(device).launch_s + read / bytes_per_s(device.layer(GLOBAL).bandwidth_gb_per_s)
    return np.where(tiles.splits > 1, seconds, 0.0)


def count_loops(product: TunedProduct, tiles: TileColumns, device: DeviceSpec) -> LoopColumns:
    """What kernels of ``tiles`` load, read and compute, by arithmetic.

    Worked example, 128 x 128 x 64 in halves by eight warps of 64 x 32: a stage is 256 rows of 128 bytes, 32 KiB; one of
    its four inner steps reads 8 * (64 + 32) * 16 * 2 bytes = 24 KiB of fragments for 2 * 128 * 128 * 16 operations.
    """
    step, itemsize = fragment_step(product, device), product.itemsize
    high, wide = whole_quotient(product.rows, tiles.rows), whole_quotient(product.columns, tiles.columns)
    fragments = np.asarray(fragment_bytes(tiles.warp_rows, tiles.warp_columns, step, itemsize))
    factors = np.asarray(factor_registers(fragments))
    sums = np.asarray(accumulator_registers(tiles.warp_rows, tiles.warp_columns))
    stage = (tiles.rows + tiles.columns) * tiles.depth * itemsize
    output = np.where(tiles.splits > 1, ACCUMULATOR_BYTES, product.output_itemsize)
    nothing = np.zeros(len(tiles), dtype=np.int64)
    loops = LoopColumns(
        blocks=np.asarray(product.batch * high * wide * tiles.splits),
        warps_per_block=tiles.warps,
        other_shared_bytes=nothing,
        stage_bytes=stage,
        registers_per_thread=sums + factors + ADDRESS_REGISTERS,
        register_stage_registers=factors,
        shared_trips=np.asarray(whole_quotient(product.depth, tiles.depth * tiles.splits)),
        register_trips=tiles.depth // step,
        flops_per_register_trip=(2 * step * tiles.rows * tiles.columns).astype(np.float64),
        bytes_per_shared_trip=stage.astype(np.float64),
        shared_bytes_per_register_trip=(fragments * tiles.warps).astype(np.float64),
        output_bytes_per_block=(tiles.rows * tiles.columns * output).astype(np.float64),
        workset_bytes=nothing.astype(np.float64),
        workset_blocks=nothing,
        throughput=f"{product.dtype}_tensor",
        resident=nothing,
    )
    loops = replace(loops, resident=_resident(loops, tiles, device))
    return with_workset(loops, product, tiles, device)


def _resident(loops: LoopColumns, tiles: TileColumns, device: DeviceSpec) -> Integers:
    """The occupancy of each, asked once for candidates that take the same."""
    size = shared_bytes_of(loops, tiles.shared_stages)
    registers = registers_of(loops, device, tiles.shared_stages, tiles.register_stages, held=False)
    uses = np.stack([loops.warps_per_block * device.teu_lanes, np.asarray(size), np.asarray(registers)], axis=1)
    distinct, place = np.unique(uses, axis=0, return_inverse=True)
    found = [resident_of(int(threads), int(shared), int(count), device) for threads, shared, count in distinct]
    return np.asarray(found, dtype=np.int64)[place.reshape(-1)]


def with_workset(loops: LoopColumns, product: TunedProduct, tiles: TileColumns, device: DeviceSpec) -> LoopColumns:
    """The distinct bytes of one iteration of the blocks that units hold at a time, as ``loops`` have them.

    Where the cache holds all inputs, each is read once. Blocks that share a reduction read other parts of it.
    """
    high, wide = whole_quotient(product.rows, tiles.rows), whole_quotient(product.columns, tiles.columns)
    grid = np.asarray(high), np.asarray(wide)
    concurrent = np.minimum(np.maximum(loops.resident, 1) * device.unit_count, loops.blocks)
    per_batch, tile = grid[0] * grid[1], (tiles.rows, tiles.columns)
    at_once = np.maximum(1, np.minimum(concurrent // tiles.splits, per_batch))
    sizes = np.stack([np.asarray(panel_elements(g, *grid, at_once, tile)) for g in range(1, MAX_GROUP + 1)])
    sizes = np.where(np.arange(1, MAX_GROUP + 1)[:, None] <= grid[0], sizes, np.inf)
    lines = np.asarray(panel_lines(sizes.argmin(axis=0) + 1, *grid, at_once, tile))
    workset = lines * tiles.depth * product.itemsize * np.maximum(1.0, concurrent / per_batch)
    if product.input_bytes <= (device.layer(GLOBAL).cache_bytes or 0):
        iterations = loops.shared_trips * np.asarray(whole_quotient(loops.blocks, concurrent))
        workset = np.minimum(workset, product.input_bytes / iterations)
    return replace(loops, workset_bytes=workset, workset_blocks=concurrent)
