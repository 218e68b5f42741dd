"""What a value of a Relax function is: its operator, extents and type of elements.

`computations` has the like of buffers, whose extents must be known.
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import Call, Expr, Node, RelaxFunction, ir, relax, tirx

from .computation_exprs import itemsize_bytes


def operator_name(value: Node) -> str | None:
    """``"relax.matmul"`` of a call of an operator; None for anything else."""
    return str(value.op.name) if isinstance(value, Call) and isinstance(value.op, ir.Op) else None


def is_graph(func: Node) -> bool:
    """Whether a function is a user's graph: what passes have cut out of one stays whole."""
    if not isinstance(func, RelaxFunction) or not isinstance(func.body, relax.SeqExpr):
        return False
    return not func.attrs or not {"Codegen", "Composite", "Primitive"} & set(map(str, func.attrs.keys()))


def is_tensor(value: Expr) -> bool:
    """Whether an argument is a tensor; clip's bounds, for one, are numbers."""
    return isinstance(getattr(value, "ty", None), relax.TensorType)


def static_shape(value: Expr) -> tuple[int, ...] | None:
    """Extents of a tensor; None where one is known only at run time, or where ``value`` is no tensor."""
    extents = _extents(value)
    known = None if extents is None else [known_extent(extent) for extent in extents]
    return None if known is None or None in known else tuple(extent for extent in known if extent is not None)


def _extents(value: Expr) -> tuple[Expr, ...] | None:
    """None where ``value`` is no tensor, or its rank is known only at run time."""
    shape = value.ty.shape if is_tensor(value) else None
    return tuple(shape.values) if shape is not None and hasattr(shape, "values") else None


def known_extent(extent: int | Expr) -> int | None:
    """None where it is known only at run time."""
    return int(extent) if isinstance(extent, int | tirx.IntImm) else None


def extent_text(extent: Expr) -> str:
    """``"64"``, or the name of one that is known only at run time."""
    return str(getattr(extent, "value", extent))


def value_bytes(value: Expr) -> float:
    """Of all elements; of one where extents are known only at run time."""
    return prod(static_shape(value) or ()) * itemsize_bytes(dtype_of(value))


def dtype_of(value: Expr) -> str:
    """The tensor's type of elements; "" for what is no tensor."""
    return str(value.ty.dtype) if is_tensor(value) else ""


def described(value: Expr) -> str:
    """``(64, n) float16``, for messages."""
    extents = _extents(value)
    if extents is None:
        return f"(?) {dtype_of(value) or 'no tensor'}"
    return f"({', '.join(map(extent_text, extents))}) {dtype_of(value)}"


def shapes_of(call: Call) -> str:
    """``(64, 32) float16 and (32, 8) float16``, for messages."""
    return " and ".join(described(argument) for argument in call.args)
