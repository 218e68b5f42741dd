"""An ONNX graph whose constants are NumPy arrays: the record that every import step takes and returns.

A `ModelProto` cannot hold more than 2 GiB, and each copy of one copies all its weights. Here the weights leave the
protobuf once; a step then shares what it does not change, and no step mutates what it was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

from .import_limits import ImportLimits

_Message = TypeVar("_Message", onnx.ModelProto, onnx.NodeProto, onnx.TensorProto, onnx.ValueInfoProto)

# The ONNX domain of the standard operators has two spellings.
STANDARD_DOMAINS = ("", "ai.onnx")
# What a constant may hold at most to take part in shape inference and value propagation.
_INFERENCE_ELEMENTS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class OnnxGraph:
    """One ONNX main graph.

    * ``nodes``: in topological order once `sort_nodes` has run. Nodes are shared between graphs: replace, never edit.
    * ``inputs``: what the caller gives at run time; constants are never among them.
    * ``outputs``: in the model's order; only names and element types, since binding an input makes declared shapes
      stale.
    * ``constants``: name to value: initializers and everything folded since.
    * ``opsets``: domain to operator set version.
    * ``limits``: how large what the import makes of it may become.
    """

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[onnx.ValueInfoProto, ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    constants: Mapping[str, Array]
    opsets: Mapping[str, int]
    limits: ImportLimits = field(default_factory=ImportLimits)

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(value.name for value in self.outputs)

    @property
    def opset(self) -> int:
        """Version of the standard operator set (1 where the model imports none)."""
        return next((self.opsets[domain] for domain in STANDARD_DOMAINS if domain in self.opsets), 1)

    def with_nodes(
        self, nodes: Iterable[onnx.NodeProto], new_constants: Mapping[str, Array] | None = None
    ) -> OnnxGraph:
        """This graph with other nodes and some constants more."""
        return replace(self, nodes=tuple(nodes), constants={**self.constants, **(new_constants or {})})


@dataclass(slots=True)
class GraphEdit:
    """A graph under rewriting, node by node: nodes so far, who makes what, constants made."""

    graph: OnnxGraph
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    producer: dict[str, int] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    taken: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = defined_names(self.graph)

    def value(self, name: str) -> Array | None:
        return self.constants.get(name, self.graph.constants.get(name))

    def append(self, node: onnx.NodeProto) -> None:
        self.producer.update(dict.fromkeys(filter(None, node.output), len(self.nodes)))
        self.nodes.append(node)

    def replace(self, index: int, node: onnx.NodeProto) -> None:
        self.nodes[index] = node
        self.producer[node.output[0]] = index

    def name(self, stem: str) -> str:
        return fresh_name(stem, self.taken)

    def constant(self, stem: str, value: Array) -> str:
        name = self.name(stem)
        self.constants[name] = value
        return name

    def result(self) -> OnnxGraph:
        return self.graph.with_nodes(self.nodes, self.constants)


def is_standard(node: onnx.NodeProto, *operators: str) -> bool:
    """Whether ``node`` is one of ``operators`` of ONNX's own domain."""
    return node.op_type in operators and node.domain in STANDARD_DOMAINS


def with_operands(
    node: onnx.NodeProto, inputs: Iterable[str], outputs: Iterable[str] | None = None, operator: str = ""
) -> onnx.NodeProto:
    """``node``, its name and attributes as they are, with other operands."""
    changed = helper.make_node(operator or node.op_type, [*inputs], [*(outputs or node.output)], node.name)
    changed.domain = node.domain
    changed.attribute.extend(node.attribute)
    return changed


def describe_node(node: onnx.NodeProto) -> str:
    """`Conv node 'conv1'`; an unnamed node is named by its first output."""
    named = f"'{node.name}'" if node.name else f"producing '{next(iter(node.output), '')}'"
    return f"{node.op_type} node {named}"


def nested_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The bodies that `node` carries as attributes (If, Loop, Scan)."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """`nodes` and every node of their nested graphs."""
    for node in nodes:
        yield node
        for body in nested_graphs(node):
            yield from all_nodes(body.node)


def read_names(node: onnx.NodeProto) -> set[str]:
    """The tensors that `node` reads from its own scope, those captured by nested graphs included."""
    names = {name for name in node.input if name}
    for body in nested_graphs(node):
        names |= captured_names(body)
    return names


def captured_names(body: onnx.GraphProto) -> set[str]:
    read = set().union(*(read_names(node) for node in body.node), (value.name for value in body.output))
    defined = {name for node in body.node for name in node.output}
    defined |= {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    return read - defined


def count_uses(graph: OnnxGraph) -> Counter[str]:
    """How many readers each tensor has; being a graph output counts as one."""
    uses = Counter(graph.output_names)
    for node in graph.nodes:
        uses.update([name for name in node.input if name])
        for body in nested_graphs(node):
            uses.update(captured_names(body))
    return uses


def defined_names(graph: OnnxGraph) -> set[str]:
    """Every tensor name in use, nested graphs included."""
    names = {*graph.input_names, *graph.constants}
    for node in all_nodes(graph.nodes):
        names.update((*node.input, *node.output))
        for body in nested_graphs(node):
            names.update(value.name for value in (*body.input, *body.output))
            names.update(tensor.name for tensor in body.initializer)
    return names


def fresh_name(stem: str, taken: set[str]) -> str:
    """`stem`, or `stem_1`, `stem_2`, ... : the first that is not taken. It is taken afterwards."""
    name, count = stem, 0
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    taken.add(name)
    return name


def rename_tensors(graph: OnnxGraph, new_names: Mapping[str, str]) -> OnnxGraph:
    """`graph` with tensors renamed everywhere but in its outputs' names."""
    return replace(
        graph,
        nodes=tuple(_rename_in_node(node, new_names) for node in graph.nodes),
        inputs=tuple(_rename_value(value, new_names) for value in graph.inputs),
        constants={new_names.get(name, name): value for name, value in graph.constants.items()},
    )


def _rename_value(value: onnx.ValueInfoProto, new_names: Mapping[str, str]) -> onnx.ValueInfoProto:
    if value.name not in new_names:
        return value
    renamed = copied(value)
    renamed.name = new_names[value.name]
    return renamed


def _rename_in_node(node: onnx.NodeProto, new_names: Mapping[str, str]) -> onnx.NodeProto:
    if not read_names(node).intersection(new_names):
        return node
    renamed = copied(node)
    _rename_inputs(renamed, new_names)
    return renamed


def _rename_inputs(node: onnx.NodeProto, new_names: Mapping[str, str]) -> None:
    """Renames in place, in a copy that this module made. ONNX forbids a nested name that shadows an outer one."""
    node.input[:] = [new_names.get(name, name) for name in node.input]
    for body in nested_graphs(node):
        for inner in body.node:
            _rename_inputs(inner, new_names)
        for output in body.output:
            output.name = new_names.get(output.name, output.name)


def graph_from_model(model: onnx.ModelProto, limits: ImportLimits | None = None) -> OnnxGraph:
    """Takes the constants out of `model`; initializers which an old file (IR < 4) also lists as inputs are no inputs.

    Raises ModelError where a tensor's bytes do not fit its shape and type, a name is defined twice, or an initializer
    is sparse.
    """
    body = model.graph
    if body.sparse_initializer:
        name = body.sparse_initializer[0].values.name
        raise ModelError(f"initializer '{name}' is sparse, which is not supported", "export dense weights")
    constants: dict[str, Array] = {}
    for tensor in body.initializer:
        if tensor.name in constants:
            raise ModelError(f"initializer '{tensor.name}' is defined twice", "export the model again")
        constants[tensor.name] = array_from_tensor(tensor)
    return OnnxGraph(
        nodes=tuple(copied(node) for node in body.node),
        inputs=tuple(copied(value) for value in body.input if value.name not in constants),
        outputs=tuple(_without_shape(value) for value in body.output),
        constants=constants,
        opsets={opset.domain: opset.version for opset in model.opset_import},
        limits=limits or ImportLimits(),
    )


def array_from_tensor(tensor: onnx.TensorProto) -> Array:
    """The value of `tensor`.

    Raises ModelError where its data do not fit its shape and element type.
    """
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError) as error:
        shape = tuple(tensor.dims)
        raise ModelError(
            f"constant '{tensor.name}' of shape {shape} and element type {tensor.data_type} cannot be read: {error}",
            "the file is damaged or was written by a faulty exporter: export it again",
        ) from error


def copied(message: _Message) -> _Message:
    """A message of its own: a part of another one keeps all of that in memory, a model's weights too."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _without_shape(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    if not value.type.HasField("tensor_type"):
        return copied(value)
    return helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, None)


def typed_value(name: str, value: Array) -> onnx.ValueInfoProto:
    """The declaration of a graph input that holds `value`."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def model_from_graph(graph: OnnxGraph, is_initializer: Callable[[str], bool]) -> onnx.ModelProto:
    """A model in which the constants that `is_initializer` names are initializers and the others trailing inputs.

    With big constants as inputs the model stays small, whatever the weights weigh.
    """
    inlined = {name: value for name, value in graph.constants.items() if is_initializer(name)}
    passed = [typed_value(name, value) for name, value in graph.constants.items() if name not in inlined]
    body = helper.make_graph(
        graph.nodes,
        "main",
        [*graph.inputs, *passed],
        graph.outputs,
        [numpy_helper.from_array(value, name) for name, value in inlined.items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in graph.opsets.items()]
    return helper.make_model(body, opset_imports=opsets)


def small_model(graph: OnnxGraph) -> onnx.ModelProto:
    """`graph` as a model that carries only constants of at most 1024 elements: enough for checks and inference."""
    return model_from_graph(graph, lambda name: graph.constants[name].size <= _INFERENCE_ELEMENTS)


def with_some_shape(model: onnx.ModelProto, *, also_inputs: bool) -> onnx.ModelProto:
    """A copy of `model` whose outputs of open rank declare rank 0: ONNX's checker compares no shapes, but wants one."""
    declared = copied(model)
    for value in (*declared.graph.output, *(declared.graph.input if also_inputs else ())):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()
    return declared


def static_shape(kind: onnx.TypeProto | None) -> tuple[int, ...] | None:
    """The shape of a tensor type, or None where its rank or a dimension is not known."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    if any(dim.WhichOneof("value") != "dim_value" for dim in dims):
        return None
    return tuple(int(dim.dim_value) for dim in dims)


def is_empty(kind: onnx.TypeProto | None) -> bool:
    """Whether a tensor type is known to have no elements."""
    return kind is not None and kind.tensor_type.elem_type != 0 and 0 in (static_shape(kind) or ())


def rank_of(kind: onnx.TypeProto | None) -> int | None:
    """The rank of a tensor type, or None where it is not known."""
    if kind is None or not kind.tensor_type.HasField("shape"):
        return None
    return len(kind.tensor_type.shape.dim)


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """The value of an attribute of `node`, or `default`."""
    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)
