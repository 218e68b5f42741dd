"""Scale-out of a single-unit program (paper §3.2): even partitions, and smaller tiles where there are too few."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.support.arithmetic import ceil_div

from .align import tensor_core_steps, transaction_step
from .rtile import reuse_score

WANTED_BALANCE = 0.9
"""Share of the units' time in use above which a partition counts as even: 81 tiles on 80 units use 0.51."""


def shrink(model: PerfModel, shapes: tuple[Shape, ...]) -> tuple[Shape, ...] | None:
    """Shrink the partitioned tile, along the axis with the smallest data reuse score first, until all units have work.

    Returns None where the units are in even use already or nothing can be shrunk. Upper tiles shrink with it where
    they would not fit inside any more.
    """
    if model.balance(model.partition_count(shapes)) >= WANTED_BALANCE:
        return None
    best, steps = shapes, [transaction_step(model, model.partition_level, axis) for axis in range(len(model.extents))]
    while model.balance(model.partition_count(best)) < WANTED_BALANCE:
        smaller = _shrunk_once(model, best, steps)
        if smaller is None:
            break
        best = smaller
    return best if model.balance(model.partition_count(best)) > model.balance(model.partition_count(shapes)) else None


def _shrunk_once(model: PerfModel, shapes: tuple[Shape, ...], steps: Sequence[int]) -> tuple[Shape, ...] | None:
    """The program with one spatial axis at the next smaller aligned size, or None where all are at their smallest."""
    level = model.partition_level
    tile = shapes[level]
    options: list[tuple[float, tuple[Shape, ...]]] = []
    for axis in model.spatial:
        smaller = _with_smaller_axis(model, shapes, axis, steps)
        if smaller is not None:
            options.append((reuse_score(model, level, smaller[level], tile), smaller))
    return min(options, key=lambda option: option[0])[1] if options else None


def _with_smaller_axis(
    model: PerfModel, shapes: tuple[Shape, ...], axis: int, steps: Sequence[int]
) -> tuple[Shape, ...] | None:
    """About half the partitioned tile along ``axis``, or None where it is at its smallest.

    It stays a whole number of the tiles above; where they would not fit inside, or (GPU) would not fill whole warps,
    they are halved too. 1000 columns of 25 threads x 40: no multiple of 40 up to 500 gives whole warps, nor one of 20;
    32 threads x 10 = 320 does.
    """
    level = model.partition_level
    size = min(shapes[level][axis], model.extents[axis])
    smallest = _smallest(model, axis)
    limit = max(smallest, size // 2)
    if limit >= size:
        return None
    for upper in _halvings(shapes[level - 1][axis] if level > 0 else limit, smallest):
        for count in range(limit // upper, 0, -1):
            shrunk = tuple(
                _cut(shape, axis, upper if at < level else count * upper, at <= level)
                for at, shape in enumerate(shapes)
            )
            if _legal(model, shrunk, steps):
                return shrunk
            if model.is_cpu:
                break
    return None


def _smallest(model: PerfModel, axis: int) -> int:
    """A vector register of the vector axis, a fragment of a tensor core's axis, one point of any other."""
    if model.tensor_core:
        return (tensor_core_steps(model.expr, model.device) or {}).get(model.names[axis], 1)
    return model.lanes if axis == model.vector else 1


def _halvings(size: int, smallest: int) -> list[int]:
    """``size`` and its halves, in whole steps of ``smallest``: 40, 20, 10, 5, 3, 2, 1."""
    sizes = [size]
    while sizes[-1] > smallest:
        sizes.append(max(smallest, ceil_div(sizes[-1], 2 * smallest) * smallest))
        if sizes[-1] == sizes[-2]:
            break
    return sizes


def _cut(shape: Shape, axis: int, size: int, owned: bool) -> Shape:
    """``shape`` with at most ``size`` along ``axis``; layers that the units share (not ``owned``) keep theirs."""
    return (*shape[:axis], min(shape[axis], size), *shape[axis + 1 :]) if owned else shape


def _legal(model: PerfModel, shapes: tuple[Shape, ...], steps: Sequence[int]) -> bool:
    """Whole transactions and whole warps on a GPU; a CPU's smaller tiles are as legal as larger ones."""
    if model.is_cpu or len(shapes) < 2:
        return True
    tile = shapes[model.partition_level]
    starts_on_transactions = all(
        tile[axis] % steps[axis] == 0 or tile[axis] >= model.extents[axis] for axis in model.spatial
    )
    return starts_on_transactions and model.threads(shapes[0], shapes[1]) % model.device.teu_lanes == 0
