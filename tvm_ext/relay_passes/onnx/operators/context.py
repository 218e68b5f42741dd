"""What rules know about the graph around a node, the pen that they write nodes with, and the rows that name them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array, DType

from ..graph import attribute, describe_node, fresh_name, rank_of, static_shape, with_operands

FLOAT, DOUBLE, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64
HALF = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
FLOATING = (FLOAT, DOUBLE, *HALF)
BOOL = onnx.TensorProto.BOOL
INTEGERS = tuple(onnx.TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The surroundings of a node.

    * ``types``: tensor name to type, as far as ONNX's inference knows it.
    * ``constants``: tensor name to value.
    * ``opset``: version of the standard operator set.
    * ``taken``: every tensor name in use.
    """

    types: Mapping[str, onnx.TypeProto]
    constants: Mapping[str, Array]
    opset: int
    taken: set[str]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The static shape of a tensor, or None where it is not known."""
        if name in self.constants:
            return self.constants[name].shape
        return static_shape(self.types.get(name))

    def rank(self, name: str) -> int | None:
        if name in self.constants:
            return self.constants[name].ndim
        return rank_of(self.types.get(name))

    def extent(self, name: str, axis: int) -> int | None:
        """The extent of one axis, negative ones counted from the end, or None where it is not known."""
        if name in self.constants:
            return int(self.constants[name].shape[axis])
        rank = self.rank(name)
        if rank is None or not -rank <= axis < rank:
            return None
        dim = self.types[name].tensor_type.shape.dim[axis]
        return int(dim.dim_value) if dim.WhichOneof("value") == "dim_value" else None

    def element_type(self, name: str) -> int:
        """The ONNX element type of a tensor; 0 (UNDEFINED) where it is not known."""
        if name in self.constants:
            return int(helper.np_dtype_to_tensor_dtype(self.constants[name].dtype))
        return int(self.types[name].tensor_type.elem_type) if name in self.types else 0

    def at(self, node: onnx.NodeProto) -> Pen:
        """A pen that writes what takes the place of `node`."""
        return Pen(node=node, types=self.types, constants=self.constants, opset=self.opset, taken=self.taken)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pen(Context):
    """One node in its surroundings, and what is written in its place.

    Worked example: x * sigmoid(x) is ``pen.add("Mul", x, pen.add("Sigmoid", x), out=pen.out)`` with ``x = pen.x``.
    """

    node: onnx.NodeProto
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    @property
    def op_type(self) -> str:
        return self.node.op_type

    @property
    def input(self) -> list[str]:
        return list(self.node.input)

    @property
    def output(self) -> list[str]:
        return list(self.node.output)

    @property
    def x(self) -> str:
        """The first operand."""
        return str(self.node.input[0])

    @property
    def out(self) -> str:
        """The first output."""
        return str(self.node.output[0])

    def operand(self, index: int) -> str:
        """The name of an operand, empty where it is absent."""
        return str(self.node.input[index]) if index < len(self.node.input) else ""

    def result(self, index: int) -> str:
        """The name of an output, empty where it is absent."""
        return str(self.node.output[index]) if index < len(self.node.output) else ""

    def attribute(self, name: str, default: Any) -> Any:
        return attribute(self.node, name, default)

    def integer(self, name: str, default: int) -> int:
        return int(attribute(self.node, name, default))

    def numbers(self, name: str, default: Iterable[int]) -> tuple[int, ...]:
        return tuple(attribute(self.node, name, default))

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(attribute(self.node, name, default))

    def text(self, name: str, default: str) -> str:
        """A string attribute as text."""
        value = attribute(self.node, name, default)
        return value.decode("utf-8") if isinstance(value, bytes) else str(value)

    def options(self, *left_out: str) -> dict[str, Any]:
        """The attributes that the node has, but for some."""
        values = {item.name: helper.get_attribute_value(item) for item in self.node.attribute}
        return {name: value for name, value in values.items() if name not in left_out}

    def refusal(self, problem: str, remedy: str) -> ModelError:
        """The error of a node that is refused: `Split node 's': <problem>`."""
        return ModelError(f"{describe_node(self.node)}: {problem}", remedy)

    def known_shape(self, name: str) -> tuple[int, ...]:
        """The static shape of an operand. Raises ModelError where it is not known."""
        shape = self.shape(name)
        if shape is None:
            raise self.refusal(f"needs the shape of '{name}'", "bind dynamic dimensions with shape={...}")
        return shape

    def known_type(self, name: str) -> int:
        """The element type of an operand. Raises ModelError where it is not known."""
        code = self.element_type(name)
        if not code:
            raise self.refusal(f"needs the element type of '{name}'", "export the model with inferred types")
        return code

    def dtype(self, name: str) -> DType:
        """`known_type` as NumPy has it."""
        return helper.tensor_dtype_to_np_dtype(self.known_type(name))

    def known_value(self, index: int) -> Array | None:
        """The value of an operand; None where it is absent. Raises ModelError where it is computed at run time."""
        name = self.operand(index)
        if not name:
            return None
        if name not in self.constants:
            remedy = f"pass it in constants={{'{name}': ...}} if it is an input, or export it as a constant"
            raise self.refusal(f"needs the value of '{name}' when the model is imported", remedy)
        return self.constants[name]

    def known_number(self, index: int, default: int) -> int:
        """The first element of `known_value`, an integer; `default` where the operand is absent."""
        value = self.known_value(index)
        return default if value is None else int(value.reshape(-1)[0])

    def add(self, operator: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Writes one node of one output and returns that output's name."""
        output = out or self.name(operator.lower())
        self.nodes.append(helper.make_node(operator, inputs, [output], f"{self._stem}_{output}", **attributes))
        return output

    def add_many(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Writes one node whose outputs have the names given."""
        self.nodes.append(helper.make_node(operator, inputs, outputs, f"{self._stem}_{outputs[0]}", **attributes))

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> str:
        """Writes a constant."""
        tensor = numpy_helper.from_array(np.ascontiguousarray(np.asarray(value, dtype)).reshape(np.shape(value)))
        return self.add("Constant", value=tensor)

    def like(self, value: float, name: str = "") -> str:
        """A constant scalar of the element type, which must be known, of a tensor: the first operand by default."""
        return self.constant(value, self.dtype(name or self.x))

    def integers(self, *values: int) -> str:
        """A constant int64 vector."""
        return self.constant(np.asarray(values, np.int64))

    def cast(self, name: str, code: int, out: str = "") -> str:
        return self.add("Cast", name, out=out, to=code)

    def reduce(self, operator: str, x: str, axes: int | Sequence[int], *, keepdims: bool = False, out: str = "") -> str:
        """Writes a reduction, its axes an operand or an attribute as the operator set wants them."""
        listed = [axes] if isinstance(axes, int) else list(axes)
        if self.opset >= (13 if operator == "ReduceSum" else 18):
            return self.add(operator, x, self.integers(*listed), out=out, keepdims=int(keepdims))
        return self.add(operator, x, out=out, axes=listed, keepdims=int(keepdims))

    def mean(self, x: str, axes: Sequence[int]) -> str:
        """Writes the mean over some axes, which stay with an extent of 1."""
        return self.reduce("ReduceMean", x, axes, keepdims=True)

    def again(self, inputs: Iterable[str], outputs: Iterable[str], operator: str = "") -> None:
        """Writes the node itself, name and attributes as they are, with other operands and outputs."""
        self.nodes.append(with_operands(self.node, inputs, outputs, operator))

    def give(self, name: str) -> None:
        """The tensor that the last node makes is the node's result."""
        assert self.nodes[-1].output[0] == name
        self.nodes[-1].output[0] = self.out

    def chain(self, operator: str, terms: Sequence[str]) -> str:
        """((a + b) + c) + ..., written by an operator of two."""
        return reduce(lambda total, term: self.add(operator, total, term), terms)

    def name(self, stem: str) -> str:
        """A tensor name that nothing has yet."""
        return fresh_name(f"{self.node.output[0] or self._stem}_{stem}", self.taken)

    @property
    def _stem(self) -> str:
        return self.node.name or self.node.op_type


Rule: TypeAlias = Callable[[Pen], None]
"""Writes what takes a node's place; where nothing is written, the node stays. `Pen.refusal` is raised to refuse it."""
Converter: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any], int], Any]
"""(BlockBuilder, Relax operands with None for absent ones, attributes as protobuf has them, opset) -> Relax expression.

Strings are bytes; several outputs are a `relax.Tuple`, and ``attributes["tvm_custom"]["num_outputs"]`` says how many.
"""
RULES: dict[str, list[Rule]] = {}
"""Operator -> its rules, in the order in which they are asked."""
REPLACED: set[str] = set()
"""The operators for which a rule always answers, so that they need no converter."""
CONTRIBUTED: dict[str, Rule] = {}
"""Operator of com.microsoft -> its rule, which always answers."""
LEARNED: dict[str, Rule] = {}
"""Operator of ai.onnx.ml -> its rule, which always answers."""
CONVERTERS: dict[str, Converter] = {}
"""Relax converters that take the place of the stock importer's, or stand where it has none."""


def rule(*operators: str, types: Collection[int] = (), replaces: bool = False) -> Callable[[Rule], Rule]:
    """A row of `RULES`.

    ``types``: the rule is for these element types of the first operand; all, and unknown ones, where none is named.
    ``replaces``: it always answers: `REPLACED`.
    """

    def add(function: Rule) -> Rule:
        def guarded(pen: Pen) -> None:
            if pen.element_type(pen.x) in types:
                function(pen)

        for operator in operators:
            RULES.setdefault(operator, []).append(guarded if types else function)
        REPLACED.update(operators if replaces else ())
        return function

    return add


def contributed(*operators: str) -> Callable[[Rule], Rule]:
    """A row of `CONTRIBUTED`."""

    def add(function: Rule) -> Rule:
        CONTRIBUTED.update(dict.fromkeys(operators, function))
        return function

    return add


def learned(*operators: str) -> Callable[[Rule], Rule]:
    """A row of `LEARNED`."""

    def add(function: Rule) -> Rule:
        LEARNED.update(dict.fromkeys(operators, function))
        return function

    return add


def converter(*operators: str) -> Callable[[Converter], Converter]:
    """A row of `CONVERTERS`."""

    def add(function: Converter) -> Converter:
        assert not CONVERTERS.keys() & set(operators), operators
        CONVERTERS.update(dict.fromkeys(operators, function))
        return function

    return add
