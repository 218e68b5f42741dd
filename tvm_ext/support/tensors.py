"""Tensors of TVM and arrays of NumPy in each other's memory; needs TVM's compiler, which a runtime alone lacks."""

from __future__ import annotations

import numpy as np
import tvm_ffi

from tvm_ext._tvm import Tensor, tensor

from .arrays import NUMPY_TYPES, Array, aligned_copy


def tensor_over(array: Array) -> Tensor:
    """A tensor on the CPU in the memory of ``array``, which nobody may change; a copy for types that NumPy lacks."""
    return tvm_ffi.from_dlpack(array) if array.dtype.name in NUMPY_TYPES else tensor(array)


def tensor_of(array: Array) -> Tensor:
    """A copy of ``array``, made once: TVM's own has another of what is not contiguous."""
    if array.dtype.name not in NUMPY_TYPES:
        return tensor(np.ascontiguousarray(array))
    return tensor_over(aligned_copy(array))


def array_over(values: Tensor) -> Array:
    """The values of a tensor on the CPU, in its memory and not to be changed; a copy for types that NumPy lacks."""
    array: Array = np.from_dlpack(values) if str(values.dtype) in NUMPY_TYPES else values.numpy()
    array.flags.writeable = False
    return array
