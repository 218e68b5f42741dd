"""Computations that a GPU runs row by row together: whatever no other kind recognises."""

from __future__ import annotations

from dataclasses import dataclass

from ..emit.gpu_rows.emit import emit_simt_rows
from ..plan.anchors import kept_buffers, row_program
from ..plan.canonical import canonical_rows
from ..plan.context import KernelContext
from ..plan.form import Form, gpu_form
from ..plan.plan_kernels import RowGroup
from .kernel_kind import Group, KernelKind, KernelPart


class GpuRows(KernelKind):
    name = "rows"
    on_gpus = True

    def of_group(self, group: Group, context: KernelContext) -> GpuRowPart | None:
        return GpuRowPart(group=group, context=context) if isinstance(group, RowGroup) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuRowPart(KernelPart[None]):
    """Its tiles follow from its shapes."""

    group: RowGroup
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        operator, device = self.context.operator, self.context.device
        rows = canonical_rows(self.group)
        kernel = emit_simt_rows(rows.computations, device, kept_buffers(rows, operator), operator.params)
        name = " + ".join(computation.name for computation in self.group.computations)
        program = row_program(self.group, operator, device)
        return [gpu_form("rows", kernel, program, [f"{name} row by row", *kernel.notes])]
