"""The positions of what is not zero, or unique: on one core, for each position's place depends on all before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext._tvm import Buffer, Stmt
from tvm_ext.analysis.computations import dtype_of, static_shape
from tvm_ext.devices.machine import Machine
from tvm_ext.ir.compaction import compact
from tvm_ext.ir.radix_sort import sort_cycles, unique
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.selection import COMPACTION, UNIQUE

from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, KernelPart

ELEMENT_CYCLES = 2.0
"""Of one element: a store and an addition on which the next store's address depends."""


class CpuCompaction(KernelKind):
    name = "a compaction"

    def of_function(self, operator: UnscheduledOperator) -> CompactionPart | None:
        if operator.has(COMPACTION):
            return CompactionPart(context=operator.parameters_only(2), sorts=False)
        return CompactionPart(context=operator.parameters_only(4), sorts=True) if operator.has(UNIQUE) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class CompactionPart(KernelPart[None]):
    """What is not zero, or with ``sorts`` what is unique."""

    context: KernelContext
    sorts: bool

    def forms(self, chosen: None = None) -> list[Form]:
        note = "a sort by bytes" if self.sorts else "positions without branches"
        return [Form(path="rows", statements=(self._statement(),), program=None, notes=(note,))]

    def _statement(self) -> Stmt:
        return unique(*self._params) if self.sorts else compact(*self._params)

    @property
    def _params(self) -> Sequence[Buffer]:
        return self.context.operator.params

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        data = self._params[0]
        elements = prod(static_shape(data))
        sorting = sort_cycles(elements, dtype_of(data)) if self.sorts else 0.0
        cycles = elements * ELEMENT_CYCLES + sorting
        return replace(choice, expected_s=cycles / Machine(self.context.device).vector_hz)
