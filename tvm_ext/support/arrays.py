"""NumPy's arrays and element types as types, one name for those of any kind; constants as kernels want them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_ext.records.choice import ConstantPack

Array = npt.NDArray[Any]
DType = np.dtype[Any]


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
    return np.ascontiguousarray(view)
