"""Elements that come in turns from a few places along an axis."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import te

from tests.unit.kernels import constructed, from_te, run
from tvm_ext._tvm import tirx
from tvm_ext.devices import device_db


def woven(rows, columns, shape):
    """``y[c, i, j] = x[c, i's phase, j's phase, i's turn, j's turn]``; of each axis its (length, offset)."""
    channels, *extents = shape
    sizes = [
        (extent + offset - 1) // length + 1 for extent, (length, offset) in zip(extents, (rows, columns), strict=True)
    ]
    x = te.placeholder((channels, rows[0], columns[0], *sizes), name="x")

    def element(c, i, j):
        (a, p), (b, q) = (
            (tirx.floordiv(at + offset, length), tirx.floormod(at + offset, length))
            for at, (length, offset) in ((i, rows), (j, columns))
        )
        return x[c, p, q, a, b] + 1.0

    return from_te(x, te.compute(shape, element, "y")), [int(size) for size in x.shape]


@pytest.mark.sampled
@pytest.mark.parametrize("columns", [(2, 0), (2, 1), (3, 1), (4, 3), (5, 2)])
@pytest.mark.parametrize("rows", [(1, 0), (2, 1), (3, 2)])
@pytest.mark.parametrize("shape", [(3, 8, 32), (2, 7, 45), (4, 1, 2), (2, 5, 3)])
def test_any_turns_of_any_extents(rows, columns, shape, rng):
    func, given = woven(rows, columns, shape)
    x = rng.standard_normal(given).astype("f4")
    at = np.indices(shape)
    (a, p), (b, q) = (divmod(at[axis] + offset, length) for axis, (length, offset) in ((1, rows), (2, columns)))
    kernel, choice = constructed(func)
    np.testing.assert_array_equal(run(kernel, choice, [x], shape, "float32"), x[at[0], p, q, a, b] + np.float32(1))


def test_a_loop_stores_all_elements_of_a_turn():
    """And takes no remainder."""
    kernel, _ = constructed(woven((1, 0), (2, 1), (3, 8, 32))[0])
    text = kernel.script()
    assert "% T.int64(2)" not in text
    assert "// T.int64(2)" not in text


@pytest.mark.parametrize(("side", "vector"), [(2, 4), (3, 8), (4, 16)])
def test_a_run_of_short_rows_takes_no_turns(side, vector):
    """Points of small images lie one behind the other, whatever divisions address them."""
    x, scale = te.placeholder((70, side, side), name="x"), te.placeholder((70,), name="scale")
    y = te.compute((70, side, side), lambda c, i, j: x[c, i, j] * scale[c] + 1.0, "y")
    text = constructed(from_te(x, scale, y), device=device_db.lookup("cpu-epyc-zen5"))[0].script()
    assert f"T.vectorized(T.int64({vector}))" in text
