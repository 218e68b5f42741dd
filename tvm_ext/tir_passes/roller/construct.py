"""ConstructProg (paper §3.2): from a tensor expression and a device to rPrograms, best predicted first.

Scale up: `search.TileSearch` builds the single-unit program (Figure 8). Scale out: its lowest unit-owned tiles are
spread evenly over the units, reduction axes staying on one. Operators with fewer tiles than units are shrunk along the
axis with the smallest data reuse score; ε grows until ``k`` programs are there. On a CPU the axis that fills the vector
registers is a choice: each legal one is constructed and the model ranks them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.cpu_tiles import legal_vector_axes
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.cost.thread_losses import resident_share, scattered_store_s
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rprogram import Prediction, RProgram, RTile
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.limits import limits

from .align import ALL_RULES, MEMORY, SHAPE, TENSOR_CORE, UNIT, tensor_core_steps
from .canonical import CanonicalForm, canonicalise
from .cpu_loops import CpuLoops, best_loops, has_register_tiles
from .rtile import storage_padding
from .scale_out import shrink
from .search import Budget, Found, Move, Outcome, TileSearch

EPSILONS = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)
"""Padding bounds tried in turn until enough programs are there (§3.2; Figure 17 evaluates 0.4 and 1.0)."""

MIN_POOL = 8
"""Register tiles that compete under the model even where a single program is wanted."""


GOOD_ENOUGH = 2.0
"""ε keeps growing while the best program takes more than this many times the operator's roofline time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnlargeStep:
    """One step of the construction of the best program, for people: what was tried, what it cost, how it ended."""

    layer: str
    tile: RTile
    axis: str | None
    larger: RTile
    reuse_score: float
    footprint_bytes: float
    capacity_bytes: float
    mem_perf_gflops: float
    max_compute_gflops: float
    outcome: Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A program that lost against the best one, and why."""

    program: RProgram
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Construction:
    """What `construct` found: programs best first, the steps to the best, the canonical form, and who lost.

    ``narrower`` are programs of fewer partitions than the best, each the fastest of as few; most partitions first.
    """

    programs: tuple[RProgram, ...]
    steps: tuple[EnlargeStep, ...]
    canonical: CanonicalForm
    rejected: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()  # for the report: that the search was cut short
    narrower: tuple[RProgram, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    model: PerfModel
    shapes: tuple[Shape, ...]
    padding: tuple[int, ...]
    prediction: Prediction
    epsilon: float
    shrunk: bool
    moves: tuple[Move, ...]
    order: tuple[int, ...] = ()  # of a CPU's loops over tiles, where it is not the usual
    ranked_s: float | None = None  # what decides, where it is not the predicted time

    @property
    def rank(self) -> tuple[float, float]:
        """Predicted time, longer where too few threads hide latency or stores are scattered; then that of all loads."""
        loads_s = sum(cost.time_s for cost in self.prediction.layers)
        if self.ranked_s is not None:
            return self.ranked_s, loads_s
        busy = resident_share(self.model, self.shapes, self.padding)
        time_s = self.prediction.time_s / busy + scattered_store_s(self.model, self.shapes)
        return time_s, loads_s


def construct(
    expr: TensorExpr, device: DeviceSpec, *, k: int = 10, first_epsilon: float = 0.0, tensor_core: bool = True
) -> Construction:
    """Up to ``k`` rPrograms for ``expr`` on ``device``, best predicted first; empty where nothing fits the device.

    Tiles name the axes of ``expr``. The bound on padding grows through `EPSILONS` from ``first_epsilon`` on. Without
    ``tensor_core`` they are tiles of vector units also where tensor cores would serve.
    """
    rules = ALL_RULES if tensor_core else ALL_RULES - {TENSOR_CORE}
    return Constructor(expr, device, k, first_epsilon, rules).run()


class Constructor:
    """One construction. What the paper's ablations leave out are methods that `benchmarks/_ablated.py` replaces."""

    def __init__(
        self, expr: TensorExpr, device: DeviceSpec, k: int, first_epsilon: float, rules: frozenset[str]
    ) -> None:
        self.expr, self.device, self.k, self.rules = expr, device, k, rules
        self.first_epsilon = first_epsilon
        self.budget = Budget(limits().search_steps)

    def relaxations(self) -> list[tuple[float, frozenset[str]]]:
        """(ε, rules) in the order in which they are tried: ε grows, then, for operators of a few points, rules go."""
        dropped = ({SHAPE}, {SHAPE, MEMORY}, {SHAPE, MEMORY, UNIT})
        bounds = [bound for bound in EPSILONS if bound >= self.first_epsilon] or [self.first_epsilon]
        return [(bound, self.rules) for bound in bounds] + [(bounds[-1], self.rules - some) for some in dropped]

    def shrunk(self, model: PerfModel, shapes: tuple[Shape, ...]) -> tuple[Shape, ...] | None:
        """Smaller tiles that give all units work, where ``shapes`` do not."""
        return shrink(model, shapes)

    def predicted(self, model: PerfModel, shapes: tuple[Shape, ...]) -> tuple[tuple[int, ...], Prediction]:
        """The padding of data tiles in shared memory, by which reads do not conflict, and the time with it."""
        stored = not model.is_cpu and len(shapes) > 1
        padding = storage_padding(model, shapes[1], shapes[0]) if stored else ()
        return padding, model.predict(shapes, padding)

    def run(self) -> Construction:
        expr, device, k = self.expr, self.device, self.k
        canonical = canonicalise(expr, fuse=False)
        models = [self._model(canonical.expr, axis) for axis in legal_vector_axes(canonical.expr, device)]
        tiled = [model for model in models if has_register_tiles(model)]
        found = [_ranked(loops) for loops in best_loops(tiled)] or self._grown(models)
        ranked = sorted(found, key=lambda candidate: candidate.rank)
        digest = expr.digest
        programs = [_program(candidate, expr, canonical, digest) for candidate in ranked[: k + 10]]
        return Construction(
            programs=tuple(programs[:k]),
            steps=_steps(ranked[0]) if ranked else (),
            canonical=canonical,
            rejected=tuple(_alternative(program, programs[0]) for program in programs[1:]),
            notes=(f"best of {limits().search_steps} tiles looked at (limit)",) if self.budget.steps < 0 else (),
            narrower=tuple(
                _program(ranked[place], expr, canonical, digest)
                for place in narrower_places([state.model.partition_count(state.shapes) for state in ranked])
            ),
        )

    def _grown(self, models: Sequence[PerfModel]) -> list[_Candidate]:
        """What grows step by step, under bounds on padding that grow until there are enough."""
        candidates: dict[tuple[str | None, tuple[Shape, ...]], _Candidate] = {}
        for bound, allowed in self.relaxations():
            for model in models:
                for candidate in self._candidates(model, allowed, bound):
                    candidates.setdefault((model.vector_axis, candidate.shapes), candidate)
            enough = len(candidates) >= max(self.k, MIN_POOL) and _close_to_roofline(models, candidates.values())
            if enough or self.budget.steps < 0 or (candidates and bound >= EPSILONS[-1]):
                break
        return list(candidates.values())

    def _model(self, expr: TensorExpr, axis: str | None) -> PerfModel:
        model = PerfModel(expr, self.device, axis)
        model.tensor_core = TENSOR_CORE in self.rules and tensor_core_steps(expr, self.device) is not None
        return model

    def _candidates(self, model: PerfModel, rules: frozenset[str], epsilon: float) -> list[_Candidate]:
        pool = max(self.k, MIN_POOL)
        below = 1 if model.is_cpu else 3
        quotas = (pool * below, below, *(1 for _ in range(model.last_level)))
        found = []
        for result in TileSearch(model, rules, epsilon, quotas, self.budget).run():
            found.append(self._candidate(model, result, result.shapes, epsilon, shrunk=False))
            shrunk = self.shrunk(model, result.shapes)
            if shrunk is not None:
                found.append(self._candidate(model, result, shrunk, epsilon, shrunk=True))
        return found

    def _candidate(
        self, model: PerfModel, found: Found, shapes: tuple[Shape, ...], epsilon: float, *, shrunk: bool
    ) -> _Candidate:
        padding, prediction = self.predicted(model, shapes)
        moves = found.trail.moves() if found.trail is not None else ()
        return _Candidate(model, shapes, padding, prediction, epsilon, shrunk, moves)


def _ranked(loops: CpuLoops) -> _Candidate:
    """The candidate of ``loops``, explained by a step for each layer."""
    return _Candidate(
        model=loops.model,
        shapes=loops.shapes,
        padding=(),
        prediction=loops.prediction,
        epsilon=0.0,
        shrunk=False,
        moves=tuple(Move(level, tile, None, tile, 0.0, "ranked") for level, tile in enumerate(loops.shapes)),
        order=loops.order if loops.order != loops.model.loop_order(loops.shapes[0]) else (),
        ranked_s=loops.ranked_s,
    )


def narrower_places(counts: Sequence[int]) -> list[int]:
    """Of programs with so many partitions, best first: those that have fewer than all before them.

    Worked example: of 80, 96, 40, 80 and 20 partitions the third and the last.
    """
    least = itertools.accumulate(counts[:-1], min)
    return [position for position, (before, own) in enumerate(zip(least, counts[1:], strict=True), 1) if own < before]


def _close_to_roofline(models: Sequence[PerfModel], candidates: Iterable[_Candidate]) -> bool:
    """Whether the best program is within a factor of the roofline, so that more padding cannot gain much."""
    best = min(candidate.prediction.time_s for candidate in candidates)
    overhead = Machine(models[0].device).launch_s
    return best - overhead <= GOOD_ENOUGH * models[0].roofline_s()


# ---- tiles of a GPU's vector units -------------------------------------------------------------------------------
def vector_program(tile: GpuTile, expr: TensorExpr, device: DeviceSpec) -> RProgram:
    """The rProgram of ``tile``, which has a size for each axis of ``expr``; raises IllegalRewrite where it has not."""
    names = [axis.name for axis in expr.axes]
    if tile.matrix or len(tile.block) != len(names) or tile.splits > 1:
        raise IllegalRewrite(f"{tile} is no tile of {expr.name} with {len(names)} axes on vector units")
    canonical = canonicalise(expr, fuse=False)
    model = PerfModel(canonical.expr, device, legal_vector_axes(canonical.expr, device)[0])
    sizes = [dict(zip(names, shape, strict=True)) for shape in (tile.inner, tile.block)]
    shapes = tuple(tuple(size[name] for name in model.names) for size in sizes)
    if any(inner > outer for inner, outer in zip(*shapes, strict=True)):
        raise IllegalRewrite(f"{tile}: a thread has more than its threadblock")
    padding = storage_padding(model, shapes[1], shapes[0])
    found = _Candidate(model, shapes, padding, model.predict(shapes, padding), 0.0, shrunk=False, moves=())
    return _program(found, expr, canonical, expr.digest)


def tile_of_vector(program: RProgram) -> GpuTile:
    """What `vector_program` makes ``program`` of, without pipelines."""
    return GpuTile(matrix=False, inner=program.tile("L0").shape, block=program.tile("L1").shape)


# ---- to records ------------------------------------------------------------------------------------------------


def _program(candidate: _Candidate, expr: TensorExpr, canonical: CanonicalForm, digest: str) -> RProgram:
    model, device = candidate.model, candidate.model.device
    partitions = model.partition_count(candidate.shapes)
    tiles = []
    for level, shape in enumerate(candidate.shapes):
        padding = candidate.padding if level == 1 else ()
        tiles.append((device.layers[level].name, _rtile(model, shape, expr, canonical, padding)))
    return RProgram(
        device=device.name,
        expr_digest=digest,
        tiles=tuple(tiles),
        vector_axis=model.vector_axis,
        unit_count=min(device.unit_count, partitions),
        partition_count=partitions,
        epsilon=candidate.epsilon,
        shrunk=candidate.shrunk,
        prediction=candidate.prediction,
        order=_order(candidate, expr, canonical),
    )


def _order(candidate: _Candidate, expr: TensorExpr, canonical: CanonicalForm) -> tuple[str, ...]:
    """Names of the loops' axes; those that the canonical form drops have one tile, and come first."""
    if not candidate.order:
        return ()
    dropped = [axis.name for axis in expr.spatial if axis.name in canonical.dropped]
    return (*dropped, *(candidate.model.names[axis] for axis in candidate.order))


def _rtile(
    model: PerfModel, shape: Shape, expr: TensorExpr, canonical: CanonicalForm, padding: tuple[int, ...] = ()
) -> RTile:
    """The tile over the expression's axes; axes of extent 1, which the canonical form drops, have size 1."""
    sizes = {**dict(zip(model.names, shape, strict=True)), **dict.fromkeys(canonical.dropped, 1)}
    order = [axis.name for axis in expr.axes if axis.name in sizes]
    names = order if len(order) == len(sizes) else [*model.names, *canonical.dropped]
    stored = tuple((t.tensor, pad) for t, pad in zip(model.inputs, padding, strict=False) if pad)
    return RTile(axes=tuple(names), shape=tuple(sizes[name] for name in names), storage_padding=stored)


def _steps(candidate: _Candidate) -> tuple[EnlargeStep, ...]:
    model = candidate.model
    steps = []
    for move in candidate.moves:
        shown = [RTile(axes=model.names, shape=shape) for shape in (move.tile, move.larger)]
        steps.append(
            EnlargeStep(
                layer=model.device.layers[move.level].name,
                tile=shown[0],
                axis=None if move.axis is None else model.names[move.axis],
                larger=shown[1],
                reuse_score=move.score,
                footprint_bytes=model.footprint_bytes(move.level, move.larger),
                capacity_bytes=model.capacity_bytes(move.level),
                mem_perf_gflops=model.mem_perf_gflops(move.level, move.larger),
                max_compute_gflops=model.max_compute_gflops(),
                outcome=move.outcome,
            )
        )
    return tuple(steps)


def _alternative(program: RProgram, best: RProgram) -> Alternative:
    slower = program.prediction.time_s / best.prediction.time_s if best.prediction.time_s else 1.0
    if slower > 1.0005:
        reason = f"predicted {slower:.2f}x slower, bound by {program.prediction.bound}"
    else:
        reason = "predicted as fast, but loads its memory layers more"
    return Alternative(program=program, reason=reason)
