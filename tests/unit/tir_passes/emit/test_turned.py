"""Element-wise operators that read across the rows which they write, in squares that are turned in registers."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.unit.kernels import constructed, legalised, relative_error, run
from tvm_ext.devices import device_db
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.emit.cpu_rows.turned import turned_squares
from tvm_ext.tir_passes.plan.canonical import canonical_rows
from tvm_ext.tir_passes.plan.context import UnscheduledOperator
from tvm_ext.tir_passes.plan.plan_kernels import RowGroup

op = relax.op
DEVICES = ("cpu-zen5", "cpu-zen3", "cpu-sse2", "cpu-neoverse-n1")


def squares_of(func, device):
    """Of the last computation, once the others are part of it where they can be."""
    spec = device_db.lookup(device)
    operator = UnscheduledOperator(func=func, name="operator", device=spec, options=BuildOptions()).simplified.operator
    (canonical,) = canonical_rows(RowGroup(computations=operator.computations[-1:])).computations
    return turned_squares(canonical, spec)


def transposed(*axes):
    return lambda x: op.permute_dims(x, axes)


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(
    "shape", [(16, 16), (77, 133), (4, 100), (33, 5), (16, 1001), (256, 48), (17, 31), (2048, 20), (1024, 77)]
)
@pytest.mark.parametrize("dtype", ["float32", "int32", "float64", "int64"])
def test_matrices_of_any_sides_are_turned(shape, dtype, rng):
    x = rng.integers(-1000, 1000, shape).astype(dtype)
    func = legalised(transposed(1, 0), shape, dtype=dtype)
    assert squares_of(func, "cpu-zen5") is not None
    kernel, choice = constructed(func)
    np.testing.assert_array_equal(run(kernel, choice, [x], shape[::-1], dtype), x.T)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("axes", [(0, 2, 3, 1), (0, 3, 1, 2), (0, 1, 3, 2), (2, 0, 1, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_any_order_of_axes(axes, rng):
    x = rng.standard_normal((3, 21, 6, 18)).astype("f4")
    expected = x.transpose(axes)
    kernel, choice = constructed(legalised(transposed(*axes), x.shape))
    np.testing.assert_array_equal(run(kernel, choice, [x], expected.shape, "float32"), expected)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("device", DEVICES)
def test_what_is_fused_reads_along_and_across(device, rng):
    """A column, a row, a matrix that lies as the result does, and the turned matrix twice."""
    shapes = (40, 23), (23, 1), (23, 40), (40,)
    x, row, same, column = (rng.standard_normal(shape).astype("f4") for shape in shapes)

    def build(x, row, same, column):
        turned = op.permute_dims(x, [1, 0])
        return op.add(op.multiply(op.add(turned, row), same), op.multiply(turned, column))

    func = legalised(build, *shapes)
    assert squares_of(func, device) is not None
    kernel, choice = constructed(func)
    actual = run(kernel, choice, [x, row, same, column], (23, 40), "float32")
    wide = x.T.astype("f8")
    assert relative_error(actual, (wide + row) * same + wide * column) < 1e-6


@pytest.mark.parametrize(
    ("device", "side"), [("cpu-zen5", 16), ("cpu-zen3", 8), ("cpu-sse2", 4), ("cpu-neoverse-n1", 4)]
)
def test_sides_are_those_of_a_register(device, side):
    found = squares_of(legalised(transposed(1, 0), (64, 100)), device)
    assert (found.columns, found.rows) == (side, side)


def test_squares_go_on_along_the_rows_that_share_sets():
    """Of 256 floats, a quarter of a page, lines lie in 4 sets; of 3136 in 16."""
    assert squares_of(legalised(transposed(1, 0), (256, 3136)), "cpu-zen5").along_rows
    assert not squares_of(legalised(transposed(1, 0), (3136, 256)), "cpu-zen5").along_rows


@pytest.mark.parametrize(
    ("build", "shapes", "dtype"),
    [
        (transposed(1, 0), [(64, 3)], "float32"),  # pixels of three channels
        (transposed(1, 0), [(64, 64)], "float16"),
        (lambda x: op.nn.relu(x), [(64, 64)], "float32"),
        (transposed(1, 0, 2), [(64, 64, 8)], "float32"),  # along the rows of both
        (lambda x: op.nn.pad(op.permute_dims(x, [1, 0]), [0, 0, 2, 2]), [(64, 64)], "float32"),
        (lambda x: op.sum(x, axis=[0]), [(64, 64)], "float32"),
    ],
    ids=["three", "half", "along", "rows", "condition", "reduction"],
)
def test_everything_else_stays_in_rows(build, shapes, dtype):
    assert squares_of(legalised(build, *shapes, dtype=dtype), "cpu-zen5") is None
