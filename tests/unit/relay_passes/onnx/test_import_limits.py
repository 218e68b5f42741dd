"""Limits of what is imported: each names the node or tensor, the number, the limit and how to raise it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tvm_ext.errors import ModelError, OptionError
from tvm_ext.relay_passes.onnx.import_limits import ImportLimits
from tvm_ext.relay_passes.onnx.import_model import import_model

Build = Callable[..., onnx.ModelProto]
SMALL = ImportLimits(tensor_elements=100, nodes=5, values=3, operands=4, results=2, text_bytes=20, rank=4, depth=2)


def _chain(build_model: Build, count: int) -> onnx.ModelProto:
    names = ["x", *(f"t{index}" for index in range(count - 1)), "y"]
    return build_model([helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)])


def _refused(model: onnx.ModelProto, match: str, limits: ImportLimits = SMALL) -> ModelError:
    with pytest.raises(ModelError, match=match) as caught:
        import_model(model, limits=limits)
    return caught.value


def test_what_is_within_the_limits_passes(build_model: Build) -> None:
    import_model(_chain(build_model, 5), limits=SMALL)


def test_counts(build_model: Build) -> None:
    error = _refused(_chain(build_model, 6), r"6 nodes \(limit 5\)")
    assert "ImportLimits(nodes=6)" in error.remedy and "TVM_EXT_IMPORT_LIMITS=nodes=6" in error.remedy
    sums = build_model([helper.make_node("Sum", ["x"] * 5, ["y"], "wide")])
    _refused(sums, r"Sum node 'wide' has 5 inputs \(limit 4\)")
    split = helper.make_node("Split", ["x"], ["y", "a", "b"], "parts", axis=1, num_outputs=3)
    _refused(build_model([split], opset=18), r"Split node 'parts' has 3 outputs \(limit 2\)")
    numbers = helper.make_node("Transpose", ["x"], ["y"], "turn", perm=[0, 1, 2, 3, 4])
    _refused(build_model([numbers]), "Transpose node 'turn' has an attribute 'perm' of more than 4")
    _refused(build_model([helper.make_node("Relu", ["x"], ["y"], "n" * 21)]), "longer than 20 bytes")
    constants = {f"c{index}": np.ones(3, "float32") for index in range(4)}
    _refused(build_model([helper.make_node("Relu", ["x"], ["y"])], constants=constants), "4 initializers")


@pytest.mark.parametrize(
    ("shape", "problem"),
    [([11, 10], "110 elements"), ([-1, 3], "negative"), ([1, 1, 1, 1, 1], "5 dimensions"), ([0, 200], "200 elements")],
)
def test_declared_extents(build_model: Build, shape: list[int], problem: str) -> None:
    model = build_model([helper.make_node("Relu", ["x"], ["y"])], inputs={"x": shape})
    assert "input 'x'" in _refused(model, problem).problem


@pytest.mark.parametrize(
    ("operator", "value", "problem"),
    [
        ("Tile", [2**62, 1], "Tile node 'n' is given the extent or count 4611686018427387904"),
        ("Tile", [-1, 1], "given the extent or count -1"),
        ("Tile", [20, 1], "result 'y' of Tile node 'n' has the shape .* 120 elements"),
        ("Expand", [50, 2, 3], "300 elements"),
        ("Pad", [0, 0, 40, 0], "elements"),
        ("Pad", [0, 0, -5, 0], "would make 'y' of shape"),
    ],
)
def test_results_are_bounded_as_they_become_known(build_model: Build, operator: str, value: Any, problem: str) -> None:
    """The operand comes from other nodes; ONNX's own inference says that four rows times 2^62 are none."""
    nodes = [helper.make_node("Identity", ["s"], ["t"]), helper.make_node(operator, ["x", "t"], ["y"], "n")]
    _refused(build_model(nodes, constants={"s": np.asarray(value)}), problem)


def test_growth_is_noticed_at_the_node_that_passes_the_limit(build_model: Build) -> None:
    names = ["x", "a", "b", "c", "d", "y"]
    nodes = [helper.make_node("Concat", [a, a], [b], b, axis=0) for a, b in itertools.pairwise(names)]
    _refused(build_model(nodes), "of Concat node 'y' has the shape .* 192 elements")


def _function(name: str, *calls: str) -> onnx.FunctionProto:
    between = [f"t{index}" for index in range(len(calls) - 1)]
    nodes = [
        helper.make_node(call, [a], [b], domain="" if call == "Relu" else "local")
        for call, (a, b) in zip(calls, itertools.pairwise(["p", *between, "q"]), strict=True)
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    return helper.make_function("local", name, ["p"], ["q"], nodes, opsets)


def _calling(build_model: Build, *functions: onnx.FunctionProto) -> onnx.ModelProto:
    model = build_model([helper.make_node("f", ["x"], ["y"], domain="local")])
    model.opset_import.append(helper.make_opsetid("local", 1))
    model.functions.extend(functions)
    return model


def test_functions(build_model: Build) -> None:
    _refused(_calling(build_model, _function("f", "g"), _function("g", "f")), "circle: 'f' -> 'g' -> 'f'")
    doubled = [_function("f", "g", "g"), _function("g", "Relu", "Relu", "Relu")]
    _refused(_calling(build_model, *doubled), r"6 nodes with its functions expanded \(limit 5\)")
    deep = [_function("f", "g"), _function("g", "h"), _function("h", "Relu")]
    _refused(_calling(build_model, *deep), r"2 deep, 'h' among them \(limit 2\)")


def test_the_checker_looks_into_functions(build_model: Build) -> None:
    """ONNX's inference ends the process over a convolution without a weight."""
    body = helper.make_node("Conv", ["p"], ["q"], "lost", kernel_shape=[3, 3])
    function = helper.make_function("local", "f", ["p"], ["q"], [body], [helper.make_opsetid("", 17)])
    model = _calling(build_model, function)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8]))
    _refused(model, "not a valid ONNX model", ImportLimits())


@pytest.mark.parametrize("operand", [True, False])
def test_split_into_more_parts_than_sizes(build_model: Build, operand: bool) -> None:
    """ONNX's inference reads sizes that are not there, and ends the process."""
    node = helper.make_node("Split", ["x", "s"] if operand else ["x"], ["y", "a", "b", "c"], "parts", axis=1)
    if not operand:
        node.attribute.append(helper.make_attribute("split", [1, 2]))
    constants = {"s": np.asarray([1, 2])} if operand else {}
    model = build_model([node], constants=constants, opset=17 if operand else 11, outputs=["y", "a"])
    _refused(model, "parts", ImportLimits())


def test_equations_that_are_no_text(build_model: Build) -> None:
    node = helper.make_node("Einsum", ["x"], ["y"], "sum", equation="ij->i")
    next(item for item in node.attribute).s = b"\xff\xfe"
    _refused(build_model([node]), "attribute 'equation' of Einsum node 'sum' is not UTF-8")


def test_the_environment_raises_limits(build_model: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_IMPORT_LIMITS", "nodes=4, values = 7")
    assert ImportLimits.current() == ImportLimits(nodes=4, values=7)
    with pytest.raises(ModelError, match="limit 4"):
        import_model(_chain(build_model, 5))
    import_model(_chain(build_model, 5), limits=ImportLimits())


@pytest.mark.parametrize("text", ["nodes", "nodes=-1", "nodes=0", "nodes=1e3", "colour=3", "nodes=" + "9" * 30])
def test_what_is_no_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_IMPORT_LIMITS", text)
    with pytest.raises(OptionError, match="limit"):
        ImportLimits.current()
