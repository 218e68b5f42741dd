"""What gathers and transposes are predicted to take."""

from __future__ import annotations

from typing import Any

import pytest

from tvm_ext._tvm import te, topi
from tvm_ext.analysis.computation_exprs import tensor_expr_of
from tvm_ext.analysis.computations import OperatorBody, read_operator
from tvm_ext.cost.row_time import RowClock
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.rprogram import Prediction
from tvm_ext.records.tuning import RowTiles
from tvm_ext.tir_passes.plan.anchors import row_program
from tvm_ext.tir_passes.plan.plan_kernels import RowGroup

CPU, A100 = "cpu-epyc-zen5", "nvidia-a100"
ENTRIES, WIDTH, ROWS = 30522, 768, 128


def gather(entries: int = ENTRIES, width: int = WIDTH, rows: int = ROWS) -> OperatorBody:
    """An embedding: ``rows`` rows of a table."""
    table, index = te.placeholder((entries, width), "float32", "T"), te.placeholder((rows,), "int32", "I")
    return _read([table, index, topi.take(table, index, axis=0, mode="clip")])


def transposition(rows: int, columns: int) -> OperatorBody:
    x = te.placeholder((rows, columns), "float32", "X")
    return _read([x, topi.transpose(x, [1, 0])])


def _read(tensors: list[Any]) -> OperatorBody:
    return read_operator(te.create_prim_func(tensors), "operator")


def predicted(operator: OperatorBody, device: str) -> Prediction:
    program = row_program(RowGroup(computations=tuple(operator.computations)), operator, lookup(device))
    assert program is not None
    return program.prediction


def test_a_gather_says_which_axes_choose_its_rows() -> None:
    expr = tensor_expr_of(gather().computations[-1], name="take")
    access = next(item for item in expr.inputs if item.tensor == "T")
    (row, column) = (axis.name for axis in expr.axes)
    assert access.gathers == ((row,), ())
    assert access.tile_shape({row: 8, column: 64}) == (8, 64)
    assert access.stride(column) == 1
    assert access.stride(row) is None


def test_a_table_that_is_not_gathered_from_has_no_such_axes() -> None:
    expr = tensor_expr_of(transposition(64, 48).computations[-1], name="transpose")
    assert all(access.gathers == () for access in expr.accesses)


@pytest.mark.parametrize("device", [CPU, A100])
def test_a_gather_moves_the_rows_that_it_reads(device: str) -> None:
    """Rows are read and written once, and the table has nothing to do with it."""
    spec = lookup(device)
    moved = 2 * ROWS * WIDTH * 4
    rate = spec.lowest_layer.bandwidth_gb_per_s
    assert rate is not None
    launch = (spec.launch_overhead_us or 0.0) * 1e-6
    busy = predicted(gather(), device).time_s - launch
    assert 0.5 * moved / (rate * 1e9) < busy < 3 * moved / (rate * 1e9)
    assert predicted(gather(entries=4 * ENTRIES), device).time_s == pytest.approx(busy + launch, rel=0.05)


def test_rows_of_a_table_come_from_where_the_table_is() -> None:
    """94 MB lie in DRAM, and 393 KB of them are read; 256 KB lie in a cache."""
    spec = lookup(CPU)
    way = RowTiles(forks=True, registers=4)
    clocks = (RowClock(gather(entries).computations, spec) for entries in (ENTRIES, 85))
    large, small = (clock.predict(way).busy_s for clock in clocks)
    assert spec.lowest_layer.bandwidth_gb_per_s is not None
    from_memory = ROWS * WIDTH * 4 / (spec.lowest_layer.bandwidth_gb_per_s * 1e9)
    assert from_memory < large < 2 * from_memory
    assert small < large / 2


def test_a_transposition_on_a_gpu_costs_a_launch_at_least() -> None:
    launch = lookup(A100).launch_overhead_us
    assert launch is not None
    assert predicted(transposition(64, 64), A100).time_s > launch * 1e-6
    assert predicted(transposition(64, 64), A100).bound == "launch"
    assert predicted(transposition(8192, 8192), A100).bound != "launch"
