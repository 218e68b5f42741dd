"""Write forms of our kernels for the benchmark's cases as batches of jobs, for the runner on the machine with the GPU.

    python benchmarks/gpu/jobs.py build/jobs --device nvidia-h200 --only gemm_float16_1024 --candidates 10

There: ``python3 gpu-bundle/run.py --jobs jobs``. Here again: ``python benchmarks/gpu/import_results.py jobs``. A batch
is a case, whose kernels take turns under the keys by which builds look for their times. Results are compared where
NumPy computes them in seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy_references
import typer
from bundle import WORKLOAD, export
from cases import Case, Tensor
from lists import standard_cases
from model_graphs import choose
from programs import function_name, program

from tvm_ext._tvm import IRModule, Target, save_json
from tvm_ext.autotune.batch_files import write_batch
from tvm_ext.autotune.kernel_host import KernelError, draw_inputs
from tvm_ext.autotune.turns import Artifact, BatchEntry
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import CompileError, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.kernel_job import JobArgument, KernelJob, TimingPlan
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.tir_passes.construct_kernels import candidates
from tvm_ext.toolchains.cuda_export import architecture_of
from tvm_ext.tuning.compile_gpu import lowered_for_gpu
from tvm_ext.tuning.kernels import measured_as


def job_of(case: Case, workload: MeasuredWorkload, configuration: str, kernel: Any, target: Any) -> KernelJob:
    """A form of ``case``; its inputs are drawn from the case's seed."""
    name = function_name(case)
    return KernelJob(
        workload=workload,
        configuration=configuration,
        module=str(save_json(IRModule({name: kernel.with_attr("global_symbol", name)}))),
        function=name,
        target=str(target),
        arguments=tuple(_argument(item) for item in (*case.inputs, case.output)),
        seed=case.seed,
        depth=case.terms,
    )


def _argument(item: Tensor) -> JobArgument:
    return JobArgument(shape=item.shape, dtype=item.dtype)


def write_jobs(case: Case, device: DeviceSpec, count: int, folder: Path, cache: KernelCache) -> tuple[Path | None, str]:
    """A batch with up to ``count`` forms of ``case``, None where there is none; and what is to be said of it."""
    target = Target(dict(device.target))
    architecture = architecture_of(str(target))
    if architecture is None:
        raise OptionError(f"{device.name} is no CUDA device.", "name one with --device, see `tvm-ext devices`")
    name, func = function_name(case), program(case)
    entries, failed = [], 0
    with tempfile.TemporaryDirectory() as made:
        expected: Path | None = None
        for number, (_, kernel) in enumerate(candidates(func, device, count, name=name)):
            known = measured_as(func, kernel, name, device)
            if known is None:
                continue
            job = job_of(case, *known, kernel, target)
            library = Path(made) / f"kernel_{number}.so"
            try:
                export(lowered_for_gpu(job), library, [architecture], cache)
            except (CompileError, KernelError, RuntimeError, ValueError):
                failed += 1
                continue
            expected = expected or _expected(case, job, Path(made) / "expected.npz")
            entries.append(BatchEntry(Artifact(job, library, expected)))
        said = f"{len(entries)} forms, {failed} do not compile" + ("" if expected else "; results are not compared")
        return (write_batch(folder, entries, TimingPlan()) if entries else None), said


def _expected(case: Case, job: KernelJob, path: Path) -> Path | None:
    """The file with the exact result; None where NumPy would take minutes, or knows no such operator."""
    try:
        result = numpy_references.reference(case, draw_inputs(job))
    except NotImplementedError:
        return None
    np.savez(path, result)
    return path


def main(
    folder: Annotated[Path, typer.Argument(help="gets a folder batch-<n> for each case")],
    device: Annotated[str, typer.Option(help="row of the device tables to construct for")] = "nvidia-h200",
    only: Annotated[list[str] | None, typer.Option(help="ids or groups of cases")] = None,
    count: Annotated[int, typer.Option("--candidates", help="forms of our kernel per case")] = 10,
) -> None:
    """Compile forms of kernels into FOLDER."""
    chosen, _ = choose(standard_cases(WORKLOAD), {}, only or [])
    cache = KernelCache.for_build(BuildOptions())
    for case in chosen:
        batch, said = write_jobs(case, lookup(device), count, folder, cache)
        print(f"{case.id}: {batch or 'no batch'}, {said}", flush=True)


if __name__ == "__main__":
    typer.run(main)
