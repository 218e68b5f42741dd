"""What is computed of a tile on its way to shared memory is computed of tensor cores' fragments instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.support.pipelining.check import cuda_source
from tests.support.pipelining.constructed import applied_product
from tests.unit.compilers import needs_nvcc
from tvm_ext._tvm import te, tirx, topi
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.pipelines import PipelinePlan
from tvm_ext.records.serialise import from_json
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.toolchains.cuda_toolchain import compile_cuda
from tvm_ext.verify.verification import verify

A100, H200, V100 = "nvidia-a100", "nvidia-h200", "nvidia-v100"
HALF = "float16"
Function = Callable[[Any], Any]

FUNCTIONS: Mapping[str, tuple[Function, Callable[[Array], Array]]] = {
    "relu": (lambda x: te.max(x, tirx.const(0, HALF)), lambda x: np.maximum(x, np.float16(0))),
    "scale": (lambda x: x * tirx.const(0.375, HALF), lambda x: x * np.float16(0.375)),
    "shift": (lambda x: x + tirx.const(1, HALF), lambda x: x + np.float16(1)),
}


def built(function: Any, device: str) -> tuple[Any, PipelinePlan]:
    options = BuildOptions(enable_pipelining=True)
    kernel = construct_kernel(function, "operator", lookup(device), options)
    plan = from_json(KernelChoice, str(kernel.attrs[CHOICE])).pipeline
    assert plan is not None
    return kernel, plan


def levels(plan: PipelinePlan) -> dict[str, int]:
    return {buffer.name: buffer.level for buffer in plan.buffers}


BOTH_LEVELS = {"A_shared": 0, "B_shared": 0, "A_fragment": 1, "B_fragment": 1}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "to", "turned", "device"),
    [
        ("relu", "a", False, A100),
        ("scale", "b", True, A100),
        ("relu", "ab", True, H200),
        ("scale", "ab", False, A100),
        ("shift", "b", False, A100),
    ],
)
def test_functions_of_fragments_are_right(name: str, to: str, turned: bool, device: str) -> None:
    of_expr, of_array = FUNCTIONS[name]
    kernel, plan = built(applied_product(64, 64, 160, of_expr, to, turned=turned), device)
    assert levels(plan) == BOTH_LEVELS, plan.refusals
    assert plan.moved == tuple(f"{factor.upper()}_shared" for factor in to)
    assert all(buffer.copy_bytes == 16 for buffer in plan.buffers if buffer.level == 0), "cp.async of whole chunks"

    def reference(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        a = of_array(arrays["A"]) if "a" in to else arrays["A"]
        b = of_array(arrays["B"]) if "b" in to else arrays["B"]
        return {"C": a.astype("float64") @ (b.T if turned else b).astype("float64")}

    result = verify(kernel, device, reference=reference)
    assert result.ok, result
    assert result.counters.bank_conflicts == 0


def test_a_padded_image_keeps_its_zeros() -> None:
    """A convolution of relu(x): what lies outside is zero before the function and behind it."""
    x, w = te.placeholder((1, 9, 9, 16), HALF, "X"), te.placeholder((3, 3, 16, 32), HALF, "W")
    rectified = te.compute(x.shape, lambda *i: FUNCTIONS["relu"][0](x[i]), "R")
    function = te.create_prim_func([x, w, topi.nn.conv2d_nhwc(rectified, w, 1, 1, 1, out_dtype="float32")])
    kernel, plan = built(function, A100)
    assert plan.moved == ("A_shared",)
    assert {"A_shared", "B_shared"} <= set(levels(plan))

    def reference(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        image = np.pad(np.maximum(arrays["X"], 0).astype("float64"), ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(image, (3, 3), axis=(1, 2))
        return {str(function.params[2].name): np.einsum("nyxcij,ijcf->nyxf", windows, arrays["W"].astype("float64"))}

    result = verify(kernel, A100, reference=reference)
    assert result.ok, result


def test_what_is_not_zero_at_the_edges_stays_with_the_copy() -> None:
    """72 rows: of a tile's 32 some lie outside, where the copy fills in zeros, and x + 1 is not 0."""
    kernel, plan = built(applied_product(72, 64, 160, FUNCTIONS["shift"][0], "a"), A100)
    assert plan.moved == ()
    reason = next(refusal.reason for refusal in plan.refusals if refusal.buffer == "A_shared")
    assert "is computed on the way" in reason
    assert "its function of zero is not zero" in reason

    def reference(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"C": (arrays["A"] + np.float16(1)).astype("float64") @ arrays["B"].astype("float64")}

    assert verify(kernel, A100, reference=reference).ok


def test_a_function_that_converts_stays_with_the_copy() -> None:
    """Fragments hold halves; four bytes of a float are not two of a half."""
    a, b = te.placeholder((64, 160), "float32", "A"), te.placeholder((160, 64), HALF, "B")
    r = te.reduce_axis((0, 160), "k")
    narrow = te.compute(a.shape, lambda i, j: a[i, j].astype(HALF), "F")
    c = te.compute((64, 64), lambda i, j: te.sum(narrow[i, r].astype("float32") * b[r, j].astype("float32"), axis=r))
    _, plan = built(te.create_prim_func([a, b, c]), A100)
    assert plan.moved == ()
    reason = next(refusal.reason for refusal in plan.refusals if refusal.buffer == "A_shared")
    assert "A_shared holds float16 in fragments, where float32 is loaded" in reason


def test_without_asynchronous_copies_it_stays_with_the_store() -> None:
    kernel, plan = built(applied_product(64, 64, 160, FUNCTIONS["relu"][0], "a"), V100)
    assert plan.moved == ()
    assert {"A_shared", "B_shared"} <= set(levels(plan))
    assert "_applied" not in str(kernel)


@needs_nvcc
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("device", "architecture"), [(A100, "sm_80"), (H200, "sm_90")])
def test_the_compiler_takes_them_without_spills(device: str, architecture: str) -> None:
    kernel, plan = built(applied_product(1024, 1024, 1024, FUNCTIONS["relu"][0], "ab"), device)
    assert plan.moved == ("A_shared", "B_shared")
    (use,) = compile_cuda(cuda_source(kernel, architecture), [architecture]).uses
    assert use.spill_store_bytes + use.spill_load_bytes == 0
    planned = from_json(KernelChoice, str(kernel.attrs[CHOICE])).gpu[0].register_count
    assert use.register_count <= 1.2 * planned
