"""Computations that run row by row together: whatever no other kind recognises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext.analysis.computation_exprs import tensor_expr_of, tensor_numbers
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.tile_workload import ROWS, tile_machine, without_names
from tvm_ext.cost.row_time import is_vectorised, operations_per_point, reduction_lanes, row_seconds, row_time_s
from tvm_ext.devices.hal import DeviceSpec
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
from ..plan.plan_kernels import RowGroup
from .kernel_kind import Candidates, Group, KernelKind, KernelPart

REGISTER_COUNTS = (1, 2, 4, 8)
"""Independent partial results of a reduction that are candidates."""


class CpuRows(KernelKind):
    name = "rows"

    def of_group(self, group: Group, context: KernelContext) -> RowPart | None:
        return RowPart(rows=canonical_rows(group), context=context) if isinstance(group, RowGroup) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class RowPart(KernelPart[RowTiles]):
    """Computations that run row by row, canonical."""

    tiles = RowTiles
    is_small = True  # and what is chosen for rows alone serves more kernels
    rows: RowGroup
    context: KernelContext

    def forms(self, chosen: RowTiles | None = None) -> list[Form]:
        computations, device = self.rows.computations, self.context.device
        way = chosen or usual_rows(computations, device)
        if chosen is not None and all(chosen != candidate for candidate, _ in row_candidates(computations, device)):
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
        return row_workload(self.rows.computations, self.context.device)

    def candidates(self) -> Candidates[RowTiles]:
        computations = self.rows.computations
        depth = max(prod(map(computation.extent, computation.reduction)) for computation in computations)
        return Candidates(found=row_candidates(computations, self.context.device), depth=max(1, depth))


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowStructure:
    """Computations, their operations for each point, and the numbers of the tensors that each reads, then writes."""

    computations: tuple[TensorExpr, ...]
    operations: tuple[float, ...]
    tensors: tuple[tuple[int, ...], ...]


def row_workload(computations: Sequence[Computation], device: DeviceSpec) -> MeasuredWorkload:
    """The key of ``computations`` that run row by row; names do not count."""
    exprs = tuple(without_names(tensor_expr_of(computation, name="")) for computation in computations)
    operations = tuple(float(operations_per_point(computation)) for computation in computations)
    structure = _RowStructure(computations=exprs, operations=operations, tensors=tensor_numbers(computations))
    dtype = ",".join(sorted({expr.output.dtype for expr in exprs}))
    return replace(tile_machine(device, ROWS), structure=to_json(structure), dtype=dtype)


def usual_rows(computations: Sequence[Computation], device: DeviceSpec) -> RowTiles:
    """Construction's own choice."""
    forks = outer_kind(row_time_s(computations, device), device) == PARALLEL
    return RowTiles(forks=forks, registers=PARTIAL_REGISTERS)


def row_candidates(computations: Sequence[Computation], device: DeviceSpec) -> list[tuple[RowTiles, float]]:
    """All choices with the seconds that the model expects of each, construction's own first."""
    usual = usual_rows(computations, device)
    counts = [count for count in REGISTER_COUNTS if count <= _most_registers(computations, device)]
    shared = device.unit_count > 1 and any(computation.point_count > 1 for computation in computations)
    ways = [
        RowTiles(forks=forks, registers=registers)
        for forks in ((usual.forks, not usual.forks) if shared else (usual.forks,))
        for registers in counts or (usual.registers,)
    ]
    return [(way, row_seconds(computations, way, device)) for way in dict.fromkeys((usual, *ways))]


def _most_registers(computations: Sequence[Computation], device: DeviceSpec) -> int:
    """Whole registers of the longest row that is reduced in vectors; 0 where none is."""
    return max(
        (
            computation.extent(computation.reduction[-1]) // reduction_lanes(computation, device)
            for computation in computations
            if computation.is_reduction and is_vectorised(computation, device)
        ),
        default=0,
    )
