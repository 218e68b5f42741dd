"""A recurrent cell's kernel: from what was recognised to statements, with what the model expects of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import OperatorBody, dtype_of
from tvm_ext.cost.cell_time import ACTIVATION_OPERATIONS, cell_tasks, choose_cell_tiles, predict_cell
from tvm_ext.cost.row_time import operations_per_point
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.cell import CellTiles, CellWork
from tvm_ext.records.rprogram import RProgram, RTile

from ...plan.cell import Cell, CellStep, find_cell
from ...plan.form import Form
from .emit import emit_cell_step


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CellKernel:
    """A cell's operator as it was simplified, and how each of its steps is run."""

    operator: OperatorBody
    forms: list[Form]

    @property
    def expected_s(self) -> float:
        """The model's time of all steps, one after the other."""
        return sum(form.program.prediction.time_s for form in self.forms if form.program is not None)


def cell_kernel(operator: OperatorBody, constants: Sequence[Buffer], device: DeviceSpec) -> CellKernel | None:
    """The kernel of an operator, as it was read, that is a cell; None for any other.

    Raises IllegalRewrite, with the reason, for a cell that has no kernel here.
    """
    cell = find_cell(operator, constants)
    if cell is None:
        return None
    forms = [_step_form(cell, step, operator.params, device) for step in cell.steps]
    return CellKernel(operator=cell.operator, forms=forms)


def _step_form(cell: Cell, step: CellStep, params: Sequence[Buffer], device: DeviceSpec) -> Form:
    work = _work(cell, step)
    tiles = choose_cell_tiles(work, device)
    if tiles is None:
        raise IllegalRewrite(f"{device.name} has no SIMD registers for the units of a cell")
    program = _program(work, tiles, device)
    statement, packs = emit_cell_step(cell, step, tiles, outer_kind(program.prediction.busy_s, device), params)
    sums = ", ".join(f"{item.computation.name} at {len(item.places)} gates" for item in step.products)
    note = f"a cell of {cell.rows} x {cell.units} units: {sums} with {len(step.values)} values fused, in {tiles}"
    return Form(path="rtile", statements=(statement,), program=program, notes=(note,), packs=packs)


def _work(cell: Cell, step: CellStep) -> CellWork:
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
        operations=sum(operations_per_point(value.computation, ACTIVATION_OPERATIONS) for value in step.values),
    )


def _program(work: CellWork, tiles: CellTiles, device: DeviceSpec) -> RProgram:
    """A step as an rProgram over the batch and the units, as reports show any other."""
    tasks = cell_tasks(work, tiles)

    def tile(rows: int) -> RTile:
        return RTile(axes=("row", "unit"), shape=(rows, min(tiles.units, work.units)))

    return RProgram(
        device=device.name,
        expr_digest="",
        tiles=(("L0", tile(tiles.rows)), ("L1", tile(work.rows))),
        vector_axis="unit",
        unit_count=min(device.unit_count, tasks),
        partition_count=tasks,
        epsilon=0.0,
        shrunk=False,
        prediction=predict_cell(work, tiles, device),
    )
