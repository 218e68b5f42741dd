"""From a job to a shared library, and to what its kernel should compute: what builders do, in whichever process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tvm_ext._tvm import IRModule, PassContext, Target, load_json, tensor, tvm
from tvm_ext.errors import TvmExtError
from tvm_ext.records.kernel_job import KernelJob
from tvm_ext.support.files import temporary_folder

from .kernel_host import KERNEL_ERRORS, KernelError, draw_inputs, first_line

HOST = "llvm"


def compile_job(job: KernelJob) -> bytes:
    """The shared library of a job for a CPU, or for what stock TVM compiles itself; raises KernelError.

    A builder is given this or another function of the same form, which must be a module's, so that it can be pickled.
    """
    try:
        return _library(job.module, job.target)
    except (*KERNEL_ERRORS, TvmExtError) as error:
        raise KernelError("compile_failed", first_line(error)) from error


def reference_results(job: KernelJob) -> bytes:
    """What the job's kernel should compute, as the bytes of a file for `kernel_host.compare`; raises KernelError."""
    import io

    try:
        with temporary_folder("reference") as folder:
            path = folder / "reference.so"
            path.write_bytes(_library(job.reference, HOST))
            module = tvm.runtime.load_module(str(path))
            inputs = [tensor(array) for array in draw_inputs(job)]
            results = [tvm.runtime.empty(result.shape, result.dtype) for result in job.results]
            module[job.function](*inputs, *results)
            arrays = [result.numpy() for result in results]
    except (*KERNEL_ERRORS, TvmExtError) as error:
        raise KernelError("compile_failed", f"the reference: {first_line(error)}") from error
    wide = [array.astype(np.float64) if array.dtype.kind not in "iub" else array for array in arrays]
    file = io.BytesIO()
    np.savez(file, *wide)
    return file.getvalue()


def _library(module: str, target: str) -> bytes:
    loaded = load_json(module)
    if not isinstance(loaded, IRModule):
        raise KernelError("compile_failed", "the job's module is no IRModule")
    with PassContext(), Target(target) as known:
        built = tvm.tirx.build(loaded, target=known, pipeline="default")
    with temporary_folder("build") as folder:
        path: Path = folder / "kernel.so"
        built.export_library(str(path))
        return path.read_bytes()
