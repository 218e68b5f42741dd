"""Computes at import what is known at import: constants, shapes that inference found, chains of small arithmetic."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

from .graph import STANDARD_DOMAINS, OnnxGraph, array_from_tensor, attribute, describe_node, is_empty, static_shape
from .import_limits import raise_limit
from .infer import infer_types
from .limit import check_operands, check_results

# A folded value may be this big, or as big as what it was computed from (a transposed weight).
_FOLDED_BYTES = 16 << 20
# ConstantOfShape makes weights of any size from a few bytes; this bounds what a hostile file can allocate.
_FILLED_BYTES = 2 << 30
# Rounds of folding: so many at least, and as many as look at this many nodes.
_ROUNDS = 16
_LOOKS = 200_000

# Deterministic operators with NumPy semantics, which exporters use to compute shapes, masks, scales and standardised
# weights (batch normalisation in training mode, as NFNet has it).
_FOLDABLE_NAMES = (
    "Abs Add And BatchNormalization BlackmanWindow Cast Ceil Clip Concat Cos Div Equal Exp Expand Flatten Floor Gather "
    "Greater GreaterOrEqual HammingWindow HannWindow Identity Less LessOrEqual Log Max MelWeightMatrix Min Mod Mul Neg "
    "Not Or Pow Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
    "ReduceProd ReduceSum ReduceSumSquare Reshape Round Sin Slice Split Sqrt Squeeze Sub Sum Tile Transpose Trilu "
    "Unsqueeze Where"
)
_FOLDABLE = frozenset(_FOLDABLE_NAMES.split())


@dataclass(slots=True)
class _Budget:
    """What folding may still take: bytes of results, and nodes looked at, round by round."""

    left_bytes: int
    left_nodes: int

    @classmethod
    def of(cls, graph: OnnxGraph) -> _Budget:
        own = sum(value.nbytes for value in graph.constants.values())
        rounds = max(_ROUNDS, _LOOKS // max(1, len(graph.nodes)))
        return cls(graph.limits.folded_bytes + 8 * own, rounds * max(1, len(graph.nodes)))


def fold_constants(graph: OnnxGraph) -> OnnxGraph:
    """`graph` without the nodes whose outputs are known, until nothing more becomes known.

    Folding a shape can make further shapes static: Shape -> Gather -> Concat -> Reshape -> Shape is two rounds.

    Raises ModelError where a tensor passes the limits of the graph.
    """
    budget = _Budget.of(graph)
    while True:
        folded = _fold_once(graph, budget)
        budget.left_nodes -= len(graph.nodes)
        if len(folded.nodes) == len(graph.nodes) or budget.left_nodes <= 0:
            return folded
        graph = folded


def _fold_once(graph: OnnxGraph, budget: _Budget) -> OnnxGraph:
    empty = {value.name: _empty(value.type) for value in graph.inputs if is_empty(value.type)}
    types = infer_types(graph)
    constants: dict[str, Array] = {}
    # An input without elements is known, though it stays an input.
    known = ChainMap(constants, dict(graph.constants), empty)
    kept = []
    for node in graph.nodes:
        check_operands(node, known, graph.limits)
        check_results(node, types, graph.limits)
        values = _empty_outputs(node, types) or _fold_node(node, known, types, graph.opset, budget)
        if values is None:
            kept.append(node)
        else:
            constants.update(values)
    return graph.with_nodes(kept, constants)


def _empty(kind: onnx.TypeProto) -> Array:
    return np.zeros(static_shape(kind) or (), onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def _empty_outputs(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto]) -> dict[str, Array] | None:
    """The outputs of a node if none has an element: there is nothing to compute."""
    names = [name for name in node.output if name]
    if not names or not all(is_empty(types.get(name)) for name in names):
        return None
    return {name: _empty(types[name]) for name in names}


def _fold_node(
    node: onnx.NodeProto,
    constants: Mapping[str, Array],
    types: Mapping[str, onnx.TypeProto],
    opset: int,
    budget: _Budget,
) -> dict[str, Array] | None:
    """The values of the node's outputs, or None where they are not known or too big."""
    if node.domain not in STANDARD_DOMAINS:
        return None
    if node.op_type == "Constant":
        return {node.output[0]: _constant_value(node)}
    if node.op_type in ("Shape", "Size"):
        value = _shape_value(node, constants, types)
        return None if value is None else {node.output[0]: value}
    if any(name and name not in constants for name in node.input):
        return None
    inputs = [constants[name] if name else None for name in node.input]
    if node.op_type == "ConstantOfShape":
        return _filled(node, inputs, budget)
    if node.op_type not in _FOLDABLE or not _fits(node, inputs, types, budget):
        return None
    values = _evaluate(node, inputs, opset)
    budget.left_bytes -= sum(value.nbytes for value in (values or {}).values())
    return values


def _constant_value(node: onnx.NodeProto) -> Array:
    """Constant holds one of `value`, `value_int(s)`, `value_float(s)`, `value_string(s)`."""
    scalar_types: dict[str, Callable[[Any], Array]] = {
        "value": array_from_tensor,
        "value_int": lambda value: np.asarray(value, np.int64),
        "value_ints": lambda value: np.asarray(value, np.int64),
        "value_float": lambda value: np.asarray(value, np.float32),
        "value_floats": lambda value: np.asarray(value, np.float32),
        "value_string": lambda value: np.asarray(value, np.object_),
        "value_strings": lambda value: np.asarray(value, np.object_),
    }
    for item in node.attribute:
        if item.name in scalar_types:
            return scalar_types[item.name](onnx.helper.get_attribute_value(item))
    raise ModelError(f"{describe_node(node)} holds no dense value", "export its value as a dense tensor")


def _shape_value(
    node: onnx.NodeProto, constants: Mapping[str, Array], types: Mapping[str, onnx.TypeProto]
) -> Array | None:
    name = node.input[0]
    shape = constants[name].shape if name in constants else static_shape(types.get(name))
    if shape is None:
        return None
    if node.op_type == "Size":
        return np.asarray(np.prod(shape, dtype=np.int64))
    # Python slices clamp exactly as Shape's start and end do; end = None means "to the last axis".
    return np.asarray(shape[attribute(node, "start", 0) : attribute(node, "end", None)], np.int64)


def _filled(node: onnx.NodeProto, inputs: list[Array | None], budget: _Budget) -> dict[str, Array] | None:
    fill = attribute(node, "value", None)
    value = np.zeros(1, np.float32) if fill is None else array_from_tensor(fill)
    shape = [] if inputs[0] is None else [int(extent) for extent in inputs[0].reshape(-1)]
    size = prod(shape) * value.itemsize
    if size > _FILLED_BYTES or any(extent < 0 for extent in shape) or value.size != 1:
        raise ModelError(
            f"{describe_node(node)} makes a constant of shape {shape}, which takes {size} bytes "
            f"(limit {_FILLED_BYTES})",
            "check the shape, or pass the tensor as an input",
        )
    budget.left_bytes -= size
    if budget.left_bytes < 0:  # left to run time, the stock importer would make it all the same
        raise ModelError(
            f"{describe_node(node)} makes {size} bytes of constants more than an import may make",
            raise_limit("folded_bytes", 4 * size),
        )
    # A view of one element: nothing is allocated before somebody needs the whole.
    return {node.output[0]: np.broadcast_to(value.reshape(-1)[0], shape)}


def _fits(
    node: onnx.NodeProto, inputs: list[Array | None], types: Mapping[str, onnx.TypeProto], budget: _Budget
) -> bool:
    """Whether the result is small, judged before it is computed."""
    present = [value for value in inputs if value is not None]
    limit = max(_FOLDED_BYTES, sum(value.nbytes for value in present))
    sizes = [_bytes_of(types.get(name)) for name in node.output if name]
    expected = sum(size for size in sizes if size is not None) if None not in sizes else _estimate(node, present)
    return expected <= min(limit, budget.left_bytes)


def _bytes_of(kind: onnx.TypeProto | None) -> int | None:
    shape = static_shape(kind)
    if kind is None or shape is None or not kind.tensor_type.elem_type:
        return None
    return prod(shape) * onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type).itemsize


def _estimate(node: onnx.NodeProto, present: list[Array]) -> float:
    """The bytes of a result whose shape is not known, from above; what is not listed grows by a cast at most."""
    itemsize = max((value.itemsize for value in present), default=1)
    ranks = max((value.ndim for value in present), default=0)
    padded = [(1,) * (ranks - value.ndim) + value.shape for value in present]
    broadcast = float(prod(max(extents) for extents in zip(*padded, strict=True))) * itemsize
    if node.op_type == "Range":
        start, stop, step = (float(value.reshape(-1)[0]) for value in present)
        return abs((stop - start) / step) * itemsize
    if node.op_type in ("Expand", "Tile"):
        return float(present[0].nbytes) * prod(max(float(extent), 1.0) for extent in present[1].reshape(-1))
    if node.op_type in ("BlackmanWindow", "HammingWindow", "HannWindow"):
        return 8 * float(present[0].reshape(-1)[0])
    if node.op_type == "MelWeightMatrix":
        return 8 * float(present[0].reshape(-1)[0]) * float(present[1].reshape(-1)[0])
    if node.op_type == "Gather":
        return float(present[1].size) * present[0].nbytes
    return max(broadcast, 8.0 * sum(value.nbytes for value in present))


# What ONNX's reference implementation raises of operands that do not fit its operator.
_REFERENCE_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


def _evaluate(node: onnx.NodeProto, inputs: list[Array | None], opset: int) -> dict[str, Array] | None:
    """Runs one node under ONNX's reference implementation; None where that has none for these types."""
    from onnx.reference import ReferenceEvaluator  # takes 0.3 s to import, and few models need it

    names = [name for name in node.input if name]
    body = onnx.helper.make_graph(
        [node],
        "folded",
        [onnx.helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(names)],
        [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name],
    )
    model = onnx.helper.make_model(body, opset_imports=[onnx.helper.make_opsetid("", opset)])
    feeds = {name: value for name, value in zip(node.input, inputs, strict=True) if value is not None}
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(model).run(None, feeds)
    except (*_REFERENCE_ERRORS, onnx.checker.ValidationError):
        return None
    arrays = [np.asarray(result) for result in results]
    return dict(zip([name for name in node.output if name], arrays, strict=True))
