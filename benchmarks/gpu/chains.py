"""Pairs of products of Bolt's Tables 1 and 2 as one GPU kernel each, for devices that need not be present.

    python benchmarks/gpu/chains.py                        # T4, A100 and H200
    python benchmarks/gpu/chains.py --device nvidia-a100 --no-compile

Per row and device: what the model decides and why, the kernel, what nvcc made of it (registers, spills), and times that
one model predicts of one kernel and of one for each product, and the least of the latter (each one's roof, a launch),
beside the speed-up that the paper measured on a T4. Nothing here is measured. Writes
``benchmarks/results/<date>-gpu-chains.json``; `bundle.py` carries the same cases to a GPU.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, progress, result_path, show, write_results
from cases import Case
from lists import bolt_chains
from programs import program
from rich.table import Table

from tvm_ext._tvm import IRModule, Target, tvm
from tvm_ext.analysis.computations import read_operator
from tvm_ext.cost.gpu_chain import ChainUnits, ProductChain, separate_s
from tvm_ext.cost.gpu_chain_tiles import construct_chain
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.plan.gpu_chain import ChainGroup, with_chains
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.toolchains.cuda_toolchain import compile_cuda

WORKLOAD = Path(__file__).resolve().parent.parent / "workloads" / "bolt_ops.csv"
DEVICES = ("nvidia-t4", "nvidia-a100", "nvidia-h200")


@dataclass(kw_only=True)
class Verdict:
    """One row on one device; times in microseconds, all predicted."""

    id: str
    shape: str
    device: str
    paper_speedup: float
    taken: bool
    reason: str
    fused_us: float | None = None
    bound: str = ""
    apart_us: float | None = None
    least_apart_us: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None

    @property
    def speedup(self) -> float | None:
        return self.apart_us / self.fused_us if self.apart_us and self.fused_us else None


def apart_s(chain: ProductChain, device: DeviceSpec, units: ChainUnits) -> float:
    """Time of a kernel for each product by the model of one kernel for all: what residence alone is worth.

    A product whose columns no threadblock holds is taken at its roof.
    """
    total = 0.0
    for one in chain.singles:
        ranked = construct_chain(one, device, units).ranked
        total += ranked[0][1].time_s if ranked else separate_s(one, device, units)
    return total


def judge(case: Case, row: dict[str, str], device: DeviceSpec, *, compiled: bool) -> Verdict:
    """What becomes of the row on ``device``."""
    func = program(case)
    operator = simplify_for_gpu(read_operator(func, case.id))
    groups = plan_for_gpu(operator)
    automatic, reasons = with_chains(groups, operator, device, always=False)
    legal = with_chains(groups, operator, device, always=True)[0]
    verdict = Verdict(
        id=case.id, shape=row["shape"], device=device.name, paper_speedup=float(row["paper_speedup"]),
        taken=len(automatic) == 1, reason="; ".join(reasons),
    )  # fmt: skip
    if not isinstance(legal[0], ChainGroup):
        return verdict
    chain, units, time = legal[0].chain, legal[0].units, legal[0].ranked[0][1]
    verdict.fused_us, verdict.bound = time.time_s * 1e6, time.bound
    verdict.apart_us = apart_s(chain, device, units) * 1e6
    verdict.least_apart_us = separate_s(chain, device, units) * 1e6
    kernel = construct_kernel(func, case.id, device, BuildOptions(enable_persistent_fusion=True))
    verdict.reason = from_json(KernelChoice, str(kernel.attrs[CHOICE])).reason if verdict.taken else verdict.reason
    if compiled:
        _compile(kernel, verdict, device)
    return verdict


def _compile(kernel: Any, verdict: Verdict, device: DeviceSpec) -> None:
    target = Target(dict(device.target))
    with target:
        executable = tvm.compile(IRModule({"main": kernel.with_attr("global_symbol", "main")}), target=target)
    source = "\n".join(str(module.inspect_source()) for module in executable.mod.imports)
    (use,) = compile_cuda(source, [str(dict(device.target)["arch"])]).uses
    verdict.registers, verdict.spill_bytes = use.register_count, use.spill_store_bytes + use.spill_load_bytes


def table(verdicts: list[Verdict]) -> Table:
    """All rows, the predicted speed-up beside the paper's measured one."""
    titles = "row", "device", "taken", "one, us", "bound", "apart, us", "predicted", "paper (T4)", "registers"
    made = Table(*titles, title="predicted, not measured; the paper's speed-ups were measured on a T4")
    for item in verdicts:
        times = [f"{value:.1f}" if value else "-" for value in (item.fused_us, item.apart_us)]
        gain = f"{item.speedup:.2f}" if item.speedup else "-"
        registers = f"{item.registers}" + (f", {item.spill_bytes} B spilled" if item.spill_bytes else "")
        made.add_row(
            item.shape, item.device, "yes" if item.taken else "no", times[0], item.bound, times[1], gain,
            f"{item.paper_speedup:.2f}", registers,
        )  # fmt: skip
    return made


def main(
    device: Annotated[list[str] | None, typer.Option(help="rows of the device tables")] = None,
    compile: Annotated[bool, typer.Option(help="by nvcc, for registers and spills")] = True,
    output: Annotated[Path | None, typer.Option(help="instead of benchmarks/results")] = None,
) -> None:
    """Judge all rows, print and keep the verdicts."""
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cases = [(case, rows[int(case.id.rsplit("_", 1)[1])]) for case in bolt_chains(WORKLOAD)]
    environment = current_environment()
    path = result_path("gpu-chains", environment, output)
    verdicts = []
    with progress() as tell:
        for name in device or DEVICES:
            for case, row in cases:
                tell(f"{name} {case.id}")
                verdicts.append(judge(case, row, lookup(name), compiled=compile))
                write_results(path, "chains of products, predicted", environment, verdicts)
    show(table(verdicts))


if __name__ == "__main__":
    typer.run(main)
