"""What one thread does with a few neighbouring elements: vector loads to registers, arithmetic there, a vector store.

Loads and stores are separate from the arithmetic, which stays scalar: a ``half8`` is eight elements of one 16-byte
access and nothing that has a logarithm. A *unit* is what one vector access can fetch: a load, or a condition that is
the same for all its lanes with a load in each branch (padding, concatenation).

Worked example, 4 lanes of ``y[i] = if_then_else(i < 64, a[i], b[i - 64])`` from i = 4*c on: ``4*c + v < 64`` is ``c <
16`` for every v < 4, so the unit is one 16-byte load from a or one from b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_ext._tvm import (
    IF_THEN_ELSE,
    Buffer,
    Call,
    Expr,
    Stmt,
    TensorLoad,
    Var,
    structural_equal,
    structural_map,
    structural_mutate,
    tirx,
)
from tvm_ext.analysis.computation_exprs import itemsize_bytes, linear_form
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, replace_loads, substitute
from tvm_ext.analysis.predicates import is_in
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.ir.build_ir import HALF_TYPES, UNROLLED, VECTORIZED, cast_to, index, load, loop, store

from .form import RowForm, accesses, address_of, position_of

MAX_LANES = 8
"""Elements of a thread's vector: eight halves are 16 bytes; sixteen bytes of int8 would cost too many registers."""

WIDEST_FLOAT = 4  # lanes of float32 in one access

TableAt = Callable[[Expr], list[tuple[Var, Expr]]]
"""What the form's variables are at a lane."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VectorLanes:
    """``width`` neighbouring elements along ``variable``, which has ``extent`` elements; None: one element."""

    variable: Var
    extent: int
    width: int

    def each(self, body: Callable[[Expr], Stmt]) -> Stmt:
        """``body`` for every lane, one by one."""
        return loop(self.width, UNROLLED, "lane", body)

    def is_aligned(self, buffer: Buffer, indices: Sequence[Expr], computation: Computation) -> bool:
        """Whether the lanes are neighbours in memory, and start at multiples of their vector."""
        address = address_of(buffer, indices, computation, uniform_in=self.variable)
        own = position_of(computation, self.variable)
        if address is None or own is None or address.coefficients[own] != 1:
            return False
        width = access_lanes(dtype_of(buffer), self.width)
        others = [c for p, c in enumerate(address.coefficients) if p != own]
        return all(step % width == 0 for step in (*others, *address.opaque, address.constant))

    def fetches(self, unit: Expr, computation: Computation) -> bool:
        """Whether ``unit``, of ``computation``, is one aligned vector access, the same condition for all lanes."""
        return self.width > 1 and _is_vector(unit, computation, self)

    def units(self, computation: Computation, form: RowForm) -> list[Expr]:
        """The units of ``computation`` that move along the lanes and come from memory: what is fetched before the
        arithmetic.
        """
        return [
            unit
            for unit in outer_loads(computation.value, lambda item: not form.is_internal(item.source))
            if mentions(unit, self.variable) and (isinstance(unit, TensorLoad) or self.fetches(unit, computation))
        ]

    def fetch(self, unit: Expr, computation: Computation, buffer: Buffer, offset: Expr, at: TableAt) -> Stmt:
        """``buffer[offset + lane]`` = the unit, of ``computation``, at each lane."""

        def element(lane: Expr) -> Stmt:
            return store(buffer, place(unit, at(index(0)), at(lane)), [offset + lane])

        is_vector = self.fetches(unit, computation)
        return vector_loop(dtype_of(unit), self.width, element) if is_vector else self.each(element)

    def store(
        self, computation: Computation, values: Callable[[Expr], Expr], at: TableAt, result: Buffer
    ) -> list[Stmt]:
        """Store ``values(lane)`` to the computation's target, through the registers ``result`` where it is a vector."""
        dtype, indices = dtype_of(computation.target), computation.indices

        def put(lane: Expr, value: Expr) -> Stmt:
            return store(computation.target, value, [substitute(item, at(lane)) for item in indices])

        moves = self.width > 1 and mentions(list(indices), self.variable)
        if not moves or not self.is_aligned(computation.target, indices, computation):
            return [self.each(lambda lane: put(lane, cast_to(values(lane), dtype)))]
        compute = self.each(lambda lane: store(result, cast_to(values(lane), dtype), [lane]))
        return [compute, vector_loop(dtype, self.width, lambda lane: put(lane, load(result, [lane])))]


def find_lanes(form: RowForm, variable: Var, extent: int) -> VectorLanes:
    """The widest vectors along ``variable`` with which every access that moves along it is one aligned vector.

    One access that is not would be several transactions for each of its lanes: then all are scalar, neighbouring
    threads on neighbouring elements. Worked examples: x[49*n + k] in vectors of 4 would start at 49: width 1; halves
    cast to floats move in vectors of 4, for 8 floats are two accesses that each use half of what they touch.
    """
    moving = [dtype_of(buffer) for _, buffer, indices in accesses(form) if mentions(list(indices), variable)]
    widest = max((itemsize_bytes(dtype) for dtype in moving), default=4.0)
    width = max(1, min(MAX_LANES, int(VECTOR_BYTES / widest)))
    while width > 1:
        lanes = VectorLanes(variable=variable, extent=extent, width=width)
        if extent % width == 0 and _all_vectors(form, lanes):
            return lanes
        width //= 2
    return VectorLanes(variable=variable, extent=extent, width=1)


def _all_vectors(form: RowForm, lanes: VectorLanes) -> bool:
    """Whether every access along the lanes is an aligned vector, and there is one."""
    known = [
        _is_vector(unit, computation, lanes)
        for computation in form.computations
        for unit in outer_loads(computation.value, lambda item: not form.is_internal(item.source))
        if mentions(unit, lanes.variable)
    ]
    known += [
        lanes.is_aligned(computation.target, computation.indices, computation)
        for computation in form.computations
        if is_in(computation.target, form.kept) and mentions(list(computation.indices), lanes.variable)
    ]
    return bool(known) and all(known)


def outer_loads(value: Expr, wanted: Callable[[Expr], bool]) -> list[Expr]:
    """The units of ``value``: conditions as a whole, and loads that no condition guards."""
    found: list[Expr] = []

    def collect(unit: Expr) -> Expr:
        if isinstance(unit, Call) or wanted(unit):
            found.append(unit)
        return unit

    map_units(value, collect)
    return found


def map_units(value: Expr, visit: Callable[[Expr], Expr]) -> Expr:
    """``value`` with each unit passed through ``visit``; a condition that it gives back is searched no further."""

    def on_call(call: Call, mutator: Any) -> Expr:
        return visit(call) if call.op.same_as(IF_THEN_ELSE) else mutator.default_mutate(call)

    def on_load(item: TensorLoad, _mutator: Any) -> Expr:
        return visit(item)

    return structural_mutate(value, [(Call, on_call), (TensorLoad, on_load)])


def _is_vector(unit: Expr, computation: Computation, lanes: VectorLanes) -> bool:
    """Whether one vector access, the same condition for all its lanes, fetches the unit."""
    if isinstance(unit, TensorLoad):
        return lanes.is_aligned(unit.source, unit.indices, computation)
    if isinstance(unit, Call) and unit.op.same_as(IF_THEN_ELSE):
        # Stock BF16ComputeLegalize makes it a condition on float32, and CUDA has no vectors of 8 floats.
        if dtype_of(unit) == "bfloat16" and lanes.width > WIDEST_FLOAT:
            return False
        branches = unit.args[1:]
        return _is_uniform(unit.args[0], lanes) and all(_is_vector(branch, computation, lanes) for branch in branches)
    return isinstance(unit.value if isinstance(unit, tirx.Cast) else unit, tirx.FloatImm | tirx.IntImm)


def _is_uniform(condition: Expr, lanes: VectorLanes) -> bool:
    """Whether all lanes of a vector agree on ``condition``: it changes at a multiple of the width, or not along them.

    Worked example, width 4: ``8 <= i`` changes at 8, a multiple; ``i <= 8`` changes at 9, within a vector.
    """
    if not mentions(condition, lanes.variable):
        return True
    kind = type(condition).__name__
    if kind in ("And", "Or"):
        return _is_uniform(condition.a, lanes) and _is_uniform(condition.b, lanes)
    if kind not in ("LT", "LE", "GT", "GE"):
        return False
    low, high = (condition.a, condition.b) if kind in ("LT", "LE") else (condition.b, condition.a)
    form = linear_form(low - high, [lanes.variable])  # low < high or low <= high
    if form is None or abs(form[0][0]) != 1:
        return False
    sign, constant = form[0][0], form[1]
    strict = kind in ("LT", "GT")
    changes_at = -constant + (0 if strict else 1) if sign == 1 else constant + (1 if strict else 0)
    return changes_at % lanes.width == 0


def access_lanes(dtype: str, width: int) -> int:
    """Lanes of one access of at most 16 bytes: 8 lanes of float32 are two accesses of 4. ``bool`` has no vectors."""
    return 1 if dtype == "bool" else max(1, min(width, int(VECTOR_BYTES / itemsize_bytes(dtype))))


def vector_loop(dtype: str, width: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """``body(lane)`` for ``width`` lanes of ``dtype`` in accesses of at most 16 bytes."""
    lanes = access_lanes(dtype, width)
    if lanes == 1:
        return loop(width, UNROLLED, "lane", body)
    return loop(
        width // lanes,
        UNROLLED,
        "piece",
        lambda piece: loop(lanes, VECTORIZED, "lane", lambda lane: body(piece * index(lanes) + lane)),
    )


def place(unit: Expr, first: Sequence[tuple[Var, Expr]], own: Sequence[tuple[Var, Expr]]) -> Expr:
    """``unit`` at a lane whose variables are given by ``own``, its conditions asked at the vector's ``first`` lane."""
    if isinstance(unit, Call) and unit.op.same_as(IF_THEN_ELSE):
        branches = [place(branch, first, own) for branch in unit.args[1:]]
        return tirx.if_then_else(substitute(unit.args[0], first), *branches)
    return substitute(unit, own)


def distinct(units: Iterable[Expr]) -> list[Expr]:
    found: list[Expr] = []
    for unit in units:
        if not any(structural_equal(unit, other) for other in found):
            found.append(unit)
    return found


# --- a thread's registers -------------------------------------------------------------------------------------------
def evaluate(
    value: Expr,
    fetched: Sequence[tuple[Expr, Expr]],
    internal: Callable[[TensorLoad], Expr | None],
    table: Sequence[tuple[Var, Expr]],
) -> Expr:
    """``value`` at one lane: units from the registers of ``fetched``, what the form itself made from ``internal``."""

    def own(item: TensorLoad) -> Expr:
        local = internal(item)
        return item if local is None else cast_to(local, dtype_of(item))

    def visit(unit: Expr) -> Expr:
        for other, register in fetched:
            if structural_equal(unit, other):
                return register
        return own(unit) if isinstance(unit, TensorLoad) else replace_loads(unit, own)

    return substitute(_without_round_trips(map_units(value, visit)), table)


def _without_round_trips(value: Expr) -> Expr:
    """``float32(float16(x))`` of a float32 x is x: what stays in registers is not rounded."""

    def peel(cast: Expr) -> Expr:
        inner = cast.value
        rounds = isinstance(inner, tirx.Cast) and dtype_of(inner) in HALF_TYPES
        wide = rounds and dtype_of(cast) == dtype_of(inner.value) == "float32"
        return inner.value if wide else cast

    return structural_map(value, (tirx.Cast, peel))


# --- half precision -------------------------------------------------------------------------------------------------
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Min")
_COMPARISONS = ("LT", "LE", "GT", "GE", "EQ", "NE")


def widened(value: Expr) -> Expr:
    """``value`` with all half-precision arithmetic in float32, which costs a GPU nothing where memory is the limit.

    The result is float32 where ``value`` was half precision, and rounded once, where it is stored. Nodes are made as
    they are: operators compute with constants, ``x * 0`` among them.
    """
    kind = type(value).__name__
    is_half = dtype_of(value) in HALF_TYPES
    if kind == "Sub" and is_half:
        return tirx.Sub(_addend(value.a), _addend(value.b))
    if kind in _ARITHMETIC:
        return type(value)(widened(value.a), widened(value.b))
    if kind in (*_COMPARISONS, "And", "Or"):
        return type(value)(widened(value.a), widened(value.b))
    if kind == "Not":
        return tirx.Not(widened(value.a))
    if kind == "Cast":
        inner = widened(value.value)
        return (
            inner
            if is_half and dtype_of(inner) == "float32"
            else cast_to(inner, "float32" if is_half else dtype_of(value))
        )
    if kind == "Select":
        return tirx.Select(widened(value.condition), widened(value.true_value), widened(value.false_value))
    if kind == "FloatImm" and is_half:
        return tirx.const(float(value.value), "float32")
    if kind == "Call" and value.op.same_as(IF_THEN_ELSE):
        return cast_to(value, "float32") if is_half else value
    if kind == "Call" and is_half and all(dtype_of(a) in (*HALF_TYPES, "float32") for a in value.args):
        return Call(value.op, [widened(a) for a in value.args], ret_ty=tirx.const(0.0, "float32").ty)
    if kind == "Call" and all(hasattr(a, "ty") for a in value.args):
        return Call(value.op, [widened(a) if dtype_of(a) == "float32" else a for a in value.args], ret_ty=value.ty)
    return cast_to(value, "float32") if is_half else value


def _addend(value: Expr) -> Expr:
    """One side of a difference. A sum is rounded as the model has it: (x + 1536) - 1536 rounds x to an integer."""
    wide = widened(value)
    if not isinstance(value, tirx.Add):
        return wide
    rounded = tirx.Var("rounded", value.ty)  # TVM takes a cast of a cast for one
    return tirx.Let(rounded, cast_to(wide, dtype_of(value)), cast_to(rounded, "float32"))
