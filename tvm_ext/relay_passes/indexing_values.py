"""Gathers, scatters and cumulative sums of constants, by NumPy with ONNX's rules for indices.

Negative indices count from the end here, which the operators' tensor expressions leave to `check_values`; scatters and
scans have no computations that `computation_values` could evaluate. An index outside its axis is left to `check_values`
to report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.arrays import Array

if TYPE_CHECKING:
    from tvm_ext._tvm import Attrs


def _inside(indices: Array, extents: Sequence[int]) -> Array:
    """``indices`` counted from 0; with several ``extents`` the last axis of ``indices`` has one index into each."""
    limits = np.asarray(extents, "int64") if len(extents) > 1 else np.int64(extents[0])
    values = indices.astype("int64")
    if ((values < -limits) | (values >= limits)).any():
        raise IllegalRewrite("an index is outside its axis")
    return np.where(values < 0, values + limits, values)


def _take(attrs: Attrs, data: Array, indices: Array) -> Array:
    axis = None if attrs.axis is None else int(attrs.axis)
    extent = data.size if axis is None else data.shape[axis]
    if not extent:
        raise IllegalRewrite("there is nothing to take")
    places = _moded(indices, extent, str(attrs.mode))
    return np.asarray(np.take(data, places, axis=axis))


def _moded(indices: Array, extent: int, mode: str) -> Array:
    """Indices from 0 below ``extent``: by ONNX's rule in TVM's mode "fast", else as the mode says."""
    if mode == "fast":
        return _inside(indices, [extent])
    if mode not in ("wrap", "clip"):
        raise IllegalRewrite(f"mode {mode} has rules of its own")
    wide = indices.astype("int64")
    return np.asarray(np.mod(wide, extent) if mode == "wrap" else np.clip(wide, 0, extent - 1))


def _gather_elements(attrs: Attrs, data: Array, indices: Array) -> Array:
    return np.asarray(data[_places(data, indices, int(attrs.axis) % data.ndim)])


def _gather_nd(attrs: Attrs, data: Array, indices: Array) -> Array:
    if int(attrs.batch_dims):
        raise IllegalRewrite("batches of gathers")
    return np.asarray(data[_tuples(data, indices)])


def _scatter_nd(attrs: Attrs, data: Array, indices: Array, updates: Array) -> Array:
    return _scattered(str(attrs.reduction), data, _tuples(data, indices), updates)


def _scatter_elements(attrs: Attrs, data: Array, indices: Array, updates: Array) -> Array:
    return _scattered(str(attrs.reduction), data, _places(data, indices, int(attrs.axis) % data.ndim), updates)


def _tuples(data: Array, indices: Array) -> tuple[Array, ...]:
    """The last axis of ``indices`` as an index into ``data`` each."""
    inside = _inside(indices, data.shape[: indices.shape[-1]])
    return tuple(np.moveaxis(inside, -1, 0))


def _places(data: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    """Each element's own place in ``data``, but for ``axis``, where ``indices`` says it."""
    if any(i > d for p, (i, d) in enumerate(zip(indices.shape, data.shape, strict=True)) if p != axis):
        raise IllegalRewrite("more indices than elements along another axis")
    own = list(np.ogrid[tuple(slice(size) for size in indices.shape)])
    own[axis] = _inside(indices, [data.shape[axis]])
    return tuple(own)


def _scattered(reduction: str, data: Array, places: tuple[Array, ...], updates: Array) -> Array:
    result: Array = data.copy()
    if reduction == "update":
        result[places] = updates  # of several updates of one element the last one counts, as in the kernel
        return result
    functions = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
    if reduction not in functions:
        raise IllegalRewrite(f"a scatter that combines by {reduction}")
    functions[reduction].at(result, places, updates)
    return result


def _cumulative(function: np.ufunc) -> Callable[..., Array]:
    def scan(attrs: Attrs, data: Array) -> Array:
        if bool(attrs.exclusive):
            raise IllegalRewrite("an exclusive scan")
        axis = None if attrs.axis is None else int(attrs.axis)
        wanted = str(attrs.dtype or "")
        dtype = data.dtype if wanted in ("", "void") else np.dtype(wanted)
        flat = data.reshape(-1) if axis is None else data
        return np.asarray(function.accumulate(flat.astype(dtype), axis=axis or 0, dtype=dtype))

    return scan


RULES: dict[str, Callable[..., Array]] = {
    "relax.take": _take,
    "relax.gather_elements": _gather_elements,
    "relax.gather_nd": _gather_nd,
    "relax.scatter_nd": _scatter_nd,
    "relax.scatter_elements": _scatter_elements,
    "relax.cumsum": _cumulative(np.add),
    "relax.cumprod": _cumulative(np.multiply),
}
"""Operator -> (attributes, operands) -> result; IllegalRewrite where it is not to be computed here."""
