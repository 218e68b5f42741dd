"""Non-maximum suppression: a heap of candidates by score; each that is popped is compared with all boxes kept so far.

An image's class is a task. So a run takes steps for the candidates that it looks at, not for all pairs of boxes, and
stops when the class has its share of rows. Of equal scores the first box goes first.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2, prod

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computations import static_shape
from tvm_ext.devices.machine import Machine
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    SERIAL,
    VECTORIZED,
    allocate,
    if_all,
    index,
    lanes_hold,
    lanes_of,
    load,
    loop,
    nest,
    new_buffer,
    parallel_cut,
    sequence,
    store,
    tile_count,
)
from tvm_ext.ir.heap import LEVEL_CYCLES, Heap, key_of, position_of
from tvm_ext.records.selection import SUPPRESSION
from tvm_ext.support.arithmetic import ceil_div

from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, SharedPart

CORNERS = 4
"""Of a box: y, x, y, x of two corners that lie opposite each other (ONNX, NonMaxSuppression)."""

OVERLAP_CYCLES = 30.0
"""Of the overlap of one box with a vector of others: about 20 instructions, one of them a division (13 cycles)."""

ZERO = (index(0),)


class CpuSuppression(KernelKind):
    name = "a suppression of boxes"

    def of_function(self, operator: UnscheduledOperator) -> SuppressionPart | None:
        if not operator.has(SUPPRESSION):
            return None
        part = SuppressionPart(context=operator.parameters_only(2))
        return part if part.share else None


@dataclass(frozen=True, kw_only=True, eq=False)
class SuppressionPart(SharedPart):
    """All images and classes of one operator."""

    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        note = f"boxes in the order of a heap: {self._count} for {self._tasks}, at most {self.share} kept"
        return [Form(path="rows", statements=(self._statement,), program=None, notes=(note,))]

    @property
    def _classes(self) -> list[int]:
        images, classes, _ = static_shape(self.context.operator.params[1])
        return [images, classes]

    @property
    def _tasks(self) -> str:
        return "{} images of {} classes".format(*self._classes)

    @property
    def _count(self) -> int:
        return static_shape(self.context.operator.params[1])[2]

    @property
    def share(self) -> int:
        """Rows that each image's class may have, or as many as there are boxes if these are fewer."""
        return min(self._count, static_shape(self.context.operator.params[4])[0] // self.task_count)

    @property
    def _lanes(self) -> int:
        return lanes_of("float32", self.context.device.register_bytes)

    @property
    def busy_s(self) -> float:
        """Seconds of one core if twice as many candidates are looked at as are kept, of scores above the threshold."""
        seen = min(self._count, 2 * self.share)
        overlaps = seen * ceil_div(self.share, 2 * self._lanes) * OVERLAP_CYCLES
        sifted = (self._count + seen * log2(1 + self._count)) * LEVEL_CYCLES
        return self.task_count * (overlaps + sifted) / Machine(self.context.device).vector_hz

    @property
    def task_count(self) -> int:
        return prod(self._classes)

    @property
    def _statement(self) -> Stmt:
        """Each class chooses its boxes; then all that were chosen become rows one behind the other."""
        images, classes = self._classes
        rows, filled = self.context.operator.params[4:]
        chosen = new_buffer((images, classes, self.share), INDEX_DTYPE, "chosen")
        counts = new_buffer((images, classes), INDEX_DTYPE, "counts")

        def write(point: tuple[Expr, ...]) -> Stmt:
            def row(number: Expr) -> Stmt:
                at = load(filled, ZERO)
                values = (*point, load(chosen, (*point, number)))
                fields = [store(rows, value, (at, index(k))) for k, value in enumerate(values)]
                return sequence(*fields, store(filled, at + index(1), ZERO))

            return loop(load(counts, point), SERIAL, "row", row)

        return sequence(
            allocate(chosen),
            allocate(counts),
            parallel_cut(self._classes, self.loop_kind, "class", lambda at: self._choose(at, chosen, counts)),
            store(filled, index(0), ZERO),
            nest(self._classes, SERIAL, ("image", "class"), write),
        )

    def _choose(self, at: tuple[Expr, ...], chosen: Buffer, counts: Buffer) -> Stmt:
        scores, above = self.context.operator.params[1], self.context.operator.params[3]
        size = new_buffer((1,), INDEX_DTYPE, "size", "local")
        kept = _KeptBoxes.of(self.share, self._lanes, self.context.operator.params)
        order = Heap(new_buffer((self._count,), INDEX_DTYPE, "candidates"), of_least=False)

        def candidate(number: Expr) -> Stmt:
            score, held = load(scores, (*at, number)), load(size, ZERO)
            taken = sequence(order.put(held, key_of(score, number)), store(size, held + index(1), ZERO))
            return if_all([score > load(above, ())], taken)

        counted, left = load(counts, at), load(size, ZERO)
        best = position_of(order.top)
        keep = sequence(kept.add(counted), store(chosen, best, (*at, counted)), store(counts, counted + index(1), at))
        step = sequence(
            kept.look_at(at[0], best),
            kept.compare(counted),
            if_all([kept.is_free], keep),
            order.pop(left),
            store(size, left - index(1), ZERO),
        )
        return sequence(
            *(allocate(buffer) for buffer in (size, order.keys, *kept.buffers)),
            store(size, index(0), ZERO),
            store(counts, index(0), at),
            loop(self._count, SERIAL, "box", candidate),
            order.build(left),
            kept.clear(),
            tirx.While(tirx.And(left > index(0), counted < index(self.share)), step),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _KeptBoxes:
    """Boxes of a class that were kept, and the one looked at, by field: low y, low x, high y, high x, area.

    Vectors of ``lanes`` are compared. Behind the last one kept there are boxes of no area, which overlap nothing.
    """

    boxes: Buffer
    limit: Buffer
    kept: Buffer
    seen: Buffer
    hidden: Buffer
    lanes: int

    @classmethod
    def of(cls, most: int, lanes: int, params: Sequence[Buffer]) -> _KeptBoxes:
        padded = ceil_div(most, lanes) * lanes
        return cls(
            boxes=params[0],
            limit=params[2],
            kept=new_buffer((CORNERS + 1, padded), "float32", "kept"),
            seen=new_buffer((CORNERS + 1,), "float32", "seen", "local"),
            hidden=new_buffer((1,), "bool", "hidden", "local"),
            lanes=lanes,
        )

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return self.kept, self.seen, self.hidden

    @property
    def is_free(self) -> Expr:
        return tirx.Not(load(self.hidden, ZERO))

    def clear(self) -> Stmt:
        return nest(
            static_shape(self.kept),
            SERIAL,
            ("field", "box"),
            lambda at: store(self.kept, tirx.const(0.0, "float32"), at),
        )

    def look_at(self, image: Expr, number: Expr) -> Stmt:
        corners = [load(self.boxes, (image, number, index(k))) for k in range(CORNERS)]
        pairs = list(zip(corners[:2], corners[2:], strict=True))
        fields = [*(tirx.min(a, b) for a, b in pairs), *(tirx.max(a, b) for a, b in pairs)]
        y0, x0, y1, x1 = (load(self.seen, (index(k),)) for k in range(CORNERS))
        stores = [store(self.seen, value, (index(k),)) for k, value in enumerate(fields)]
        return sequence(*stores, store(self.seen, (y1 - y0) * (x1 - x0), (index(CORNERS),)))

    def add(self, place: Expr) -> Stmt:
        fields = range(CORNERS + 1)
        return sequence(*(store(self.kept, load(self.seen, (index(k),)), (index(k), place)) for k in fields))

    def compare(self, count: Expr) -> Stmt:
        """Whether one of the first ``count`` boxes overlaps the one that is looked at by the limit, or more."""
        place = new_buffer((1,), INDEX_DTYPE, "place", "local")
        lanes, first = self.lanes, load(place, ZERO)
        overlaps = new_buffer((lanes,), "float32", "overlaps", "local")

        def overlap(lane: Expr) -> Stmt:
            fields = [
                (load(self.kept, (index(k), first + lane)), load(self.seen, (index(k),))) for k in range(CORNERS + 1)
            ]
            nothing = tirx.const(0.0, "float32")
            sides = [
                tirx.max(tirx.min(*high) - tirx.max(*low), nothing)
                for low, high in zip(fields[:2], fields[2:CORNERS], strict=True)
            ]
            shared = sides[0] * sides[1]
            return store(overlaps, shared / (fields[CORNERS][0] + fields[CORNERS][1] - shared), (lane,))

        tiles = tile_count(count, lanes) * index(lanes)
        step = sequence(
            loop(lanes, VECTORIZED, "lane", overlap),
            store(self.hidden, lanes_hold("or", operator.ge, overlaps, (index(0),), load(self.limit, ()), lanes), ZERO),
            store(place, tirx.Select(load(self.hidden, ZERO), tiles, first + index(lanes)), ZERO),
        )
        return sequence(
            allocate(place),
            allocate(overlaps),
            store(place, index(0), ZERO),
            store(self.hidden, tirx.const(False, "bool"), ZERO),
            tirx.While(first < tiles, step),
        )
