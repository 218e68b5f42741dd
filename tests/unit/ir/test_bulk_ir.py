"""Kernels with bulk copies go through stock TVM's passes and the CUDA compiler as they were written."""

from __future__ import annotations

import re

import pytest

from tests.unit.compilers import needs_nvcc
from tests.unit.verify.simt.bulk_kernels import Matmul
from tvm_ext._tvm import IRModule, Target, tvm
from tvm_ext.toolchains.cuda_toolchain import compile_cuda

ARCHITECTURE = "sm_90a"
KERNELS = [
    Matmul(stages=3, release=release, scope=scope)
    for release in ("barrier", "mbarrier")
    for scope in ("shared", "shared.dyn")
]


def source_of(kernel: Matmul) -> str:
    target = Target({"kind": "cuda", "arch": ARCHITECTURE})
    library = tvm.compile(IRModule({"main": kernel.function()}), target=target)
    (module,) = library.mod.imports
    return str(module.inspect_source())


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_source_has_what_was_written(kernel: Matmul) -> None:
    source = source_of(kernel)
    body = source[source.rindex('extern "C" __global__') :]
    assert body.count("__syncthreads") == (2 if kernel.release == "barrier" else 1), "none is added by ThreadSync"
    loops = re.findall(r"for \(int (\w+)", body)
    assert loops.count("ko") == 1, "the main loop stays one rolled loop"
    assert body.count("cp_async_bulk") == 4, "A and B, in the prologue and in the main loop"
    if kernel.scope == "shared":
        assert re.search(r"__shared__ alignas\(8\) uint64_t full_ptr\[3\]", body)
    else:
        assert re.search(r"__align__\((8|16|32|64|128)\) uchar buf_dyn_shmem_ptr", body)
        assert "((uint64_t*)buf_dyn_shmem_ptr)[" in body, "at a multiple of 8 bytes from there"


@needs_nvcc
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_it_compiles_without_spills(kernel: Matmul) -> None:
    (use,) = compile_cuda(source_of(kernel), [ARCHITECTURE]).uses
    assert not use.spills and use.stack_bytes == 0
    assert use.register_count <= 128
