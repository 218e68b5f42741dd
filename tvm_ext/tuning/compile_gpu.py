"""Libraries of jobs for GPUs: by the passes that builds use, with machine code in them for a GPU that is elsewhere."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tvm_ext._tvm import IRModule, Module, PassContext, Sequential, Target, load_json, tvm
from tvm_ext.autotune.kernel_host import KERNEL_ERRORS, KernelError, first_line
from tvm_ext.errors import TvmExtError
from tvm_ext.records.kernel_job import KernelJob
from tvm_ext.support.files import temporary_folder
from tvm_ext.tir_passes.guard_indices import GuardIndices
from tvm_ext.toolchains.cuda_export import architecture_of, write_imports


def compile_gpu_job(job: KernelJob) -> bytes:
    """The shared library of a job for a GPU; raises KernelError.

    A CUDA kernel's carries machine code for the architecture of the job's target, so that the machine with the GPU
    needs a driver and TVM's runtime alone; without a CUDA compiler here it carries source.
    """
    try:
        with temporary_folder("gpu_job") as folder:
            return _library(job, folder)
    except (*KERNEL_ERRORS, TvmExtError) as error:
        raise KernelError("compile_failed", first_line(error)) from error


def lowered_for_gpu(job: KernelJob) -> Module:
    """The job's kernel as builds lower it: with its indices guarded against what stock TVM simplifies wrongly."""
    loaded = load_json(job.module)
    if not isinstance(loaded, IRModule):
        raise KernelError("compile_failed", "the job's module is no IRModule")
    with PassContext(), Target(job.target) as target:
        return tvm.tirx.build(Sequential([GuardIndices()])(loaded), target=target, pipeline="default")


def _library(job: KernelJob, folder: Path) -> bytes:
    built, architecture = lowered_for_gpu(job), architecture_of(job.target)
    architectures = [] if architecture is None else [architecture]
    path = folder / "kernel.so"
    pack = partial(_pack, architectures, folder)
    built.export_library(str(path), workspace_dir=str(folder), fpack_imports=pack)
    return path.read_bytes()


def _pack(
    architectures: list[str], folder: Path, module: Module, _is_system: bool, _prefix: str, _workspace: str
) -> str:
    return str(write_imports(module, architectures, folder))
