"""Folding of batch normalization, scales and biases, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from tvm_ext.relay_passes.onnx.fold_batch_norm import fold_channel_scales, lower_batch_norm, merge_scales, split_biases
from tvm_ext.relay_passes.onnx.graph import OnnxGraph
from tvm_ext.relay_passes.onnx.import_model import clean_graph

BuildGraph = Callable[..., OnnxGraph]
SameMeaning = Callable[..., None]


def _random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def _statistics(channels: int) -> dict[str, Any]:
    names = ("scale", "shift", "mean", "var")
    values = {name: _random(channels, seed=index) for index, name in enumerate(names)}
    return values | {"var": np.abs(values["var"]) + 0.5}


def _batch_norm(data: str, out: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        "BatchNormalization", [data, "scale", "shift", "mean", "var"], [out], f"{out}_bn", **attributes
    )


def _fold(graph: OnnxGraph) -> OnnxGraph:
    return fold_channel_scales(merge_scales(lower_batch_norm(graph)))


def _operators(graph: OnnxGraph) -> list[str]:
    return [node.op_type for node in graph.nodes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_into_convolution(
    build_graph: BuildGraph, same_meaning: SameMeaning, kind: str, group: int, bias: bool
) -> None:
    weight = (6, 6 // group, 3, 3)
    constants = {"w": _random(*weight), **_statistics(6)}
    if bias:
        constants["b"] = _random(6)
    operands = ["x", "w", *(["b"] if bias else [])]
    graph = build_graph(
        [helper.make_node(kind, operands, ["c"], group=group, pads=[1, 1, 1, 1]), _batch_norm("c", epsilon=1e-3)],
        inputs={"x": [2, 6, 5, 4]},
        constants=constants,
    )
    after = _fold(graph)
    assert _operators(after) == [kind]
    same_meaning(graph, after, {"x": (2, 6, 5, 4)})
    split = split_biases(after)
    assert _operators(split) == [kind, "Add"]
    assert split.constants[split.nodes[1].input[1]].shape == (1, 6, 1, 1)
    same_meaning(graph, split, {"x": (2, 6, 5, 4)})


@pytest.mark.parametrize("bias", [False, True])
def test_into_gemm(build_graph: BuildGraph, same_meaning: SameMeaning, bias: bool) -> None:
    constants = {"w": _random(5, 3), **_statistics(5), **({"b": _random(5)} if bias else {})}
    operands = ["x", "w", *(["b"] if bias else [])]
    graph = build_graph(
        [helper.make_node("Gemm", operands, ["c"], transB=1, alpha=0.5), _batch_norm("c")], constants=constants
    )
    after = clean_graph(graph)
    assert _operators(after) == ["Gemm"]
    same_meaning(graph, after, {"x": (2, 3)})


def test_batch_norm_and_scale_layer_in_front_of_a_convolution(
    build_graph: BuildGraph, same_meaning: SameMeaning
) -> None:
    """DenseNet: four element-wise operators become two."""
    constants = {"factor": _random(3, 1, 1, seed=5), "offset": _random(1, 3, 1, 1, seed=6), **_statistics(3)}
    graph = build_graph(
        [
            _batch_norm("x", "a"),
            helper.make_node("Mul", ["a", "factor"], ["b"]),
            helper.make_node("Add", ["offset", "b"], ["c"]),
            helper.make_node("Relu", ["c"], ["y"]),
        ],
        inputs={"x": [2, 3, 4, 4]},
        constants=constants,
    )
    after = _fold(graph)
    assert _operators(after) == ["Mul", "Add", "Relu"]
    same_meaning(graph, after, {"x": (2, 3, 4, 4)})


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 1, 1, 1), (6, 5, 4), (1, 1, 6, 1, 1)])
def test_constants_along_other_axes_stay(
    build_graph: BuildGraph, same_meaning: SameMeaning, shape: tuple[int, ...]
) -> None:
    constants = {"w": _random(6, 3, 1, 1), "factor": _random(*shape)}
    graph = build_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Mul", ["c", "factor"], ["y"])],
        inputs={"x": [2, 3, 5, 4]},
        constants=constants,
    )
    after = _fold(graph)
    assert _operators(after) == ["Conv", "Mul"]
    same_meaning(graph, after, {"x": (2, 3, 5, 4)})


def test_single_channel_is_not_widened(build_graph: BuildGraph, same_meaning: SameMeaning) -> None:
    """One output channel times a (3, 1, 1) constant makes three: the convolution's bias cannot."""
    graph = build_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Mul", ["c", "f"], ["y"])],
        inputs={"x": [2, 3, 5, 4]},
        constants={"w": _random(1, 3, 1, 1), "f": _random(3, 1, 1)},
    )
    assert _operators(_fold(graph)) == ["Conv", "Mul"]


def test_a_result_read_twice_stays(build_graph: BuildGraph, same_meaning: SameMeaning) -> None:
    graph = build_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            _batch_norm("c", "n"),
            helper.make_node("Add", ["c", "n"], ["y"]),
        ],
        inputs={"x": [1, 3, 4, 4]},
        constants={"w": _random(3, 3, 1, 1), **_statistics(3)},
    )
    after = _fold(graph)
    assert _operators(after) == ["Conv", "Mul", "Add", "Add"]
    same_meaning(graph, after, {"x": (1, 3, 4, 4)})


def test_a_result_that_is_an_output_stays(build_graph: BuildGraph, same_meaning: SameMeaning) -> None:
    graph = build_graph(
        [helper.make_node("Conv", ["x", "w"], ["c"]), _batch_norm("c")],
        inputs={"x": [1, 3, 4, 4]},
        outputs=["c", "y"],
        constants={"w": _random(3, 3, 1, 1), **_statistics(3)},
    )
    after = _fold(graph)
    assert _operators(after) == ["Conv", "Mul", "Add"]
    same_meaning(graph, after, {"x": (1, 3, 4, 4)})


def test_shared_weights_keep_their_other_reader(build_graph: BuildGraph, same_meaning: SameMeaning) -> None:
    graph = build_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"]),
            _batch_norm("a", "n"),
            helper.make_node("Conv", ["x", "w"], ["b"]),
            helper.make_node("Add", ["n", "b"], ["y"]),
        ],
        inputs={"x": [1, 3, 4, 4]},
        constants={"w": _random(3, 3, 1, 1), **_statistics(3)},
    )
    after = _fold(graph)
    assert _operators(after) == ["Conv", "Conv", "Add"]
    same_meaning(graph, after, {"x": (1, 3, 4, 4)})


def test_statistics_that_are_inputs_stay(build_graph: BuildGraph) -> None:
    inputs = {"x": [1, 3, 4, 4], **{name: [3] for name in ("scale", "shift", "mean", "var")}}
    assert _operators(_fold(build_graph([_batch_norm("x")], inputs=inputs))) == ["BatchNormalization"]


def test_zero_bias_goes(build_graph: BuildGraph) -> None:
    constants = {"w": _random(3, 3, 1, 1), "b": np.zeros(3, np.float32)}
    graph = build_graph(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"])], inputs={"x": [1, 3, 4, 4]}, constants=constants
    )
    assert _operators(split_biases(graph)) == ["Conv"]


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["Mul", "Add", "BN", "Relu"]), st.sampled_from([(), (4, 1, 1), (1, 4, 1, 1), (5,), (1,)])
    ),
    min_size=1,
    max_size=7,
)


# The fixtures are functions without state.
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_STEPS, starts_with_convolution=st.booleans(), tap=st.integers(min_value=-1, max_value=6))
def test_any_chain_keeps_its_meaning(
    build_graph: BuildGraph,
    same_meaning: SameMeaning,
    steps: list[tuple[str, tuple[int, ...]]],
    starts_with_convolution: bool,
    tap: int,
) -> None:
    """Chains of scales, shifts, normalizations and activations; one value on the way may be an output too."""
    nodes, constants, data = [], _statistics(4), "x"
    if starts_with_convolution:
        constants["w"] = _random(4, 4, 3, 3)
        nodes.append(helper.make_node("Conv", ["x", "w"], ["t"], pads=[1, 1, 1, 1]))
        data = "t"
    for index, (kind, shape) in enumerate(steps):
        out = f"t{index}"
        if kind == "BN":
            nodes.append(_batch_norm(data, out))
        elif kind == "Relu":
            nodes.append(helper.make_node("Relu", [data], [out]))
        else:
            constants[f"c{index}"] = _random(*shape, seed=index)
            operands = [data, f"c{index}"] if index % 2 else [f"c{index}", data]
            nodes.append(helper.make_node(kind, operands, [out]))
        data = out
    outputs = list(dict.fromkeys([data, *([f"t{tap}"] if 0 <= tap < len(steps) else [])]))
    graph = build_graph(nodes, inputs={"x": [2, 4, 5, 5]}, outputs=outputs, constants=constants)
    same_meaning(graph, clean_graph(graph), {"x": (2, 4, 5, 5)})
