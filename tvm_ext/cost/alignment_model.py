"""How fast a matrix product is whose operands are read 16, 8, 4 or 2 bytes at a time, and what padding them costs.

CUTLASS's kernels copy tiles of both operands from the L2 cache into shared memory. Narrow copies need more
instructions and predicates for the same bytes (Bolt §3.2.3). Worked example, the first row of Bolt's Table 3 on a T4:
16640 x 414 halves of input for 32 filters. In copies of 16 bytes, with 48 for 46 channels, the tiles take 46 us, in
copies of 4 bytes 90 us. Writing the padded tensor takes 4.5 us: 1.80 times the speed (the paper measured 1.62).

It is a model for ranking: absolute times leave out what both forms have in common.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, BULK_COPIES_SINCE, has
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import UNKNOWN_CACHE_RATE, Machine
from tvm_ext.support.arithmetic import ceil_div

from .epilogue_traffic import BYTES_PER_GB, US_PER_S, moved_us

COPY_SHARE = 0.37
"""Share of the time of copying tiles, 16 bytes at a time, that grows with the number of copies.

From Bolt's Table 3: without their padding (9 to 24 % of the time), its six convolutions are 1.98 to 2.26 times as
fast in copies of 16 bytes as in those of 4, 2.1 on average: 1 - s + 4 s = 2.1.
"""

STAGED_TILE_RATE = 0.4
"""Share of the L2 cache's bandwidth at which tiles are copied through registers: with it the speed-ups of the table's
rows are 1.61 to 1.94 on a T4, where the paper measured 1.60 to 1.99 (each within 11 %)."""

ASYNCHRONOUS_TILE_RATE = 0.8
"""The same by cp.async: what a product of 4096 x 4096 x 4096 halves at 80 % of an A100's peak asks for."""

TILE_ROWS, WIDEST_TILE_COLUMNS, NARROWEST_TILE_COLUMNS = 128, 128, 32
"""A choice: of one usual template; narrow products get narrower tiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignedProduct:
    """A product as its kernel computes it: extents with their padding, and how many elements of A and B one copy takes.

    ``input_elements`` is A as it lies in memory: a convolution reads each of its elements once for every tap.
    """

    rows: int
    columns: int
    depth: int
    batch: int
    input_elements: int
    alignments: tuple[int, int]
    itemsize_bytes: float
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTile:
    """A threadblock's part of a product: rows, columns, and the slices that its depth is cut into."""

    rows: int
    columns: int
    slices: int = 1


def product_us(product: AlignedProduct, device: DeviceSpec, tile: BlockTile | None = None) -> float:
    """Predicted microseconds of one launch: the longest of multiplying, copying tiles, and moving each matrix once."""
    if tile is None:
        columns = min(WIDEST_TILE_COLUMNS, max(NARROWEST_TILE_COLUMNS, 1 << (product.columns - 1).bit_length()))
        tile = BlockTile(rows=TILE_ROWS, columns=columns)
    blocks = product.batch * ceil_div(product.rows, tile.rows) * ceil_div(product.columns, tile.columns) * tile.slices
    held = ceil_div(blocks, device.unit_count) * device.unit_count  # the busiest unit's share, on every unit
    depth = ceil_div(product.depth, tile.slices)
    copied = [
        extent * depth * product.itemsize_bytes * slowdown(alignment * product.itemsize_bytes)
        for extent, alignment in zip((tile.rows, tile.columns), product.alignments, strict=True)
    ]
    copies_us = held * sum(copied) / (_tile_gb_per_s(device) * BYTES_PER_GB) * US_PER_S
    work = 2.0 * held * tile.rows * tile.columns * depth
    elements = (
        product.input_elements,
        *(product.batch * product.columns * item for item in (product.depth, product.rows)),
    )
    moving_us = sum(moved_us(count * product.itemsize_bytes, device) for count in elements)
    multiplying_us = work / (_gflops(product, device) * BYTES_PER_GB) * US_PER_S
    power_us = device.least_multiplying_s(work, f"{product.dtype}_tensor") * US_PER_S
    return max(multiplying_us, copies_us, moving_us, power_us) + Machine(device).launch_us


def copied_us(read_bytes: float, written_bytes: float, device: DeviceSpec) -> float:
    """A kernel that copies a tensor into another, with padding or without it."""
    return moved_us(read_bytes, device) + moved_us(written_bytes, device) + Machine(device).launch_us


def has_matrix_units(device: DeviceSpec, dtype: str) -> bool:
    """Whether the device multiplies matrices of this type in units of their own."""
    return device.peak_gflops_of(f"{dtype}_tensor") is not None


def slowdown(copy_bytes: float) -> float:
    """Time of copying the same bytes in narrower copies: 1 at 16 bytes, 2.1 at 4."""
    return 1 - COPY_SHARE + COPY_SHARE * VECTOR_BYTES / copy_bytes


def _gflops(product: AlignedProduct, device: DeviceSpec) -> float:
    key = f"{product.dtype}_tensor"
    widest = all(alignment * product.itemsize_bytes >= VECTOR_BYTES for alignment in product.alignments)
    collective = widest and has(device, BULK_COPIES_SINCE)  # TMA copies 16 bytes at least, and wgmma goes with it
    peak = device.peak_gflops_of(key) if collective else device.emitted_gflops_of(key)
    assert peak is not None, f"{device.name} has no matrix units for {product.dtype}: ask `has_matrix_units` first"
    return peak


def _tile_gb_per_s(device: DeviceSpec) -> float:
    memory = device.lowest_layer
    cache = memory.cache_bandwidth_gb_per_s or UNKNOWN_CACHE_RATE * (memory.bandwidth_gb_per_s or 0.0)
    return cache * (ASYNCHRONOUS_TILE_RATE if has(device, ASYNC_COPIES_SINCE) else STAGED_TILE_RATE)
