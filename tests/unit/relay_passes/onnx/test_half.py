"""Models in half precision: every tensor of one operator has the type that its schema asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_ext import relay
from tvm_ext.relay_passes.onnx.half import to_half

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs, [output], **attributes)


def tensor(name: str, values: Any, dtype: str = "float32") -> Any:
    return numpy_helper.from_array(np.array(values, dtype), name)


def model(nodes: list[Any], inputs: dict[str, list[int]], output: list[int], constants: list[Any]) -> Any:
    ends = [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()]
    result = helper.make_tensor_value_info("y", FLOAT, output)
    graph = helper.make_graph(nodes, "g", ends, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def resized_twice() -> Any:
    """The second Resize needs the rank that the first one gives; scales are float32 in every model."""
    doubled = [node("Resize", [source, "", "scales"], name) for source, name in (("x", "a"), ("b", "y"))]
    nodes = [doubled[0], node("Relu", ["a"], "b"), doubled[1]]
    return model(nodes, {"x": [1, 2, 4, 4]}, [1, 2, 16, 16], [tensor("scales", [1, 1, 2, 2])])


def scattered(**value: Any) -> Any:
    """Updates of the input's type go into what a constant makes."""
    zeros = node("ConstantOfShape", ["shape"], "zeros", **value)
    nodes = [zeros, node("ScatterND", ["zeros", "at", "x"], "y")]
    constants = [tensor("shape", [4, 3], "int64"), tensor("at", [[0], [2]], "int64")]
    return model(nodes, {"x": [2, 3]}, [4, 3], constants)


def counted() -> Any:
    """A Range has no half precision; of integers it is none of ours."""
    numbers = [("start", 0.0), ("limit", 4.0), ("delta", 0.5)]
    nodes = [node("Constant", [], name, value_float=number) for name, number in numbers]
    nodes += [node("Range", [name for name, _ in numbers], "r"), node("Range", ["i0", "i1", "i2"], "s")]
    nodes += [node("Cast", ["s"], "t", to=FLOAT), node("Add", ["r", "t"], "u"), node("Mul", ["u", "x"], "y")]
    return model(nodes, {"x": [8]}, [8], [tensor(f"i{n}", v, "int64") for n, v in enumerate((0, 8, 1))])


def branches() -> Any:
    """A condition's bodies, one of which uses a constant of its own, the other one from outside."""
    bodies = {}
    for name, made in (("then_branch", node("Constant", [], "c", value_floats=[2.0])), ("else_branch", None)):
        add = node("Add", ["x", "c" if made else "one"], f"{name}_y")
        end = helper.make_tensor_value_info(f"{name}_y", FLOAT, [3])
        bodies[name] = helper.make_graph([*([made] if made else []), add], name, [], [end])
    nodes = [helper.make_node("If", ["condition"], ["y"], **bodies)]
    return model(nodes, {"x": [3]}, [3], [tensor("one", [1.0]), tensor("condition", True, "bool")])


MODELS = {
    "resized twice": resized_twice(),
    "scattered into zeros": scattered(),
    "scattered into ones": scattered(value=tensor("", [1.0])),
    "counted": counted(),
    "branches": branches(),
}


@pytest.mark.parametrize("name", MODELS)
def test_halves_are_sound_and_computed_in_half(name: str) -> None:
    half = to_half(MODELS[name])
    onnx.checker.check_model(half, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(half, strict_mode=True).graph
    kinds = {value.name: value.type.tensor_type for value in (*inferred.value_info, *inferred.output)}
    assert kinds["y"].elem_type == HALF
    module, params = relay.frontend.from_onnx(half)
    assert str(relay.prepare(module, params)["main"].ret_ty.dtype) == "float16"


def test_scales_are_as_they_were() -> None:
    """1.3 is 1.2998 in half precision: 20 pixels would become 25."""
    nodes = [node("Resize", ["x", "", "scales"], "y")]
    half = to_half(model(nodes, {"x": [1, 1, 20, 20]}, [1, 1, 26, 26], [tensor("scales", [1, 1, 1.3, 1.3])]))
    module, params = relay.frontend.from_onnx(half)
    assert [int(size) for size in relay.prepare(module, params)["main"].ret_ty.shape] == [1, 1, 26, 26]
