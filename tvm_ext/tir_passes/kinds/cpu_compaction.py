"""The positions of what is not zero: on one core, for each position's place depends on all before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext.analysis.computations import static_shape
from tvm_ext.devices.machine import Machine
from tvm_ext.ir.compaction import compact
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.selection import COMPACTION

from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, KernelPart

ELEMENT_CYCLES = 2.0
"""Of one element: a store and an addition on which the next store's address depends."""


class CpuCompaction(KernelKind):
    name = "a compaction"

    def of_function(self, operator: UnscheduledOperator) -> CompactionPart | None:
        return CompactionPart(context=operator.parameters_only(2)) if operator.has(COMPACTION) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class CompactionPart(KernelPart[None]):
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        statement = compact(*self.context.operator.params)
        return [Form(path="rows", statements=(statement,), program=None, notes=("positions without branches",))]

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        elements = prod(static_shape(self.context.operator.params[0]))
        return replace(choice, expected_s=elements * ELEMENT_CYCLES / Machine(self.context.device).vector_hz)
