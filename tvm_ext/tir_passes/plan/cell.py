"""Recognises recurrent cells: products whose results are read element by element at several places of one axis.

An LSTM's step multiplies a state by the weights of four gates at once, and unit j then reads columns j, H + j, 2H + j
and 3H + j of that product. No column is finished by itself, so that the product is no anchor with an epilogue; but a
tile of some units in *all* gates is. A `Cell` is that: steps, each of products and of `CellValue`, which are
element-wise computations at one place of their last axis. ::

    sums = h W^T + x            products: sums, at 0, H, 2H and 3H; x is read where they are
    i, o, f, c = split(sums)    values: sigmoid(sums) at 0, H and 2H, tanh(sums) at 3H, the new states at 0

A product that reads the values of another (a GRU that resets the state before its product) makes a second step; what
passes from one step to the next is stored. Not here: what is no cell, and weights that are known only at run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from tvm_ext._tvm import Buffer, Expr, TensorLoad, tirx
from tvm_ext.analysis.computation_exprs import access_of, axis_names, linear_form
from tvm_ext.analysis.computations import Computation, OperatorBody, static_shape
from tvm_ext.analysis.predicates import has_call, is_in
from tvm_ext.analysis.tensor_expr import Access
from tvm_ext.errors import IllegalRewrite

from .plan_kernels import is_affine_copy, simplify

MOST_GAPS = 2
"""Times as many gates may be packed as are used."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellValue:
    """An element-wise computation at ``place``: at its last axis' positions ``place + unit``.

    ``stored``: it is an output, or a later step reads it.
    """

    computation: Computation
    place: int
    stored: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellProduct:
    """A reduction read at ``places`` of its last axis, multiples of ``spacing`` apart; a later step reads ``stored``.

    ``weights`` is its only load that moves along that axis, and reads a constant that nothing else does.
    """

    computation: Computation
    places: tuple[int, ...]
    stored: tuple[int, ...]
    weights: TensorLoad
    access: Access  # of the weights

    @property
    def spacing(self) -> int:
        """Columns from one gate to the next."""
        return gcd(*(place - self.places[0] for place in self.places)) or 1

    @property
    def gates(self) -> tuple[int, ...]:
        """The places as numbers of gates, from the first on: (0, 1, 3) of an LSTM whose gates o and c are coupled."""
        return tuple((place - self.places[0]) // self.spacing for place in self.places)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellStep:
    """What is computed tile by tile in one go."""

    products: tuple[CellProduct, ...]
    values: tuple[CellValue, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cell:
    """``lead``: the extents of the axes before the last, which all computations share; ``units`` are at each place."""

    operator: OperatorBody
    lead: tuple[int, ...]
    units: int
    steps: tuple[CellStep, ...]

    @property
    def rows(self) -> int:
        return prod(self.lead)


def find_cell(operator: OperatorBody, constants: Sequence[Buffer]) -> Cell | None:
    """The cell that an operator is, as it was read; None where it is none.

    Raises IllegalRewrite, with the reason, for one of a form that has no kernel here.
    """
    shapes = {static_shape(output) for output in operator.outputs}
    if len(shapes) != 1 or () in shapes:
        return None
    (*lead, units) = shapes.pop()
    reductions = [computation for computation in operator.computations if computation.is_reduction]
    if not any(static_shape(reduction.target)[-1:] > (units,) for reduction in reductions):
        return None  # nothing to read at two places: most operators go no further
    operator = simplify(operator, _is_cheaper_read_through)
    reductions = [computation for computation in operator.computations if computation.is_reduction]
    if not all(map(_has_own_axes, operator.computations)):
        return None
    if any(static_shape(computation.target)[:-1] != tuple(lead) for computation in operator.computations):
        return None
    uses = _Uses.of(operator, units)
    if uses is None or max(len(uses.places_of(reduction)) for reduction in reductions) < 2:
        return None
    return Cell(operator=operator, lead=tuple(lead), units=units, steps=_steps(operator, uses, constants))


def _is_cheaper_read_through(producer: Computation, consumers: Sequence[Computation]) -> bool:
    """Slices, transposes and broadcasts, and what has fewer elements than whoever reads it: a mask for each row."""
    if producer.is_reduction or not producer.writes_at_its_own_axes():
        return False
    if is_affine_copy(producer):
        return True
    fewer = all(producer.point_count < consumer.point_count for consumer in consumers)
    return fewer and not has_call(producer) and not any(consumer.is_reduction for consumer in consumers)


def _has_own_axes(computation: Computation) -> bool:
    """Whether it writes each element at its own spatial axes, whole."""
    shape = static_shape(computation.target)
    own = tuple(computation.extent(v) for v in computation.spatial)
    return bool(shape) and computation.writes_at_its_own_axes() and own == shape


# --- which elements of which computation are needed ----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Read:
    """``reader`` at ``place`` (None: a reduction, which reads everything) reads ``read`` at ``at``."""

    reader: Computation
    place: int | None
    read: Computation
    at: int


@dataclass(frozen=True, slots=True)
class _Uses:
    """What of an operator's computations is needed, and by whom."""

    needed: list[tuple[Computation, int]]
    reads: list[_Read]

    @staticmethod
    def of(operator: OperatorBody, units: int) -> _Uses | None:
        """The places of all computations; None where an element-wise one reads another across units or rows."""
        uses = _Uses([], [])
        waiting: list[tuple[Computation, int]] = [
            (computation, 0) for computation in operator.computations if operator.is_output(computation.target)
        ]
        for product in (computation for computation in operator.computations if computation.is_reduction):
            for read in _produced(product, operator):
                if read.is_reduction or read.extents[-1] != units:
                    return None
                uses.reads.append(_Read(product, None, read, 0))
                waiting.append((read, 0))
        while waiting:
            computation, place = waiting.pop()
            if any(computation is other and place == at for other, at in uses.needed):
                continue
            if not 0 <= place <= static_shape(computation.target)[-1] - units:
                return None  # read under a condition, beyond its end
            uses.needed.append((computation, place))
            if computation.is_reduction:
                continue
            for read in _produced(computation, operator):
                shifts = _shifts(computation, read.target)
                if shifts is None:
                    return None
                uses.reads.extend(_Read(computation, place, read, place + shift) for shift in shifts)
                waiting += [(read, place + shift) for shift in shifts]
        return uses

    def places_of(self, computation: Computation) -> tuple[int, ...]:
        return tuple(sorted({at for other, at in self.needed if other is computation}))


def _produced(computation: Computation, operator: OperatorBody) -> list[Computation]:
    """The computations whose results ``computation`` reads."""
    sources = computation.sources()
    return [other for other in operator.computations if is_in(other.target, sources)]


def _shifts(reader: Computation, buffer: Buffer) -> list[int] | None:
    """How far from its own column an element-wise computation reads ``buffer``; None where it reads across rows."""
    shifts = []
    for load in reader.loads():
        if not load.source.same_as(buffer):
            continue
        shift = shift_of(load, reader)
        if shift is None:
            return None
        shifts.append(shift)
    return shifts


def shift_of(load: TensorLoad, reader: Computation) -> int | None:
    """``c`` of a load at ``[own axes..., last axis + c]``; None of any other."""
    *lead, last = load.indices
    *own, column = reader.spatial
    if len(lead) != len(own):
        return None
    for index, variable in zip(lead, own, strict=True):
        if not index.same_as(variable) and not (reader.extent(variable) == 1 and _is_zero(index)):
            return None
    form = linear_form(last, [column])
    return form[1] if form is not None and form[0] == [1] else None


def _is_zero(expr: Expr) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr.value) == 0


# --- steps ---------------------------------------------------------------------------------------------------------
def _steps(operator: OperatorBody, uses: _Uses, constants: Sequence[Buffer]) -> tuple[CellStep, ...]:
    """The needed computations in the order of the function, each in the first step that has what it reads."""
    when: dict[tuple[int, int], int] = {}
    order = [
        (computation, place) for computation in operator.computations for place in sorted(uses.places_of(computation))
    ]
    for computation, place in order:
        sources = [(id(r.read), r.at) for r in uses.reads if r.reader is computation and r.place in (None, place)]
        first = max((when[source] for source in sources), default=0)
        when[(id(computation), place)] = first + 1 if computation.is_reduction and sources else first
    stored = {
        (id(r.read), r.at)
        for r in uses.reads
        if r.place is None or when[(id(r.reader), r.place)] > when[(id(r.read), r.at)]
    }
    steps = []
    for number in range(max(when.values()) + 1):
        present = [(computation, place) for computation, place in order if when[(id(computation), place)] == number]
        products = [
            computation
            for computation in operator.computations
            if computation.is_reduction and any((other is computation for other, _ in present))
        ]
        if not products:
            raise IllegalRewrite("a cell's step has no product")
        steps.append(
            CellStep(
                products=tuple(_product(product, operator, uses, stored, constants) for product in products),
                values=tuple(
                    CellValue(
                        computation=computation,
                        place=place,
                        stored=operator.is_output(computation.target) or (id(computation), place) in stored,
                    )
                    for computation, place in present
                    if not computation.is_reduction
                ),
            )
        )
    return tuple(steps)


def _product(
    computation: Computation,
    operator: OperatorBody,
    uses: _Uses,
    stored: set[tuple[int, int]],
    constants: Sequence[Buffer],
) -> CellProduct:
    """``computation`` as a cell's product; raises IllegalRewrite where it is none, with the reason."""
    name, places, units = computation.name, uses.places_of(computation), static_shape(operator.outputs[0])[-1]
    names = dict(zip([v.name for v in computation.variables], axis_names(computation), strict=True))
    (*rows, column) = (names[v.name] for v in computation.spatial)
    accesses = [(load, access_of(load.source, load.indices, computation)) for load in computation.loads()]
    moving = [(load, access) for load, access in accesses if access.stride(column) != 0]
    if len(moving) != 1 or any(index is None for index in moving[0][1].indices):
        raise IllegalRewrite(f"{name}: {len(moving)} operands of the product differ by column, where a cell has one")
    weights, access = moving[0]
    readers = [load for own in operator.computations for load in own.loads() if load.source.same_as(weights.source)]
    if not is_in(weights.source, constants) or len(readers) != 1:
        raise IllegalRewrite(f"{name}: the weights {weights.source.name} are no constant that it alone reads")
    if any(access.uses(row) for row in rows):
        raise IllegalRewrite(f"{name}: the weights {weights.source.name} differ from row to row")
    product = CellProduct(
        computation=computation,
        places=places,
        stored=tuple(
            place for place in places if operator.is_output(computation.target) or (id(computation), place) in stored
        ),
        weights=weights,
        access=replace(access, is_constant=True),
    )
    if len(places) > 1 and (product.spacing < units or product.gates[-1] > MOST_GAPS * len(places)):
        raise IllegalRewrite(f"{name}: read at columns {places} by {units} units: uneven, or some column twice")
    return product
