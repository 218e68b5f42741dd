"""A strided window's input, split by phase, gives back every element that the window reads."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import te

from tests.unit.kernels import from_te
from tvm_ext._tvm import tirx
from tvm_ext.analysis.computation_exprs import axis_names, tensor_expr_of
from tvm_ext.analysis.computations import Computation, read_operator, static_shape, substitute
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import phase_split
from tvm_ext.ir.build_ir import SERIAL, as_index, load, nest, new_buffer, sequence, store
from tvm_ext.tir_passes.emit.cpu_tiles.packing import phase_pack


def _window(size: int, taps: int, stride: int, dilation: int = 1) -> tuple[Computation, TensorExpr]:
    """out[f, y, x] = sum over c, r, q of in[c, 2*y + r, stride*x + dilation*q] * w[f, c, r, q]."""
    x = te.placeholder((3, 9, size), name="x")
    w = te.placeholder((8, 3, 3, taps), name="w")
    c, r, q = te.reduce_axis((0, 3), "c"), te.reduce_axis((0, 3), "r"), te.reduce_axis((0, taps), "q")
    width = (size - dilation * (taps - 1) - 1) // stride + 1
    shape = (8, 4, width)
    out = te.compute(
        shape,
        lambda f, y, j: te.sum(x[c, 2 * y + r, stride * j + dilation * q] * w[f, c, r, q], axis=[c, r, q]),
        name="out",
    )
    (computation,) = read_operator(from_te(x, w, out), "window").computations
    return computation, tensor_expr_of(computation, name="window")


def _split(computation: Computation, expr: TensorExpr) -> object:
    return phase_split(expr.inputs[0], expr.axes[2].name, expr.extents)


@pytest.mark.parametrize(
    ("size", "taps", "stride"), [(20, 3, 2), (21, 3, 2), (23, 7, 2), (17, 1, 2), (31, 11, 4), (16, 2, 3)]
)
def test_every_element_of_every_window(size: int, taps: int, stride: int) -> None:
    computation, expr = _window(size, taps, stride)
    names = axis_names(computation)
    source = computation.loads()[0]
    packed = phase_pack(source, expr.inputs[0], computation, names, 2)
    assert packed is not None
    width = computation.extents[2]
    seen = new_buffer((3, 4, width, 3, taps), "float32", "seen")
    f, y, x, c, r, q = computation.variables

    def read(values: tuple[object, ...]) -> object:
        table = [(v, as_index(value, v)) for v, value in zip((c, y, x, r, q), values, strict=True)]
        place = [substitute(i, table) for i in packed.indices([f, y, x, c, r, q], 0, 0)]
        return store(seen, load(packed.buffer, place), list(values))

    reads = nest([3, 4, width, 3, taps], SERIAL, ["c", "y", "x", "r", "q"], read)
    func = tirx.PrimFunc([source.source, seen], sequence(packed.copy(computation, SERIAL), reads))
    func = func.with_attrs({"global_symbol": "main", "s_tir": True})
    data = np.random.default_rng(0).standard_normal((3, 9, size)).astype("float32")
    result = tvm.runtime.tensor(np.full((3, 4, width, 3, taps), np.nan, "float32"))
    tvm.compile(tvm.IRModule({"main": func}), "llvm")["main"](tvm.runtime.tensor(data), result)
    at = np.indices((3, 4, width, 3, taps))
    np.testing.assert_array_equal(result.numpy(), data[at[0], 2 * at[1] + at[3], stride * at[2] + at[4]])


def test_holds_each_element_once() -> None:
    computation, expr = _window(21, 3, 2)
    assert _split(computation, expr) == (3, 9, 2, 11)
    packed = phase_pack(computation.loads()[0], expr.inputs[0], computation, axis_names(computation), 2)
    assert packed is not None
    assert static_shape(packed.buffer) == (3, 9, 2, 11)


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 2)])
def test_leaves_contiguous_and_dilated_windows_alone(stride: int, dilation: int) -> None:
    assert _split(*_window(21, 3, stride, dilation)) is None
