"""Arrays and tensors in one memory, and where packed constants lie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tvm_ext._tvm import tensor
from tvm_ext.records.choice import ConstantPack
from tvm_ext.support.arrays import aligned_empty, pack
from tvm_ext.support.tensors import array_over, tensor_over


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5, 11)])
@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "float32"])
def test_arrays_start_at_a_line(shape: tuple[int, ...], dtype: str) -> None:
    array = aligned_empty(shape, np.dtype(dtype))
    assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous
    assert array.ctypes.data % 64 == 0 or array.size == 0


def test_tensor_and_array_in_one_memory() -> None:
    array = np.arange(12, dtype="int64").reshape(3, 4)
    over = tensor_over(array)
    assert str(over.dtype) == "int64"
    back = array_over(over)
    assert back.ctypes.data == array.ctypes.data
    with pytest.raises(ValueError, match="read-only"):
        back[0, 0] = 1
    del array, over
    np.testing.assert_array_equal(back, np.arange(12).reshape(3, 4))


def test_types_that_numpy_lacks_are_copied() -> None:
    array = np.arange(5).astype(ml_dtypes.bfloat16)
    over = tensor_over(array)
    assert str(over.dtype) == "bfloat16"
    np.testing.assert_array_equal(array_over(over), array)
    np.testing.assert_array_equal(array_over(tensor(array)).astype("float32"), np.arange(5))


def test_packed_constants_start_at_a_line() -> None:
    packed = pack(
        np.arange(15, dtype="float32").reshape(3, 5), ConstantPack(param_index=0, extents=(5, 4), strides=(1, 5))
    )
    np.testing.assert_array_equal(packed[:, :3], np.arange(15).reshape(3, 5).T)
    assert packed.ctypes.data % 64 == 0 and not packed[:, 3].any()
