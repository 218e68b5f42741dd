"""A model in pieces, by turns: what is compiled, and what the import refuses and ONNX Runtime runs beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import onnx

from tvm_ext.errors import InputError, ModelError
from tvm_ext.frontend import from_onnx
from tvm_ext.relay_passes.onnx.bind_inputs import declared_dims
from tvm_ext.relay_passes.onnx.check import sort_nodes
from tvm_ext.relay_passes.onnx.clean import drop_dead_nodes
from tvm_ext.relay_passes.onnx.control_flow import OPERATORS
from tvm_ext.relay_passes.onnx.fold_constants import fold_constants
from tvm_ext.relay_passes.onnx.graph import OnnxGraph, all_nodes, attribute, is_standard, model_from_graph, read_names
from tvm_ext.relay_passes.onnx.import_model import checked_graph, expanded
from tvm_ext.relay_passes.onnx.infer import infer_types


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a model as a model of its own, whose inputs declare element types and leave shapes open.

    ``refused`` are the operators for which it is not compiled; empty where it is.
    """

    model: onnx.ModelProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    refused: tuple[str, ...] = ()


def partition(model: onnx.ModelProto) -> list[Piece]:
    """``model`` in pieces, in the order in which they run; the whole model where nothing, or no part, is refused.

    A piece holds all operators with as many changes between compiled and refused before them. Raises ModelError where
    the model is damaged, or a tensor that passes from piece to piece has no known element type.
    """
    graph, unsupported = expanded(checked_graph(model), model)
    graph = sort_nodes(drop_dead_nodes(fold_constants(graph)))
    names = {name for node in unsupported for name in node.output if name}
    refused = _with_tied(graph.nodes, [_is_refused(node, names, graph) for node in graph.nodes], other_ends(model))
    if not any(refused):
        return [whole(model)]
    return _pieces(graph, _turns(graph.nodes, refused), model)


def importable_with_loops(model: onnx.ModelProto) -> bool:
    """Whether ``model`` has control flow, and is imported whole with it: all shapes are known, all ends tensors."""
    if other_ends(model) or not any(is_standard(node, *OPERATORS) for node in model.graph.node):
        return False
    constants = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        dims = None if value.name in constants else declared_dims(value)
        if value.name not in constants and (dims is None or not all(isinstance(size, int) for size in dims)):
            return False
    try:
        from_onnx(model)
    except (ModelError, InputError):
        return False
    return True


def claimable(model: onnx.ModelProto, others: Set[str] = frozenset()) -> list[list[int]]:
    """Groups of places in ``model.graph.node`` that the import takes, each without a node between that it refuses.

    A node is refused for each operator that its definition needs and the import lacks, and for strings and other
    inputs and outputs of the model, named in ``others``, that are no tensors of numbers; sequences are not handed to a
    refused node. Raises ModelError where the model is damaged.
    """
    nodes = list(model.graph.node)
    own = {name: place for place, node in enumerate(nodes) for name in node.output if name}
    graph, unsupported = expanded(checked_graph(model), model)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        for name in read_names(node):
            readers.setdefault(name, []).append(node)
    reached = [name for node in unsupported for name in node.output if name]
    refused = [
        _is_refused(node, set(reached), graph)
        or (is_standard(node, "Cast") and attribute(node, "to", 0) == onnx.TensorProto.STRING)
        for node in nodes
    ]
    while reached:  # from inside a definition on to the node of the model that it defines
        name = reached.pop()
        if name in own:
            refused[own[name]] = True
        else:
            reached += [output for node in readers.pop(name, ()) for output in node.output if output]
    in_order = sort_nodes(replace(graph, nodes=tuple(nodes))).nodes
    places = {id(node): place for place, node in enumerate(nodes)}
    turns = _turns(in_order, _with_tied(in_order, [refused[places[id(node)]] for node in in_order], others))
    groups: dict[int, list[int]] = {}
    for node, turn in zip(in_order, turns, strict=True):
        if turn % 2 == 0:
            groups.setdefault(turn, []).append(places[id(node)])
    return [group for group in groups.values() if any(_computes(nodes[place]) for place in group)]


def _computes(node: onnx.NodeProto) -> bool:
    return not is_standard(node, "Constant", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Shape")


def other_ends(model: onnx.ModelProto) -> set[str]:
    """The names of inputs and outputs that are sequences, optional values or maps."""
    ends = (*model.graph.input, *model.graph.output)
    return {value.name for value in ends if value.type.WhichOneof("value") != "tensor_type"}


def whole(model: onnx.ModelProto) -> Piece:
    """``model`` as one piece, to be compiled."""
    body = model.graph
    constants = {tensor.name for tensor in body.initializer}
    inputs = tuple(value.name for value in body.input if value.name not in constants)
    return Piece(model=model, inputs=inputs, outputs=tuple(value.name for value in body.output))


def _is_refused(node: onnx.NodeProto, unsupported: Set[str], graph: OnnxGraph) -> bool:
    """Whether the import refuses ``node`` or something in its bodies. Control flow is, since it is compiled for known
    shapes alone; but for an If whose condition is constant.
    """
    if any(not unsupported.isdisjoint(inner.output) for inner in all_nodes([node])):
        return True
    return is_standard(node, *OPERATORS) and not (node.op_type == "If" and node.input[0] in graph.constants)


_MAKING = (
    "Optional",
    *(f"Sequence{name}" for name in ("Construct", "Empty", "Erase", "Insert", "Map")),
    "SplitToSequence",
)
_PASSING = ("Identity", "OptionalGetElement", *OPERATORS)


def _with_tied(nodes: Sequence[onnx.NodeProto], refused: Iterable[bool], ends: Set[str]) -> list[bool]:
    """``refused``, and whether a sequence, or another value of ``ends``, ties a node of the sorted ``nodes`` to these.

    A compiled piece takes and gives tensors alone. All that a node gives which makes or passes sequences counts as one.
    """
    others = set(ends)
    for node in nodes:
        makes = any(is_standard(inner, *_MAKING) for inner in all_nodes([node]))
        if makes or (is_standard(node, *_PASSING) and not others.isdisjoint(read_names(node))):
            others.update(node.output)
    touched = [others & (read_names(node) | {*node.output}) for node in nodes]
    tied, reached, before = list(refused), set(ends), -1
    while len(reached) > before:
        before = len(reached)
        tied = [own or not reached.isdisjoint(names) for own, names in zip(tied, touched, strict=True)]
        reached.update(*(names for own, names in zip(tied, touched, strict=True) if own))
    return tied


def _turns(nodes: Iterable[onnx.NodeProto], refused: Iterable[bool]) -> list[int]:
    """For each node how often compiled (even) and refused (odd) operators change on the way to it, at most."""
    turn_of: dict[str, int] = {}
    turns = []
    for node, is_refused in zip(nodes, refused, strict=True):
        before = [turn_of[name] for name in read_names(node) if name in turn_of]
        turn = max((turn + (turn % 2 != is_refused) for turn in before), default=int(is_refused))
        turns.append(turn)
        turn_of.update(dict.fromkeys(node.output, turn))
    return turns


def _pieces(graph: OnnxGraph, turns: list[int], model: onnx.ModelProto) -> list[Piece]:
    types = infer_types(graph)
    pieces = []
    for turn in sorted(set(turns)):
        nodes = [node for node, own in zip(graph.nodes, turns, strict=True) if own == turn]
        made = {name for node in nodes for name in node.output if name}
        read = set().union(*map(read_names, nodes))
        later = set(graph.output_names).union(
            *(read_names(node) for node, own in zip(graph.nodes, turns, strict=True) if own > turn)
        )
        inputs = sorted(read - made - graph.constants.keys())
        outputs = sorted(made & later)
        part = replace(
            graph,
            nodes=tuple(nodes),
            inputs=tuple(_declared(name, types) for name in inputs),
            outputs=tuple(_declared(name, types) for name in outputs),
            constants={name: value for name, value in graph.constants.items() if name in read},
        )
        proto = model_from_graph(part, lambda _name: True)
        proto.ir_version = model.ir_version
        operators = tuple(dict.fromkeys(node.op_type for node in nodes)) if turn % 2 else ()
        pieces.append(Piece(model=proto, inputs=tuple(inputs), outputs=tuple(outputs), refused=operators))
    return pieces


def _declared(name: str, types: Mapping[str, onnx.TypeProto]) -> onnx.ValueInfoProto:
    """The declaration of tensor ``name`` of any shape."""
    kind = types.get(name)
    if kind is None or kind.WhichOneof("value") is None:
        raise ModelError(
            f"the element type of tensor '{name}' is not known, at which the model would be cut",
            "run the whole model in ONNX Runtime, or declare the tensor in the model's value_info",
        )
    open_type = onnx.TypeProto()
    open_type.CopyFrom(kind)
    if open_type.HasField("tensor_type"):
        for dim in open_type.tensor_type.shape.dim:
            dim.Clear()
    return onnx.helper.make_value_info(name, open_type)
