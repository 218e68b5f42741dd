"""Indices that stock TVM simplifies wrongly are right behind `GuardIndices`, as kernels and in every pipeline."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import sym
from tvm.script import tirx as T  # noqa: N812 - the name that TVMScript is written with

from tvm_ext import relay
from tvm_ext._tvm import CPU_PIPELINE, PIPELINE_NAME, RKERNEL_PIPELINE, Expr, IRModule, PrimFunc, Var, tirx
from tvm_ext.tir_passes.expressions.guard_indices import guarded


@T.prim_func(s_tir=True)
def shifted(a: T.Buffer((4, 8), "float32"), b: T.Buffer((96,), "float32")):
    for row in range(96):
        b[row] = a[row // 24, (row % 24 + 6) % 8]


@T.prim_func(s_tir=True)
def below_zero(a: T.Buffer((4, 8), "float32"), b: T.Buffer((96,), "float32")):
    for row in range(96):
        b[row] = a[row // 24, (row % 24 - 10) % 8] + a[(row - 96) // 24 + 4, (row - 96) % 8]


@T.prim_func(s_tir=True)
def two_quotients(a: T.Buffer((5, 27), "float32"), b: T.Buffer((96,), "float32")):
    for row in range(96):
        b[row] = a[(row + 12) // 24, (row + 12) // 4]


@T.prim_func(s_tir=True)
def of_stores(a: T.Buffer((96,), "float32"), b: T.Buffer((12, 8), "float32")):
    for row in range(96):
        b[row // 8, (row + 3) % 8] = a[row]


@T.prim_func(s_tir=True)
def without_offsets(a: T.Buffer((4, 24), "float32"), b: T.Buffer((96,), "float32")):
    for row in range(96):
        b[row] = a[row // 24, row % 24]


ROWS = np.arange(96)
WANTED: dict[str, tuple[PrimFunc, Callable[[np.ndarray], np.ndarray]]] = {
    "shifted": (shifted, lambda a: a[ROWS // 24, (ROWS % 24 + 6) % 8]),
    "below zero": (below_zero, lambda a: a[ROWS // 24, (ROWS % 24 - 10) % 8] + a[ROWS // 24, ROWS % 8]),
    "two quotients": (two_quotients, lambda a: a[(ROWS + 12) // 24, (ROWS + 12) // 4]),
    "of stores": (of_stores, lambda a: _stored(a)),
}


def _stored(a: np.ndarray) -> np.ndarray:
    b = np.zeros((12, 8), "float32")
    b[ROWS // 8, (ROWS + 3) % 8] = a
    return b


@pytest.mark.sampled
@pytest.mark.parametrize("pipeline", [PIPELINE_NAME, CPU_PIPELINE, RKERNEL_PIPELINE])
@pytest.mark.parametrize("name", WANTED)
def test_kernels_read_and_write_where_they_say(name: str, pipeline: str) -> None:
    func, expected = WANTED[name]
    shapes = [tuple(int(size) for size in param.ty.shape) for param in func.params]
    a = np.random.default_rng(1).standard_normal(shapes[0]).astype("float32")
    result = tvm.runtime.tensor(np.zeros(shapes[1], "float32"))
    module = IRModule({"main": func.with_attr("global_symbol", "main")})
    tvm.tirx.build(module, target="llvm", pipeline=pipeline)["main"](tvm.runtime.tensor(a), result)
    np.testing.assert_array_equal(result.numpy(), expected(a))


def test_stock_tvm_still_needs_it() -> None:
    """When this fails, TVM has mended it, and the pass can go."""
    row = Var("row", "int64")
    number = lambda value: tirx.IntImm("int64", value)  # noqa: E731 - it is short
    indices: list[Expr] = [row // number(24), (row % number(24) + number(6)) % number(8)]
    domain = {row: tvm.ir.Range(number(0), number(96))}
    level = sym.iter_affine_map.IterMapLevel.NoCheck
    simplified = sym.iter_map_simplify(indices, domain, tirx.const(True, "bool"), level, False)
    assert "row + T.int64(6)" in str(simplified[0])


@T.prim_func(s_tir=True)
def one_place(a: T.Buffer((15, 7), "float32"), b: T.Buffer((96,), "float32")):
    for row in range(96):
        b[row] = a[(row + 6) // 7, (row + 6) % 7]


@pytest.mark.parametrize("func", [without_offsets, one_place])
def test_other_functions_stay_as_they_are(func: PrimFunc) -> None:
    assert guarded(func).same_as(func)


def test_a_tiled_tensor_in_other_order() -> None:
    """Tile, Split and Concat in one kernel, found by a random chain."""
    x = np.arange(2 * 8 * 3, dtype="float32").reshape(2, 8, 3)
    nodes = [
        helper.make_node("Tile", ["x", "repeats"], ["tiled"]),
        helper.make_node("Split", ["tiled", "sizes"], ["a", "b", "c"], axis=1),
        helper.make_node("Concat", ["c", "b", "a"], ["y"], axis=1),
    ]
    constants = [numpy_helper.from_array(np.array(v), n) for n, v in (("repeats", [2, 3, 1]), ("sizes", [14, 6, 4]))]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", (2, 8, 3)), ("y", (4, 24, 3)))
    )
    model = helper.make_model(helper.make_graph(nodes, "tiled", inputs, outputs, constants))
    mod, params = relay.frontend.from_onnx(model)
    module = relay.GraphModule(relay.build(mod, "llvm", params=params, kernel_cache="off"))
    module.run(x=x)
    tiled = np.tile(x, (2, 3, 1))
    wanted = np.concatenate([tiled[:, 20:], tiled[:, 14:20], tiled[:, :14]], axis=1)
    np.testing.assert_array_equal(module.get_output(0).numpy(), wanted)
