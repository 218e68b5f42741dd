"""Where operands of a schedule lie among the merged kernel's parameters, and which operators can share a body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, PrimFunc, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.records.merged import UNIT_BYTES
from tvm_ext.records.rammer import SchedulePlan
from tvm_ext.records.rtask_plan import ARENA, DataPlace
from tvm_ext.support.arithmetic import ceil_div

from .kernel import Body
from .tables import EntryCode

WEIGHTS = -2
"""In place of an argument's index: all constants."""

WEIGHT_ALIGNMENT = 64
"""Bytes, as in the arena."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Of constants, (argument, first byte) and the bytes of all; types of the memories that are no arguments."""

    weights: tuple[tuple[int, int], ...]
    weight_bytes: int
    weight_dtype: str
    arena_dtype: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parameters:
    """Of the merged kernel: ``every`` one in order."""

    every: tuple[Buffer, ...]
    table: Buffer
    state: Buffer


class Operands:
    """The parameters of the merged kernel of ``plan``; the same buffers whenever they are asked for."""

    def __init__(self, plan: SchedulePlan, kernels: Mapping[str, PrimFunc]) -> None:
        self.plan = plan
        self.layout = _layout(plan, kernels)
        self._weight_at = dict(self.layout.weights)
        self._bases = self._made()

    def place(self, place: DataPlace) -> tuple[int, int]:
        """Which base, and how many `UNIT_BYTES` behind its beginning."""
        if place.argument == ARENA:
            assert place.offset % UNIT_BYTES == 0
            return ARENA, place.offset // UNIT_BYTES
        if place.argument in self._weight_at:
            return WEIGHTS, self._weight_at[place.argument] // UNIT_BYTES
        return place.argument, 0

    def base(self, which: int) -> Buffer:
        return self._bases[which]

    def parameters(self, table_words: int, state_words: int) -> Parameters:
        """All of them: inputs, constants, table, state, outputs, arena."""
        table, state = (_flat(size, "int32", name) for size, name in ((table_words, "table"), (state_words, "state")))
        roles = [argument.role for argument in self.plan.arguments]
        inputs = [self._bases[place] for place, role in enumerate(roles) if role == "input"]
        outputs = [self._bases[place] for place, role in enumerate(roles) if role == "output"]
        weights, arena = ([self._bases[which]] if which in self._bases else [] for which in (WEIGHTS, ARENA))
        return Parameters(every=(*inputs, *weights, table, state, *outputs, *arena), table=table, state=state)

    def _made(self) -> dict[int, Buffer]:
        found: dict[int, Buffer] = {}
        for number, argument in enumerate(self.plan.arguments):
            if argument.role != "constant":
                shape = [tirx.IntImm("int64", extent) for extent in argument.shape]
                found[number] = tirx.decl_buffer(shape, argument.dtype, f"{argument.role}{number}")
        layout = self.layout
        if layout.weight_bytes:
            found[WEIGHTS] = _memory(layout.weight_bytes, layout.weight_dtype, "weights")
        if self.plan.arena_bytes:
            found[ARENA] = _memory(self.plan.arena_bytes, layout.arena_dtype, "arena")
        return found


class Bodies:
    """The distinct bodies that some operators need, in the order in which they are first asked for."""

    def __init__(self, plan: SchedulePlan, kernels: Mapping[str, PrimFunc], operands: Operands) -> None:
        self._plan, self._kernels, self._operands = plan, kernels, operands
        self._number: dict[tuple[str, tuple[int, ...]], int] = {}
        self.found: list[Body] = []

    def code(self, operator: int, kernel: int) -> EntryCode:
        """What entries of ``operator`` run by its rKernel ``kernel``."""
        data = self._plan.operators[operator]
        places = [self._operands.place(place) for place in data.places]
        function, bases = data.codes[kernel].function, tuple(which for which, _ in places)
        if (function, bases) not in self._number:
            self._number[function, bases] = len(self.found)
            self.found.append(Body(function=self._kernels[function], bases=tuple(map(self._operands.base, bases))))
        return EntryCode(body=self._number[function, bases], operands=tuple(units for _, units in places))


def _memory(size_bytes: int, dtype: str, name: str) -> Buffer:
    return _flat(ceil_div(size_bytes, int(itemsize_bytes(dtype))), dtype, name)


def _flat(size: int, dtype: str, name: str) -> Buffer:
    return tirx.decl_buffer([tirx.IntImm("int64", size)], dtype, name)


def _layout(plan: SchedulePlan, kernels: Mapping[str, PrimFunc]) -> Layout:
    weights: list[tuple[int, int]] = []
    size = 0
    for number, argument in enumerate(plan.arguments):
        if argument.role == "constant":
            weights.append((number, size))
            size += ceil_div(argument.size_bytes, WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
    constant = {number for number, _ in weights}
    arena: set[str] = set()
    for operator in plan.operators:
        linked = next(code.function for code in operator.codes if code.function in kernels)
        parameters = kernels[linked].params
        for place, parameter in zip(operator.places, parameters, strict=True):
            if place.argument == ARENA:
                arena.add(str(parameter.ty.element_type.dtype))
    return Layout(
        weights=tuple(weights),
        weight_bytes=size,
        weight_dtype=_common({plan.arguments[number].dtype for number in constant}),
        arena_dtype=_common(arena),
    )


def _common(dtypes: set[str]) -> str:
    """The type of all, or bytes."""
    (only,) = dtypes if len(dtypes) == 1 else ("uint8",)
    return "uint8" if only == "bool" else only
