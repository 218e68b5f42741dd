"""Which functions with an open axis are loops over blocks of rows, and that no other is taken for one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from tests.support.guard_workspaces import guard_workspaces
from tests.support.guarded_memory import call_guarded
from tests.unit.kernels import cpu
from tvm_ext.options import BuildOptions
from tvm_ext.records.serialise import from_json
from tvm_ext.records.step_loop import STEP_LOOP, StepLoop
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.plan.open_rows import BLOCK, with_open_rows

ROWS = tirx.Var("rows", "int64")
X = te.placeholder((ROWS, 6), "float32", "x")
Y = te.placeholder((1, ROWS), "float32", "y")


def function(*tensors: Any) -> Any:
    return te.create_prim_func(list(tensors))


def scaled_sums() -> Any:
    """Twice the sum of each row, beside what is read along the second axis of another tensor."""
    k = te.reduce_axis((0, 6), "k")
    sums = te.compute((ROWS,), lambda i: te.sum(X[i, k], axis=k), "sums")
    return function(X, Y, te.compute((1, ROWS), lambda j, i: sums[i] * 2 + Y[j, i], "out"))


def products() -> Any:
    """Rows of three by a matrix, whose columns fill no register: tiles reach across the ends of rows."""
    x, w = te.placeholder((ROWS, 3, 7), "float32", "x"), te.placeholder((7, 51), "float32", "w")
    k = te.reduce_axis((0, 7), "k")
    return function(x, w, te.compute((ROWS, 3, 51), lambda i, b, j: te.sum(x[i, b, k] * w[k, j], axis=k), "out"))


@functools.cache
def compiled(make: Callable[[], Any]) -> Any:
    kernel = construct_kernel(with_open_rows(make()), "operator", cpu(), BuildOptions())
    return tvm.compile(guard_workspaces(kernel).with_attr("global_symbol", "main"), target="llvm")["main"]


def run(make: Callable[[], Any], shape: tuple[int, ...], *values: np.ndarray) -> np.ndarray:
    """The kernel's output, with guards around all that it touches."""
    out = tvm.runtime.tensor(np.full(shape, np.nan, "f"))
    call_guarded("main", compiled(make), [*map(tvm.runtime.tensor, values), out], [len(values)])
    return np.asarray(out.numpy())


def test_axes_may_lie_behind_others_of_one_place() -> None:
    plan = from_json(StepLoop, str(with_open_rows(scaled_sums()).attrs[STEP_LOOP]))
    assert (plan.input_count, plan.sliced, plan.collected, plan.rows, plan.axes) == (2, (0, 1), (0,), BLOCK, (0, 1, 1))


@pytest.mark.parametrize("rows", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_any_number_of_rows(rows: int) -> None:
    random = np.random.default_rng(rows)
    x, y, z, w = (random.normal(size=shape).astype("f") for shape in ((rows, 6), (1, rows), (rows, 3, 7), (7, 51)))
    np.testing.assert_allclose(run(scaled_sums, (1, rows), x, y), 2 * x.sum(axis=1) + y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(products, (rows, 3, 51), z, w), z @ w, rtol=1e-5, atol=1e-5)


def total() -> Any:
    k = te.reduce_axis((0, ROWS), "k")
    return te.compute((6,), lambda j: te.sum(X[k, j], axis=k))


def shifted(shape: tuple[Any, ...], value: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: te.compute(shape, value)


OTHERS = {
    "sums over all rows": total,
    "backwards": shifted((ROWS, 6), lambda i, j: X[ROWS - 1 - i, j]),
    "one row for all": shifted((ROWS, 6), lambda i, j: X[0, j] + X[i, j]),
    "its neighbour": shifted((ROWS, 6), lambda i, j: X[tirx.max(i - 1, 0), j]),
    "the number of the row": shifted((ROWS, 6), lambda i, j: X[i, j] + i.astype("float32")),
    "the number of rows": shifted((ROWS, 6), lambda i, j: X[i, j] / ROWS.astype("float32")),
    "rows of twos": shifted((ROWS * 2, 3), lambda i, j: X[i // 2, (i % 2) * 3 + j]),
    "behind others": shifted((3, ROWS), lambda j, i: X[i, j]),
    "rows of a constant": shifted((ROWS, 6), lambda i, j: tirx.const(2.5, "float32")),
    "a square": shifted((ROWS, ROWS), lambda i, j: X[i, 0] * X[j, 0]),
    "extents that are known": lambda: te.compute((6,), lambda j: te.placeholder((6,), "float32", "z")[j]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_row_by_row_is_no_loop(name: str) -> None:
    result = OTHERS[name]()
    func = function(*result.op.input_tensors, result)
    assert with_open_rows(func).same_as(func)


def test_each_of_several_computations_must_be_row_by_row() -> None:
    """A total that every row is divided by."""
    sums = total()
    func = function(X, te.compute((ROWS, 6), lambda i, j: X[i, j] / sums[j]))
    assert with_open_rows(func).same_as(func)
