"""What tensors without elements become: constants, neutral elements, slices."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.support.case_workers import run_trials
from tests.support.operator_types.cases import empty_cases
from tests.support.operator_types.check import TRIAL
from tvm_ext import relay
from tvm_ext._tvm import relax, tensor
from tvm_ext.relay_passes.settle_empty_tensors import SettleEmptyTensors
from tvm_ext.runtime.graph_module import flatten_outputs

CASES = (
    "Compress 3->0",
    "Einsum 4->0",
    "GlobalAveragePool 5->0",
    "NonMaxSuppression 3->0",
    "QuantizeLinear 3->0",
    "ReduceMax 4->0",
    "RoiAlign 5->0",
    "ScatterND 2->0",
)
"""One of each kind; tests/property/test_operator_types.py tries all."""


def test_operators_on_no_elements_are_right_or_refused() -> None:
    """Products of nothing once were what their memory held before; means of nothing divided by 0 in the build."""
    cases = [case for case in empty_cases() if case.name in CASES]
    results = list(run_trials(cases, TRIAL, jobs=1, limit_s=300.0))
    assert {item.name for item in results} == set(CASES)
    assert [f"{item.name}: {item.problem}" for item in results if item.failed] == []


def test_a_split_with_an_empty_part_runs() -> None:
    node = helper.make_node("Split", ["x", "sizes"], ["a", "b", "c"], axis=0)
    graph = helper.make_graph(
        [node],
        "split",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 2))],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, (size, 2))
            for name, size in (("a", 0), ("b", 3), ("c", 0))
        ],
        [numpy_helper.from_array(np.asarray([0, 3, 0]), "sizes")],
    )
    mod, params = relay.frontend.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]))
    machine = relay.build(mod, "llvm", params=params).vm()
    x = np.arange(6, dtype="float32").reshape(3, 2)
    parts = [item.numpy() for item in flatten_outputs(machine["main"](tensor(x)))]
    for part, expected in zip(parts, (x[:0], x, x[:0]), strict=True):
        np.testing.assert_array_equal(part, expected)


def test_what_has_elements_stays() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(relax.op.sum(x, axis=[1]))
    text = str(SettleEmptyTensors()(builder.get()))
    assert "R.sum" in text
    assert "metadata" not in text
