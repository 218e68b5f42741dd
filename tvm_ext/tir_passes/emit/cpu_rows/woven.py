"""An axis along which elements come in turns from a few places: a loop over the turns, all elements of one in its body.

Worked example, ``y[v] = x[v % 2, v // 2]``: ``for w: y[2 * w] = x[0, w]; y[2 * w + 1] = x[1, w]``. LLVM loads both
lines in vectors and interleaves them; of the one loop it makes a gather. Transposed convolutions of stride 2 end so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Expr, Stmt, Var, nodes_in, structural_map, tirx
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.predicates import contiguous_in
from tvm_ext.ir.build_ir import SERIAL, index, loop, sequence

LONGEST_TURN = 4
"""A choice: elements that the loop's body stores; two such axes store its square."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WovenAxis:
    """Elements ``length * w + phase - offset`` of ``axis``, for turns w and phases below ``length``."""

    axis: Var
    length: int
    offset: int

    def emit(self, extent: int, value: Expr, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body`` (place, value there) for each of ``extent`` places; those of cut turns are written out."""
        first, end = -(-self.offset // self.length), (extent + self.offset) // self.length
        before, behind = (self.length * turn - self.offset for turn in (first, end))
        if first >= end:
            return sequence(*(self._point(place, value, body) for place in range(extent)))

        def turn(number: Expr) -> Stmt:
            return sequence(*(self._element(number + index(first), phase, value, body) for phase in range(self.length)))

        return sequence(
            *(self._point(place, value, body) for place in range(before)),
            loop(end - first, SERIAL, self.axis.name, turn),
            *(self._point(place, value, body) for place in range(behind, extent)),
        )

    def _point(self, place: int, value: Expr, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        turn, phase = divmod(place + self.offset, self.length)
        return self._element(index(turn), phase, value, body)

    def _element(self, turn: Expr, phase: int, value: Expr, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        def quotient(node: Expr) -> Expr:
            return turn if _matches(node, self) else node

        def remainder(node: Expr) -> Expr:
            return index(phase) if _matches(node, self) else node

        known = structural_map(value, [(tirx.FloorDiv, quotient), (tirx.FloorMod, remainder)])
        return body(turn * index(self.length) + index(phase - self.offset), known)


def turns_of(computation: Computation, axes: Sequence[Var]) -> list[WovenAxis]:
    """The turns in which elements along ``axes`` come; none where those along the last one do not.

    ``x[v // 4, v % 4]`` of rows of 4 is a run of memory: none either.
    """
    if contiguous_in(computation, axes[-1]):
        return []
    found = [turns for axis in axes if (turns := _turns(computation.value, axis)) is not None]
    return found if found and found[-1].axis.same_as(axes[-1]) else []


def _turns(value: Expr, axis: Var) -> WovenAxis | None:
    """Those of the one remainder of ``axis`` in ``value``."""
    found = [_parts(node, axis) for node in nodes_in(value, tirx.FloorMod)]
    known = {parts for parts in found if parts is not None}
    if len(known) != 1:
        return None
    ((length, offset),) = known
    return (
        WovenAxis(axis=axis, length=length, offset=offset)
        if 1 < length <= LONGEST_TURN and 0 <= offset < length
        else None
    )


def _parts(node: Expr, axis: Var) -> tuple[int, int] | None:
    """Divisor and offset of a quotient or remainder of ``axis + offset``."""
    if not isinstance(node.b, tirx.IntImm):
        return None
    if axis.same_as(node.a):
        return int(node.b), 0
    is_moved = isinstance(node.a, tirx.Add) and axis.same_as(node.a.a) and isinstance(node.a.b, tirx.IntImm)
    return (int(node.b), int(node.a.b)) if is_moved else None


def _matches(node: Expr, turns: WovenAxis) -> bool:
    return _parts(node, turns.axis) == (turns.length, turns.offset)
