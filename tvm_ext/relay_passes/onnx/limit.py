"""Refuses models that are too large or too deep, or say numbers that nothing can have, before anything works on them.

Plain Python over the protobuf, in time that grows with what is allowed: neither ONNX's own checks, which are C++ and
recursive, nor NumPy have seen the model yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from math import isfinite, prod

import onnx

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

from .graph import STANDARD_DOMAINS, describe_node, nested_graphs
from .import_limits import ImportLimits, beyond, raise_limit

_DAMAGED = "the file is damaged or was written by a faulty exporter: export it again"
# Attributes whose integers are no extents, axes or counts: values, and the ends of slices ("to the last": 2^63 - 1).
_ANY_NUMBER = frozenset(
    {("Slice", "starts"), ("Slice", "ends"), ("Shape", "start"), ("Shape", "end"), ("Constant", "value_int"),
     ("Constant", "value_ints")}
)  # fmt: skip
_FunctionKey = tuple[str, str]


def check_limits(model: onnx.ModelProto, limits: ImportLimits) -> None:
    """The whole model, its functions and nested graphs included.

    Raises ModelError naming the limit, what passed it, and how to raise it.
    """
    _check_count("functions", model.functions, "values", limits)
    for function in model.functions:
        _check_count(f"nodes of function '{function.name[:80]}'", function.node, "nodes", limits)
        _check_nodes(function.node, limits)
    _check_graph(model.graph, limits)
    _check_expansion(model, limits)


def check_node_count(nodes: Sized, limits: ImportLimits) -> None:
    """Raises ModelError where expansion has made too many nodes."""
    _check_count("nodes", nodes, "nodes", limits)


def check_extents(shape: Sequence[int], what: str, limits: ImportLimits) -> None:
    """A shape that a tensor may have; ``what`` names the tensor, in an error. Raises ModelError."""
    shown = tuple(shape[:8]) if len(shape) <= 8 else f"{len(shape)} dimensions"
    if len(shape) > limits.rank:
        raise beyond(f"{what} has {len(shape)} dimensions", "rank", len(shape), limits)
    if any(extent < 0 for extent in shape):
        raise ModelError(f"{what} has the shape {shown}, which is negative", _DAMAGED)
    # Extents beside a 0 count as well: they are numbers of loops and of bytes somewhere.
    elements = prod(max(extent, 1) for extent in shape)
    if elements > limits.tensor_elements:
        raise beyond(f"{what} has the shape {shown}, {elements} elements", "tensor_elements", elements, limits)


def _check_count(what: str, items: Sized, name: str, limits: ImportLimits) -> None:
    _check_size("the model", what, items, name, limits)


def _check_size(whose: str, what: str, items: Sized, name: str, limits: ImportLimits) -> None:
    if len(items) > getattr(limits, name):
        raise beyond(f"{whose} has {len(items)} {what}", name, len(items), limits)


def _check_graph(graph: onnx.GraphProto, limits: ImportLimits) -> None:
    """``graph`` and what is inside it, level by level."""
    level, total = [graph], 0
    for _ in range(limits.depth):
        for body in level:
            total += len(body.node)
            _check_count("nodes", range(total), "nodes", limits)
            _check_body(body, limits)
        level = [inner for body in level for node in body.node for inner in nested_graphs(node)]
        if not level:
            return
    raise _too_deep(limits)


def _too_deep(limits: ImportLimits) -> ModelError:
    return beyond(
        f"the model has graphs more than {limits.depth} deep inside graphs", "depth", 2 * limits.depth, limits
    )


def _check_body(body: onnx.GraphProto, limits: ImportLimits) -> None:
    for what, items in (("inputs", body.input), ("outputs", body.output), ("initializers", body.initializer)):
        _check_count(what, items, "values", limits)
    for value in body.input:
        _check_text(value.name, "an input's name", limits)
        _check_declared(value.type, f"input '{value.name}'", limits)
    for tensor in body.initializer:
        _check_text(tensor.name, "a constant's name", limits)
        check_extents(tensor.dims, f"constant '{tensor.name}'", limits)
    _check_nodes(body.node, limits)


def _check_declared(kind: onnx.TypeProto, what: str, limits: ImportLimits) -> None:
    """The declared extents of an input; what is open counts as 1."""
    if kind.HasField("tensor_type"):
        dims = kind.tensor_type.shape.dim
        check_extents([dim.dim_value if dim.HasField("dim_value") else 1 for dim in dims], what, limits)
        for dim in dims:
            _check_text(dim.dim_param, f"a dimension of {what}", limits)


def _check_nodes(nodes: Iterable[onnx.NodeProto], limits: ImportLimits) -> None:
    for node in nodes:
        if len(node.name) > limits.text_bytes:
            raise _too_long("a node's name", limits)
        for what, items, name in (
            ("inputs", node.input, "operands"),
            ("outputs", node.output, "results"),
            ("attributes", node.attribute, "operands"),
        ):
            _check_size(describe_node(node), what, items, name, limits)
        for item in node.attribute:
            _check_attribute(node, item, limits)


def _check_attribute(node: onnx.NodeProto, item: onnx.AttributeProto, limits: ImportLimits) -> None:
    if item.HasField("t"):
        check_extents(item.t.dims, f"attribute '{item.name}' of {describe_node(node)}", limits)
    if node.op_type == "Constant":
        return
    count = max(len(item.ints), len(item.floats), len(item.strings))
    if count > limits.operands:
        problem = f"{describe_node(node)} has an attribute '{item.name[:80]}' of more than {limits.operands} values"
        raise ModelError(problem, raise_limit("operands", count))
    far = next((number for number in (item.i, *item.ints) if abs(number) >= limits.tensor_elements), None)
    if far is not None and (node.op_type, item.name) not in _ANY_NUMBER:
        problem = f"{describe_node(node)} has the number {far} in its attribute '{item.name}'"
        raise beyond(problem, "tensor_elements", abs(far), limits)
    for text in (item.s, *item.strings):
        _check_string(node, item.name, text, limits)


def _check_string(node: onnx.NodeProto, name: str, text: bytes, limits: ImportLimits) -> None:
    """ONNX's inference never comes back from an equation of Einsum that is no text."""
    if len(text) > limits.text_bytes:
        raise _too_long(f"attribute '{name[:80]}' of {describe_node(node)}", limits)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"attribute '{name}' of {describe_node(node)} is not UTF-8", _DAMAGED) from error


def _check_text(text: str, what: str, limits: ImportLimits) -> None:
    if len(text) > limits.text_bytes:
        raise _too_long(what, limits)


def _too_long(what: str, limits: ImportLimits) -> ModelError:
    return ModelError(
        f"{what} is longer than {limits.text_bytes} bytes", raise_limit("text_bytes", 16 * limits.text_bytes)
    )


# --- functions --------------------------------------------------------------------------------------------------------
def _check_expansion(model: onnx.ModelProto, limits: ImportLimits) -> None:
    """Functions end, and all calls written out are few enough: f calls g twice, which calls h twice, ...: 2^n nodes."""
    bodies: dict[_FunctionKey, Sequence[onnx.NodeProto]] = {}
    for function in model.functions:
        bodies.setdefault((function.domain, function.name), function.node)
    sizes: dict[_FunctionKey, int] = {}
    for key in bodies:
        _measure(key, bodies, sizes, (), limits)
    total = _expanded(_flat(model.graph.node, limits), bodies, sizes)
    if total > limits.nodes:
        raise beyond(f"the model has {total} nodes with its functions expanded", "nodes", total, limits)


def _measure(
    key: _FunctionKey,
    bodies: Mapping[_FunctionKey, Sequence[onnx.NodeProto]],
    sizes: dict[_FunctionKey, int],
    path: tuple[_FunctionKey, ...],
    limits: ImportLimits,
) -> None:
    """Puts into ``sizes`` how many nodes a call of function ``key`` stands for; ``path``: who calls it."""
    if key in sizes:
        return
    if key in path:
        names = " -> ".join(f"'{name}'" for _, name in (*path[path.index(key) :], key))
        raise ModelError(f"functions of the model call each other in a circle: {names}", "write the recursion out")
    if len(path) >= limits.depth:
        problem = f"functions of the model call each other {len(path)} deep, '{key[1]}' among them"
        raise beyond(problem, "depth", 2 * len(path), limits)
    nodes = list(_flat(bodies[key], limits))
    for node in nodes:
        callee = (node.domain, node.op_type)
        if callee in bodies:
            _measure(callee, bodies, sizes, (*path, key), limits)
    sizes[key] = _expanded(nodes, bodies, sizes)


def _expanded(
    nodes: Iterable[onnx.NodeProto],
    bodies: Mapping[_FunctionKey, Sequence[onnx.NodeProto]],
    sizes: Mapping[_FunctionKey, int],
) -> int:
    return sum(sizes[node.domain, node.op_type] if (node.domain, node.op_type) in bodies else 1 for node in nodes)


def _flat(nodes: Iterable[onnx.NodeProto], limits: ImportLimits) -> Iterator[onnx.NodeProto]:
    """``nodes`` and those inside them, as deep as is allowed."""
    level: list[onnx.NodeProto] = list(nodes)
    for _ in range(limits.depth + 1):
        yield from level
        level = [inner for node in level for body in nested_graphs(node) for inner in body.node]
        if not level:
            return
    raise _too_deep(limits)


# Operands that say extents, axes or counts.
_SIZE_OPERANDS: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1, 2),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
# Of these, the operators whose numbers may be negative: axes, diagonals, an extent to be found, what is cut off.
_MAY_BE_NEGATIVE = frozenset({"CumProd", "CumSum", "DFT", "Pad", "Reshape", "Resize", "Squeeze", "Trilu", "Unsqueeze"})


def check_operands(node: onnx.NodeProto, known: Mapping[str, Array], limits: ImportLimits) -> None:
    """The operands of ``node`` that say how large its result is, where they are known.

    Raises ModelError for a number that is negative or beyond the largest extent, a range of too many steps.
    """
    if node.domain not in STANDARD_DOMAINS:
        return
    for index in _SIZE_OPERANDS.get(node.op_type, ()):
        if index < len(node.input) and node.input[index] in known:
            _check_numbers(node, known[node.input[index]], limits)
    if node.op_type == "Range" and all(name in known for name in node.input):
        _check_range(node, [known[name] for name in node.input], limits)


def _check_numbers(node: onnx.NodeProto, value: Array, limits: ImportLimits) -> None:
    if value.dtype.kind not in "iuf" or value.size > limits.operands:
        return
    for number in value.reshape(-1).tolist():
        if number < 0 and node.op_type not in _MAY_BE_NEGATIVE:
            raise ModelError(f"{describe_node(node)} is given the extent or count {number}", "export a positive one")
        if not -limits.tensor_elements < number < limits.tensor_elements:  # NaN is not either
            raise ModelError(
                f"{describe_node(node)} is given the extent or count {number} (limit {limits.tensor_elements})",
                raise_limit("tensor_elements", abs(number)) if isinstance(number, int) else "export the model again",
            )


def _check_range(node: onnx.NodeProto, bounds: list[Array], limits: ImportLimits) -> None:
    start, stop, step = (value.reshape(-1).tolist()[0] if value.size else 0 for value in bounds)
    finite = all(isinstance(number, int) or isfinite(number) for number in (start, stop, step))
    if not finite or step == 0:
        raise ModelError(f"{describe_node(node)} counts from {start} to {stop} by {step}", "export a range that ends")
    count = (stop - start) / step
    if count > limits.constant_elements:
        raise beyond(f"{describe_node(node)} makes {count:.0f} numbers", "constant_elements", int(count) + 1, limits)


def check_results(node: onnx.NodeProto, types: Mapping[str, onnx.TypeProto], limits: ImportLimits) -> None:
    """The shapes of what ``node`` makes, as far as they are known. Raises ModelError."""
    for name in node.output:
        kind = types.get(name)
        if kind is not None and kind.HasField("tensor_type"):
            dims = kind.tensor_type.shape.dim
            shape = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in dims]
            if min(shape, default=0) < 0:
                raise ModelError(
                    f"{describe_node(node)} would make '{name}' of shape {tuple(shape[:8])}: a window, scale, pad or "
                    "slice is larger than what it is applied to",
                    "compare the node with the definition of its operator",
                )
            check_extents(shape, f"the result '{name}' of {describe_node(node)}", limits)
