"""Plain CUDA kernels as rKernels: the converted text computes what the kernel does, in every shape of vEU."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.legacy_cuda import MATMUL, REVERSED, ROW_SUMS, SAXPY, TRANSPOSE, run_on_cpu
from tests.support.simt.good_kernels import argument, primitive_function
from tests.unit.compilers import needs_nvcc
from tvm_ext._tvm import Expr, Stmt, Target, tirx, tvm
from tvm_ext.errors import InputError
from tvm_ext.ir.build_ir import allocate, index, sequence
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.rammer_runtime.legacy.convert import ConvertedKernel, call_task, convert_kernel
from tvm_ext.rammer_runtime.legacy.tokens import functions_of, text_of, tokens_of
from tvm_ext.toolchains.cuda_toolchain import compile_cuda

needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler is installed")

KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "saxpy": (SAXPY, {"grid": (5, 1, 1), "block": (48, 1, 1)}),
    "matmul": (MATMUL, {"grid": (3, 3, 1), "block": (8, 8, 1)}),
    "row_sums": (ROW_SUMS, {"grid": (7, 1, 1), "block": (48, 1, 1), "dynamic_shared_bytes": 160}),
    "transpose": (TRANSPOSE, {"grid": (2, 3, 2), "block": (8, 4, 1)}),
    "reversed": (REVERSED, {"grid": (3, 1, 1), "block": (32, 1, 1)}),
}


def converted(name: str) -> ConvertedKernel:
    source, launch = KERNELS[name]
    return convert_kernel(source, name, **launch)


def case(name: str, rng: np.random.Generator) -> tuple[list[Any], int, np.ndarray]:
    """(arguments, which of them is the result, what it should be)"""
    if name == "saxpy":
        x, y = (rng.standard_normal(240, dtype=np.float32) for _ in range(2))
        return [x, y, 2.0, 200], 1, np.concatenate([2 * x[:200] + y[:200], y[200:]])
    if name == "matmul":
        a, b = (rng.standard_normal((24, 24), dtype=np.float32) for _ in range(2))
        return [a, b, np.full((24, 24), np.nan, np.float32), 24], 2, a.astype(np.float64) @ b
    if name == "row_sums":
        x = rng.standard_normal((6, 40), dtype=np.float32)
        return [x, np.full_like(x, np.nan), 6, 40], 1, np.repeat(x.astype(np.float64).sum(axis=1)[:, None], 40, axis=1)
    if name == "transpose":
        x = rng.standard_normal((2, 24, 16), dtype=np.float32)
        return [x, np.full((2, 16, 24), np.nan, np.float32), 24, 16], 1, 2 * x.transpose(0, 2, 1)
    x = rng.standard_normal((3, 32), dtype=np.float32)
    return [x, np.full_like(x, np.nan)], 1, x[:, ::-1]


@needs_gcc
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", KERNELS)
def test_a_converted_kernel_computes_the_same(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    kernel = converted(name)
    arguments, result, expected = case(name, rng)
    assert run_on_cpu(kernel, arguments, 160, tmp_path)
    np.testing.assert_allclose(arguments[result], expected, rtol=1e-5, atol=1e-5)


def test_records_say_what_a_veu_needs() -> None:
    matmul, row_sums, saxpy = converted("matmul"), converted("row_sums"), converted("saxpy")
    assert (matmul.task_count, matmul.threads, matmul.meeting) == (9, 64, 64)
    assert matmul.shared_bytes == 8 * 8 * 4 + 8 * 9 * 4
    assert row_sums.shared_bytes == 160 + 4
    assert (saxpy.threads, saxpy.meeting, saxpy.shared_bytes) == (48, 64, 0)
    assert saxpy.parameters == (("const float*", "x"), ("float*", "y"), ("float", "a"), ("int", "n"))
    assert "__restrict__" not in saxpy.text and "__ldg" not in saxpy.text


def test_threads_vote_only_where_some_may_leave() -> None:
    barrier = "__global__ void k(float* x) { x[0] = 0; __syncthreads(); }"
    for block, votes in ((64, "64u, false}"), (48, "64u, true}")):
        assert votes in convert_kernel(barrier, "k", grid=(1, 1, 1), block=(block, 1, 1)).text


@needs_gcc
def test_returns_of_lambdas_are_their_own(tmp_path: Path) -> None:
    source = "__global__ void k(int* x) { auto f = [](int i) { return 2 * i; }; x[threadIdx.x] = f(x[threadIdx.x]); }"
    x = np.arange(32, dtype=np.int32)
    assert run_on_cpu(convert_kernel(source, "k", grid=(1, 1, 1), block=(32, 1, 1)), [x], 32, tmp_path)
    np.testing.assert_array_equal(x, 2 * np.arange(32))


def test_the_call_brings_the_text_to_a_kernel() -> None:
    kernel = converted("reversed")
    x, y = argument("x", 96), argument("y", 96)
    pool = gpu_buffer((kernel.shared_bytes,), "uint8", "pool", "shared")

    def body(block: Expr, thread: Expr) -> Stmt:
        first = [tirx.address_of(tirx.BufferLoad(buffer, [index(0)])) for buffer in (x, y, pool)]
        return sequence(allocate(pool), call_task(kernel, first[:2], block, thread, first[2]))

    target = Target({"kind": "cuda", "arch": "sm_80"})
    function = primitive_function([x, y], launch(3, 32, body))
    with target:
        library = tvm.compile(tvm.IRModule({"main": function}), target=target)
    source = str(library.mod.imports[0].inspect_source())
    assert source.count(f"void {kernel.symbol}(") == 1
    places = ("(&(x_ptr[0]))", "(&(y_ptr[0]))", "((int)blockIdx.x)", "((int)threadIdx.x)", "(&(pool_ptr[0]))")
    assert f"{kernel.symbol}({', '.join(places)})" in source
    with pytest.raises(InputError, match="has 1 arguments"):
        call_task(kernel, [index(0)], index(0), index(0), index(0))


@needs_gcc
def test_without_votes_an_early_return_would_leave_the_others_waiting(tmp_path: Path, rng: np.random.Generator) -> None:
    kernel = converted("row_sums")
    arguments, *_ = case("row_sums", rng)
    plain = ConvertedKernel(**{name: getattr(kernel, name) for name in ConvertedKernel.__slots__} | {
        "text": kernel.text.replace("64u, true}", "64u, false}")
    })  # fmt: skip
    assert plain.text != kernel.text
    assert not run_on_cpu(plain, arguments, 160, tmp_path)


PERSISTENT = """
extern "C" __global__ void __launch_bounds__(160) persistent(float* x, float* y, float* z, int kernel, int task) {
  __shared__ __align__(16) unsigned char pool[%d];
  const int thread = threadIdx.x;
  switch (kernel) {
    case 0: %s(x, y, 2.f, 200, task, thread, pool); break;
    case 1: %s(x, y, z, 24, task, thread, pool); break;
    case 2: %s(x, y, 6, 40, task, thread, pool); break;
    case 3: %s(x, y, 24, 16, task, thread, pool); break;
    case 4: %s(x, y, task, thread, pool); break;
  }
}
"""


@needs_nvcc
@pytest.mark.slow
def test_nvcc_takes_all_in_one_kernel_with_one_pool() -> None:
    kernels = [converted(name) for name in KERNELS]
    pool = max(kernel.shared_bytes for kernel in kernels)
    text = "\n".join(kernel.text for kernel in kernels)
    text += PERSISTENT % (pool, *(kernel.symbol for kernel in kernels))
    compiled = compile_cuda(text, ("sm_75", "sm_80", "sm_90"))
    assert {use.architecture for use in compiled.uses} == {"sm_75", "sm_80", "sm_90"}
    for use in compiled.uses:
        assert use.shared_bytes - pool in range(1025)  # sm_90 keeps 1 KB for itself
        assert not use.spill_store_bytes


REFUSED = {
    "cooperative groups": "#include <cooperative_groups.h>\n__global__ void k(float* x) { }",
    "dynamic parallelism": "__global__ void k(float* x) { k<<<1, 1>>>(x); }",
    "texture reference": "texture<float, 1> t;\n__global__ void k(float* x) { x[0] = tex1Dfetch(t, 0); }",
    "is a template": "template <typename T> __global__ void k(T* x) { x[threadIdx.x] = 0; }",
    "cannot be moved": '__global__ void k(float* x) { asm volatile("bar.sync 0;"); }',
    "votes": "__global__ void k(int* x) { x[0] = __syncthreads_or(x[1]); }",
    "inner block": "__global__ void k(float* x) { { __shared__ float s[4]; s[0] = x[0]; } }",
    "size of its shared memory": "__global__ void k(float* x) { __shared__ Unknown s[4]; }",
    "returns early": "__global__ void k(int* x) { if (threadIdx.x > 3) return; x[0] = __shfl_sync(~0u, x[1], 0); }",
    "lambdas": "__global__ void k(int* x) { auto f = [&](int i) { return i; }; __syncthreads(); }",
    "a macro that returns": "#define STOP return\n__global__ void k(int* x) { STOP; }",
    "used outside of functions": "struct S { int f() { return threadIdx.x; } };\n__global__ void k(int* x) { }",
    "shared memory of function f": "__device__ void f() { __shared__ int s; }\n__global__ void k(int* x) { f(); }",
    "no __global__ function 'k'": "__global__ void other(float* x) { }",
    "a parameter of a form": "__global__ void k(float x[4]) { }",
    "never closed": "__global__ void k(float* x) { if (x) { }",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_meaning_in_a_schedule_is_refused(reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        convert_kernel(REFUSED[reason], "k", grid=(1, 1, 1), block=(32, 1, 1))


def test_warps_that_are_not_whole_cannot_exchange_values() -> None:
    source = "__global__ void k(int* x) { x[threadIdx.x] = __shfl_down_sync(0xffff, x[threadIdx.x], 1); }"
    with pytest.raises(InputError, match="the last warp is not whole"):
        convert_kernel(source, "k", grid=(1, 1, 1), block=(48, 1, 1))
    assert convert_kernel(source, "k", grid=(1, 1, 1), block=(64, 1, 1)).meeting == 64


def test_a_launch_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="1 to 1024 threads"):
        convert_kernel(SAXPY, "saxpy", grid=(0, 1, 1), block=(48, 1, 1))


@pytest.mark.parametrize("source", [SAXPY, MATMUL, ROW_SUMS, TRANSPOSE, REVERSED])
def test_tokens_joined_are_the_source_without_comments(source: str) -> None:
    text = text_of(tokens_of(source))
    assert _solid(text) == _solid(source)
    assert "//" not in text and len(text.splitlines()) == len(source.splitlines())


def _solid(text: str) -> list[str]:
    return [token.text for token in tokens_of(text) if token.kind != "space"]


def test_functions_are_found_with_what_is_said_of_them() -> None:
    found = {function.name: function for function in functions_of(tokens_of(REVERSED + TRANSPOSE))}
    assert list(found) == ["last", "turn", "unrelated", "reversed", "start", "twice", "transpose"]
    assert "template" in found["twice"].words and "__global__" in found["reversed"].words
