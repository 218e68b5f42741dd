"""EnlargeTile of Figure 8: grows one tile layer by layer along the axis that saves most traffic per byte held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal

from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.support.limits import check_time, limits

from .align import BANK, Aligner
from .rtile import reuse_score, storage_padding

Outcome = Literal[
    "enlarged",
    "memory keeps up",
    "over capacity",
    "over thread limit",
    "nothing larger",
    "bypassed",
    "streamed",
    "ranked",
]
"""Why a step ended as it did.

"memory keeps up": MemPerf > MaxComputePerf, the layer is done (line 17). "over capacity": the larger tile does not fit,
the present one is kept (line 13). "bypassed": one reduction does not fit this cache, so tiles stream through it.
"streamed": no axis saves traffic (constant reuse score), so the layer is loaded through directly. "ranked": the tile
is the best of all, by the model (`cpu_loops.py`).
"""


@dataclass(frozen=True, slots=True)
class Move:
    """One raw step of a search; `construct.EnlargeStep` is its readable form."""

    level: int
    tile: Shape
    axis: int | None
    larger: Shape
    score: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Trail:
    """The moves that led to a tile, as a linked list that branches share."""

    move: Move
    before: Trail | None

    def moves(self) -> tuple[Move, ...]:
        """All moves from the first on."""
        found: list[Move] = []
        at: Trail | None = self
        while at is not None:
            found.append(at.move)
            at = at.before
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Found:
    """A finished rProgram: its tiles from the highest layer down, and how it was reached."""

    shapes: tuple[Shape, ...]
    trail: Trail | None


@dataclass(slots=True)
class Budget:
    """Tiles that the searches for one operator may still look at."""

    steps: int

    def take(self) -> bool:
        """Whether there is one more; LimitPassed where the clock has run out."""
        check_time()
        self.steps -= 1
        return self.steps >= 0


class TileSearch:
    """One run of ConstructProg for a model (hence a vector axis), a rule set and an ε.

    ``quotas[level]`` bounds the rPrograms that one entry into a layer may add: without it the first register tile
    would fill the result list with variants of its lower layers (Figure 8, line 8, counts results only). Where
    ``budget`` is used up, what has been found by then is the result.
    """

    def __init__(
        self,
        model: PerfModel,
        rules: frozenset[str],
        epsilon: float,
        quotas: tuple[int, ...],
        budget: Budget | None = None,
    ) -> None:
        self.budget = budget if budget is not None else Budget(limits().search_steps)
        self.model = model
        self.rules = rules
        self.epsilon = epsilon
        self.quotas = quotas
        self.results: list[Found] = []
        self._visited: set[tuple[int, Shape, tuple[Shape, ...]]] = set()

    def run(self) -> list[Found]:
        """All rPrograms found, in the order in which Figure 8 finds them."""
        aligner = self._aligner(0, ())
        tile = aligner.start((1,) * len(self.model.extents))
        if self._refusal(tile, aligner, ()) is not None:
            return []
        saturating = self._grow_to(tile, aligner, self.model.saturates_teu)
        if saturating is not None and self._refusal(saturating, aligner, ()) is None:
            tile = saturating
        if self._constant_score():
            self._stream(tile)
        elif all((score <= 0 for score, _, _ in self._next_rtile_shapes(tile, aligner))):
            self._add(tile, aligner, (), Trail(Move(0, tile, None, tile, 0.0, "streamed"), None))
        else:
            self._enlarge_tile(aligner.start((1,) * len(self.model.extents)), aligner, (), None, self.quotas[0])
        return self.results

    def _aligner(self, level: int, program: tuple[Shape, ...]) -> Aligner:
        return Aligner(self.model, level, program[-1] if program else None, self.rules, self.epsilon)

    # ---- Figure 8 ----------------------------------------------------------------------------------------------

    def _enlarge_tile(
        self, tile: Shape, aligner: Aligner, program: tuple[Shape, ...], trail: Trail | None, stop_at: int
    ) -> None:
        """EnlargeTile (Figure 8, lines 5-20), until ``stop_at`` results are there."""
        level = aligner.level
        nexts = self._next_rtile_shapes(tile, aligner)
        if not nexts or nexts[0][0] <= 0:
            outcome: Outcome = "streamed" if nexts else "nothing larger"
            self._add(tile, aligner, program, Trail(Move(level, tile, None, tile, 0.0, outcome), trail))
            return
        for score, axis, larger in nexts:
            if len(self.results) >= stop_at or not self.budget.take():
                return
            key = (level, larger, program)
            if key in self._visited:
                return  # line 12: better orders of the same steps have been followed
            self._visited.add(key)
            refusal = self._refusal(larger, aligner, program)
            if refusal is not None:
                self._add(tile, aligner, program, Trail(Move(level, tile, axis, larger, score, refusal), trail))
                continue
            if self._memory_keeps_up(level, larger, program):
                self._add(
                    larger, aligner, program, Trail(Move(level, tile, axis, larger, score, "memory keeps up"), trail)
                )
            if len(self.results) < stop_at:
                step = Trail(Move(level, tile, axis, larger, score, "enlarged"), trail)
                self._enlarge_tile(larger, aligner, program, step, stop_at)

    def _next_rtile_shapes(self, tile: Shape, aligner: Aligner) -> list[tuple[float, int, Shape]]:
        """GetNextRTileShapes (lines 21-27): the next aligned tile along each axis, best data reuse score first."""
        found = []
        for axis in range(len(tile)):
            size = aligner.next_size(tile, axis)
            if size is not None:
                larger = (*tile[:axis], size, *tile[axis + 1 :])
                found.append((reuse_score(self.model, aligner.level, tile, larger), axis, larger))
        found.sort(key=lambda scored: (-scored[0], -scored[1]))
        return found

    def _memory_keeps_up(self, level: int, tile: Shape, program: tuple[Shape, ...]) -> bool:
        """Line 17, MemPerf > MaxComputePerf; a register tile must also fill the TEU's pipeline."""
        model = self.model
        target = model.max_compute_gflops()
        if level == 0:
            return model.saturates_teu(tile) and model.mem_perf_gflops(0, tile) > target
        if model.is_cpu:
            target = min(target, model.tile_compute_gflops(program[0]))
        return model.mem_perf_gflops(level, tile) > target

    def _refusal(self, tile: Shape, aligner: Aligner, program: tuple[Shape, ...]) -> Outcome | None:
        """Why a tile may not be held in its layer, or None: MemFootprint against Capacity (line 13), thread limits."""
        if self._footprint(aligner.level, tile, program) > self.model.capacity_bytes(aligner.level):
            return "over capacity"
        return None if aligner.level != 1 or aligner.threads_fit(tile) else "over thread limit"

    def _footprint(self, level: int, tile: Shape, program: tuple[Shape, ...]) -> float:
        padding: tuple[int, ...] = ()
        if level == 1 and BANK in self.rules and not self.model.is_cpu:
            padding = storage_padding(self.model, tile, program[0])
        return self.model.footprint_bytes(level, tile, padding)

    # ---- from one layer to the next ----------------------------------------------------------------------------

    def _add(self, tile: Shape, aligner: Aligner, program: tuple[Shape, ...], trail: Trail | None) -> None:
        """P.Add(mem, T), then EnlargeTile(T, mem.Next(), P)."""
        if not aligner.fits_execution_unit(tile):
            return
        extended = (*program, tile)
        level = aligner.level + 1
        key = (level, tile, extended)
        if key in self._visited:
            return
        self._visited.add(key)
        if level == self.model.last_level:
            self.results.append(Found(extended, trail))
            return
        if self.model.is_cpu:
            self._enter_cache(level, extended, trail)
        else:
            self._enter_shared_memory(level, extended, trail)

    def _enter_cache(self, level: int, program: tuple[Shape, ...], trail: Trail | None) -> None:
        """First tile of a CPU's cache: the upper tile with its whole reduction, which stays on one unit (§3.2)."""
        model, aligner = self.model, self._aligner(level, program)
        tile = tuple(model.extents[i] if i in model.reduction else size for i, size in enumerate(program[-1]))
        if self._refusal(tile, aligner, program) is not None:
            move = Move(level, tile, None, tile, 0.0, "bypassed")
            self._add(tile, aligner, program, Trail(move, trail))
            return
        stop_at = len(self.results) + self.quotas[level]
        if self._memory_keeps_up(level, tile, program):
            move = Move(level, tile, None, tile, 0.0, "memory keeps up")
            self._add(tile, aligner, program, Trail(move, trail))
        if len(self.results) < stop_at:
            self._enlarge_tile(tile, aligner, program, trail, stop_at)

    def _enter_shared_memory(self, level: int, program: tuple[Shape, ...], trail: Trail | None) -> None:
        """First tile of a GPU's shared memory: aligned to transactions and to whole warps."""
        aligner = self._aligner(level, program)
        for first in (aligner.start(self._whole_windows(program[-1])), aligner.start(program[-1])):
            tile = self._grow_to(first, aligner, aligner.fits_execution_unit)
            if tile is not None and self._refusal(tile, aligner, program) is None:
                break
        else:
            return
        stop_at = len(self.results) + self.quotas[level]
        if self._memory_keeps_up(level, tile, program):
            move = Move(level, tile, None, tile, 0.0, "memory keeps up")
            self._add(tile, aligner, program, Trail(move, trail))
        if len(self.results) < stop_at:
            self._enlarge_tile(tile, aligner, program, trail, stop_at)

    def _grow_to(self, tile: Shape, aligner: Aligner, accepted: Callable[[Shape], bool]) -> Shape | None:
        """Double one spatial axis after another until ``accepted(tile)``; None where no axis is left.

        First the axis that comes closest to whole warps, then the one with the best reuse score: of 17 x 11 points,
        8 x 4 threads are a warp, while 17 x 11 (each axis whole) never becomes one.
        """
        while not accepted(tile):
            larger = [grown for axis in self.model.spatial if (grown := self._doubled(tile, axis, aligner)) is not None]
            if not larger:
                return None
            tile = max(larger, key=lambda shape: (aligner.filled_lanes(shape), self._score(aligner, tile, shape)))
        return tile

    def _score(self, aligner: Aligner, tile: Shape, larger: Shape) -> float:
        return reuse_score(self.model, aligner.level, tile, larger)

    def _doubled(self, tile: Shape, axis: int, aligner: Aligner) -> Shape | None:
        size = aligner.doubled_size(tile, axis)
        return None if size is None else (*tile[:axis], size, *tile[axis + 1 :])

    # ---- constant data reuse score -----------------------------------------------------------------------------

    def _constant_score(self) -> bool:
        """Whether no axis saves traffic in any layer: element-wise operators, plain reductions (§3.2, "Scaling up").

        That is so where every input element is used once: as many points as elements. A pooling with windows that
        overlap gains nothing in registers, but does in the layer below.
        """
        points = prod(self.model.extents)
        return all(points <= prod(table.spans(self.model.extents)) for table in self.model.inputs)

    def _streamed_tile(self, program: tuple[Shape, ...], aligner: Aligner) -> Shape:
        return self._contiguous_run(program, aligner) if self.model.is_cpu else self._thread_group(program, aligner)

    def _stream(self, tile: Shape) -> None:
        """Construct the top layer only and load it directly from the lowest."""
        trail = Trail(Move(0, tile, None, tile, 0.0, "streamed"), None)
        program: tuple[Shape, ...] = (tile,)
        for level in range(1, self.model.last_level):
            tile = self._streamed_tile(program, self._aligner(level, program))
            program = (*program, tile)
            trail = Trail(Move(level, tile, None, tile, 0.0, "streamed"), trail)
        if (
            self._refusal(tile, self._aligner(len(program) - 1, program[:-1]), program[:-1]) is None
            or self.model.is_cpu
        ):
            self.results.append(Found(program, trail))

    def _contiguous_run(self, program: tuple[Shape, ...], aligner: Aligner) -> Shape:
        """A CPU's block for a streamed operator: whole inner axes first, as far as the cache goes.

        Nothing is reused, so the block only has to be long: 16 of 83 columns become 83, then 83 rows, ...
        """
        model = self.model
        tile = tuple(model.extents[i] if i in model.reduction else s for i, s in enumerate(program[-1]))
        for axis in sorted(model.spatial, key=lambda i: (i == model.vector, i), reverse=True):
            while (larger := self._doubled(tile, axis, aligner)) is not None:
                if self._refusal(larger, aligner, program) is not None:
                    return tile
                tile = larger
        return tile

    def _whole_windows(self, tile: Shape) -> Shape:
        """``tile`` with every window whole: reduction axes that share an index with a spatial one (2*h + r).

        Neighbouring windows overlap, but only a tile that holds several rows h *and* several taps r saves traffic;
        enlarging either axis alone scores nothing, so the greedy path would never find it.
        """
        windows = self.model.windows
        return tuple(self.model.extents[i] if i in windows else size for i, size in enumerate(tile))

    def _thread_group(self, program: tuple[Shape, ...], aligner: Aligner) -> Shape:
        """A GPU's threadblock for a streamed operator: whole warps and transactions, a warp for each TEU if it may."""
        device, model = self.model.device, self.model
        wanted = device.teu_lanes * device.teus_per_unit
        deep = tuple(1 if i in model.reduction else size for i, size in enumerate(program[-1]))
        start = aligner.start(self._whole_windows(deep))
        warps = self._grow_to(start, aligner, aligner.fits_execution_unit)
        if warps is None:
            return start
        group = self._grow_to(
            warps,
            aligner,
            lambda shape: model.threads(program[0], shape) >= wanted and aligner.fits_execution_unit(shape),
        )
        return warps if group is None or self._refusal(group, aligner, program) is not None else group
