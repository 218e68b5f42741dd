"""Targets of Reshape of which only one extent is computed at run time: that one is what is left over, -1.

Exporters compute a target from the input's shape: Shape -> Slice, one for each axis, -> Mul -> Concat. Where the steps
of a sequence are open, the whole is no constant, though all of it but the steps is known.

Worked example: Reshape of (steps, 1, 2, 8) by Concat(Slice of its shape, [1], [8 * 2]) is Reshape by [-1, 1, 16].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

import numpy as np
import onnx

from .graph import STANDARD_DOMAINS, GraphEdit, OnnxGraph, attribute, is_standard, with_operands
from .infer import infer_types

_Elements = list[int | None]
_MOST_ELEMENTS = 16  # of a tensor that may say a shape
_LOOKS = 100_000  # at nodes, in all rounds together
_SAME = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"})  # by its elements in a row
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {"Add": operator.add, "Mul": operator.mul, "Sub": operator.sub}


def settle_reshapes(graph: OnnxGraph) -> OnnxGraph:
    """``graph`` whose Reshapes have constant targets wherever one extent at most is open.

    A settled Reshape can make the shapes behind it known, of a further layer say, and so the next one's target.
    """
    most = min(sum(map(_is_reshape, graph.nodes)), 1 + _LOOKS // max(1, len(graph.nodes)))
    for _ in range(most):
        settled = _settled_once(graph)
        if settled is graph:
            break
        graph = settled
    return graph


def _settled_once(graph: OnnxGraph) -> OnnxGraph:
    if all(node.input[1] in graph.constants for node in graph.nodes if _is_reshape(node)):
        return graph
    values, edit = _known_elements(graph), GraphEdit(graph)
    for node in graph.nodes:
        target = values.get(node.input[1]) if _is_reshape(node) and node.input[1] not in graph.constants else None
        if target is not None and target.count(None) <= 1 and all(item is None or item > 0 for item in target):
            value = np.asarray([-1 if item is None else item for item in target], np.int64)
            node = with_operands(node, [node.input[0], edit.constant(f"{node.output[0]}_target", value)])
        edit.append(node)
    return edit.result() if edit.constants else graph


def _is_reshape(node: onnx.NodeProto) -> bool:
    return is_standard(node, "Reshape") and len(node.input) == 2


def _known_elements(graph: OnnxGraph) -> dict[str, _Elements]:
    """Name of a small integer tensor -> its elements in a row, None for those that are computed at run time."""
    types = infer_types(graph)
    values: dict[str, _Elements] = {
        name: [int(item) for item in value.reshape(-1)]
        for name, value in graph.constants.items()
        if value.ndim <= 1 and value.size <= _MOST_ELEMENTS and value.dtype.kind in "iu"
    }
    for node in graph.nodes:
        if node.domain in STANDARD_DOMAINS and len(node.output) == 1:
            found = _elements(node, values, types)
            if found is not None and len(found) <= _MOST_ELEMENTS:
                values[node.output[0]] = found
    return values


def _elements(
    node: onnx.NodeProto, values: Mapping[str, _Elements], types: Mapping[str, onnx.TypeProto]
) -> _Elements | None:
    if node.op_type == "Shape":
        return _extents(node, types.get(node.input[0]))
    given = [values.get(name) for name in node.input]
    if not given or given[0] is None:
        return None
    if node.op_type in _SAME:
        return given[0]
    if any(item is None for item in given):
        return None
    known = [item for item in given if item is not None]
    if node.op_type == "Concat":
        return [element for item in known for element in item]
    if node.op_type == "Gather":
        return _gathered(*known)
    if node.op_type == "Slice":
        return _sliced(known)
    if node.op_type in _ARITHMETIC and len(known) == 2:
        return _combined(_ARITHMETIC[node.op_type], *known)
    return None


def _extents(node: onnx.NodeProto, kind: onnx.TypeProto | None) -> _Elements | None:
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    extents = [dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in kind.tensor_type.shape.dim]
    return extents[attribute(node, "start", 0) : attribute(node, "end", None)]


def _gathered(data: _Elements, indices: _Elements) -> _Elements | None:
    if any(index is None or not -len(data) <= index < len(data) for index in indices):
        return None
    return [data[index] for index in indices if index is not None]


def _sliced(operands: list[_Elements]) -> _Elements | None:
    """Of one axis: data, start, end, and axis and step where they are given."""
    data, *bounds = operands
    numbers = [bound[0] for bound in bounds if len(bound) == 1 and bound[0] is not None]
    if len(numbers) != len(bounds) or len(numbers) < 2 or (len(numbers) == 4 and numbers[3] < 1):
        return None
    return data[numbers[0] : numbers[1] : numbers[3] if len(numbers) == 4 else 1]


def _combined(function: Callable[[int, int], int], a: _Elements, b: _Elements) -> _Elements | None:
    if len(a) != len(b) and 1 not in (len(a), len(b)):
        return None
    size = max(len(a), len(b))
    pairs = zip(a * (size // max(1, len(a))), b * (size // max(1, len(b))), strict=True)
    return [None if x is None or y is None else function(x, y) for x, y in pairs]
