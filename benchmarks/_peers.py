"""Contenders that benchmarks add to those of `tvm-ext bench`: NumPy for a matrix product, the FMA units."""

from __future__ import annotations

import ctypes

import numpy as np
import tvm

from tvm_ext.bench.contenders import INSTALL_PEERS, Contender
from tvm_ext.bench.environment import Placement
from tvm_ext.devices import microbench_kernels
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.support.arrays import Array

NUMPY = "numpy"
PEAK = "fma_peak"
"""Multiply-adds in registers alone: what the cores can do at most, in the same minutes as the networks."""

PEAK_STEPS = 4_000_000
"""Of each chain of multiply-adds of `prepare_peak`: some 10 ms, long against the start of the threads."""

_CPU_SET_BYTES = 128
"""glibc's ``cpu_set_t``: a bit for each of 1024 cores."""


def prepare_numpy_matmul(left: Array, right: Array, threads: int, placement: Placement | None = None) -> Contender:
    """`np.matmul` of two matrices into an array that is there already, by NumPy's own BLAS on ``threads`` threads.

    An OpenBLAS has its workers bound as ``placement`` says. The number of threads stays set for the process.
    Raises UnsupportedEnvironmentError where threadpoolctl is not installed, which sets it.
    """
    try:
        import threadpoolctl
    except ImportError as error:
        raise UnsupportedEnvironmentError("comparing with NumPy needs threadpoolctl.", INSTALL_PEERS) from error
    blas = threadpoolctl.ThreadpoolController().select(user_api="blas")
    blas.limit(limits=threads)
    for library in blas.info():
        if placement is not None and library["internal_api"] == "openblas":
            place_openblas(library["filepath"], placement)
    result = np.empty((left.shape[0], right.shape[1]), left.dtype)

    def run() -> None:
        np.matmul(left, right, out=result)

    return Contender(name=NUMPY, import_s=0.0, build_s=0.0, run=run, outputs=lambda: [result])


def prepare_peak(threads: int) -> tuple[Contender, float]:
    """A contender that only multiplies and adds, on all threads, and the float32 operations of one of its runs.

    It has no outputs, being a limit and no way to compute a network.
    """
    device, target = device_for_target("llvm")
    lanes, chains = device.teu_lanes, min(16, device.register_limit - 2)
    kernel = microbench_kernels.chain_kernel("float32", lanes, chains, threads, PEAK_STEPS)
    built = tvm.compile(tvm.IRModule({"main": kernel}), target=target)["main"]
    operands = tvm.runtime.tensor(np.full((2, lanes), 0.5, "float32"))  # x / 2 + 1 / 2 stays finite
    sums = tvm.runtime.tensor(np.zeros((threads, chains * lanes), "float32"))
    contender = Contender(name=PEAK, import_s=0.0, build_s=0.0, run=lambda: built(operands, sums), outputs=list)
    return contender, 2.0 * lanes * chains * PEAK_STEPS * threads


def place_openblas(library: str, placement: Placement) -> bool:
    """Bind the workers of the OpenBLAS in file ``library``; False where it has no entry for that or refuses.

    OpenBLAS counts its workers from 0; the calling thread comes last.
    """
    bind = getattr(ctypes.CDLL(library), "openblas_setaffinity", None)
    if bind is None:
        return False
    bind.argtypes = (ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p)
    bind.restype = ctypes.c_int
    masks = [_cpu_set(core) for core in placement.worker_cores]
    return all(bind(worker, _CPU_SET_BYTES, mask) == 0 for worker, mask in enumerate(masks))


def _cpu_set(core: int) -> ctypes.Array[ctypes.c_char]:
    """Core 9 is bit 1 of byte 1."""
    return ctypes.create_string_buffer((1 << core).to_bytes(_CPU_SET_BYTES, "little"), _CPU_SET_BYTES)
