"""The register tiles of a CPU kernel that are best by the model, each under the loops that are best for it.

Growing one register tile step by step (`search.py`) does not reach all: 8 x 48 in 32 registers is no step beyond any
tile that scores well. Their number is small, so all are ranked, by cycles on the cores that get tiles; for the first
few, the orders of the loops over tiles are compared, and tasks that hold in L2 what they read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.load_ports import PORTS_OVERLAP, PortTimes
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.cost.register_choices import register_tiles
from tvm_ext.cost.register_tiles import overlapped
from tvm_ext.records.rprogram import Prediction
from tvm_ext.support.arithmetic import ceil_div

COMPARED_TILES, BLOCKED_TILES = 8, 3
"""Register tiles whose orders of loops are compared; the best of these, for which there are larger tasks. A choice:
beyond them the model's cycles differ by more than loads add.
"""

PERMUTED_AXES = 3
"""Loops of which all orders are compared; of more, those with another innermost loop."""

LEAST_GAIN = 0.97
"""Share of the time of the usual loops, at most, of other orders and larger tasks: beyond, as many measured are slower.

Only the usual order asks for the next panel of weights ahead.
"""

TASK_LEVEL = 2
"""The layer, L2, whose tiles are tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuLoops:
    """The tiles of each layer, the spatial axes from the outermost loop in, what the model says, and what decides.

    ``ranked_s`` are seconds with the terms of `cost/load_ports.py`, and without what every program moves from the
    lowest layer at least: that is no reason for one of them, and hides what is, since in a network the tensors that the
    kernel before wrote are in a cache.
    """

    model: PerfModel
    shapes: tuple[Shape, ...]
    order: tuple[int, ...]
    prediction: Prediction
    ranked_s: float


def has_register_tiles(model: PerfModel) -> bool:
    """Whether all register tiles can be ranked: on a CPU, a sum of products with vectors along a spatial axis."""
    is_tiled = model.is_cpu and model.vector in model.spatial and model.last_level > TASK_LEVEL
    return is_tiled and bool(model.reduction) and len(model.inputs) > 1


def best_loops(models: Sequence[PerfModel]) -> list[CpuLoops]:
    """The loops of the best register tiles along the vector axes of ``models``, best first."""
    rankings = [_Ranking(model) for model in models]
    singles = [(rankings[i].fastest_order(tile, tile), rankings[i]) for tile, i in _compared_tiles(models)]
    singles.sort(key=lambda single: single[0].ranked_s)
    found = [loops for loops, _ in singles]
    for single, ranking in singles[:BLOCKED_TILES]:
        register = single.shapes[0]
        blocked = ranking.fastest_order(register, _task(single.model, register, single.model.device.unit_count))
        if blocked.ranked_s < LEAST_GAIN * single.ranked_s:
            found.append(blocked)
    for single, ranking in singles[:1]:
        found += ranking.fewer_tasks(single)
    return sorted(found, key=lambda loops: loops.ranked_s)


def _compared_tiles(models: Sequence[PerfModel]) -> list[tuple[Shape, int]]:
    """The `COMPARED_TILES` of the least `_even_compute_s` with their model's place, ranked.

    It is no less than the cycles on all units: the tiles of more need not be balanced.
    """
    tiles = [(model.compute_s(tile), tile, i) for i, model in enumerate(models) for tile in _whole_vectors(model)]
    best: list[tuple[float, Shape, int]] = []
    for least_s, tile, i in sorted(tiles):
        if len(best) == COMPARED_TILES and least_s > best[-1][0]:
            break
        best = sorted([*best, (_even_compute_s(models[i], tile), tile, i)])[:COMPARED_TILES]
    return [(tile, i) for _, tile, i in best]


def _whole_vectors(model: PerfModel) -> list[Shape]:
    """The register tiles; an axis that is shorter than its last vector is rounded up."""
    rounded = [
        tuple(
            ceil_div(size, model.lanes) * model.lanes if axis == model.vector else size for axis, size in enumerate(t)
        )
        for t in register_tiles(model)
    ]
    return list(dict.fromkeys(rounded))


def _even_compute_s(model: PerfModel, tile: Shape) -> float:
    """Seconds of the arithmetic, with a task for each register tile."""
    return model.compute_s(tile) / float(model.task_balance(_shapes(model, tile, tile)))


def _shapes(model: PerfModel, register: Shape, task: Shape) -> tuple[Shape, ...]:
    """Tiles of all layers above the lowest: caches hold whole reductions, from `TASK_LEVEL` on those of a task."""

    def whole(shape: Shape) -> Shape:
        return tuple(model.extents[i] if i in model.reduction else size for i, size in enumerate(shape))

    return (register, *(whole(register if level < TASK_LEVEL else task) for level in range(1, model.last_level)))


class _Ranking:
    """Asks ``model`` for the loops of a register tile that take least."""

    def __init__(self, model: PerfModel) -> None:
        self.model, self.ports = model, PortTimes(model)
        self._busy_s: dict[Shape, tuple[float, float]] = {}

    def fastest_order(self, register: Shape, task: Shape) -> CpuLoops:
        """The loops with the order that takes the least time: the usual one, unless another gains."""
        shapes = _shapes(self.model, register, task)
        usual, *others = (self.under(shapes, order) for order in _orders(self.model, register))
        other = min(others, key=lambda own: own.ranked_s, default=usual)
        return other if other.ranked_s < LEAST_GAIN * usual.ranked_s else usual

    def fewer_tasks(self, single: CpuLoops) -> list[CpuLoops]:
        """The register tile of ``single`` in tasks for half of the cores and for one, behind it in the ranking.

        Where cores have other work, such tasks may be the better ones (Rammer, 3.3).
        """
        register, units = single.shapes[0], self.model.device.unit_count
        tasks = [_task(self.model, register, least) for least in (max(1, units // 2), 1)]
        shapes = dict.fromkeys(_shapes(self.model, register, task) for task in tasks)
        fewer = [self.under(larger, single.order) for larger in shapes if larger != single.shapes]
        behind = single.ranked_s / LEAST_GAIN
        return [replace(loops, ranked_s=max(loops.ranked_s, behind)) for loops in fewer]

    def under(self, shapes: tuple[Shape, ...], order: tuple[int, ...]) -> CpuLoops:
        """What the model says of ``shapes`` whose loops over tiles have this ``order``."""
        arithmetic_s, issue_s = self._busy(shapes[0])
        prediction = self.model.predict(shapes, order=order)
        balance = float(self.model.task_balance(shapes, order))
        first, *caches, lowest = [cost.time_s for cost in prediction.layers[1:]]
        times = [arithmetic_s / balance, issue_s / balance + first, *caches, max(0.0, lowest - self.model.once_s)]
        ranked_s = overlapped(times, PORTS_OVERLAP)
        return CpuLoops(model=self.model, shapes=shapes, order=order, prediction=prediction, ranked_s=ranked_s)

    def _busy(self, register: Shape) -> tuple[float, float]:
        """Seconds of the arithmetic, and in which L1 starts loads and takes in lines again: under any order."""
        if register not in self._busy_s:
            issue_s = self.ports.issue_s(register) + self.model.layer_s(1, self.ports.evicted_bytes(register))
            self._busy_s[register] = self.ports.arithmetic_s(register), issue_s
        return self._busy_s[register]


def _orders(model: PerfModel, register: Shape) -> list[tuple[int, ...]]:
    """Orders of the loops over tiles; axes of one tile have no loop, and come first."""
    usual = model.loop_order(register)
    single = tuple(axis for axis in usual if register[axis] >= model.extents[axis])
    looped = tuple(axis for axis in usual if axis not in single)
    if len(looped) <= PERMUTED_AXES:
        others = [order for order in itertools.permutations(looped) if order != looped]
    else:
        others = [(*(own for own in looped if own != axis), axis) for axis in looped[:-1]]
    return [usual, *(single + order for order in others if _along_rows(model, order))]


def _along_rows(model: PerfModel, order: tuple[int, ...]) -> bool:
    """Whether the loops go along the rows of each input before they go across: the processor loads rows ahead.

    Measured on a Zen 3, 3x3 on 176 x 64 x 64: columns within rows 174 to 180 GFLOP/s, rows within columns 100 to 157.
    """
    for access, table in zip(model.expr.inputs, model.inputs, strict=True):
        steps = [abs(access.stride(model.names[axis]) or 0) for axis in order if table.uses(axis)]
        if not table.packed and steps != sorted(steps, reverse=True):
            return False
    return True


def _task(model: PerfModel, register: Shape, least_tasks: int) -> Shape:
    """The task that loads least into L2 and fits it: axes are doubled while that saves, then cut to even sizes.

    There are ``least_tasks`` of them at least.
    """
    task = _shapes(model, register, register)[TASK_LEVEL]
    loaded = model.traffic_bytes(TASK_LEVEL, task)
    while True:
        larger = [
            (*task[:axis], 2 * task[axis], *task[axis + 1 :])
            for axis in model.spatial
            if task[axis] < model.extents[axis]
        ]
        held = [
            (model.traffic_bytes(TASK_LEVEL, shape), shape)
            for shape in larger
            if model.footprint_bytes(TASK_LEVEL, shape) <= model.capacity_bytes(TASK_LEVEL)
            and prod(ceil_div(model.extents[i], shape[i]) for i in model.spatial) >= least_tasks
        ]
        if not held or min(held)[0] >= loaded:
            return tuple(
                _even(model.extents[axis], register[axis], size) if axis in model.spatial else register[axis]
                for axis, size in enumerate(task)
            )
        loaded, task = min(held)


def _even(extent: int, register: int, size: int) -> int:
    """``size``, whole register tiles of ``extent``, cut so that all are about as large: 33 by 8 are 7 at a time."""
    count = ceil_div(extent, register)
    return register * ceil_div(count, ceil_div(count, size // register))
