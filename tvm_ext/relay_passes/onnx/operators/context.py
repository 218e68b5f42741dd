"""What rules and checks know about the graph around a node, and the pen that rules write nodes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from tvm_ext.errors import ModelError
from tvm_ext.support.arrays import Array

from ..graph import attribute, describe_node, fresh_name, rank_of, static_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The surroundings of a node.

    Attributes
    ----------
    types
        Tensor name to type, as far as ONNX's inference knows it.
    constants
        Tensor name to value.
    opset
        Version of the standard operator set.
    taken
        Every tensor name in use.
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

    def known_shape(self, node: onnx.NodeProto, name: str) -> tuple[int, ...]:
        """The static shape of an operand of `node`.

        Raises
        ------
        ModelError
            It is not known.
        """
        shape = self.shape(name)
        if shape is None:
            raise refusal(node, f"needs the shape of '{name}'", "bind dynamic dimensions with shape={...}")
        return shape

    def known_type(self, node: onnx.NodeProto, name: str) -> int:
        """The element type of an operand of `node`.

        Raises
        ------
        ModelError
            It is not known.
        """
        code = self.element_type(name)
        if not code:
            raise refusal(node, f"needs the element type of '{name}'", "export the model with inferred types")
        return code

    def known_value(self, node: onnx.NodeProto, index: int) -> Array | None:
        """The value of operand `index` of `node`; None where that operand is absent.

        Raises
        ------
        ModelError
            It is computed at run time.
        """
        name = operand(node, index)
        if not name:
            return None
        if name not in self.constants:
            remedy = f"pass it in constants={{'{name}': ...}} if it is an input, or export it as a constant"
            raise refusal(node, f"needs the value of '{name}' when the model is imported", remedy)
        return self.constants[name]


Rule: TypeAlias = Callable[[onnx.NodeProto, Context], list[onnx.NodeProto] | None]
"""None: this node is none of the forms that the rule is for. A rule may raise ModelError (see `refusal`)."""
Check: TypeAlias = Callable[[onnx.NodeProto, Context], None]
"""Raises ModelError where a node is not what ONNX allows, or what is computed rightly."""
Converter: TypeAlias = Callable[[Any, Sequence[Any], Mapping[str, Any], int], Any]
"""(BlockBuilder, Relax operands with None for absent ones, attributes as protobuf has them, opset) -> Relax expression.

Strings are bytes; several outputs are a `relax.Tuple`, and ``attributes["tvm_custom"]["num_outputs"]`` says how many.
"""


def refusal(node: onnx.NodeProto, problem: str, remedy: str) -> ModelError:
    """The error of a node that is refused: `Split node 's': <problem>`."""
    return ModelError(f"{describe_node(node)}: {problem}", remedy)


def operand(node: onnx.NodeProto, index: int) -> str:
    """The name of an operand, empty where it is absent."""
    return str(node.input[index]) if index < len(node.input) else ""


def result(node: onnx.NodeProto, index: int) -> str:
    """The name of an output, empty where it is absent."""
    return str(node.output[index]) if index < len(node.output) else ""


def text_attribute(node: onnx.NodeProto, name: str, default: str) -> str:
    """A string attribute as text."""
    value = attribute(node, name, default)
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


@dataclass(kw_only=True, slots=True)
class Pen:
    """Writes the nodes that take the place of one node.

    Worked example: x * sigmoid(x) is ``pen.add("Mul", x, pen.add("Sigmoid", x), out=node.output[0])``.
    """

    node: onnx.NodeProto
    context: Context
    nodes: list[onnx.NodeProto] = field(default_factory=list)

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

    def scalar_like(self, value: float, name: str) -> str:
        """A constant scalar of the element type of tensor `name`, which must be known."""
        code = self.context.known_type(self.node, name)
        return self.constant(value, helper.tensor_dtype_to_np_dtype(code))

    def integers(self, *values: int) -> str:
        """A constant int64 vector."""
        return self.constant(np.asarray(values, np.int64))

    def cast(self, name: str, code: int, out: str = "") -> str:
        return self.add("Cast", name, out=out, to=code)

    def reduce(self, operator: str, x: str, axes: int | Sequence[int], *, keepdims: bool = False, out: str = "") -> str:
        """Writes a reduction, its axes an operand or an attribute as the operator set wants them."""
        listed = [axes] if isinstance(axes, int) else list(axes)
        if self.context.opset >= (13 if operator == "ReduceSum" else 18):
            return self.add(operator, x, self.integers(*listed), out=out, keepdims=int(keepdims))
        return self.add(operator, x, out=out, axes=listed, keepdims=int(keepdims))

    def mean(self, x: str, axes: Sequence[int]) -> str:
        """Writes the mean over some axes, which stay with an extent of 1."""
        if self.context.opset >= 18:
            return self.add("ReduceMean", x, self.integers(*axes), keepdims=1)
        return self.add("ReduceMean", x, axes=list(axes), keepdims=1)

    def name(self, stem: str) -> str:
        """A tensor name that nothing has yet."""
        return fresh_name(f"{self.node.output[0] or self._stem}_{stem}", self.context.taken)

    @property
    def _stem(self) -> str:
        return self.node.name or self.node.op_type
