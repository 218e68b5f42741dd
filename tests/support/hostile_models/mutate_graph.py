"""Changes to what surrounds the nodes of a model: constants, inputs, outputs, versions, functions, its bytes."""

from __future__ import annotations

import random

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .mutate import INTEGERS, Mutation, nodes, position, tensor_names


def other_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    """An integer of a constant, which says a shape, an axis or a count, becomes a hostile one."""
    tensors = [item for item in model.graph.initializer if item.data_type == TensorProto.INT64]
    if not tensors:
        return
    tensor = draw.choice(tensors)
    value = numpy_helper.to_array(tensor).copy()
    if value.size:
        value.reshape(-1)[draw.randrange(value.size)] = draw.choice(INTEGERS)
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def other_constant_shape(model: onnx.ModelProto, draw: random.Random) -> None:
    """Extents that do not fit the data."""
    if model.graph.initializer:
        tensor = draw.choice(model.graph.initializer)
        del tensor.dims[draw.randrange(4) :]
        tensor.dims.extend(draw.choices(INTEGERS, k=draw.randrange(3)))


def resized_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    """A constant of another shape that is whole in itself."""
    if model.graph.initializer:
        tensor = draw.choice(model.graph.initializer)
        shape = draw.choices((0, 1, 2, 3, 8), k=draw.randrange(5))
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type or TensorProto.FLOAT)
        tensor.CopyFrom(numpy_helper.from_array(np.ones(shape, dtype), tensor.name))


def other_constant_type(model: onnx.ModelProto, draw: random.Random) -> None:
    if model.graph.initializer:
        draw.choice(model.graph.initializer).data_type = draw.choice((*TensorProto.DataType.values(), 99, -1))


def cut_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    if model.graph.initializer:
        tensor = draw.choice(model.graph.initializer)
        tensor.raw_data = tensor.raw_data[: draw.randrange(len(tensor.raw_data) + 1)]


def external_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    if model.graph.initializer:
        tensor = draw.choice(model.graph.initializer)
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=draw.choice(("", "/etc/passwd", "../x", "model.onnx", "a\0b")))
        tensor.external_data.add(key="offset", value=draw.choice(("-1", "9" * 30, "x")))


def repeat_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    if model.graph.initializer:
        model.graph.initializer.append(draw.choice(model.graph.initializer))


def drop_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    if model.graph.initializer:
        model.graph.initializer.pop(position(model.graph.initializer, draw))


def run_time_constant(model: onnx.ModelProto, draw: random.Random) -> None:
    """What was constant is an input of run time."""
    if model.graph.initializer:
        tensor = model.graph.initializer.pop(position(model.graph.initializer, draw))
        model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))


def _some_value(model: onnx.ModelProto, draw: random.Random) -> onnx.ValueInfoProto:
    values: list[onnx.ValueInfoProto] = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    return draw.choice(values)


def other_extent(model: onnx.ModelProto, draw: random.Random) -> None:
    dims = _some_value(model, draw).type.tensor_type.shape.dim
    dim = draw.choice(dims) if dims else dims.add()
    dim.dim_value = draw.choice(INTEGERS)


def open_extent(model: onnx.ModelProto, draw: random.Random) -> None:
    dims = _some_value(model, draw).type.tensor_type.shape.dim
    dim = draw.choice(dims) if dims else dims.add()
    dim.dim_param = draw.choice(("n", "", "n + 1", "9**9**9**9", "n / 0", "-n", "(" * 5000))


def other_rank(model: onnx.ModelProto, draw: random.Random) -> None:
    shape = _some_value(model, draw).type.tensor_type.shape
    if draw.random() < 0.5 and shape.dim:
        shape.dim.pop()
    else:
        for _ in range(draw.choice((1, 2, 9, 70))):
            shape.dim.add(dim_value=1)


def other_element_type(model: onnx.ModelProto, draw: random.Random) -> None:
    kind = _some_value(model, draw).type.tensor_type
    kind.elem_type = draw.choice((*TensorProto.DataType.values(), 99, -1))


def no_tensor(model: onnx.ModelProto, draw: random.Random) -> None:
    value = _some_value(model, draw)
    kind = onnx.TypeProto()
    kind.CopyFrom(value.type)
    value.type.Clear()
    wrapped = draw.choice(("sequence_type", "optional_type", "nothing", "sparse", "map"))
    if wrapped in ("sequence_type", "optional_type"):
        getattr(value.type, wrapped).elem_type.CopyFrom(kind)
    elif wrapped == "sparse":
        value.type.sparse_tensor_type.elem_type = TensorProto.FLOAT
    elif wrapped == "map":
        value.type.map_type.key_type = TensorProto.INT64


def contradictory_shape(model: onnx.ModelProto, draw: random.Random) -> None:
    name = draw.choice(tensor_names(model))
    shape = draw.choices(INTEGERS, k=draw.randrange(6))
    model.graph.value_info.append(helper.make_tensor_value_info(name, draw.randrange(1, 17), shape))


def other_opset(model: onnx.ModelProto, draw: random.Random) -> None:
    opset = draw.choice(model.opset_import)
    opset.version = draw.choice((*INTEGERS, 5, 6, 9, 11, 13, 17, 21, 24))


def other_opset_domain(model: onnx.ModelProto, draw: random.Random) -> None:
    draw.choice(model.opset_import).domain = draw.choice(("ai.onnx", "com.microsoft", "org.example", "ai.onnx.ml"))


def other_version(model: onnx.ModelProto, draw: random.Random) -> None:
    model.ir_version = draw.choice((-1, 0, 1, 2, 3, 7, 99, 2**62))


def other_result(model: onnx.ModelProto, draw: random.Random) -> None:
    """Another tensor is an output of the model too, or instead."""
    value = draw.choice(model.graph.output)
    if draw.random() < 0.5:
        value = model.graph.output.add()
        value.CopyFrom(model.graph.output[0])
    value.name = draw.choice([*tensor_names(model), "", "nobody"])


def bury_node(model: onnx.ModelProto, draw: random.Random) -> None:
    """A node inside branches inside branches."""
    if not model.graph.node:
        return
    index = position(model.graph.node, draw)
    node = onnx.NodeProto()
    node.CopyFrom(model.graph.node[index])
    for _ in range(draw.choice((1, 3, 20))):
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
        inside = helper.make_graph([node], "buried", [], outputs)
        condition = draw.choice(tensor_names(model))
        nothing = helper.make_graph([], "nothing", [], outputs)
        node = helper.make_node("If", [condition], list(node.output), then_branch=inside, else_branch=nothing)
    model.graph.node[index].CopyFrom(node)


def make_function(model: onnx.ModelProto, draw: random.Random) -> None:
    """A node becomes a call of a function that calls others, or itself."""
    if not model.graph.node:
        return
    node = model.graph.node[position(model.graph.node, draw)]
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    calls_itself = draw.random() < 0.3
    node.op_type, node.domain = "made", "local"
    del node.attribute[:]
    body = node if calls_itself else inner
    opsets = [*model.opset_import, *([] if calls_itself else [helper.make_opsetid("org.example", 1)])]
    model.functions.append(helper.make_function("local", "made", list(node.input), list(node.output), [body], opsets))


def confuse_function(model: onnx.ModelProto, draw: random.Random) -> None:
    """A function's signature no longer fits its body, or another one has its name."""
    if not model.functions:
        return make_function(model, draw)
    function = draw.choice(model.functions)
    change = draw.randrange(5)
    if change == 0:
        function.name = draw.choice([*(other.name for other in model.functions), "Relu", ""])
    elif change == 1:
        function.domain = draw.choice(("", "org.example"))
    elif change == 2:
        del function.opset_import[:]
    elif change == 3:
        function.input.append(draw.choice([*function.input, "more", ""]))
    else:
        function.output.append(draw.choice([*function.output, *function.input, "more"]))
    return None


def endless_function(model: onnx.ModelProto, draw: random.Random) -> None:
    """A node in a function calls the function that comes first."""
    inside = [node for function in model.functions for node in function.node]
    if inside:
        node = draw.choice(inside)
        node.op_type, node.domain = model.functions[0].name, model.functions[0].domain


def no_name(model: onnx.ModelProto, draw: random.Random) -> None:
    for node in nodes(model):
        node.name = draw.choice(("", "same", "a/b:c", "\0", "ü" * 300))


GRAPH_MUTATIONS: tuple[Mutation, ...] = (
    other_constant, other_constant, other_constant, other_constant_shape, resized_constant, resized_constant,
    other_constant_type, cut_constant, external_constant, repeat_constant, drop_constant, run_time_constant,
    other_extent, other_extent, open_extent, other_rank, other_element_type, no_tensor, contradictory_shape,
    other_opset, other_opset, other_opset_domain, other_version, other_result, bury_node, make_function,
    confuse_function, endless_function, no_name,
)  # fmt: skip


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """Bits flipped, bytes replaced, parts cut out, repeated or cut off."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        place = draw.randrange(len(changed))
        length = draw.choice((1, 2, 10, 100))
        match draw.randrange(6):
            case 0 | 1:
                changed[place] ^= 1 << draw.randrange(8)
            case 2:
                changed[place] = draw.choice((0, 1, 127, 128, 255))
            case 3:
                del changed[place : place + length]
            case 4:
                changed[place:place] = changed[place : place + length]
            case 5:
                changed[place:place] = draw.choice((b"\xff" * 9 + b"\x01", b"\x80\x01", b"\0\0", draw.randbytes(4)))
        changed = changed or bytearray(b"\0")
    return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.05 else changed)
