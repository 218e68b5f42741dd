"""Where operands of a schedule lie among the merged kernel's parameters, and which operators can share a body."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from tvm_ext._tvm import Buffer, PrimFunc, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.records.merged import UNIT_BYTES
from tvm_ext.records.rammer import SchedulePlan
from tvm_ext.records.rtask_split import ARENA, DataPlace
from tvm_ext.support.arithmetic import ceil_div

from .kernel import Body
from .tables import EntryCode

WEIGHTS = -2
"""In place of an argument's index: all constants."""

WEIGHT_ALIGNMENT = 64
"""Bytes, as in the arena."""


class Operands:
    """The parameters of the merged kernel of ``plan``; the same buffers whenever they are asked for.

    Constants lie behind each other in one memory: ``weights`` has (argument, first byte) of each.
    """

    def __init__(self, plan: SchedulePlan, kernels: Mapping[str, PrimFunc]) -> None:
        self.plan = plan
        sizes = [(n, argument.size_bytes) for n, argument in enumerate(plan.arguments) if argument.role == "constant"]
        aligned = [ceil_div(size, WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT for _, size in sizes]
        starts = [0, *accumulate(aligned)]
        self.weights = tuple((number, start) for (number, _), start in zip(sizes, starts, strict=False))
        self.weight_bytes = starts[-1]
        self.weight_dtype = _common({plan.arguments[number].dtype for number, _ in sizes})
        self.arena_dtype = _common(_arena_dtypes(plan, kernels))
        self._weight_at = dict(self.weights)
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

    def parameters(self, table: Buffer, state: Buffer) -> list[Buffer]:
        """All of them: inputs, constants, table, state, outputs, arena."""
        roles = [argument.role for argument in self.plan.arguments]
        inputs = [self._bases[position] for position, role in enumerate(roles) if role == "input"]
        outputs = [self._bases[position] for position, role in enumerate(roles) if role == "output"]
        weights, arena = ([self._bases[which]] if which in self._bases else [] for which in (WEIGHTS, ARENA))
        return [*inputs, *weights, table, state, *outputs, *arena]

    def _made(self) -> dict[int, Buffer]:
        bases: dict[int, Buffer] = {}
        for number, argument in enumerate(self.plan.arguments):
            if argument.role != "constant":
                shape = [tirx.IntImm("int64", extent) for extent in argument.shape]
                bases[number] = tirx.decl_buffer(shape, argument.dtype, f"{argument.role}{number}")
        for which, size_bytes, dtype, name in (
            (WEIGHTS, self.weight_bytes, self.weight_dtype, "weights"),
            (ARENA, self.plan.arena_bytes, self.arena_dtype, "arena"),
        ):
            if size_bytes:
                bases[which] = flat_buffer(ceil_div(size_bytes, int(itemsize_bytes(dtype))), dtype, name)
        return bases


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


def flat_buffer(size: int, dtype: str, name: str) -> Buffer:
    return tirx.decl_buffer([tirx.IntImm("int64", size)], dtype, name)


def _arena_dtypes(plan: SchedulePlan, kernels: Mapping[str, PrimFunc]) -> set[str]:
    """The types of what lies in the arena."""
    dtypes: set[str] = set()
    for operator in plan.operators:
        linked = next(code.function for code in operator.codes if code.function in kernels)
        for place, parameter in zip(operator.places, kernels[linked].params, strict=True):
            if place.argument == ARENA:
                dtypes.add(str(parameter.ty.element_type.dtype))
    return dtypes


def _common(dtypes: set[str]) -> str:
    """The type of all, or bytes."""
    (only,) = dtypes if len(dtypes) == 1 else ("uint8",)
    return "uint8" if only == "bool" else only
