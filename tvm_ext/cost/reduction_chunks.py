"""When a CPU's register tiles go over their reduction in chunks, how long these are, and for how many tiles at a time.

A processor's prefetcher follows a row of memory within a page, and a few tens of rows at once. A register tile that
reads a few elements of each of very many rows far apart waits for most of them, and so does the next tile, for by then
the caches have seen all other rows. Measured on a core of a Cascade Lake, 1x1 convolutions in blocks of 16 channels,
tiles of 2 registers of filters by 8 pixels, GFLOP/s:

| channels, pixels, filters | whole | by 512 channels | by 256 | by 128 |
|---|---|---|---|---|
| 4096, 64, 256 | 78 | 113 | 116 | 120 |
| 2048, 256, 256 | 105 | 124 | 129 | 141 |
| 1024, 1024, 128 | 102 | 123 | 145 | 139 |
| 512, 784, 64 | 141 | | 138 | 153 |

Where tiles go on by whole lines, each asks for what the next one reads (`is_asked_for`), and no prefetcher has to
follow: whole reductions are then faster by 1 to 8 % (two cores of a Zen 5, 1,024 to 2,048 channels).

A register tile that reads a longer panel of weights than the core's own cache keeps, 16 columns of 6,144 rows in 512
KiB, loads it again for every tile of rows, from where all cores' loads meet. In chunks the part that a chunk reads
stays in L1, and the rows of a run of tiles share it.

The constants below say how the loops of a kernel are cut, by this table, and are no facts of a device: no data sheet
says how many rows a prefetcher follows, and one processor's measurements are no row of another. What they are compared
with, pages and cores, is the device's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext.analysis.tensor_expr import Access, Axis, TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div

from .dot_products import dot_product

FOLLOWED_ROWS = 8
"""Rows far apart that a chunk goes over: 128 channels in blocks of 16, the last column of the table."""

MOST_ROWS = 32
"""A reduction over more rows far apart goes in chunks: of 32, the last line of the table, these gain little."""

LEAST_STEPS, LEAST_CHUNKS = 128, 4
"""Multiply-adds of one sum in a chunk, at least, for between two of them every sum is stored and loaded; and so many
times that in a reduction: 256 channels in two chunks ran at 51 GFLOP/s, whole at 62 to 72.
"""

RUN_BYTES = 64 * 1024
"""The sums of the tiles that go over a chunk together: a small part of any core's L2, which its rows pass, too."""

LEAST_SHARING = 4
"""Tiles in the innermost loop of a run, for a matrix unit's reduction to go in chunks: between two of these every sum
is stored and loaded, 8 KiB for each 2 x 2 tiles.
"""

TASKS_PER_UNIT = 4
"""Tasks that longer runs leave for every core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionChunks:
    """The outermost axis of a reduction, of ``extent`` steps, goes ``steps`` at a time."""

    extent: int
    steps: int

    @property
    def count(self) -> int:
        return ceil_div(self.extent, self.steps)


def reduction_chunks(tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> ReductionChunks | None:
    """The chunks of a kernel of ``tile``; None where its reduction stays whole."""
    page = device.page_bytes
    if not page or not expr.reduction or device.kind != "cpu":
        return None
    vector = expr.spatial[tile.vector].name
    affine = [access for access in expr.inputs if all(index is not None for index in access.indices)]
    streamed = [
        access for access in affine if _streams(access, vector) and not is_asked_for(access, tile, expr, device)
    ]
    whole = dict(zip((axis.name for axis in expr.spatial), tile.register, strict=True))
    whole |= {axis.name: axis.extent for axis in expr.reduction}
    first = expr.reduction[0]
    dot = dot_product(expr, device)
    stepped = [
        axis for place, axis in enumerate(expr.axes) if axis.kind == "reduce" and not (dot and place in dot.axes)
    ]
    inner = prod(axis.extent for axis in stepped[1:])
    if dot is not None and dot.has_tile_registers:
        return _for_tiles(affine, whole, stepped, tile, expr, device)
    rows = max((far_rows(access, whole, page) for access in streamed), default=1)
    rows_of_step = max((far_rows(access, {**whole, first.name: 1}, page) for access in streamed), default=1)
    if not stepped or first.extent * inner < LEAST_CHUNKS * LEAST_STEPS:
        return None
    followed = FOLLOWED_ROWS // rows_of_step if rows > MOST_ROWS and rows_of_step < rows else None
    panels = [access for access in affine if access.uses(vector)]
    held = _steps_held(panels, whole, first.name, Machine(device).own_bytes, device)
    wanted = min((count for count in (followed, held) if count is not None), default=first.extent)
    steps = _even(first.extent, max(1, wanted, ceil_div(LEAST_STEPS, inner)))
    return ReductionChunks(extent=first.extent, steps=steps) if steps < first.extent else None


def _streams(access: Access, vector: str) -> bool:
    """Whether it goes through a register tile element by element."""
    return not access.is_constant and not access.uses(vector)


def moving_axes(access: Access, tile: CpuTile, expr: TensorExpr) -> tuple[int, ...]:
    """Spatial axes, by position, whose tiles follow each other in what ``access`` reads, the outermost first."""
    counts = [ceil_div(axis.extent, size) for axis, size in zip(expr.spatial, tile.register, strict=True)]
    return tuple(place for place in tile.order if counts[place] > 1 and access.stride(expr.spatial[place].name))


def is_asked_for(access: Access, tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> bool:
    """Whether each tile asks for what the next one reads of ``access``: tiles go on by whole lines in rows far apart,
    and no first cache holds it all (`tir_passes/emit/cpu_tiles/ahead.py`).
    """
    first = device.layers[1]
    if any(index is None for index in access.indices) or not _streams(access, expr.spatial[tile.vector].name):
        return False
    rows = [axis for axis in expr.reduction if line_steps(access, axis.name, first.transaction_bytes)]
    moving = moving_axes(access, tile, expr)
    if not rows or not moving or prod(access.shape) * access.itemsize_bytes <= (first.capacity_bytes or 0):
        return False
    last = moving[-1]
    return line_steps(access, expr.spatial[last].name, first.transaction_bytes, tile.register[last]) > 0


def line_steps(access: Access, axis: str, line_bytes: int, count: int = 1) -> int:
    """Whole lines that ``access`` moves along ``count`` elements of ``axis``."""
    return int(abs(access.stride(axis) or 0) * access.itemsize_bytes * count) // line_bytes


def _for_tiles(
    inputs: Sequence[Access],
    whole: Mapping[str, int],
    stepped: Sequence[Axis],
    tile: CpuTile,
    expr: TensorExpr,
    device: DeviceSpec,
) -> ReductionChunks | None:
    """Chunks for a matrix unit, which takes in 64 bytes a cycle by 2 x 2 tiles, more than an L2 serves: where half of
    L1 does not hold what the tiles of a run share.

    Worked example, 32 lanes of 1,024 bytes under 512 rows: of 16 steps of 64 bytes, 12 fill 24 KiB, so that eight
    steps at a time are two even chunks.
    """
    longer = with_longer_runs(tile, expr, device)
    innermost = next((place for place in reversed(longer.order) if longer.outer[place] > 1), None)
    if not stepped or innermost is None or longer.outer[innermost] < LEAST_SHARING:
        return None
    shared = [access for access in inputs if not access.uses(expr.spatial[innermost].name)]
    first, l1_bytes = stepped[0], device.layers[1].capacity_bytes or 0
    held = _steps_held(shared, whole, first.name, l1_bytes / 2, device)
    if held is None:
        return None
    parts = ceil_div(first.extent, max(1, held))
    return ReductionChunks(extent=first.extent, steps=ceil_div(first.extent, parts)) if parts > 1 else None


def _steps_held(
    panels: Sequence[Access], whole: Mapping[str, int], first: str, room_bytes: float, device: DeviceSpec
) -> int | None:
    """Steps along the axis ``first`` whose part of the ``panels`` fills half of L1; None where all fit the room."""
    panel_bytes = sum(access.itemsize_bytes * prod(access.tile_shape(whole)) for access in panels)
    l1_bytes = device.layers[1].capacity_bytes
    if panel_bytes <= room_bytes or not l1_bytes:
        return None
    return int(whole[first] * l1_bytes / 2 / panel_bytes)


def _even(extent: int, steps: int) -> int:
    """The smallest divisor of ``extent`` from ``steps`` to less than twice that; ``steps`` where there is none."""
    return next((size for size in range(steps, 2 * steps) if extent % size == 0), steps)


def far_rows(access: Access, sizes: Mapping[str, int], page_bytes: int) -> int:
    """Rows about a page apart or further that a tile of ``sizes`` reads."""
    rows, pitch = 1, int(access.itemsize_bytes)
    for size, span in zip(reversed(access.shape), reversed(access.tile_shape(sizes)), strict=True):
        rows *= span if 2 * pitch >= page_bytes else 1
        pitch *= size
    return rows


def with_longer_runs(tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> CpuTile:
    """``tile`` with tasks as large as sums may wait, the innermost loops first, and enough of them for all cores."""
    counts = [ceil_div(axis.extent, size) for axis, size in zip(expr.spatial, tile.register, strict=True)]
    most = max(1, int(RUN_BYTES / (prod(tile.register) * max(4.0, expr.output.itemsize_bytes))))
    wanted = TASKS_PER_UNIT * device.unit_count if device.unit_count > 1 else 1
    outer = [1] * len(counts)
    for place in reversed(tile.order):
        others = prod(ceil_div(count, size) for count, size in zip(counts, outer, strict=True)) // counts[place]
        shared = min(ceil_div(counts[place], tile.outer[place]), ceil_div(wanted, others))
        parts = max(ceil_div(counts[place] * prod(outer), most), shared)
        outer[place] = ceil_div(counts[place], parts)
        if outer[place] < counts[place]:
            break
    return replace(tile, inner=tuple(1 for _ in outer), outer=tuple(outer))
