"""Operators that stock TVM writes for GPUs: launches in loops of the host, numbers that the host hands over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from tvm import te, topi

from tvm_ext.devices.device_db import device_for_target, lookup
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.verify import simt
from tvm_ext.verify.build_check import check_kernel

A100 = "nvidia-a100"
RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.permutation(600).astype("float32").reshape(2, 300)
PLACES = np.array([[0, 3, 3]], "int64")
UPDATES = np.array([1, 2, 4], "float32")


def kernel_of(operator: Callable[..., Any], arrays: Mapping[str, Any]) -> Any:
    """The operator on tensors like ``arrays``, in kernels for an A100."""
    given = [te.placeholder(value.shape, str(value.dtype), name) for name, value in arrays.items()]
    with device_for_target(A100)[1]:
        made = operator(*given)
        func = te.create_prim_func([*given, *(made if isinstance(made, list) else [made])])
        return construct_kernel(func, "operator", lookup(A100), BuildOptions())


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[Any]]] = {
    "topk": (
        lambda x: topi.gpu.topk(x, 3, 1, "both", False, "int64"), {"x": NUMBERS},
        [-np.sort(-NUMBERS, 1)[:, :3], np.argsort(-NUMBERS, 1)[:, :3]],
    ),
    "sort": (lambda x: topi.gpu.sort(x, axis=1), {"x": NUMBERS[:, :7].copy()}, [np.sort(NUMBERS[:, :7], 1)]),
    "scatter_nd": (
        lambda x, at, new: topi.gpu.scatter_nd(x, at, new, "add"),
        {"x": np.arange(6, dtype="float32"), "at": PLACES, "new": UPDATES},
        [np.array([1, 1, 2, 9, 4, 5], "float32")],
    ),
    "scatter_elements": (
        lambda x, at, new: topi.gpu.scatter_elements(x, at, new, 0, "max"),
        {"x": np.array([0, 1, 2, np.nan, 4], "float32"), "at": PLACES[0], "new": np.array([np.nan, 9, 1], "float32")},
        [np.array([np.nan, 1, 2, np.nan, 4], "float32")],
    ),
}  # fmt: skip


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", CASES)
def test_what_stock_tvm_writes_is_interpreted(name: str) -> None:
    operator, arrays, wanted = CASES[name]
    kernel = kernel_of(operator, arrays)
    kernels = simt.lower(kernel, A100)
    result = simt.run(kernels, arrays, device=A100)
    assert result.ok, [str(item) for item in result.findings][:3]
    outputs = [tensor.name for tensor in kernels[0].tensors if tensor.name not in kernels[0].workspaces]
    for output, value in zip(outputs[len(arrays) :], wanted, strict=True):
        np.testing.assert_array_equal(result.outputs[output], value)
    plan = plan_build(A100, BuildOptions())
    with plan.target:
        check = check_kernel("operator", kernel, None, plan.device, plan.target)
    assert not check.problem and check.launches == len(kernels)


def test_launches_in_loops_are_one_each() -> None:
    """Runs of 128 elements are merged three times: to 256, 512 and 1024."""
    x = np.zeros((1, 1000), "float32")
    kernel = kernel_of(lambda x: topi.gpu.sort(x, axis=1), {"x": x})
    names = [item.name for item in simt.lower(kernel, A100)]
    assert max(names.count(name) for name in names) == 3
