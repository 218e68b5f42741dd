"""Reductions and softmax: over nothing, over no axes, of infinities, of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from tests.support.small_models import onnx_model
from tests.unit.relay_passes.onnx.single_nodes import assert_same, built, cleaned, floats, model_of


@pytest.mark.parametrize("what", ["Sum", "Prod", "Max", "Min", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_reductions_over_nothing_have_the_neutral_element(what: str, keepdims: int) -> None:
    """The empty tensor is an intermediate one: a slice from 0 to 0."""
    slice_ = helper.make_node("Slice", ["x", "start", "end", "axis"], ["empty"])
    reduce = helper.make_node(f"Reduce{what}", ["empty", "axis"], ["y"], keepdims=keepdims)
    constants = {name: np.asarray([value]) for name, value in (("start", 0), ("end", 0), ("axis", 1))}
    model = onnx_model([slice_, reduce], {"x": [2, 3]}, constants=constants, opset=20)
    x = floats(2, 3)
    wanted = {"Prod": 1.0, "Max": -np.inf, "Min": np.inf, "LogSum": -np.inf, "LogSumExp": -np.inf}.get(what, 0.0)
    got = ReferenceEvaluator(cleaned(model)).run(None, {"x": x})[0]
    np.testing.assert_array_equal(got, np.full((2, 1) if keepdims else (2,), wanted, np.float32))


@pytest.mark.parametrize("what", ["Sum", "Mean", "Max", "L1", "L2", "LogSum", "LogSumExp", "SumSquare", "Prod"])
def test_reductions_over_no_axes_treat_single_elements(what: str) -> None:
    x = np.abs(floats(2, 3)) + 0.5
    node = helper.make_node(f"Reduce{what}", ["x"], ["y"], noop_with_empty_axes=1)
    wanted = {"LogSum": np.log(x), "SumSquare": x * x}.get(what, x)
    np.testing.assert_allclose(ReferenceEvaluator(cleaned(model_of(node, {"x": x}))).run(None, {"x": x})[0], wanted)


INFINITE_ROWS = np.array(
    [
        [1, 2, 3, -np.inf], [-np.inf] * 4, [np.inf, 1, 2, 3], [np.inf, np.inf, 0, -np.inf], [np.nan, 1, 2, 3],
        [np.inf, np.nan, 0, 0], [-np.inf, -np.inf, -np.inf, 5], [88, 89, 90, 91], [3e38] * 4,
    ],
    np.float32,
)  # fmt: skip


@pytest.mark.parametrize("keepdims", [0, 1])
def test_log_sum_exp_of_infinities_is_what_onnx_runtime_says(keepdims: int) -> None:
    node = helper.make_node("ReduceLogSumExp", ["x", "axes"], ["y"], keepdims=keepdims)
    assert_as_onnx_runtime(model_of(node, {"x": INFINITE_ROWS}, {"axes": np.array([1])}), INFINITE_ROWS)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_softmax_of_infinities_is_what_onnx_runtime_says(operator: str) -> None:
    """NaN for rows of -inf or with inf; 0 for a -inf among numbers."""
    assert_as_onnx_runtime(model_of(helper.make_node(operator, ["x"], ["y"]), {"x": INFINITE_ROWS}), INFINITE_ROWS)


def assert_as_onnx_runtime(model: onnx.ModelProto, x: Any) -> None:
    runtime = pytest.importorskip("onnxruntime")
    wanted = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    assert_same(built(model, {"x": x}), wanted)


def test_means_of_integers_are_truncated() -> None:
    x = np.asarray([[-3, -4], [7, 8], [2, 2]], np.int32)
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[1], keepdims=0)
    np.testing.assert_array_equal(built(model_of(node, {"x": x}, opset=13), {"x": x})[0], [-3, 7, 2])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
@pytest.mark.parametrize("axes", [[1], None])
@pytest.mark.parametrize("what", ["L2", "LogSum", "LogSumExp"])
def test_roots_and_logarithms_of_integers_are_truncated(what: str, axes: list[int] | None, dtype: Any) -> None:
    x = np.asarray([[3, 5, 9], [6, 8, 2]], dtype)
    node = helper.make_node(f"Reduce{what}", ["x"], ["y"], keepdims=0, axes=axes)
    if axes is None:
        node = helper.make_node(f"Reduce{what}", ["x"], ["y"], noop_with_empty_axes=1)
    rows = x.astype(np.float64) if axes else x.astype(np.float64)[..., None]
    forms = {"L2": lambda v: np.sqrt((v * v).sum(-1)), "LogSum": lambda v: np.log(v.sum(-1))}
    wanted = forms.get(what, lambda v: np.log(np.exp(v).sum(-1)) + 1e-9)(rows)
    got = built(model_of(node, {"x": x}, opset=13 if axes else 18), {"x": x})[0]
    assert_same([got], [wanted.astype(dtype)])


def test_logarithms_beyond_the_integers_are_their_lowest_or_largest() -> None:
    """ONNX's text has no value for them, and its reference takes no integers: ONNX Runtime's."""
    x = np.asarray([[0, 0], [-7, 2], [1, 6], [2**31 - 1, 2**31 - 1]], np.int32)
    wanted = {"ReduceLogSum": [-(2**31), -(2**31), 1, 22], "ReduceLogSumExp": [0, 2, 6, 2**31 - 1]}
    for operator, numbers in wanted.items():
        model = model_of(helper.make_node(operator, ["x"], ["y"], keepdims=0, axes=[1]), {"x": x}, opset=13)
        assert built(model, {"x": x})[0].tolist() == numbers, operator
