"""Binding of shapes, element types and constant inputs, and what stays open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tvm_ext.errors import InputError, ModelError
from tvm_ext.relay_passes.onnx.bind_inputs import evaluate_dimension
from tvm_ext.relay_passes.onnx.import_model import import_model, require_bound_dimensions, unbound_dimensions

Build = Callable[..., onnx.ModelProto]


def _shapes(mod: Any) -> list[list[str]]:
    """Extents as numbers, open dimensions as names."""
    return [
        [getattr(dim, "name", None) or str(int(dim)) for dim in parameter.ty.shape] for parameter in mod["main"].params
    ]


@pytest.fixture
def relu(build_model: Build) -> Callable[..., onnx.ModelProto]:
    return lambda shape, **options: build_model(
        [helper.make_node("Relu", ["net/x"], ["y"])], inputs={"net/x": shape}, **options
    )


def test_named_dimension_is_bound_everywhere(build_model: Build) -> None:
    model = build_model([helper.make_node("Add", ["a", "b"], ["y"])], inputs={"a": ["batch", 3], "b": ["batch", 3]})
    mod, _ = import_model(model)
    assert unbound_dimensions(mod) == {"batch": ("a", "b")}
    mod, _ = import_model(model, {"a": [4, 3]})
    assert _shapes(mod) == [["4", "3"], ["4", "3"]]
    assert unbound_dimensions(mod) == {}
    require_bound_dimensions(mod)


def test_expressions_of_dimensions(build_model: Build) -> None:
    model = build_model(
        [helper.make_node("Concat", ["a", "b"], ["y"], axis=0)], inputs={"a": ["past"], "b": ["past + 1"]}
    )
    mod, _ = import_model(model, {"a": [4]})
    assert _shapes(mod) == [["4"], ["5"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("n", 6), ("2*n+1", 13), ("n//4", 1), ("n - m", None), ("n/0", None), ("a b", None), ("f(n)", None)],
)
def test_evaluate_dimension(text: str, expected: int | None) -> None:
    assert evaluate_dimension(text, {"n": 6}) == expected


def test_unbound_dimension_is_named(relu: Callable[..., onnx.ModelProto]) -> None:
    mod, _ = import_model(relu(["batch", 3]))
    with pytest.raises(InputError, match=r"'batch' of input 'net/x'") as caught:
        require_bound_dimensions(mod)
    assert "shape={'net/x': [...]}" in caught.value.remedy


def test_unnamed_dimensions_are_not_the_same(build_model: Build) -> None:
    """Stock TVM takes all unnamed dimensions for one symbol, and so (2, 3) for a shape error."""
    mod, _ = import_model(build_model([helper.make_node("Relu", ["x"], ["y"])], inputs={"x": [None, None]}))
    assert set(unbound_dimensions(mod)) == {"x_dim0", "x_dim1"}


def test_unknown_rank(relu: Callable[..., onnx.ModelProto]) -> None:
    mod, _ = import_model(relu(None))
    with pytest.raises(InputError, match="rank of net_x"):
        require_bound_dimensions(mod)
    mod, _ = import_model(relu(None), {"net/x": [2, 5]})
    assert _shapes(mod) == [["2", "5"]]


def test_requests_may_keep_dimensions_open(relu: Callable[..., onnx.ModelProto]) -> None:
    mod, _ = import_model(relu(["batch", "width"]), {"net/x": [-1, 8]})
    assert _shapes(mod) == [["batch", "8"]]
    mod, _ = import_model(relu(["batch", "width"]), {"net/x": ["batch", None]})
    assert set(unbound_dimensions(mod)) == {"batch", "width"}


def test_batch_of_a_static_model_can_change(relu: Callable[..., onnx.ModelProto]) -> None:
    mod, _ = import_model(relu([1, 3]), {"net/x": [8, 3]})
    assert _shapes(mod) == [["8", "3"]]


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ({"net/x": [1, 4]}, "dimension 1 of input 'net/x' is 3 in the model, but 4"),
        ({"net/x": [1, 3, 1]}, r"has 2 dimensions \[1, 3\], but the shape given has 3: \[1, 3, 1\]"),
        ({"net/x": [1.5, 3]}, "1.5 is no extent"),
        ({"net/x": [True, 3]}, "True is no extent"),
        ({"net/x": [-2, 3]}, "-2 is no extent"),
        ({"net/y": [1, 3]}, "no input named 'net/y'"),
    ],
)
def test_wrong_shapes(relu: Callable[..., onnx.ModelProto], shape: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        import_model(relu([1, 3]), shape)


def test_unknown_input_gets_a_suggestion(relu: Callable[..., onnx.ModelProto]) -> None:
    with pytest.raises(InputError) as caught:
        import_model(relu([1, 3]), {"net/z": [1, 3]})
    assert "did you mean 'net/x'?" in caught.value.remedy


def test_contradicting_extents(build_model: Build) -> None:
    model = build_model([helper.make_node("Add", ["a", "b"], ["y"])], inputs={"a": ["n"], "b": ["n"]})
    with pytest.raises(InputError, match="dimension 'n' of input 'b' is given as 3, but elsewhere as 2"):
        import_model(model, {"a": [2], "b": [3]})


def test_dtype(relu: Callable[..., onnx.ModelProto]) -> None:
    import_model(relu([1, 3]), dtype="float32")
    import_model(relu([1, 3]), dtype={"net/x": "float32"})
    for dtype in ("float16", {"net/x": "int32"}):
        with pytest.raises(InputError, match="'net/x' is float32 in the model"):
            import_model(relu([1, 3]), dtype=dtype)
    with pytest.raises(InputError, match="no input named 'other'"):
        import_model(relu([1, 3]), dtype={"other": "float32"})


def _reshape(build_model: Build) -> onnx.ModelProto:
    model = build_model([helper.make_node("Reshape", ["x", "shape"], ["y"], "view")])
    model.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [2]))
    return model


def test_constants_bind_inputs(build_model: Build) -> None:
    model = _reshape(build_model)
    mod, _ = import_model(model, constants={"shape": np.array([3, 2])})
    assert [parameter.name for parameter in mod["main"].params] == ["x"]
    assert [int(dim) for dim in mod["main"].ret_ty.shape] == [3, 2]


@pytest.mark.parametrize("value", [np.array([3, 2], np.int32), np.array([3, 2, 1])])
def test_constants_must_fit(build_model: Build, value: Any) -> None:
    with pytest.raises(InputError, match="'shape'"):
        import_model(_reshape(build_model), constants={"shape": value})


def test_hint_names_the_input_that_should_be_constant(build_model: Build) -> None:
    model = build_model([helper.make_node("TopK", ["x", "k"], ["y", "i"], "best")])
    model.graph.input.append(helper.make_tensor_value_info("k", TensorProto.INT64, [1]))
    with pytest.raises(ModelError, match="TopK node 'best'") as caught:
        import_model(model)
    assert "'k'" in caught.value.remedy
    assert "constants=" in caught.value.remedy
    import_model(model, constants={"k": np.array([2])})


def test_scalar_and_zero_size_inputs(relu: Callable[..., onnx.ModelProto]) -> None:
    assert _shapes(import_model(relu([]))[0]) == [[]]
    mod, _ = import_model(relu([0, 3]))
    assert _shapes(mod) == [["0", "3"]]
    assert unbound_dimensions(mod) == {}
