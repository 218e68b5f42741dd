"""Binds what the caller knows about the inputs: shapes, named dimensions, element types, constant values."""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array

from .graph import OnnxGraph

# One declared dimension: its extent, or its name, or None where the model leaves it open without a name.
Dim: TypeAlias = int | str | None
# What a caller may say for one dimension; None, -1 and a name keep what the model declares.
RequestedDim: TypeAlias = int | str | None

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def bind_inputs(
    graph: OnnxGraph,
    shape: Mapping[str, Sequence[RequestedDim]] | None,
    dtype: str | Mapping[str, str] | None,
    constants: Mapping[str, npt.ArrayLike] | None,
) -> OnnxGraph:
    """`graph` with the shapes asked for, and with the inputs in `constants` turned into constants.

    A named dimension takes its value everywhere it occurs. The first dimension (the batch) may differ from what the
    file declares; every other declared extent must be met.

    Raises InputError for an unknown input (with the nearest name), a wrong rank, extent or element type.
    """
    graph = replace(graph, inputs=tuple(_unwrap_optional(value) for value in graph.inputs))
    graph = _bind_constants(graph, constants or {})
    shape = shape or {}
    types = _requested_types(graph, dtype)
    for name in (*shape, *types):
        _require_known(graph, name)
    values: dict[str, int] = {}
    merged = {value.name: _merge(value, shape.get(value.name), values) for value in graph.inputs if _is_tensor(value)}
    return replace(graph, inputs=tuple(_declare(value, merged, values, types) for value in graph.inputs))


def _unwrap_optional(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """An optional tensor as an input is a tensor: TVM's functions have no absent arguments."""
    if not value.type.optional_type.elem_type.HasField("tensor_type"):
        return value
    return helper.make_value_info(value.name, value.type.optional_type.elem_type)


def declared_dims(value: onnx.ValueInfoProto) -> list[Dim] | None:
    """The declared dimensions of a tensor input; None where even the rank is open. A zero extent is an extent."""
    if not _is_tensor(value) or not value.type.tensor_type.HasField("shape"):
        return None
    return [
        int(dim.dim_value) if dim.WhichOneof("value") == "dim_value" else (dim.dim_param or None)
        for dim in value.type.tensor_type.shape.dim
    ]


def _is_tensor(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.HasField("tensor_type"))


def _require_known(graph: OnnxGraph, name: str) -> None:
    if name in graph.input_names:
        return
    near = difflib.get_close_matches(name, graph.input_names, n=1)
    suggestion = f"did you mean '{near[0]}'? " if near else ""
    raise InputError(
        f"the model has no input named '{name}'",
        f"{suggestion}its inputs are {', '.join(map(repr, graph.input_names))}",
    )


def _bind_constants(graph: OnnxGraph, constants: Mapping[str, npt.ArrayLike]) -> OnnxGraph:
    bound: dict[str, Array] = {}
    for name, given in constants.items():
        _require_known(graph, name)
        declared = next(value for value in graph.inputs if value.name == name)
        bound[name] = np.array(given)  # the caller may write to theirs afterwards
        _check_constant(declared, bound[name])
    inputs = tuple(value for value in graph.inputs if value.name not in bound)
    return replace(graph, inputs=inputs, constants={**graph.constants, **bound})


def _check_constant(declared: onnx.ValueInfoProto, value: Array) -> None:
    expected = _element_type(declared)
    if expected not in (None, str(value.dtype)):
        raise InputError(
            f"the constant given for input '{declared.name}' is {value.dtype}, the model declares {expected}",
            f"convert it with astype('{expected}')",
        )
    dims = declared_dims(declared)
    fits = dims is None or (
        len(dims) == value.ndim
        and all(not isinstance(dim, int) or dim == extent for dim, extent in zip(dims, value.shape, strict=True))
    )
    if not fits:
        raise InputError(
            f"the constant given for input '{declared.name}' has shape {_text(value.shape)}, "
            f"the model declares {_text(dims or [])}",
            "give a value of the declared shape",
        )


def _element_type(value: onnx.ValueInfoProto) -> str | None:
    code = value.type.tensor_type.elem_type if _is_tensor(value) else 0
    return str(helper.tensor_dtype_to_np_dtype(code)) if code else None


def _requested_types(graph: OnnxGraph, dtype: str | Mapping[str, str] | None) -> dict[str, str]:
    """A single `dtype` speaks of all floating-point inputs, as it did in Relay."""
    if dtype is None:
        return {}
    if isinstance(dtype, str):
        return {value.name: dtype for value in graph.inputs if (_element_type(value) or "").startswith("float")}
    return dict(dtype)


def _merge(
    value: onnx.ValueInfoProto, requested: Sequence[RequestedDim] | None, values: dict[str, int]
) -> list[Dim] | None:
    """The dimensions of one input under the caller's request; extents learnt for named dimensions go into `values`."""
    declared = declared_dims(value)
    if requested is None:
        return declared
    asked = [_requested_extent(value.name, dim) for dim in requested]
    if declared is None:
        return list(asked)
    if len(asked) != len(declared):
        raise InputError(
            f"input '{value.name}' has {len(declared)} dimensions {_text(declared)}, "
            f"but the shape given has {len(asked)}: {_text(asked)}",
            f"give {len(declared)} extents",
        )
    return [
        _merge_dim(value.name, axis, had, want, values)
        for axis, (had, want) in enumerate(zip(declared, asked, strict=True))
    ]


def _text(dims: Sequence[Dim]) -> str:
    return f"[{', '.join('?' if dim is None else str(dim) for dim in dims)}]"


def _requested_extent(name: str, dim: RequestedDim) -> int | None:
    if dim is None or isinstance(dim, str):
        return None
    if isinstance(dim, bool) or not hasattr(dim, "__index__") or operator.index(dim) < -1:
        raise InputError(
            f"{dim!r} is no extent of input '{name}'", "an extent is an integer of at least 0 (-1 keeps it open)"
        )
    return None if operator.index(dim) == -1 else operator.index(dim)


def _merge_dim(name: str, axis: int, declared: Dim, asked: int | None, values: dict[str, int]) -> Dim:
    if asked is None:
        return declared
    if isinstance(declared, str) and values.setdefault(declared, asked) != asked:
        raise InputError(
            f"dimension '{declared}' of input '{name}' is given as {asked}, but elsewhere as {values[declared]}",
            "give the same extent wherever the name occurs",
        )
    if isinstance(declared, int) and declared != asked and axis != 0:
        raise InputError(
            f"dimension {axis} of input '{name}' is {declared} in the model, but {asked} in the shape given",
            f"give {declared}, or export the model with this dimension dynamic (only the first can be changed here)",
        )
    return asked


def _declare(
    value: onnx.ValueInfoProto,
    merged: Mapping[str, list[Dim] | None],
    values: Mapping[str, int],
    types: Mapping[str, str],
) -> onnx.ValueInfoProto:
    """The declaration of `value` with every bound name replaced and every open dimension named."""
    if not _is_tensor(value):
        return value
    dims = merged[value.name]
    code = _checked_type(value, types.get(value.name))
    if dims is None:
        return helper.make_tensor_value_info(value.name, code, None)
    shape = [_extent_or_name(value.name, axis, dim, values) for axis, dim in enumerate(dims)]
    return helper.make_tensor_value_info(value.name, code, shape)


def _checked_type(value: onnx.ValueInfoProto, requested: str | None) -> int:
    declared = _element_type(value)
    if requested is None:
        return int(value.type.tensor_type.elem_type)
    if declared is None:
        return int(helper.np_dtype_to_tensor_dtype(np.dtype(requested)))
    if requested != declared:
        raise InputError(
            f"input '{value.name}' is {declared} in the model, but {requested} was asked for",
            f"pass dtype='{declared}', or convert the model",
        )
    return int(value.type.tensor_type.elem_type)


def _extent_or_name(name: str, axis: int, dim: Dim, values: Mapping[str, int]) -> int | str:
    if dim is None:
        return f"{name}_dim{axis}"
    if isinstance(dim, int):
        return dim
    extent = evaluate_dimension(dim, values)
    return dim if extent is None else extent


def evaluate_dimension(text: str, values: Mapping[str, int]) -> int | None:
    """The extent that a dimension's name stands for, such as `past + 1`; None while a name in it has no value."""
    if text in values:
        return values[text]
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
    return _evaluate(tree, values)


def _evaluate(tree: ast.expr, values: Mapping[str, int]) -> int | None:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int):
        return int(tree.value)
    if isinstance(tree, ast.Name):
        return values.get(tree.id)
    if isinstance(tree, ast.BinOp) and type(tree.op) in _ARITHMETIC:
        left, right = _evaluate(tree.left, values), _evaluate(tree.right, values)
        division = isinstance(tree.op, ast.Div | ast.FloorDiv)
        if left is None or right is None or (division and right == 0):
            return None
        return _ARITHMETIC[type(tree.op)](left, right)
    return None
