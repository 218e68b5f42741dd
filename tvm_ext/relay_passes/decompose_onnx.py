"""Operators, or forms of them, that the stock importer lacks or gets wrong, written with ones that it gets right."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx
from onnx import helper

from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx_graph import (
    STANDARD_DOMAINS,
    OnnxGraph,
    attribute,
    count_uses,
    defined_names,
    describe_node,
    fresh_name,
    infer_types,
)

# Names a new intermediate tensor.
Namer = Callable[[str], str]
# None: this node is none of the forms that the rule is for.
Rule = Callable[[onnx.NodeProto, Namer, Mapping[str, onnx.TypeProto]], list[onnx.NodeProto] | None]


def decompose_operators(graph: OnnxGraph) -> OnnxGraph:
    """`graph` with every node replaced for which a rule below has something to say."""
    if not any(node.op_type in _RULES for node in graph.nodes):
        return graph
    types, taken = infer_types(graph), defined_names(graph)
    nodes: list[onnx.NodeProto] = []
    for node in graph.nodes:
        rule = _RULES.get(node.op_type) if node.domain in STANDARD_DOMAINS else None
        replaced = None if rule is None else rule(node, lambda stem: fresh_name(stem, taken), types)
        nodes.extend([node] if replaced is None else replaced)
    return graph.with_nodes(nodes)


def refuse_training(graph: OnnxGraph) -> None:
    """The stock importer would normalize with the running statistics, silently.

    Raises
    ------
    ModelError
        A BatchNormalization runs in training mode, or its updated statistics are read.
    """
    uses = count_uses(graph)
    for node in graph.nodes:
        if node.op_type != "BatchNormalization" or node.domain not in STANDARD_DOMAINS:
            continue
        if attribute(node, "training_mode", 0) or any(uses[name] for name in node.output[1:]):
            raise ModelError(
                f"{describe_node(node)} is in training mode", "export the model for inference (model.eval() in PyTorch)"
            )


def _is_inf(node: onnx.NodeProto, name: Namer, types: Mapping[str, onnx.TypeProto]) -> list[onnx.NodeProto] | None:
    """One-sided IsInf: x > -x says that x is positive, whatever its type; x > x is never true."""
    positive, negative = bool(attribute(node, "detect_positive", 1)), bool(attribute(node, "detect_negative", 1))
    if positive and negative:
        return None
    x, out = node.input[0], node.output[0]
    infinite, opposite, side = name(f"{out}_infinite"), name(f"{out}_opposite"), name(f"{out}_side")
    comparison = "Greater" if positive else "Less"
    return [
        helper.make_node("IsInf", [x], [infinite]),
        helper.make_node("Neg", [x], [opposite]),
        helper.make_node(comparison, [x, opposite if positive or negative else x], [side]),
        helper.make_node("And", [infinite, side], [out], node.name),
    ]


def _lp_normalization(
    node: onnx.NodeProto, name: Namer, types: Mapping[str, onnx.TypeProto]
) -> list[onnx.NodeProto] | None:
    """x / |x|_p along one axis, 0 where the norm is 0: the norm becomes 1 there, and 0 / 1 = 0."""
    x, out = node.input[0], node.output[0]
    axis = int(attribute(node, "axis", -1))
    power = "L1" if attribute(node, "p", 2) == 1 else "L2"
    norm, is_zero, correction, safe = (name(f"{out}_{part}") for part in ("norm", "is_zero", "correction", "safe"))
    axes = name(f"{out}_axes")
    nought = name(f"{out}_nought")
    return [
        helper.make_node("Constant", [], [axes], value_ints=[axis]),
        helper.make_node(f"Reduce{power}", [x, axes], [norm], keepdims=1),
        helper.make_node("Sub", [norm, norm], [nought]),
        helper.make_node("Equal", [norm, nought], [is_zero]),
        helper.make_node("CastLike", [is_zero, x], [correction]),
        helper.make_node("Add", [norm, correction], [safe]),
        helper.make_node("Div", [x, safe], [out], node.name),
    ]


def _pow(node: onnx.NodeProto, name: Namer, types: Mapping[str, onnx.TypeProto]) -> list[onnx.NodeProto] | None:
    """Pow with two types: computed in the exponent's where only that is floating, and given in the base's."""
    base, exponent, out = node.input[0], node.input[1], node.output[0]
    if base not in types or exponent not in types:
        return None
    base_type, exponent_type = types[base].tensor_type.elem_type, types[exponent].tensor_type.elem_type
    if base_type == exponent_type or 0 in (base_type, exponent_type):
        return None
    if _is_floating(exponent_type) and not _is_floating(base_type):
        wide, power = name(f"{out}_wide"), name(f"{out}_power")
        return [
            helper.make_node("Cast", [base], [wide], to=exponent_type),
            helper.make_node("Pow", [wide, exponent], [power]),
            helper.make_node("Cast", [power], [out], node.name, to=base_type),
        ]
    converted = name(f"{out}_exponent")
    return [
        helper.make_node("Cast", [exponent], [converted], to=base_type),
        helper.make_node("Pow", [base, converted], [out], node.name),
    ]


def _is_floating(element_type: int) -> bool:
    return element_type in (
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.DOUBLE,
        onnx.TensorProto.FLOAT16,
        onnx.TensorProto.BFLOAT16,
    )


_RULES: Mapping[str, Rule] = {"IsInf": _is_inf, "LpNormalization": _lp_normalization, "Pow": _pow}

DECOMPOSED = frozenset({"LpNormalization"})
"""Operators that need no converter since no node of theirs is left."""
