"""Kernels that are constructed from rPrograms: not accused, and their harmful mutants are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.simt.good_kernels import GoodKernel
from tests.unit.verify.simt.judge import DEVICE, check, harm_of, interpreted, judge, lowered
from tvm_ext._tvm import te, topi
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.construct_kernels import construct_kernel

Reference = Callable[..., np.ndarray]


def _matmul(m: int, n: int, k: int, dtype: str) -> Any:
    a, b = te.placeholder((m, k), dtype, "A"), te.placeholder((k, n), dtype, "B")
    axis = te.reduce_axis((0, k), "k")

    def element(i: Any, j: Any) -> Any:
        return te.sum(a[i, axis].astype("float32") * b[axis, j].astype("float32"), axis=axis)

    return te.create_prim_func([a, b, te.compute((m, n), element, "C")])


def _rows(operator: Callable[[Any], Any], *shape: int) -> Any:
    a = te.placeholder(shape, "float32", "A")
    return te.create_prim_func([a, operator(a)])


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) @ b.astype(np.float64)


def _softmax(a: np.ndarray) -> np.ndarray:
    powers = np.exp(a.astype(np.float64))
    return powers / powers.sum(axis=1, keepdims=True)


CASES: dict[str, tuple[Callable[[], Any], Reference]] = {
    "matmul": (lambda: _matmul(32, 32, 32, "float32"), _product),
    "matmul_of_odd_sizes": (lambda: _matmul(21, 35, 17, "float32"), _product),
    "matmul_by_tensor_cores": (lambda: _matmul(64, 32, 64, "float16"), _product),
    "softmax": (lambda: _rows(topi.nn.softmax, 3, 200), _softmax),
    "column_sums": (lambda: _rows(lambda a: topi.sum(a, axis=0), 100, 40), lambda a: a.astype(np.float64).sum(axis=0)),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_harmful_mutants_of_constructed_kernels_are_caught(name: str) -> None:
    make, reference = CASES[name]
    function = construct_kernel(make(), name, lookup(DEVICE), BuildOptions(enable_pipelining=False))
    kernel = GoodKernel(name=name, function=function, reference=reference)
    kernels, expected = lowered(kernel), reference(*kernel.inputs())
    assert interpreted(kernel, kernels, expected) == ((), False)
    assert harm_of(kernel, kernels, expected) == frozenset()
    judged = list(judge(kernel, every=29))
    check(judged)
    assert any(one.harm for one in judged)
