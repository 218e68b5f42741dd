"""Every operator of Roller's, ALCOP's and Bolt's lists as a kernel for GPUs that need not be present.

    python benchmarks/gpu/sweep.py                         # V100, A100 and H200
    python benchmarks/gpu/sweep.py --device nvidia-a100 C0 A17 --no-compile

Per operator and device: the path taken and why, CPU time to construct and emit, what nvcc made of it beside the plan
(registers, spills, shared memory), and what the SIMT interpreter counts in its first threadblocks (bank conflicts,
sectors per request, findings). Prints a summary and the exceptions, writes
``benchmarks/results/<date>-gpu-sweep-<device>.json``, in which the results of chosen operators replace their own.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, earlier_results, progress, result_path, show, write_results
from cases import Case, roller
from lists import alcop, bolt
from planned_use import PlannedUse, compare
from programs import program
from rich.table import Table
from sweep_count import count_blocks, is_aligned

from tvm_ext._tvm import IRModule, Target, tvm
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import CompileError, TvmExtError
from tvm_ext.options import BuildOptions, usable_core_count
from tvm_ext.records.choice import CHOICE, OWN_PATHS, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.toolchains.cuda_toolchain import CompiledCuda, compile_cuda, find_nvcc

WORKLOADS = Path(__file__).resolve().parent.parent / "workloads"
DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200")
OLDEST = (7, 5)
"""The oldest capability that CUDA 13 compiles for: kernels for a V100 are compiled for it instead, and said to be."""

FULL = 0.95
"""Share of the bytes of the sectors that a kernel loads which it asked for, from which on they count as whole."""


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
    aligned: bool = False  # rows of all inputs are whole memory sectors
    conflicts: int | None = None
    wavefronts: int | None = None
    load_efficiency: float | None = None  # of 32-byte sectors
    store_efficiency: float | None = None
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
        construct_ms=0.0, aligned=is_aligned(case),
    )  # fmt: skip
    start = time.process_time()
    try:
        kernel = construct_kernel(func, case.id, device, BuildOptions(enable_pipelining=False))
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


def compile_many(sources: list[str], architecture: str) -> list[CompiledCuda | TvmExtError]:
    """Each of ``sources``, on all cores; where one fails, its error stands in its place."""

    def attempt(source: str) -> CompiledCuda | TvmExtError:
        try:
            return compile_cuda(source, [architecture])
        except CompileError as error:
            return error

    with ThreadPoolExecutor(usable_core_count()) as pool:
        return list(pool.map(attempt, sources))


def compare_with_plan(outcomes: list[Outcome], sources: list[str], device: DeviceSpec) -> None:
    """Compile everything and note registers, spills and shared memory beside the plan."""
    capability = max(device.compute_capability or OLDEST, OLDEST)
    architecture = f"sm_{capability[0]}{capability[1]}"
    for outcome, result in zip(outcomes, compile_many(sources, architecture), strict=True):
        outcome.architecture = architecture
        if isinstance(result, TvmExtError):
            outcome.error = str(result)
            continue
        uses = result.uses
        outcome.registers = max(use.register_count for use in uses)
        outcome.spill_bytes = sum(use.spill_store_bytes + use.spill_load_bytes for use in uses)
        outcome.shared_bytes = max(use.shared_bytes for use in uses)
        plan = PlannedUse(
            threads=outcome.threads,
            shared_bytes=outcome.planned_shared_bytes,
            register_count=outcome.planned_registers,
            device=device,
            dynamic_shared=outcome.planned_shared_bytes > (device.layer("L1").capacity_bytes or 0),
        )
        for use in uses:
            outcome.remarks += [item.text for item in compare(use, plan) if item.state == "problem"]


def count(case: Case, outcome: Outcome, kernel: Any, device: DeviceSpec) -> None:
    """Run some threadblocks in the interpreter and note what it finds and counts."""
    result = count_blocks(case, kernel, device)
    outcome.conflicts = result.counters.bank_conflicts
    outcome.wavefronts = result.counters.total("wavefronts", scope="shared")
    outcome.load_efficiency = result.counters.sector_efficiency(store=False)
    outcome.store_efficiency = result.counters.sector_efficiency(store=True)
    outcome.findings = [str(item) for item in result.findings]


# --- summaries ----------------------------------------------------------------------------------------------------
def loads_whole_sectors(outcome: Outcome) -> bool:
    """Whether at least 95 % of what moves from global memory was asked for."""
    return outcome.load_efficiency is None or outcome.load_efficiency >= FULL


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
        "of aligned",
    ):
        table.add_column(column)
    groups = dict.fromkeys(item.group for item in outcomes)
    for name, part in [*((g, [o for o in outcomes if o.group == g]) for g in groups), ("all", outcomes)]:
        counted = [o for o in part if o.conflicts is not None]
        whole = [o for o in counted if loads_whole_sectors(o)]
        table.add_row(
            name,
            str(len(part)),
            str(sum(o.path in OWN_PATHS for o in part)),
            str(sum(o.tensor_cores for o in part)),
            f"{statistics.median(o.construct_ms for o in part):.0f}",
            str(sum(o.registers is not None for o in part)),
            str(sum(bool(o.spill_bytes) for o in part)),
            f"{sum(o.conflicts == 0 for o in counted)} of {len(counted)}",
            f"{len(whole)} of {len(counted)}",
            f"{sum(o.aligned for o in whole)} of {sum(o.aligned for o in counted)}",
        )
    return table


def exceptions(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """One line for whatever is not as it should be."""
    for item in outcomes:
        said = [item.error] if item.error else []
        said += [] if item.path in OWN_PATHS else [f"{item.path}: {item.reason}"]
        said += item.remarks + item.findings[:1]
        if item.conflicts:
            said.append(f"{item.conflicts} conflicts in {item.wavefronts} wavefronts")
        if item.aligned and not loads_whole_sectors(item):
            said.append(f"uses {item.load_efficiency:.0%} of the sectors that it loads")
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
        path = result_path(f"gpu-sweep-{name}", environment)
        before = earlier_results(path, environment) if ids else []
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
        write_results(path, "gpu-sweep", environment, _with_others(before, outcomes))
        show(summary(spec, outcomes))
        for line in exceptions(outcomes):
            print(line)
        print(f"written: {path}")


def _with_others(before: Sequence[dict[str, Any]], outcomes: list[Outcome]) -> list[Outcome]:
    """``outcomes`` in place of those of the same operators in ``before``, in its order; the others stay."""
    fresh = {item.id: item for item in outcomes}
    kept = [fresh.pop(record["id"], None) or Outcome(**record) for record in before]
    return [*kept, *fresh.values()]


if __name__ == "__main__":
    typer.run(main)
