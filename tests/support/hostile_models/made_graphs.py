"""Hand-made hostile graphs: endless recursion, growth step by step, and very many of everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import FunctionProto, TensorProto, helper, numpy_helper

from .record import HostileCase

_Make: TypeAlias = Callable[[], onnx.ModelProto]
_OPSETS = (helper.make_opsetid("", 20), helper.make_opsetid("local", 1))


def graph_cases(wanted: Callable[[str], bool]) -> Iterator[HostileCase]:
    for name, make in (*_recursions(), *_growths(), *_multitudes()):
        if wanted(name):
            yield HostileCase(kind="made", name=name, data=make().SerializeToString())
    if wanted("branches 3000 deep"):
        yield HostileCase(kind="made", name="branches 3000 deep", data=_bytes_of_branches(3000))


def _graph(
    nodes: Sequence[onnx.NodeProto],
    shape: Sequence[int] = (4, 8),
    constants: dict[str, Any] | None = None,
    functions: Sequence[FunctionProto] = (),
    outputs: Sequence[str] = ("y",),
    more_inputs: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    body = helper.make_graph(
        nodes,
        "hostile",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape), *more_inputs],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(body, opset_imports=_OPSETS, functions=functions, ir_version=10)


# --- recursion --------------------------------------------------------------------------------------------------------
def _function(name: str, *nodes: onnx.NodeProto) -> FunctionProto:
    return helper.make_function("local", name, ["p"], ["q"], list(nodes), _OPSETS)


def _call(name: str, given: str = "p", made: str = "q") -> onnx.NodeProto:
    return helper.make_node(name, [given], [made], domain="local")


def _recursions() -> Iterator[tuple[str, _Make]]:
    calls_itself = _function("f", _call("f"))
    circle = [_function("f", _call("g")), _function("g", _call("f"))]
    standard = helper.make_function("", "Relu", ["p"], ["q"], [helper.make_node("Relu", ["p"], ["q"])], _OPSETS)
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    yield "a function that calls itself", partial(_graph, [_call("f", "x", "y")], functions=[calls_itself])
    yield "two functions that call each other", partial(_graph, [_call("f", "x", "y")], functions=circle)
    yield "an uncalled function that calls itself", partial(_graph, relu, functions=[calls_itself])
    yield "a function inside a branch that calls itself", _recursive_branch
    for depth in (20, 300, 5000):
        yield f"functions {depth} deep", partial(_nested_calls, depth, 1)
    for depth in (9, 24, 60):
        yield f"functions that double {depth} times", partial(_nested_calls, depth, 2)
    for depth in (5, 12, 28):
        yield f"branches {depth} deep", partial(_nested_branches, depth)
    for depth in (3, 28):
        yield f"loops {depth} deep", partial(_nested_loops, depth)
    yield "a function that lost an input", _lost_input
    yield "a function of a standard name", partial(_graph, relu, functions=[standard])


def _recursive_branch() -> onnx.ModelProto:
    inside = helper.make_graph(
        [helper.make_node("f", ["p"], ["t"], domain="local")],
        "inside",
        [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)],
    )
    condition = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.asarray(True)))
    branch = helper.make_node("If", ["c"], ["q"], then_branch=inside, else_branch=inside)
    return _graph([_call("f", "x", "y")], functions=[_function("f", condition, branch)])


def _nested_calls(depth: int, calls: int) -> onnx.ModelProto:
    """f0 calls f1, which calls f2 ...; each calls the next so many times."""
    functions = []
    for level in range(depth):
        names = ["p", *(f"t{number}" for number in range(calls - 1)), "q"]
        inner = f"f{level + 1}" if level + 1 < depth else "Relu"
        nodes = [_call(inner, given, made) for given, made in itertools.pairwise(names)]
        for node in nodes:
            node.domain = "local" if level + 1 < depth else ""
        functions.append(_function(f"f{level}", *nodes))
    return _graph([_call("f0", "x", "y")], functions=functions)


def _nested_branches(depth: int) -> onnx.ModelProto:
    node = helper.make_node("Relu", ["x"], ["t0"])
    for level in range(depth):
        made = [helper.make_tensor_value_info(f"t{level}", TensorProto.FLOAT, None)]
        other = [helper.make_tensor_value_info(f"o{level}", TensorProto.FLOAT, None)]
        then = helper.make_graph([node], f"then{level}", [], made)
        otherwise = helper.make_graph([helper.make_node("Neg", ["x"], [f"o{level}"])], f"else{level}", [], other)
        node = helper.make_node("If", ["b"], [f"t{level + 1}"], then_branch=then, else_branch=otherwise)
    node.output[0] = "y"
    return _graph([node], more_inputs=[helper.make_tensor_value_info("b", TensorProto.BOOL, [])])


def _bytes_of_branches(depth: int) -> bytes:
    """Protobuf refuses to write it."""
    message = b""
    for _ in range(depth):
        for tag in (
            b"\x0a",
            b"\x32",
            b"\x2a",
        ):  # NodeProto in GraphProto.node, in AttributeProto.g, in NodeProto.attribute
            length = len(message)
            size = bytes([length & 127 | 128, length >> 7 & 127 | 128, length >> 14])
            message = tag + size + message
    return bytes(onnx.ModelProto(opset_import=_OPSETS).SerializeToString()) + b"\x3a" + size + message[4:]


def _nested_loops(depth: int) -> onnx.ModelProto:
    node = helper.make_node("Relu", ["x"], ["t0"])
    for level in range(depth):
        given = [
            helper.make_tensor_value_info(f"n{level}", TensorProto.INT64, []),
            helper.make_tensor_value_info(f"go{level}", TensorProto.BOOL, []),
        ]
        go = helper.make_node("Identity", [f"go{level}"], [f"on{level}"])
        made = [
            helper.make_tensor_value_info(f"on{level}", TensorProto.BOOL, []),
            helper.make_tensor_value_info(f"t{level}", TensorProto.FLOAT, None),
        ]
        body = helper.make_graph([go, node], f"loop{level}", given, made)
        node = helper.make_node("Loop", ["trips", ""], [f"t{level + 1}"], body=body)
    node.output[0] = "y"
    return _graph([node], constants={"trips": np.int64(2**62)})


def _lost_input() -> onnx.ModelProto:
    """ONNX's checker does not look into functions, and its inference reads what is not there."""
    body = helper.make_node("Conv", ["p"], ["q"], kernel_shape=[3, 3])
    return _graph([_call("f", "x", "y")], (1, 3, 8, 8), functions=[_function("f", body)])


# --- growth -----------------------------------------------------------------------------------------------------------
def _repeated(operator: str, steps: int, *more: str, twice: bool = False, **attributes: Any) -> list[onnx.NodeProto]:
    names = ["x", *(f"t{step}" for step in range(1, steps)), "y"]
    return [
        helper.make_node(operator, [given, *([given] if twice else []), *more], [made], f"step{step}", **attributes)
        for step, (given, made) in enumerate(itertools.pairwise(names))
    ]


def _growing(
    steps: int, shape: Sequence[int], operator: str, *more: str, by: Any = None, **how: Any
) -> onnx.ModelProto:
    constants = {} if by is None else {"by": by}
    return _graph(_repeated(operator, steps, *more, **how), shape, constants)


def _outer(operator: str) -> onnx.ModelProto:
    """Two long axes, which a product or a broadcast joins."""
    row = np.ones((1, 2**20), "float32")
    return _graph([helper.make_node(operator, ["x", "w"], ["y"])], (2**20, 1), {"w": row})


def _growths() -> Iterator[tuple[str, _Make]]:
    for steps in (40, 70):
        yield f"Concat doubles {steps} times", partial(_growing, steps, (4, 8), "Concat", twice=True, axis=0)
        yield f"Tile doubles {steps} times", partial(_growing, steps, (4, 8), "Tile", "by", by=[2, 1])
    scales, taps = np.asarray([1, 1, 2, 2], "float32"), np.ones((1, 1, 8, 8), "float32")
    square = helper.make_node("Einsum", ["x", "x", "x"], ["y"], equation="ab,cd,ef->abcdef")
    yield "Pad grows tenfold", partial(_growing, 12, (4, 8), "Pad", "by", by=[0, 0, 10**9, 0])
    yield "Resize doubles 40 times", partial(_growing, 40, (1, 1, 2, 2), "Resize", "", "by", by=scales)
    yield "ConvTranspose grows", partial(_growing, 12, (1, 1, 2, 2), "ConvTranspose", "by", by=taps, strides=[8, 8])
    yield "Gather repeats", partial(_growing, 8, (2, 2), "Gather", "by", by=np.zeros((10, 100), "int64"))
    for operator in ("Add", "Mul"):
        yield f"{operator} doubles 60 times", partial(_growing, 60, (4, 8), operator, twice=True)
    yield "MatMul of two long axes", partial(_outer, "MatMul")
    yield "Add of two long axes", partial(_outer, "Add")
    yield "Einsum of an outer product", partial(_graph, [square], (2**8, 2**8))
    yield "a constant filled 30 times over", _many_filled
    yield "constants that double 40 times", _doubling_constants


def _many_filled() -> onnx.ModelProto:
    made = [helper.make_node("ConstantOfShape", ["h"], [f"c{number}"]) for number in range(30)]
    nodes = [*made, helper.make_node("Sum", ["x", *(f"c{number}" for number in range(30))], ["y"])]
    return _graph(nodes, (1,), {"h": [2**29 - 1]})


def _doubling_constants() -> onnx.ModelProto:
    nodes = _repeated("Concat", 40, twice=True, axis=0)
    nodes[0].input[:] = ["c", "c"]
    nodes[-1].output[0] = "t"
    return _graph([*nodes, helper.make_node("Add", ["x", "t"], ["y"])], (1, 8), {"c": np.ones((4, 8), "float32")})


# --- multitudes -------------------------------------------------------------------------------------------------------
_CHAINS = ("Relu", "Identity", "Softmax", "LeakyRelu", "Sign", "Tanh")


def _multitudes() -> Iterator[tuple[str, _Make]]:
    eye, ones = np.eye(8, dtype="float32"), np.ones(8, "float32")
    for count in (20, 100_000):
        for operator in _CHAINS:
            yield f"a chain of {count} {operator}", partial(_growing, count, (4, 8), operator)
    for count in (1_000, 100_000):
        yield f"a chain of {count} Relu", partial(_growing, count, (4, 8), "Relu")
        yield f"a chain of {count} MatMul", partial(_growing, count, (4, 8), "MatMul", "by", by=eye)
        yield f"a chain of {count} Add", partial(_growing, count, (4, 8), "Add", "by", by=ones)
        for operator in ("Concat", "Sum", "Max"):
            yield f"{operator} of {count}", partial(_wide, operator, count)
        for what, make in _MANY.items():
            yield f"{count} {what}", partial(make, count)
    yield "a name of ten million letters", partial(_graph, [helper.make_node("Relu", ["x"], ["y"], "n" * 10**7)])
    yield "a chain of constants", partial(_graph, _constant_chain(3_000), constants={"c": ones})


def _wide(operator: str, count: int) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x"] * count, ["y"])
    if operator == "Concat":
        node.attribute.append(helper.make_attribute("axis", 0))
    return _graph([node])


def _many_parts(count: int) -> onnx.ModelProto:
    parts = ["y", *(f"o{number}" for number in range(count - 1))]
    return _graph([helper.make_node("Split", ["x"], parts, axis=0, num_outputs=count)], (count, 2))


def _many_outputs(count: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), *_fan(count)]
    return _graph(nodes, outputs=["y", *(f"f{number}" for number in range(count))])


def _many_constants(count: int) -> onnx.ModelProto:
    return _graph([_RELU], constants={f"c{number}": np.float32(1) for number in range(count)})


def _many_functions(count: int) -> onnx.ModelProto:
    inside = helper.make_node("Relu", ["p"], ["q"])
    return _graph([_RELU], functions=[_function(f"f{number}", inside) for number in range(count)])


def _many_attributes(count: int) -> onnx.ModelProto:
    node = helper.make_node("Relu", ["x"], ["y"])
    node.attribute.extend(helper.make_attribute(f"a{number}", number) for number in range(count))
    return _graph([node])


def _many_numbers(count: int) -> onnx.ModelProto:
    return _graph([helper.make_node("Transpose", ["x"], ["y"], perm=list(range(count)))])


def _fan(count: int) -> list[onnx.NodeProto]:
    return [helper.make_node("Neg", ["x"], [f"f{number}"]) for number in range(count)]


def _many_inputs(count: int) -> onnx.ModelProto:
    more = [helper.make_tensor_value_info(f"i{number}", TensorProto.FLOAT, [2]) for number in range(count)]
    return _graph([_RELU], more_inputs=more)


_RELU = helper.make_node("Relu", ["x"], ["y"])
_MANY: dict[str, Callable[[int], onnx.ModelProto]] = {
    "outputs of Split": _many_parts,
    "inputs": _many_inputs,
    "outputs": _many_outputs,
    "constants": _many_constants,
    "functions": _many_functions,
    "attributes": _many_attributes,
    "numbers in an attribute": _many_numbers,
}


def _constant_chain(count: int) -> list[onnx.NodeProto]:
    """What is known at import, but only round by round."""
    nodes = _repeated("Sqrt", count)
    nodes[0].input[0] = "c"
    nodes[-1].output[0] = "known"
    return [*nodes, helper.make_node("Add", ["x", "known"], ["y"])]
