"""The register tiles that a CPU kernel can have: what construction ranks, and what a search moves in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tvm_ext.support.arithmetic import ceil_div

from .access_table import Shape
from .perf_model import PerfModel

MOST_PIECES = 8
"""Vector registers along the vector axis of a register tile."""

FEWEST_ACCUMULATORS = 0.5
"""Of those that hide the latency of multiply-adds, the share that a register tile has at least, where it can."""

MOST_REGISTER_TILES = 160
"""Along one vector axis; where there are more, those of the fewest cycles."""


def register_tiles(model: PerfModel) -> list[Shape]:
    """Register tiles along the model's vector axis that fit the registers, those of the fewest cycles first.

    Shapes are over all axes: one step of the reduction.
    """
    core = model.core
    most = core.limit

    def choices(axis: int) -> list[int]:
        extent = model.extents[axis]
        if axis == model.vector:
            return sorted({min(count * model.lanes, extent) for count in range(1, MOST_PIECES + 1)})
        return core.row_sizes(axis)

    found: list[tuple[int, Shape]] = []
    lanes = [model.lanes if axis == model.vector else core.rows_at_once(axis) for axis in model.spatial]
    for sizes in _products([choices(axis) for axis in model.spatial], lanes, most):
        shape = _over_axes(model, sizes)
        if core.registers(shape) <= most:
            found.append((core.accumulators(shape), shape))
    enough = FEWEST_ACCUMULATORS * (model.device.fma_latency_cycles or 1) * model.device.fma_rate
    wanted = min(enough, max((count for count, _ in found), default=0))
    kept = [shape for count, shape in found if count >= wanted]
    return sorted(kept, key=lambda shape: (core.total_cycles(shape), shape))[:MOST_REGISTER_TILES]


def _products(choices: Sequence[Sequence[int]], lanes: Sequence[int], most: int) -> Iterator[Shape]:
    """Combinations of choices of at most ``most`` registers."""
    if not choices:
        yield ()
        return
    for size in choices[0]:
        used = ceil_div(size, lanes[0])
        if used > most:
            break
        for rest in _products(choices[1:], lanes[1:], most // used):
            yield (size, *rest)


def _over_axes(model: PerfModel, sizes: Shape) -> Shape:
    shape = [1] * len(model.extents)
    for axis, size in zip(model.spatial, sizes, strict=True):
        shape[axis] = size
    return tuple(shape)
