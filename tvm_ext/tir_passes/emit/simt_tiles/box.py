"""Data tiles of a GPU kernel: which box of a tensor a step of a threadblock touches (paper Figure 4).

The positions of a box follow from the affine access; its elements may be computed while they are copied (padding, casts
and other computations fused before the anchor). A `CopyShape` divides a box among the threads that copy it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from tvm_ext._tvm import Expr, TensorLoad, Var
from tvm_ext.analysis.computation_exprs import linear_index
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads, static_shape, substitute
from tvm_ext.ir.build_ir import as_index, bind, load
from tvm_ext.support.arithmetic import ceil_div

from .tiling import Number, SimtTiling, both, digits, quotient, remainder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoxDim:
    """One dimension of a box: tensor positions ``constant + step * (sum(coefficient * axis))``.

    ``step`` leaves out what a stride jumps over: ``in[2*y]`` has coefficient 1 and step 2. ``length`` is the number of
    positions that the tensor has. ``places`` are the tensor's dimensions behind it: one, or those which together are
    the digits of ``variable``, a fused axis (``[f // 28, f % 28]``).
    """

    terms: tuple[tuple[int, int], ...]  # (axis, coefficient)
    step: int
    constant: int
    length: int
    places: tuple[int, ...]
    variable: Var | None = None

    def size(self, tile: Mapping[int, int]) -> int:
        """Positions held: 2*x + r with x = 4 and r = 3 spans 2*3 + 2 + 1 = 9."""
        return 1 + sum(abs(c) * (tile[p] - 1) for p, c in self.terms)

    def low(self, tile: Mapping[int, int]) -> int:
        """The first position, in steps from where all axes are at the tile's start; below 0 for flipped axes."""
        return sum(c * (tile[p] - 1) for p, c in self.terms if c < 0)

    def offset(self, within: Mapping[int, Number], tile: Mapping[int, int]) -> Number:
        """Where in the box the element is for which each axis is ``within`` the tile."""
        total: Number = -self.low(tile)
        for p, c in self.terms:
            total = total + within.get(p, 0) * c
        return total

    def position(self, starts: Mapping[int, Expr], tile: Mapping[int, int], offset: Number) -> Expr:
        """Position in the tensor of the box's element ``offset``."""
        total: Number = offset + self.low(tile)
        for p, c in self.terms:
            total = total + starts[p] * c
        return total * self.step + self.constant

    def bounds(self, ends: Mapping[int, int]) -> tuple[int, int]:
        """Lowest and highest position in the tensor when each axis runs up to ``ends``."""
        high = sum(c * (ends[p] - 1) for p, c in self.terms if c > 0)
        low = sum(c * (ends[p] - 1) for p, c in self.terms if c < 0)
        return self.constant + self.step * low, self.constant + self.step * high


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Box:
    """The data tile of one load of the anchor; ``producers`` are the computations whose values it stands for."""

    load: TensorLoad
    dims: tuple[BoxDim, ...]
    producers: tuple[Computation, ...]

    @property
    def dtype(self) -> str:
        return dtype_of(self.load)

    def uses(self, axis: int) -> bool:
        return any(axis == p for dim in self.dims for p, _ in dim.terms)

    def shape(self, tile: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(dim.size(tile) for dim in self.dims)

    def value_at(self, positions: Sequence[Expr]) -> Expr:
        """The element at a position per box dimension: loaded, or computed by a fused producer."""
        indices = list(self.load.indices)
        for dim, position in zip(self.dims, positions, strict=True):
            for place in dim.places:
                original = indices[place]
                if dim.variable is None:
                    indices[place] = as_index(position, original)
                else:
                    indices[place] = substitute(original, [(dim.variable, as_index(position, dim.variable))])
        return produce(load(self.load.source, indices), self.producers)


def produce(value: Expr, producers: Sequence[Computation]) -> Expr:
    """``value`` with every load of a producer's tensor replaced by what the producer computes there."""

    def swap(item: TensorLoad) -> Expr:
        for computation in producers:
            if item.source.same_as(computation.target):
                moved = bind(computation.spatial, item.indices)
                return produce(substitute(computation.value, moved), producers)
        return item

    return replace_loads(value, swap) if producers else value


def box_of(item: TensorLoad, computation: Computation, producers: Sequence[Computation]) -> Box | None:
    """The box of the load ``item``; None where it is no box (a gather, two fused axes in one index)."""
    names = [str(p) for p in range(len(computation.variables))]
    extents = dict(enumerate(computation.extents))
    dims: list[BoxDim] = []
    fused: dict[int, list[int]] = {}
    for position, (index, size) in enumerate(zip(item.indices, static_shape(item.source), strict=True)):
        form = linear_index(index, computation.variables, names)
        if form is None:
            mentioned = [p for p, own in enumerate(computation.variables) if mentions(index, own)]
            if len(mentioned) != 1:
                return None
            fused.setdefault(mentioned[0], []).append(position)
        elif form.terms:
            dims.append(_box_dim([(int(n), c) for n, c in form.terms], form.constant, size, position, extents))
    for axis, places in fused.items():
        digits = BoxDim(
            terms=((axis, 1),),
            step=1,
            constant=0,
            length=extents[axis],
            places=tuple(places),
            variable=computation.variables[axis],
        )
        dims.append(digits)
    dims.sort(key=lambda dim: dim.places)
    return Box(load=item, dims=tuple(dims), producers=tuple(producers))


def _box_dim(terms: list[tuple[int, int]], constant: int, size: int, place: int, extents: Mapping[int, int]) -> BoxDim:
    step = gcd(*(c for _, c in terms))
    dim = BoxDim(
        terms=tuple((p, c // step) for p, c in terms), step=step, constant=constant, length=size, places=(place,)
    )
    # A fused axis that addresses a run of memory ([0, f]) has positions beyond the dimension's own size.
    reached = dim.bounds(extents)[1] + 1
    return BoxDim(terms=dim.terms, step=step, constant=constant, length=max(size, reached), places=(place,))


def window_stride(box: Box, d: int, tiling: SimtTiling) -> int:
    """The stride of a window (``2*x + r``: 2), or 1."""
    terms = box.dims[d].terms
    strides = [c for p, c in terms if p in tiling.spatial and tiling.threads[p] > 1]
    if len(strides) != 1 or strides[0] < 2 or any(c < 0 for _, c in terms):
        return 1
    return strides[0]


# --- copies -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyShape:
    """Units of ``width`` neighbours in memory, numbered along the box.

    ``sizes`` are the box's; its last ``run`` dimensions are one run of memory. Units are numbered so that ``patch``
    neighbours of a run come first, then the rows, then the next patch. A row may be given more units than it has
    (``row_units``), so that no warp goes on in the next row: 58 columns take 64 units, 6 of them idle.

    With a ``phase`` > 1 the columns of a row are taken in the order in which shared memory keeps them: for 5 columns
    and two phases 0, 2, 4, 1, 3 (and an idle unit).

    A ``last_resort`` copies what lies apart in memory, and is worth it only where it leaves no bank conflict.
    """

    sizes: tuple[int, ...]
    run: int
    width: int
    patch: int
    row_units: int
    phase: int = 1
    last_resort: bool = False

    @property
    def run_units(self) -> int:
        """Units that a row has."""
        return prod(self.sizes[len(self.sizes) - self.run :]) // self.width

    @property
    def units(self) -> int:
        """All unit numbers, idle ones included."""
        return prod(self.sizes[: len(self.sizes) - self.run]) * self.row_units

    @property
    def has_idle_units(self) -> bool:
        return self.row_units != self.run_units

    def _parts(self, unit: Number) -> tuple[list[Number], Number]:
        """(coordinates of the row, unit in the row)."""
        left, *parts = digits(unit, [1, *self.sizes[: len(self.sizes) - self.run], self.patch])
        if self.row_units == self.patch:  # the first row coordinate is not reduced: it is the last digit
            return parts[:-1], parts[-1]
        return parts[:-1], left * self.patch + parts[-1]

    def _column(self, position: Number) -> Number:
        """The column that is the ``position``-th of its row to be copied."""
        if self.phase == 1:
            return position
        each = ceil_div(self.run_units, self.phase)
        return remainder(position, each) * self.phase + quotient(position, each)

    def used(self, unit: Number) -> Number:
        """Whether the unit is not idle: a bool or a condition.

        Sorted by phase, both the last column of a phase that is one shorter and what follows the last phase are idle.
        """
        position = self._parts(unit)[1]
        used = self._column(position) < self.run_units
        sorted_units = self.phase * ceil_div(self.run_units, self.phase)
        if self.phase == 1 or self.row_units <= sorted_units:
            return used
        return both(used, position < sorted_units)

    def offsets(self, unit: Number, element: Number) -> list[Number]:
        """Where in the box ``element`` of ``unit`` is; a box of a scalar has no dimensions to be somewhere in."""
        if not self.sizes:
            return []
        rows, position = self._parts(unit)
        return [*rows, *digits(self._column(position) * self.width + element, self.sizes[len(rows) :])]
