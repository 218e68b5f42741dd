"""ONNX's own shape and type inference, kept from the nodes on which it ends the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import onnx
from onnx import helper

from tvm_ext.errors import ModelError

from .graph import (
    STANDARD_DOMAINS,
    OnnxGraph,
    all_nodes,
    attribute,
    is_standard,
    nested_graphs,
    small_model,
    with_operands,
)
from .operators.packed_product import PACKED_PRODUCT

# Not an operator: inference steps over it and leaves its results unknown.
_HIDDEN = "HiddenFromInference"
_Danger: TypeAlias = Callable[[onnx.NodeProto, OnnxGraph], bool]


def infer_types(graph: OnnxGraph) -> dict[str, onnx.TypeProto]:
    """Inference, values of small integer tensors propagated, for every tensor of the graph.

    Raises ModelError where the inference finds a contradiction.
    """
    try:
        known = _with_stand_ins(_without_dangers(graph))
        inferred = onnx.shape_inference.infer_shapes(small_model(known), data_prop=True).graph
    except _INFERENCE_ERRORS as error:
        reason = " ".join(str(error).split())[:2000]
        raise ModelError(f"the model's shapes contradict each other: {reason}", "export the model again") from error
    return {value.name: value.type for value in (*inferred.input, *inferred.value_info, *inferred.output)}


# What comes out of it besides its own error: reservations of vectors, names that are no text, opsets that it lacks.
_INFERENCE_ERRORS = (
    onnx.shape_inference.InferenceError,
    onnx.checker.ValidationError,
    MemoryError,
    RuntimeError,
    ValueError,
)


def _with_stand_ins(graph: OnnxGraph) -> OnnxGraph:
    """`graph` with MatMul in place of products by packed weights, contributed ones and those that become of them.

    What a Loop carries has the type that it has before: inference allows for other shapes, which the import refuses.
    """
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        if is_standard(node, "Loop"):
            carried = node.input[2:]
            hidden = [f"{name}_of_inference" if name else "" for name in node.output[: len(carried)]]
            nodes.append(with_operands(node, node.input, [*hidden, *node.output[len(carried) :]]))
            pairs = zip(carried, node.output, strict=False)
            nodes += [helper.make_node("Identity", [given], [made]) for given, made in pairs if made]
            continue
        if node.op_type not in ("MatMulNBits", PACKED_PRODUCT):
            nodes.append(node)
            continue
        shape, weights = (f"{node.output[0]}_{stem}_of_inference" for stem in ("shape", "weights"))
        sizes = [int(attribute(node, name, 0)) for name in ("K", "N")]
        nodes.append(helper.make_node("Constant", [], [shape], value_ints=sizes))
        nodes.append(helper.make_node("ConstantOfShape", [shape], [weights]))
        nodes.append(helper.make_node("MatMul", [node.input[0], weights], [node.output[0]]))
    return replace(graph, nodes=tuple(nodes)) if len(nodes) > len(graph.nodes) else graph


def _without_dangers(graph: OnnxGraph) -> OnnxGraph:
    hidden = [_is_dangerous(node, graph) for node in graph.nodes]
    if not any(hidden):
        return graph
    nodes = [_hide(node) if away else node for node, away in zip(graph.nodes, hidden, strict=True)]
    return replace(graph, nodes=tuple(nodes))


def _is_dangerous(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    danger = _DANGERS.get(node.op_type)
    if danger is not None and node.domain in STANDARD_DOMAINS and danger(node, graph):
        return True
    bodies = list(nested_graphs(node))
    return any(_is_dangerous(inner, graph) for body in bodies for inner in all_nodes(body.node))


def _hide(node: onnx.NodeProto) -> onnx.NodeProto:
    return onnx.NodeProto(op_type=_HIDDEN, input=node.input, output=node.output, name=node.name)


def _splits_otherwise(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Its inference reads as many sizes as there are outputs, though there are fewer."""
    sizes = attribute(node, "split", None)
    given = node.input[1] if len(node.input) > 1 else ""
    if given:
        return given not in graph.constants or graph.constants[given].size != len(node.output)
    count = attribute(node, "num_outputs", len(node.output))
    return count != len(node.output) or (sizes is not None and len(sizes) != len(node.output))


def _normalizes_before_the_first_axis(node: onnx.NodeProto, _: OnnxGraph) -> bool:
    """Its inference writes extents of the mean at negative positions; the rank is not known yet."""
    return len(node.output) > 1 and attribute(node, "axis", -1) < 0


_DANGERS: Mapping[str, _Danger] = {"LayerNormalization": _normalizes_before_the_first_axis, "Split": _splits_otherwise}
