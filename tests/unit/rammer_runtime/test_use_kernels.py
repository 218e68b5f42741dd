"""Kernels that a user gives to a build: rTasks of the same schedule as constructed ones, or an error that says why."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.legacy_corpus import KERNELS, WRONG, corpus
from tests.support.legacy_corpus import converted as converted_stock
from tests.support.legacy_cuda import MATMUL
from tests.support.merged_runs import MergedGraph, Runs, merged_graph
from tests.support.small_modules import inputs_of, module_of
from tests.unit.compilers import needs_nvcc
from tvm_ext import relay
from tvm_ext._tvm import IRModule, PrimFunc, gpu_schedule_rules
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import InputError
from tvm_ext.options import BuildOptions
from tvm_ext.rammer_runtime.legacy.use_kernels import LegacyKernel, UseLegacyKernels
from tvm_ext.records.rtasks import RTaskGraph
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.emit.schedule_stock_gpu import schedule_by_stock
from tvm_ext.toolchains.cuda_toolchain import compile_cuda

op = relax.op
DEVICE, TARGET = device_for_target("nvidia-a100")
PRODUCT = LegacyKernel(
    source=MATMUL, function="matmul", grid=(3, 3, 1), block=(8, 8, 1), shapes=[(24, 24)] * 3, numbers={"n": 24},
    time_us=3.0,
)  # fmt: skip


def graph() -> IRModule:
    """Two products, of which one is read by a softmax; a ReLU before the other."""
    x, a, b = inputs_of((24, 24), (24, 24), (24, 24))
    right = op.nn.relu(op.matmul(op.nn.relu(b), a))
    return module_of([x, a, b], op.nn.softmax(op.matmul(x, a)), right)


@functools.cache
def operators() -> dict[str, PrimFunc]:
    return relay.operators(graph(), "nvidia-a100", enable_persistent_fusion=False)


@functools.cache
def with_product() -> MergedGraph:
    return merged_graph(graph(), kernels={"matmul": PRODUCT})


def stock(name: str) -> PrimFunc:
    """A user's own: what stock TVM makes of the operator."""
    with TARGET:
        return schedule_by_stock(operators()[name], name, DEVICE, "a test")[0]


def in_numpy(x: Any, a: Any, b: Any) -> list[Any]:
    powers = np.exp(x @ a - (x @ a).max(axis=1, keepdims=True))
    return [powers / powers.sum(axis=1, keepdims=True), np.maximum(np.maximum(b, 0) @ a, 0)]


def test_functions_of_tensor_ir_run_in_a_schedule_beside_constructed_kernels(rng: np.random.Generator) -> None:
    given = {name: stock(name) for name in ("matmul", "softmax")}
    runs = Runs(merged_graph(graph(), kernels=given))
    (region,) = runs.graph.record.regions
    names = {item.name.split("#")[0].split("_step")[0] for item in region.operators}
    assert runs.graph.record.outside == () and len(names) >= 4
    values = [rng.standard_normal((24, 24), dtype=np.float32) for _ in range(3)]
    for actual, wanted in zip(runs(values), in_numpy(*values), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    assert runs.findings == []


def test_cuda_text_becomes_rtasks_with_its_order_and_needs() -> None:
    (region,) = with_product().record.regions
    product = next(item for item in region.operators if item.name == "matmul")
    rtasks = RTaskGraph.from_json(region.graph)
    position = [item.name for item in rtasks.operators].index("matmul")
    kernel = rtasks.operators[position].kernels[0]
    assert (product.task_count, kernel.need.threads) == (9, 64)
    assert kernel.need.shared_bytes >= 8 * 8 * 4 + 8 * 9 * 4
    readers = [item.name for item in rtasks.operators if position in item.predecessors]
    assert readers and all("softmax" in name for name in readers)  # what it only reads orders nothing
    ((_, func),) = with_product().functions.items()
    assert f"{PRODUCT.function}_rtask_" in func.script()


@needs_nvcc
@pytest.mark.slow
def test_nvcc_takes_a_schedule_with_cuda_text() -> None:
    lib = relay.build(graph(), "nvidia-a100", enable_rammer=True, kernel_cache="off", kernels={"matmul": PRODUCT})
    assert lib.report.path_counts()["legacy"] == 1
    (use,) = [item for item in compile_cuda(lib.source(), ("sm_80",)).uses if "rammer" in item.name]
    assert not use.spill_store_bytes


def test_without_schedules_it_is_a_launch_of_its_own() -> None:
    settings = {"enable_persistent_fusion": False, "kernel_cache": "off"}
    lib = relay.build(graph(), "nvidia-a100", kernels={"matmul": PRODUCT}, **settings)
    assert lib.report.path_counts()["legacy"] == 1
    calls = [line for line in lib.source().splitlines() if "matmul_rtask_" in line and "blockIdx.x" in line]
    assert len(calls) == 1 and "(&(x0_ptr[0])), (&(x1_ptr[0])), (&(matmul_ptr[0])), 24," in calls[0]


def test_pointers_in_another_order_get_their_tensors() -> None:
    turned = replace(PRODUCT, source=MATMUL.replace("const float* a, const float* b", "const float* b, const float* a"))
    text = kernel_of(replace(turned, order=(1, 0, 2))).script()
    assert text.index("x1[") < text.index("x0[")


def kernel_of(kernel: Any, name: str = "matmul", device: str = "nvidia-a100") -> PrimFunc:
    row, target = device_for_target(device)
    with target:
        mod = UseLegacyKernels({name: kernel}, row)(IRModule(operators()))
    return mod[name]


HALF = MATMUL.replace("const float* a", "const half* a")
PROBLEMS: dict[str, tuple[Any, str]] = {
    "no operator": (PRODUCT, "names 'matmull', which is no operator.*did you mean 'matmul'"),
    "shapes": (
        replace(PRODUCT, shapes=[(24, 24), (24, 32), (24, 32)]),
        r"matmul: the kernel is for tensors.*x1: float",
    ),
    "type": (replace(PRODUCT, source=HALF), "matmul: parameter const half. a of matmul for a tensor of float32"),
    "count": (replace(PRODUCT, order=(0, 1)), "takes 3 pointers, in the order .0, 1.*it has 3 tensors"),
    "twice": (replace(PRODUCT, order=(0, 0, 2)), "in the order .0, 0, 2"),
    "number": (replace(PRODUCT, numbers={}), "parameter int n of matmul has no value"),
    "threads": (replace(PRODUCT, block=(64, 32, 1)), "operator matmul: .*1 to 1024 threads"),
    "grid": (replace(PRODUCT, grid=(1, 1, 70000)), "operator matmul: a grid of"),
    "shared": (
        replace(PRODUCT, dynamic_shared_bytes=1 << 20),
        "operator matmul: matmul takes .* bytes of shared memory",
    ),
    "function": (replace(PRODUCT, function="product"), "operator matmul: .*no __global__ function 'product'"),
    "text": ("void f()", "operator matmul: a str as its kernel"),
    "unscheduled": (None, "has no loop that is bound to threads"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_does_not_fit_is_refused_by_operator(problem: str) -> None:
    kernel, message = PROBLEMS[problem]
    with pytest.raises(InputError, match=f"(?s){message}"):
        kernel_of(
            operators()["matmul"] if kernel is None else kernel, "matmull" if problem == "no operator" else "matmul"
        )


def test_a_function_of_other_tensors_is_refused() -> None:
    with pytest.raises(InputError, match=r"operator matmul: the kernel is for tensors \[24, 24\], \[24, 24\]"):
        kernel_of(stock("relu"))


def test_a_function_that_would_store_beyond_its_tensor_is_refused() -> None:
    """dlight's own schedule of a product by a vector: 24 rows in blocks of 16."""
    x, v = inputs_of((24, 24), (24,))
    func = relay.operators(module_of([x, v], op.matmul(x, v)), "nvidia-a100")["matmul"]
    gemv = next(rule for rule in gpu_schedule_rules() if type(rule).__name__ == "GEMV")
    with TARGET:
        scheduled = gemv.apply(func, TARGET, False).mod["main"]
        with pytest.raises(InputError, match=r"operator matmul: block matmul of .* would store beyond its tensor"):
            UseLegacyKernels({"matmul": scheduled}, DEVICE)(IRModule({"matmul": func}))


@pytest.mark.parametrize(("device", "kernel"), [("cpu-zen4", PRODUCT), ("amd-mi50", PRODUCT), ("cpu-zen4", None)])
def test_other_devices_say_what_they_take(device: str, kernel: LegacyKernel | None) -> None:
    with pytest.raises(InputError, match="operator matmul"):
        kernel_of(stock("matmul") if kernel is None else kernel, device=device)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["matmul", "softmax"])
def test_kernels_of_stock_tvm_compute_the_same_behind_conversion(name: str, tmp_path: Path) -> None:
    found = converted_stock(name, operators()[name], tmp_path)
    assert found.reason == "" and found.launches >= 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")
def test_a_corpus_of_stock_tvm_s_kernels_computes_the_same_behind_conversion() -> None:
    kernels = 0
    for found in corpus(KERNELS):
        kernels += 0 if found.reason else found.launches
        print(f"{found.operator}: {found.reason or 'equal'}; {kernels} kernels so far", flush=True)
        assert not found.reason.startswith(WRONG), found
    assert kernels >= KERNELS


def test_construction_leaves_it_alone() -> None:
    given = kernel_of(PRODUCT)
    assert given.attrs["tirx.is_scheduled"]
    with TARGET:
        other = construct_kernel(operators()["matmul"], "matmul", DEVICE, BuildOptions())
    assert "rtask" not in other.script()
