"""The device functions of blocks that wait for each other: their text says the orders, and compilers take it."""

from __future__ import annotations

import pytest

from tests.support.opencl_sync import opencl_text
from tests.support.simt.persistent_kernels import PersistentKernel
from tests.unit.compilers import needs_nvcc
from tests.unit.verify.simt.test_persistent import TICKETS
from tvm_ext._tvm import Target, tvm
from tvm_ext.ir.device_sync import ALL, SETTLE, WAIT_LIMIT, SyncOrders, cuda_texts
from tvm_ext.toolchains.cuda_toolchain import compile_cuda

ARCHITECTURES = ("sm_75", "sm_80", "sm_90")


def test_the_orders_are_in_the_text() -> None:
    assert "ld.acquire.gpu" in cuda_texts()["tvm_ext_wait_until"]
    assert "red.release.gpu" in cuda_texts()["tvm_ext_arrive"]
    weak = SyncOrders(wait="relaxed", arrive="relaxed")
    assert "acquire" not in "".join(cuda_texts(weak).values()) and "release" not in "".join(cuda_texts(weak).values())
    assert "memory_order_acquire" in opencl_text() and "memory_order_release" in opencl_text()


def source(kernel: PersistentKernel) -> str:
    """CUDA as stock TVM prints it, with the functions that the calls bring along."""
    target = Target({"kind": "cuda", "arch": "sm_80"})
    with target:
        library = tvm.compile(tvm.IRModule({"main": kernel.function()}), target=target)
    return str(library.mod.imports[0].inspect_source())


def test_calls_bring_their_text_once() -> None:
    text = source(TICKETS)
    for name in (name for name in ALL if name != SETTLE):  # which kernels of schedules call
        assert text.count(f"int {name}(") == 1
        assert text.count(f"{name}((&(state_ptr[") == (2 if name == "tvm_ext_take" else 1)


CALLER = """
extern "C" __global__ void caller(int* state) {
  const int epoch = tvm_ext_read_epoch(state), taken = tvm_ext_take(state + 1, epoch, 5);
  tvm_ext_wait_until(state + 2, epoch, 3, tvm_ext_settle(state + 4, epoch, gridDim.x) ? 3 : taken);
  tvm_ext_arrive(state + 3, 1);
  tvm_ext_end_run(state);
}
"""


@needs_nvcc
@pytest.mark.parametrize("architectures", [("sm_75",), pytest.param(ARCHITECTURES, marks=pytest.mark.slow)])
def test_nvcc_takes_them(architectures: tuple[str, ...]) -> None:
    texts = "".join(cuda_texts().values())
    endless, limited = (
        compile_cuda(texts + CALLER, architectures, extra_flags=flags) for flags in ((f"-D{WAIT_LIMIT}=0",), ())
    )
    assert {use.architecture for use in limited.uses} == set(architectures)
    assert b"waits for the counter" in limited.image  # by default
    assert b"waits for the counter" not in endless.image


@needs_nvcc
@pytest.mark.slow
def test_nvcc_takes_a_persistent_kernel() -> None:
    compiled = compile_cuda(source(TICKETS), ARCHITECTURES)
    assert {use.architecture for use in compiled.uses} == set(ARCHITECTURES)
    assert not any(use.spill_store_bytes or use.spill_load_bytes for use in compiled.uses)
