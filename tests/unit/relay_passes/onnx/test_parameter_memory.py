"""Whose memory the parameters of an imported model are in."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_ext.relay_passes.onnx.fold_batch_norm import _product
from tvm_ext.relay_passes.onnx.import_model import _tensors
from tvm_ext.support.arrays import aligned_empty


def made(shape: tuple[int, ...] = (4, 16)) -> np.ndarray:
    array = aligned_empty(shape, np.dtype("float32"))
    array[...] = np.arange(array.size).reshape(shape)
    return array


def test_an_array_of_its_own_is_the_tensor() -> None:
    array = made()
    tensor = _tensors({"w": array}, ["w"])["w"]
    array[0, 0] = 7
    assert tensor.numpy()[0, 0] == 7


@pytest.mark.parametrize("case", ["shared", "read-only", "unaligned", "strided"])
def test_other_arrays_are_copied(case: str) -> None:
    array = made()
    arrays = {"w": array}
    if case == "shared":
        arrays["v"] = array[:2]
    elif case == "read-only":
        arrays["w"] = array.view()
        arrays["w"].flags.writeable = False
    elif case == "unaligned":
        arrays["w"] = array.reshape(-1)[1:]
    else:
        arrays["w"] = array[:, ::2]
    expected = {name: value.copy() for name, value in arrays.items()}
    tensors = _tensors(arrays, list(arrays))
    array[...] = -1
    for name, tensor in tensors.items():
        assert np.array_equal(tensor.numpy(), expected[name])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_products_are_rounded_once(dtype: str, rng: np.random.Generator) -> None:
    weight, factor = rng.standard_normal((30, 70, 3)).astype(dtype), rng.standard_normal((30, 1, 1))
    product = _product(weight, factor)
    assert product.dtype == weight.dtype
    assert np.array_equal(product, (weight.astype("float64") * factor).astype(dtype))
