"""Inputs and outputs of a Relax function as `TensorSpec`s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from tvm_ext.relay_passes.onnx.import_model import ORIGINAL_NAMES, OUTPUT_NAMES

from .graph_module import Dimension, TensorSpec

if TYPE_CHECKING:
    from tvm_ext._tvm import Expr, Type


def input_specs(mod: tvm.IRModule) -> tuple[TensorSpec, ...]:
    """One spec per parameter of ``main``."""
    original = _attribute(mod, ORIGINAL_NAMES, {})
    return tuple(
        _spec(str(variable.name), variable.ty, str(original.get(variable.name, ""))) for variable in mod["main"].params
    )


def output_specs(mod: tvm.IRModule) -> tuple[TensorSpec, ...]:
    """One spec per output of ``main``, tuples flattened; without names they are ``output0``, ``output1``, ..."""
    kinds = list(_leaves(mod["main"].ret_ty))
    known = [str(name) for name in _attribute(mod, OUTPUT_NAMES, [])]
    names = known if len(known) == len(kinds) else [f"output{index}" for index in range(len(kinds))]
    return tuple(_spec(name, kind) for name, kind in zip(names, kinds, strict=True))


def _attribute(mod: tvm.IRModule, name: str, default: Any) -> Any:
    attributes = mod["main"].attrs
    return attributes[name] if attributes and name in attributes else default


def spec_of(name: str, value: Any) -> TensorSpec:
    """The spec of a tensor or of anything NumPy can read."""
    array = value if isinstance(value, tvm.runtime.Tensor | np.ndarray) else np.asarray(value)
    return TensorSpec(name=name, shape=tuple(int(size) for size in array.shape), dtype=str(array.dtype))


def _leaves(kind: Type) -> Iterator[Type]:
    if isinstance(kind, relax.TupleType):
        for field in kind.fields:
            yield from _leaves(field)
    else:
        yield kind


def _spec(name: str, kind: Type, original: str = "") -> TensorSpec:
    if isinstance(kind, relax.ShapeType):
        return TensorSpec(name=name, original_name=original, shape=(int(kind.ndim),), dtype="int64")
    if not isinstance(kind, relax.TensorType):
        return TensorSpec(name=name, original_name=original, shape=(), dtype=str(getattr(kind, "dtype", "object")))
    dtype = "" if kind.dtype is None else str(kind.dtype)
    if kind.shape is None:
        return TensorSpec(name=name, original_name=original, shape=None, dtype=dtype)
    return TensorSpec(name=name, original_name=original, shape=tuple(map(_dimension, kind.shape)), dtype=dtype)


def _dimension(size: Expr) -> Dimension:
    try:
        return int(size)
    except TypeError:
        return str(size)
