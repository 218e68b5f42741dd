"""Refuses, with the node or tensor named, what no importer could make sense of."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

from .graph import STANDARD_DOMAINS, OnnxGraph, all_nodes, describe_node, read_names, small_model, with_some_shape

# The converters know operators by name alone; this domain's are those that they were written for, besides ONNX's own.
CONTRIBUTED_DOMAIN = "com.microsoft"
LEARNED_DOMAIN = "ai.onnx.ml"
# How many names an error message lists before it says "and N more".
_NAMES_SHOWN = 8


def shown(names: Sequence[str]) -> str:
    """`'a', 'b' and 3 more`."""
    more = len(names) - _NAMES_SHOWN
    text = ", ".join(f"'{name}'" for name in names[:_NAMES_SHOWN])
    return f"{text} and {more} more" if more > 0 else text


def check_names(graph: OnnxGraph) -> None:
    """Every tensor is defined exactly once, and what is read or returned is defined.

    Raises ModelError naming the tensor and the node.
    """
    defined = {"": "an empty name", **dict.fromkeys(graph.constants, "an initializer")}
    for name in graph.input_names:
        if name in defined:
            raise ModelError(f"graph input '{name}' is defined twice", "export the model again")
        defined[name] = "a graph input"
    for node in graph.nodes:
        for name in filter(None, node.output):
            if name in defined:
                raise ModelError(
                    f"tensor '{name}' is defined twice: by {defined[name]} and by {describe_node(node)}",
                    "give each tensor a name of its own",
                )
            defined[name] = describe_node(node)
    for node in graph.nodes:
        for name in sorted(read_names(node) - defined.keys()):
            raise ModelError(f"{describe_node(node)} reads tensor '{name}', which nothing defines", "export again")
    for name in graph.output_names:
        if name not in defined:
            raise ModelError(f"graph output '{name}' is defined by nothing", "export the model again")


def sort_nodes(graph: OnnxGraph) -> OnnxGraph:
    """`graph` in topological order, otherwise in the order given.

    Raises ModelError where the nodes form a cycle; its nodes are named in order.
    """
    producer = {name: index for index, node in enumerate(graph.nodes) for name in node.output if name}
    needs = [sorted({producer[name] for name in read_names(node) if name in producer}) for node in graph.nodes]
    order: list[int] = []
    state = [0] * len(needs)  # 0: not seen, 1: on the current path, 2: placed
    for root in range(len(needs)):
        path = [(root, iter(needs[root]))] if state[root] == 0 else []
        state[root] = max(state[root], 1)
        while path:
            index, rest = path[-1]
            below = next((item for item in rest if state[item] != 2), None)
            if below is None:
                path.pop()
                state[index] = 2
                order.append(index)
            elif state[below] == 1:
                raise _cycle_error(graph, [item for item, _ in path], below)
            else:
                state[below] = 1
                path.append((below, iter(needs[below])))
    return replace(graph, nodes=tuple(graph.nodes[index] for index in order))


def _cycle_error(graph: OnnxGraph, path: list[int], entry: int) -> ModelError:
    # The path runs from reader to producer; read backwards it follows the data.
    loop = [graph.nodes[index] for index in reversed(path[path.index(entry) :])]
    names = " -> ".join(describe_node(node) for node in (*loop, loop[0]))
    return ModelError(f"the graph has a cycle: {names}", "an ONNX graph must be acyclic: unroll the loop")


def check_structure(graph: OnnxGraph) -> None:
    """ONNX's own checker on the graph without its weights: attributes, arities, types, operator versions.

    Raises ModelError with the checker's words.
    """
    for value in (*graph.inputs, *graph.outputs):
        code = value.type.tensor_type.elem_type
        if code not in onnx.TensorProto.DataType.values():
            raise ModelError(f"'{value.name}' has the element type {code}, which ONNX does not have", "export it again")
    try:
        onnx.checker.check_model(with_some_shape(small_model(graph), also_inputs=True))
    except onnx.checker.ValidationError as error:
        reason = " ".join(str(error).split("==> Context:")[0].split())
        raise ModelError(f"this is not a valid ONNX model: {reason}", "export the model again") from error
    except UnicodeDecodeError as error:
        # The checker's message quotes a name which is no UTF-8.
        raise ModelError("this is not a valid ONNX model: a name in it is not UTF-8", "export it again") from error


def find_unsupported(graph: OnnxGraph, supported: Collection[str]) -> list[onnx.NodeProto]:
    """The nodes, nested graphs included, whose operator the importer has no converter for."""
    known = (*STANDARD_DOMAINS, CONTRIBUTED_DOMAIN)
    return [node for node in all_nodes(graph.nodes) if node.op_type not in supported or node.domain not in known]


def unsupported_error(graph: OnnxGraph, nodes: Iterable[onnx.NodeProto]) -> ModelError:
    """One error that lists every unsupported operator at once, with its operator set and its nodes."""
    by_operator: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        domain = "" if node.domain in STANDARD_DOMAINS else node.domain
        by_operator.setdefault((domain, node.op_type), []).append(node.name or next(iter(node.output), ""))
    lines = []
    for (domain, operator), names in sorted(by_operator.items()):
        version = graph.opsets.get(domain, graph.opset if not domain else None)
        lines.append(f"\n  {domain or 'ai.onnx'}.{operator} (opset {version or 'not imported'}): nodes {shown(names)}")
    return ModelError(
        f"{len(lines)} operator(s) of the model are not supported:{''.join(lines)}",
        "export with other operators (a lower opset often decomposes them), or cut these nodes off",
    )


def warn_non_finite(constants: Iterable[tuple[str, Array]]) -> None:
    """Warns of constants that hold NaN or infinity. A tensor whose only such values are -inf is a mask and is fine."""
    names = [name for name, value in constants if _is_suspicious(value)]
    if names:
        warnings.warn(
            f"{len(names)} constant(s) of the model hold NaN or infinity: {shown(names)}. Outputs that depend on them "
            "will not be finite; check the training or the conversion to a narrower type.",
            UserWarning,
            stacklevel=2,
        )


def _is_suspicious(value: Array) -> bool:
    if value.dtype.kind != "f" or bool(np.isfinite(value).all()):
        return False
    return bool((np.isnan(value) | np.isposinf(value)).any())
