"""Changes to the nodes of a sound model as damage or malice would make them, in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import onnx
from onnx import AttributeProto, helper

Mutation: TypeAlias = Callable[[onnx.ModelProto, random.Random], None]

_POWERS = (65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1)
INTEGERS = (-(2**63), -(2**31), -1000, -2, -1, 0, 1, 2, 3, 7, 1000, *_POWERS)
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-30, 1e30, 2.0**31, 1e9)
TEXTS = (b"", b"VALID", b"SAME_LOWER", b"garbage", b"nearest", b"\xff\xfe", b"a" * 5000)
_OPERATORS = tuple(sorted({schema.name for schema in onnx.defs.get_all_schemas()}))


def bodies(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for item in node.attribute:
            if item.HasField("g"):
                yield from bodies(item.g)


def nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    inside = [node for graph in bodies(model.graph) for node in graph.node]
    return [*inside, *(node for function in model.functions for node in function.node)]


def tensor_names(model: onnx.ModelProto) -> list[str]:
    names = [value.name for value in (*model.graph.input, *model.graph.initializer, *model.graph.output)]
    return [*names, *(name for node in nodes(model) for name in node.output)]


def some_node(model: onnx.ModelProto, draw: random.Random) -> onnx.NodeProto:
    found = nodes(model)
    return draw.choice(found) if found else model.graph.node.add(op_type="Relu")


def position(values: Sequence[object], draw: random.Random) -> int:
    return draw.randrange(len(values)) if values else 0


def drop_input(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    if node.input:
        node.input.pop(position(node.input, draw))


def cut_inputs(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    del node.input[position(node.input, draw) :]


def empty_input(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    if node.input:
        node.input[position(node.input, draw)] = ""


def add_inputs(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    node.input.extend(draw.choices(tensor_names(model), k=draw.choice((1, 2, 5, 40))))


def swap_inputs(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    names = list(node.input)
    draw.shuffle(names)
    node.input[:] = names


def other_input(model: onnx.ModelProto, draw: random.Random) -> None:
    """Any tensor in place of an input: another type or rank, often a cycle."""
    node = some_node(model, draw)
    if node.input:
        node.input[position(node.input, draw)] = draw.choice([*tensor_names(model), "nobody", "x" * 3000])


def drop_output(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    if node.output:
        node.output.pop(position(node.output, draw))


def other_output(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    if node.output:
        node.output[position(node.output, draw)] = draw.choice([*tensor_names(model), "", "fresh"])


def add_outputs(model: onnx.ModelProto, draw: random.Random) -> None:
    node = some_node(model, draw)
    node.output.extend(f"more{number}" for number in range(draw.choice((1, 2, 9))))


def _with_attributes(model: onnx.ModelProto, draw: random.Random) -> AttributeProto:
    """An attribute of any node; where none has one, a new one whose name some operator knows."""
    found: list[AttributeProto] = [item for node in nodes(model) for item in node.attribute]
    if not found:
        some_node(model, draw).attribute.append(helper.make_attribute("axis", 0))
        return _with_attributes(model, draw)
    return draw.choice(found)


def other_number(model: onnx.ModelProto, draw: random.Random) -> None:
    """One number of an attribute becomes a hostile one."""
    item = _with_attributes(model, draw)
    if item.type == AttributeProto.INT:
        item.i = draw.choice(INTEGERS)
    elif item.type == AttributeProto.INTS and item.ints:
        item.ints[position(item.ints, draw)] = draw.choice(INTEGERS)
    elif item.type == AttributeProto.FLOAT:
        item.f = draw.choice(FLOATS)
    elif item.type == AttributeProto.STRING:
        item.s = draw.choice(TEXTS)


def other_length(model: onnx.ModelProto, draw: random.Random) -> None:
    item = _with_attributes(model, draw)
    if item.type == AttributeProto.INTS:
        values = list(item.ints) or [1]
        del item.ints[:]
        item.ints.extend((values * 20)[: draw.choice((0, 1, 3, len(values) + 1, 20))])


def other_attribute_type(model: onnx.ModelProto, draw: random.Random) -> None:
    item = _with_attributes(model, draw)
    name = item.name
    value = draw.choice((3, 1.5, "text", [1, 2], [0.5], ["a", "b"], helper.make_tensor("t", 1, [1], [2.0])))
    item.CopyFrom(helper.make_attribute(name, value))


def untrue_attribute_type(model: onnx.ModelProto, draw: random.Random) -> None:
    """The type field alone says something else."""
    _with_attributes(model, draw).type = draw.choice(AttributeProto.AttributeType.values())


def drop_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    found = [node for node in nodes(model) if node.attribute]
    if found:
        node = draw.choice(found)
        node.attribute.pop(position(node.attribute, draw))


def repeat_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    item = _with_attributes(model, draw)
    some_node(model, draw).attribute.append(item)


def known_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    """An attribute that the operator has and the node left out, with a hostile value."""
    node = some_node(model, draw)
    if not onnx.defs.has(node.op_type):
        return
    for name, described in sorted(onnx.defs.get_schema(node.op_type).attributes.items()):
        kind = str(described.type).rsplit(".", 1)[-1]
        if name not in {item.name for item in node.attribute} and kind in ("INT", "INTS", "FLOAT", "STRING"):
            values = {
                "INT": draw.choice(INTEGERS),
                "INTS": draw.choices(INTEGERS, k=draw.choice((1, 2, 4))),
                "FLOAT": draw.choice(FLOATS),
                "STRING": draw.choice(TEXTS),
            }
            node.attribute.append(helper.make_attribute(name, values[kind]))
            return


def other_operator(model: onnx.ModelProto, draw: random.Random) -> None:
    some_node(model, draw).op_type = draw.choice((*_OPERATORS, "NoSuchOperator", ""))


def other_domain(model: onnx.ModelProto, draw: random.Random) -> None:
    some_node(model, draw).domain = draw.choice(("com.microsoft", "ai.onnx.ml", "org.example", "local", "ai.onnx"))


def delete_node(model: onnx.ModelProto, draw: random.Random) -> None:
    body = draw.choice(list(bodies(model.graph)))
    if body.node:
        body.node.pop(position(body.node, draw))


def repeat_node(model: onnx.ModelProto, draw: random.Random) -> None:
    """The same outputs twice."""
    body = draw.choice(list(bodies(model.graph)))
    if body.node:
        body.node.append(draw.choice(body.node))


def shuffle_nodes(model: onnx.ModelProto, draw: random.Random) -> None:
    kept = list(model.graph.node)
    draw.shuffle(kept)
    del model.graph.node[:]
    model.graph.node.extend(kept)


NODE_MUTATIONS: tuple[Mutation, ...] = (
    drop_input, cut_inputs, empty_input, add_inputs, swap_inputs, other_input, drop_output, other_output, add_outputs,
    other_number, other_number, other_number, other_length, other_attribute_type, untrue_attribute_type, drop_attribute,
    repeat_attribute, known_attribute, known_attribute, other_operator, other_domain, delete_node, repeat_node,
    shuffle_nodes,
)  # fmt: skip
