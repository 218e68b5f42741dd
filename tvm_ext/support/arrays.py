"""NumPy's arrays and element types as types, one name for those of any kind; constants as kernels want them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_ext.records.choice import ConstantPack

from .toom_cook import transforms

Array = npt.NDArray[Any]
DType = np.dtype[Any]

NUMPY_TYPES = frozenset(map(str, map(np.dtype, "bhilBHILefd")))
"""Types of elements that NumPy and TVM pass to each other by DLPack; bool only since NumPy 1.25."""

_LINE_BYTES = 64  # of x86 and Arm cores' caches, and what TVM aligns tensors to (kAllocAlignment)


def pack(array: Array, how: ConstantPack) -> Array:
    """The packed copy of ``array``: ``[i...]`` is ``array.flat[offset + sum(i * stride)]``, or 0 outside."""
    flat = np.ascontiguousarray(array).reshape(-1)
    reach = [(extent - 1) * stride for extent, stride in zip(how.extents, how.strides, strict=True)]
    low = how.offset + sum(step for step in reach if step < 0)
    high = how.offset + sum(step for step in reach if step > 0)
    before, after = max(0, -low), max(0, high + 1 - flat.size)
    padded = np.pad(flat, (before, after)) if before or after else flat
    view = np.lib.stride_tricks.as_strided(
        padded[how.offset + before :], how.extents, [stride * flat.itemsize for stride in how.strides], writeable=False
    )
    values = view if how.winograd is None else _winograd(view, how.winograd)
    packed = aligned_empty(values.shape, flat.dtype)
    packed[...] = values
    return packed


def _winograd(filters: Array, m: int) -> Array:
    """G g G^T of the filters whose taps are axes 1 and 2, computed in float64, for tiles of ``m`` x ``m`` outputs."""
    matrix = np.array(transforms(m).filters, dtype="float64")
    rows = np.tensordot(matrix, filters, axes=(1, 1))  # [a, panel, x, ...]
    both = np.tensordot(matrix, rows, axes=(1, 2))  # [b, a, panel, ...]
    made: Array = np.moveaxis(both, 2, 0).swapaxes(1, 2)
    return made


def is_aligned(array: Array) -> bool:
    """Whether ``array`` starts where `aligned_empty` would have it."""
    return array.ctypes.data % _LINE_BYTES == 0


def aligned_empty(shape: Sequence[int], dtype: DType) -> Array:
    """An array in row-major order that starts at a cache line, as `tvm.runtime.empty` would have it.

    NumPy's allocation of 4 MiB and more asks for pages of 2 MiB, TVM's does not.
    """
    size = prod(shape) * dtype.itemsize
    room = np.empty(size + _LINE_BYTES, np.uint8)
    start = -room.ctypes.data % _LINE_BYTES
    return room[start : start + size].view(dtype).reshape(shape)


def aligned_copy(array: Array) -> Array:
    """A copy of ``array`` as `aligned_empty` makes them."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
