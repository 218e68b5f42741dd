"""Floats are no reals: kernels of expressions that stock TVM's simplifier would change, against NumPy, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import te

from tests.unit.float_expressions import EXPRESSIONS, assert_same, function_of, operands
from tests.unit.kernels import constructed, from_te, run
from tvm_ext import relay
from tvm_ext._tvm import tirx
from tvm_ext.tir_passes.expressions.exact_floats import keep_floats, pass_nan_on

DTYPES = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_mean_what_they_say(name, dtype):
    if (name, dtype) == ("x + C - C", "bfloat16"):
        pytest.skip("stock TVM computes bfloat16 in float32 on CPUs and rounds where it stores: docs/numerics.md")
    expression, reference = EXPRESSIONS[name]
    x, y = operands(dtype)
    with np.errstate(all="ignore"):
        expected = np.asarray(reference(x, y)).astype(dtype)
    kernel, choice = constructed(function_of(expression, dtype, len(x)))
    assert choice.path in ("rtile", "rows")  # made here, not stock TVM's
    assert_same(name, run(kernel, choice, [x, y], x.shape, dtype), expected)


@pytest.mark.optimised
def test_relu_is_one_instruction_and_a_maximum_of_two_tensors_loads_both():
    """What NaN costs: nothing beside a constant, and no load under a condition, of which LLVM makes a gather."""
    x, y = te.placeholder((64, 1000), name="x"), te.placeholder((64, 1), name="y")
    relu = function_of(EXPRESSIONS["max(x, 0)"][0], "float32", 1024)
    larger = from_te(x, y, te.compute(x.shape, lambda i, j: tirx.Max(x[i, j], y[i, 0]), "z"))
    target = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512"})
    texts = []
    for function in (relu, larger):
        kernel, _ = constructed(function)
        texts.append(tvm.compile(kernel.with_attr("global_symbol", "main"), target=target).mod.inspect_source("asm"))
    assert "vmaxps" in texts[0]
    assert "vcmp" not in texts[0]
    assert "vcmp" in texts[1]
    assert "vgather" not in texts[1]


def test_integers_are_left_alone():
    x = te.placeholder((8,), "int32", "x")
    func = from_te(x, te.compute((8,), lambda i: tirx.Max(x[i], tirx.Sub(x[i] + 1, x[i])), "y"))
    tvm.ir.assert_structural_equal(pass_nan_on(keep_floats(func.body)), func.body)


def test_a_binding_that_is_written_for_each_region_is_one_for_each():
    """Regions of a padded row bind the same variable to 0 and to loads: the simplifier would take 0 for all."""
    nodes = [helper.make_node("Pad", ["x", "amounts"], ["padded"]), helper.make_node("Cast", ["padded"], ["y"], to=7)]
    graph = helper.make_graph(
        nodes,
        "cast",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, None)],
        [numpy_helper.from_array(np.array([0, 1, 1, 2]), "amounts")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    mod, params = relay.frontend.from_onnx(model)
    module = relay.build(mod, "llvm", params=params)["default"]()
    values = np.arange(64, dtype="float32").reshape(8, 8) + 1.5
    module.run(x=values)
    np.testing.assert_array_equal(module.get_output(0).numpy(), np.pad(values.astype("int64"), ((0, 1), (1, 2))))
