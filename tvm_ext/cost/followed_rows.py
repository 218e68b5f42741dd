"""Which accesses a processor's prefetcher follows: those to few rows of memory at a time.

It follows a row within a page, and a few tens of rows at once. A kernel that writes a line of each of more rows, one
after the other, waits for every line. Measured on a core of a Cascade Lake, GB/s of lines of as many rows in turns:

| rows | 16 | 32 | 48 | 96 |
|---|---|---|---|---|
| written, in L3 | 21 | 20 | 12 | 13 |
| written, in memory | 10 | 6 | 4 | 4 |
| read, in L3 | 25 | 25 | 20 | 19 |
| read, in memory | 12 | 11 | 6 | 6 |

Two lines come in pairs: a 1x1 convolution of 16 to 96 channels that writes 96 rows
of 112 x 112 takes 10 us a row beyond its arithmetic in tiles of 32 columns, 18 us in tiles of 16 or 8.
"""

from __future__ import annotations

from collections.abc import Iterator

from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div

from .reduction_chunks import MOST_ROWS, far_rows, is_asked_for, reduction_chunks

UNFOLLOWED_COST = 2
"""Times as long that a row's bytes take where it is not followed."""

LINES_TOGETHER = 2
"""A row of which so many lines are touched at a time needs not be followed."""


def is_followed(access: Access, tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> bool:
    """Whether the rows of ``access``, one of ``expr``'s in its true shape, are few enough under the loops of ``tile``.

    Worked example, 96 filters by 112 columns, each filter a row: in register tiles of 48 x 8 that go along the columns
    48 rows get half a line each in turns: not followed. Of 32 x 8 they are.
    """
    page, line = device.page_bytes, device.layers[1].transaction_bytes
    if page is None or any(index is None for index in access.indices) or access.is_constant:
        return True
    if access is not expr.output and (
        is_asked_for(access, tile, expr, device) or reduction_chunks(tile, expr, device) is not None
    ):
        return True
    sizes = _between_visits(access, tile, expr, page)
    return far_rows(access, sizes, page) <= MOST_ROWS or _run_bytes(access, sizes) >= LINES_TOGETHER * line


def _between_visits(access: Access, tile: CpuTile, expr: TensorExpr, page: int) -> dict[str, int]:
    """Points that are gone through until a row of ``access`` goes on: those of the loops within the one along rows."""
    extents = expr.extents
    sizes = {axis.name: axis.extent for axis in expr.reduction}
    sizes |= {axis.name: size for axis, size in zip(expr.spatial, tile.register, strict=True)}
    for name, trips in _loops(tile, expr):
        step = abs(access.stride(name) or 0) * access.itemsize_bytes
        if trips > 1 and 0 < 2 * step < page:
            break
        sizes[name] = min(extents[name], sizes[name] * trips)
    return sizes


def _loops(tile: CpuTile, expr: TensorExpr) -> Iterator[tuple[str, int]]:
    """(axis, trips) of the loops over register tiles, innermost first."""
    counts = [ceil_div(axis.extent, size) for axis, size in zip(expr.spatial, tile.register, strict=True)]
    single = (1,) * len(counts)
    for within, step in ((tile.inner, single), (tile.outer, tile.inner), (counts, tile.outer)):
        for place in reversed(tile.order):
            yield expr.spatial[place].name, ceil_div(within[place], step[place])


def _run_bytes(access: Access, sizes: dict[str, int]) -> float:
    """Bytes that lie together of what is touched of a row at a time."""
    run = access.itemsize_bytes
    for size, span in zip(reversed(access.shape), reversed(access.tile_shape(sizes)), strict=True):
        run *= span
        if span < size:
            break
    return run
