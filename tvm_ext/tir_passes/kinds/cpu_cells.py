"""Recurrent cells: products whose columns meet, j with H + j and 2H + j, in element-wise computations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.cost.cell_time import CellClock
from tvm_ext.cost.row_time import operations_per_point
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import SERIAL, outer_kind
from tvm_ext.records.cell import CellTiles, CellWork
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.rprogram import RProgram, RTile

from ..emit.cpu_cells.emit import emit_cell_step
from ..plan.cell import Cell, CellStep, find_cell
from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, KernelPart


class CpuCells(KernelKind):
    name = "a cell"

    def of_function(self, operator: UnscheduledOperator) -> CellPart | None:
        read = operator.as_read
        cell = find_cell(read.operator, read.constants)
        return None if cell is None else CellPart(cell=cell, context=replace(read, operator=cell.operator))


@dataclass(frozen=True, kw_only=True, eq=False)
class CellPart(KernelPart[None]):
    """All steps of a recurrent cell; its context has the operator as the cell's recogniser simplified it."""

    cell: Cell
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        params, device = self.context.operator.params, self.context.device
        return [_step_form(self.cell, step, params, device) for step in self.cell.steps]

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        """With the model's time of all steps, one after the other."""
        times = (form.program.prediction.time_s for form in forms if form.program is not None)
        return replace(choice, expected_s=sum(times))


def _step_form(cell: Cell, step: CellStep, params: Sequence[Buffer], device: DeviceSpec) -> Form:
    clock = CellClock(_work(cell, step, Machine(device)), device)
    tiles = clock.usual_tiles()
    if tiles is None:
        raise IllegalRewrite(f"{device.name} has no SIMD registers for the units of a cell")
    kind = outer_kind(clock.predict(tiles).busy_s, device, alone_s=clock.predict(tiles, units=1).busy_s)
    program = _program(clock, tiles, units=1 if kind == SERIAL else device.unit_count)
    statement, packs = emit_cell_step(cell, step, tiles, kind, params)
    sums = ", ".join(f"{product.computation.name} at {len(product.places)} gates" for product in step.products)
    note = f"a cell of {cell.rows} x {cell.units} units: {sums} with {len(step.values)} values fused, in {tiles}"
    return Form(path="rtile", statements=(statement,), program=program, notes=(note,), packs=packs)


def _work(cell: Cell, step: CellStep, machine: Machine) -> CellWork:
    return CellWork(
        rows=cell.rows,
        units=cell.units,
        products=tuple(
            (
                len(product.places),
                prod(product.computation.extent(v) for v in product.computation.reduction),
                itemsize_bytes(dtype_of(product.weights.source)),
            )
            for product in step.products
        ),
        operations=sum(operations_per_point(value.computation, machine) for value in step.values),
    )


def _program(clock: CellClock, tiles: CellTiles, units: int) -> RProgram:
    """A step as an rProgram over the batch and the units, as reports show any other."""
    work, device, tasks = clock.work, clock.device, clock.task_count(tiles)

    def tile(rows: int) -> RTile:
        return RTile(axes=("row", "unit"), shape=(rows, min(tiles.units, work.units)))

    return RProgram(
        device=device.name,
        expr_digest="",
        tiles=(("L0", tile(tiles.rows)), ("L1", tile(work.rows))),
        vector_axis="unit",
        unit_count=min(units, tasks),
        partition_count=tasks,
        epsilon=0.0,
        shrunk=False,
        prediction=clock.predict(tiles, units),
    )
