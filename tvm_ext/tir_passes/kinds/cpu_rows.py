"""Computations that run row by row together: whatever no other kind recognises."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tvm_ext.analysis.computation_exprs import count_operations, tensor_expr_of, tensor_numbers
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import ROWS, tile_machine, without_names
from tvm_ext.cost.row_time import RowClock, is_vectorised, reduction_lanes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import PARALLEL, SERIAL, outer_kind
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import to_json
from tvm_ext.records.tuning import RowTiles

from ..emit.cpu_rows.emit import emit_rows
from ..emit.cpu_rows.reduce_row import PARTIAL_REGISTERS
from ..plan.anchors import kept_buffers, row_program
from ..plan.canonical import canonical_rows
from ..plan.context import KernelContext
from ..plan.form import Form
from ..plan.join_points import join_points
from ..plan.plan_kernels import RowGroup
from .kernel_kind import Candidates, Group, KernelKind, KernelPart

REGISTER_COUNTS = (1, 2, 4, 8)
"""Independent partial results of a reduction that are candidates."""


class CpuRows(KernelKind):
    name = "rows"

    def of_group(self, group: Group, context: KernelContext) -> RowPart | None:
        if not isinstance(group, RowGroup):
            return None
        joined = join_points(group, kept_buffers(group, context.operator))
        return RowPart(rows=canonical_rows(joined, fuses_points=True), context=context)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPart(KernelPart[RowTiles]):
    """Computations that run row by row, canonical."""

    tiles = RowTiles
    is_small = True  # and what is chosen for rows alone serves more kernels
    rows: RowGroup
    context: KernelContext

    @cached_property
    def clock(self) -> RowClock:
        return RowClock(self.rows.computations, self.context.device)

    def forms(self, chosen: RowTiles | None = None) -> list[Form]:
        computations, device = self.rows.computations, self.context.device
        way = chosen or self._usual
        if chosen is not None and chosen not in self._ways():
            raise IllegalRewrite(f"{computations[0].name} row by row on {device.unit_count} cores has no {chosen}")
        kind, kept = PARALLEL if way.forks else SERIAL, kept_buffers(self.rows, self.context.operator)
        form = Form(
            path="rows",
            statements=tuple(emit_rows(computations, device, kept, kind, way.registers)),
            program=row_program(self.rows, self.context.operator, device),
            notes=(f"{' + '.join(computation.name for computation in computations)} row by row",),
        )
        return [form]

    def key(self) -> MeasuredWorkload:
        """Names do not count."""
        computations = self.rows.computations
        exprs = tuple(without_names(tensor_expr_of(computation, name="")) for computation in computations)
        operations = tuple(float(count_operations(computation.value)) for computation in computations)
        structure = _RowStructure(computations=exprs, operations=operations, tensors=tensor_numbers(computations))
        dtype = ",".join(sorted({expr.output.dtype for expr in exprs}))
        return replace(tile_machine(self.context.device, ROWS), structure=to_json(structure), dtype=dtype)

    def candidates(self) -> Candidates[RowTiles]:
        """All choices with the seconds that the model expects of each, construction's own first."""
        depth = max(prod(map(own.extent, own.reduction)) for own in self.rows.computations)
        found = [(way, self.clock.predict(way).time_s) for way in self._ways()]
        return Candidates(found=found, depth=max(1, depth))

    @cached_property
    def _usual(self) -> RowTiles:
        """Construction's own choice."""
        forked = RowTiles(forks=True, registers=PARTIAL_REGISTERS)
        return replace(forked, forks=outer_kind(self.clock.predict(forked).busy_s, self.context.device) == PARALLEL)

    def _ways(self) -> list[RowTiles]:
        usual, most = self._usual, self._most_registers()
        counts = [count for count in REGISTER_COUNTS if count <= most] or [usual.registers]
        shared = self.context.device.unit_count > 1 and any(own.point_count > 1 for own in self.rows.computations)
        forks = (usual.forks, not usual.forks) if shared else (usual.forks,)
        ways = (RowTiles(forks=forked, registers=registers) for forked in forks for registers in counts)
        return list(dict.fromkeys((usual, *ways)))

    def _most_registers(self) -> int:
        """Whole registers of the longest row that is reduced in vectors; 0 where none is."""
        device = self.context.device
        return max(
            (
                computation.extent(computation.reduction[-1]) // reduction_lanes(computation, device)
                for computation in self.rows.computations
                if computation.is_reduction and is_vectorised(computation, device)
            ),
            default=0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowStructure:
    """Computations, their operations for each point, and the numbers of the tensors that each reads, then writes."""

    computations: tuple[TensorExpr, ...]
    operations: tuple[float, ...]
    tensors: tuple[tuple[int, ...], ...]
