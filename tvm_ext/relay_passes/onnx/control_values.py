"""Values that go into branches and bodies of control flow, and come out of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tvm_ext._tvm import BlockBuilder, Constant, Expr, Var, relax, structural_equal, tirx
from tvm_ext.errors import ModelError
from tvm_ext.support.tensors import array_over

from .graph import describe_node


def block(builder: BlockBuilder, body: Callable[[], Expr]) -> Expr:
    """A branch that binds what ``body`` emits."""
    builder._begin_binding_block()
    result = builder.emit(body())
    return relax.SeqExpr([builder._end_block()], result)


def returning(value: Expr) -> Expr:
    return relax.SeqExpr([], value)


def fields(builder: BlockBuilder, value: Expr, count: int) -> list[Expr]:
    """The ``count`` results of a function, which gives a tuple of several. (A sequence is a tuple, too.)"""
    return [value] if count == 1 else [builder.emit(relax.TupleGetItem(value, place)) for place in range(count)]


def bound(builder: BlockBuilder, value: Expr) -> Expr:
    return value if isinstance(value, Var | Constant) else builder.emit(value)


def scalar(builder: BlockBuilder, value: Expr) -> Expr:
    """A tensor of one element, of whatever rank, as one of rank 0."""
    if isinstance(value, Constant):
        return relax.const(array_over(value.value).reshape(()))
    return builder.emit(relax.op.reshape(value, ())) if extents(value.ty) else value


def nothing(kind: Any) -> Expr:
    """What no step stacks."""
    return relax.const(np.zeros((0, *extents(kind)), str(kind.dtype)))


def moved(rank: int, axis: int) -> list[int]:
    """The permutation that moves axis 0 to ``axis``."""
    order = list(range(1, rank))
    order.insert(axis % rank, 0)
    return order


def declared(node: onnx.NodeProto, name: str, kind: Any) -> onnx.ValueInfoProto:
    """The declaration of a body's input; raises ModelError where it is no tensor of known shape."""
    shape = known_extents(node, name, kind)
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(str(kind.dtype))), shape)


def known_extents(node: onnx.NodeProto, name: str, kind: Any) -> list[int]:
    """`extents` of the value ``name`` that ``node`` reads or gives; raises ModelError where one is not known."""
    try:
        return extents(kind)
    except ValueError:
        if isinstance(kind, relax.TupleType):
            raise ModelError(
                f"{describe_node(node)} has '{name}', a sequence or optional value, which may change from step to step",
                "run the model in a tvm_ext.InferenceSession, which leaves this node to ONNX Runtime",
            ) from None
        raise ModelError(
            f"{describe_node(node)} has '{name}', whose shape is not known", "bind dynamic dimensions with shape={...}"
        ) from None


def extents(kind: Any) -> list[int]:
    """The extents of a tensor's type; raises ValueError where one is not known."""
    is_known = isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr)
    found = kind.shape.values if is_known else [kind]
    if not all(isinstance(extent, tirx.IntImm) for extent in found):
        raise ValueError(str(kind))
    return [int(extent) for extent in found]


def changing(node: onnx.NodeProto, problem: str) -> ModelError:
    return ModelError(
        f"{describe_node(node)}: {problem}; results have known shapes here",
        "export it with fixed shapes, or use tvm_ext.InferenceSession, which leaves this node to ONNX Runtime",
    )


def _text(kind: Any) -> str:
    try:
        return f"{kind.dtype} of {'x'.join(map(str, extents(kind))) or 'rank 0'}"
    except ValueError:
        return "of a shape that is not known"


def require_equal(
    node: onnx.NodeProto,
    what: str,
    names: Sequence[str],
    first: Sequence[Any],
    second: Sequence[Any],
    where: str = "before a step",
    elsewhere: str = "after it",
) -> None:
    """Raise ModelError where a value of ``names`` has two types."""
    for name, one, two in zip(names, first, second, strict=False):
        if not structural_equal(one, two):
            raise changing(node, f"{what} '{name}' is {_text(one)} {where}, {_text(two)} {elsewhere}")
