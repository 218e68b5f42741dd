"""Every operator of Roller's, ALCOP's and Bolt's lists as a kernel for GPUs that need not be present.

    python benchmarks/gpu/sweep.py                         # V100, A100 and H200
    python benchmarks/gpu/sweep.py --device nvidia-a100 C0 A17 --no-compile

Per operator and device: the path taken and why, CPU time to construct and emit, what nvcc made of it beside the plan
(registers, spills, shared memory), and what the SIMT interpreter counts in its first threadblocks (bank conflicts,
sectors per request, findings). Prints a summary and the exceptions, writes
``benchmarks/results/<date>-gpu-sweep-<device>.json``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import typer
from _common import current_environment, progress, result_path, show, write_results
from cases import Case, Tensor, roller
from lists import alcop, bolt
from programs import program
from rich.table import Table

from tvm_ext._tvm import IRModule, Target, tvm
from tvm_ext.cuda_toolchain import compile_many, find_nvcc
from tvm_ext.device_db import device_for_target
from tvm_ext.errors import TvmExtError
from tvm_ext.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.plan import CHOICE, KernelChoice, from_json
from tvm_ext.ptxas_report import PlannedUse, compare
from tvm_ext.testing import simt
from tvm_ext.testing.verification import random_array
from tvm_ext.tir_passes.construct_gpu_kernels import construct_gpu_kernel

WORKLOADS = Path(__file__).resolve().parent.parent / "workloads"
DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")
OLDEST = (7, 5)
"""The oldest capability that CUDA 13 compiles for: kernels for a V100 are compiled for it instead, and said to be."""

COUNTED_BLOCKS = (0, 1)
COUNTED_ELEMENTS = 4_000_000
"""An operator with larger tensors is counted at a smaller batch: the interpreter keeps the state of every element."""


@dataclass(kw_only=True)
class Outcome:
    """One operator on one device."""

    id: str
    group: str
    dtype: str
    path: str
    reason: str
    tensor_cores: bool
    construct_ms: float
    launches: int = 0
    threads: int = 0
    planned_registers: int = 0
    planned_shared_bytes: int = 0
    architecture: str = ""
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    remarks: list[str] = field(default_factory=list)
    counted_shape: str = ""
    conflicts: int | None = None
    wavefronts: int | None = None
    load_efficiency: float | None = None
    findings: list[str] = field(default_factory=list)
    error: str = ""


def operators() -> list[Case]:
    """All three lists."""
    return [
        *roller(WORKLOADS / "roller_ops.csv"),
        *alcop(WORKLOADS / "alcop_ops.csv"),
        *bolt(WORKLOADS / "bolt_ops.csv"),
    ]


def build(case: Case, device: DeviceSpec) -> tuple[Outcome, Any]:
    """Construct and emit; the function is None where that was refused."""
    func = program(case)
    outcome = Outcome(
        id=case.id, group=case.group, dtype=case.inputs[0].dtype, path="none", reason="", tensor_cores=False,
        construct_ms=0.0,
    )  # fmt: skip
    start = time.process_time()
    try:
        kernel = construct_gpu_kernel(func, case.id, device, BuildOptions())
    except TvmExtError as error:
        outcome.error = str(error)
        return outcome, None
    outcome.construct_ms = (time.process_time() - start) * 1e3
    choice = from_json(KernelChoice, str(kernel.attrs[CHOICE]))
    outcome.path, outcome.reason = choice.path, choice.reason
    outcome.tensor_cores = " on matrix units " in choice.reason
    outcome.launches = sum(plan.launches for plan in choice.gpu)
    outcome.threads = max((plan.threads for plan in choice.gpu), default=0)
    outcome.planned_registers = max((plan.register_count for plan in choice.gpu), default=0)
    outcome.planned_shared_bytes = max((plan.shared_bytes for plan in choice.gpu), default=0)
    return outcome, kernel


def cuda_source(kernel: Any, target: Any) -> str:
    """The CUDA C++ of a scheduled function."""
    module = IRModule({"main": kernel.with_attr("global_symbol", "main")})
    return str(tvm.compile(module, target=target).mod.imports[0].inspect_source())


def compare_with_plan(outcomes: list[Outcome], sources: list[str], device: DeviceSpec) -> None:
    """Compile everything and note registers, spills and shared memory beside the plan."""
    capability = max(device.compute_capability or OLDEST, OLDEST)
    architecture = f"sm_{capability[0]}{capability[1]}"
    for outcome, result in zip(outcomes, compile_many(sources, [architecture]), strict=True):
        outcome.architecture = architecture
        if isinstance(result, TvmExtError):
            outcome.error = str(result)
            continue
        uses = result.uses_on(architecture)
        outcome.registers = max(use.register_count for use in uses)
        outcome.spill_bytes = sum(use.spill_store_bytes + use.spill_load_bytes for use in uses)
        outcome.shared_bytes = max(use.shared_bytes for use in uses)
        plan = PlannedUse(
            threads=outcome.threads,
            shared_bytes=outcome.planned_shared_bytes,
            register_count=outcome.planned_registers,
            register_file_count=device.registers_per_unit or 65536,
            dynamic_shared=outcome.planned_shared_bytes > (device.layer("L1").capacity_bytes or 0),
        )
        for use in uses:
            outcome.remarks += [item.text for item in compare(use, plan) if item.state == "problem"]


def smaller(case: Case) -> Case:
    """The case at a batch for which no tensor exceeds `COUNTED_ELEMENTS`, where its first dimension is one."""

    def elements(tensor: Tensor) -> int:
        count = 1
        for extent in tensor.shape:
            count *= extent
        return count

    x, *others = case.inputs
    largest = max(elements(x), elements(case.output))
    if largest <= COUNTED_ELEMENTS or x.shape[0] != case.output.shape[0]:
        return case
    batch = max(1, x.shape[0] * COUNTED_ELEMENTS // largest)
    if x.shape[0] > 1024:
        batch = max(256, batch // 256 * 256)  # rows of a product, kept a multiple of any tile
    shrunk = [replace(t, shape=(min(batch, t.shape[0]), *t.shape[1:])) for t in (x, case.output)]
    if (
        len(others) == 1
        and len(others[0].shape) == len(x.shape)
        and others[0].shape[0] == x.shape[0]
        and len(x.shape) == 3
    ):
        others = [replace(others[0], shape=(min(batch, x.shape[0]), *others[0].shape[1:]))]  # a batched product
    return replace(case, inputs=(shrunk[0], *others), output=shrunk[1])


def count(case: Case, outcome: Outcome, kernel: Any, device: DeviceSpec) -> None:
    """Run some threadblocks in the interpreter and note what it finds and counts.

    Of several launches the first alone: the later ones read what all blocks of the first have written.
    """
    small = smaller(case)
    if small is not case:
        kernel = construct_gpu_kernel(program(small), case.id, device, BuildOptions())
    kernels = simt.lower(kernel.with_attr("global_symbol", "main"), device.name)[:1]
    blocks = [b for b in COUNTED_BLOCKS if b < max((plan.blocks for plan in _plans(kernel)), default=1)]
    generator = np.random.default_rng(case.seed)
    arrays = {item.name: random_array(item.shape, item.dtype, generator) for item in small.inputs}
    result = simt.run(kernels, arrays, device=device.name, blocks=blocks)
    outcome.counted_shape = " ".join("x".join(map(str, item.shape)) for item in small.inputs)
    outcome.conflicts = result.counters.bank_conflicts
    outcome.wavefronts = result.counters.total("wavefronts", scope="shared")
    outcome.load_efficiency = result.counters.sector_efficiency(store=False)
    outcome.findings = [str(item) for item in result.findings]


def _plans(kernel: Any) -> tuple[Any, ...]:
    return from_json(KernelChoice, str(kernel.attrs[CHOICE])).gpu


# --- summaries ----------------------------------------------------------------------------------------------------
def summary(device: DeviceSpec, outcomes: list[Outcome]) -> Table:
    table = Table(title=f"{device.name}: {len(outcomes)} operators")
    for column in (
        "list",
        "operators",
        "ours",
        "tensor cores",
        "ms median",
        "compiled",
        "spills",
        "no conflicts",
        "sectors >= 95 %",
    ):
        table.add_column(column)
    groups = dict.fromkeys(item.group for item in outcomes)
    for name, part in [*((g, [o for o in outcomes if o.group == g]) for g in groups), ("all", outcomes)]:
        counted = [o for o in part if o.conflicts is not None]
        table.add_row(
            name,
            str(len(part)),
            str(sum(o.path == "rtile" for o in part)),
            str(sum(o.tensor_cores for o in part)),
            f"{statistics.median(o.construct_ms for o in part):.0f}",
            str(sum(o.registers is not None for o in part)),
            str(sum(bool(o.spill_bytes) for o in part)),
            f"{sum(o.conflicts == 0 for o in counted)} of {len(counted)}",
            f"{sum((o.load_efficiency or 0) >= 0.95 for o in counted)} of {len(counted)}",
        )
    return table


def exceptions(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """One line for whatever is not as it should be."""
    for item in outcomes:
        said = [item.error] if item.error else []
        said += [] if item.path == "rtile" else [f"{item.path}: {item.reason}"]
        said += item.remarks + item.findings[:1]
        if item.conflicts:
            said.append(f"{item.conflicts} conflicts in {item.wavefronts} wavefronts")
        for line in said:
            yield f"{item.id} ({item.group}): {line.splitlines()[0]}"


def main(
    ids: Annotated[list[str] | None, typer.Argument(help="Operators by id; all of them.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Devices of the tables.")] = None,
    compile: Annotated[bool, typer.Option(help="Compile with nvcc.")] = True,
    interpret: Annotated[bool, typer.Option(help="Count in the SIMT interpreter.")] = True,
) -> None:
    """Construct, emit, compile and count."""
    if compile:
        find_nvcc()
    environment = current_environment()
    chosen = [case for case in operators() if not ids or case.id in ids]
    for name in device or DEVICES:
        spec, target = device_for_target(name)
        outcomes, sources, compiled = [], [], []
        with progress() as say:
            for case in chosen:
                say(f"{name}: {case.id}")
                outcome, kernel = build(case, spec)
                outcomes.append(outcome)
                if kernel is None:
                    continue
                if compile:
                    sources.append(cuda_source(kernel, Target(target, host="llvm")))
                    compiled.append(outcome)
                if interpret:
                    count(case, outcome, kernel, spec)
            say(f"{name}: nvcc")
            if compile:
                compare_with_plan(compiled, sources, spec)
        path = result_path(f"gpu-sweep-{name}", environment)
        write_results(path, "gpu-sweep", environment, outcomes)
        show(summary(spec, outcomes))
        for line in exceptions(outcomes):
            print(line)
        print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
