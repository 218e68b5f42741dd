"""The operators of Bolt's Tables 1 to 3 and Figure 9 as CUTLASS's templates, for devices that need not be present.

    python benchmarks/gpu/templates.py                           # A100 (sm_80) and H100 (sm_90a), compiled by nvcc
    python benchmarks/gpu/templates.py --match T3 --no-compile
    python benchmarks/gpu/templates.py --device nvidia-t4 --output t4.json

Each row, of pairs each product and both together, is a graph of its own, with a bias and an activation, that goes
through partitioning. Per row and device: what was recognised, how many templates are legal, the best one and its
predicted time, the name of its kernel, and what nvcc made of it; channels that are no multiple of 8 once as they are,
and once padded; of pairs in one kernel (channels padded), what templates apart and one kernel of our own are
predicted to take. What nvcc says of registers names kernels by their types, in which not all templates have one of
their own: "-" where a unit of several tells them from no other, and then none of it spills. Nothing here is measured.
Writes ``benchmarks/results/<date>-gpu-templates.json``.
"""

from __future__ import annotations

import csv
import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer
from _common import current_environment, progress, result_path, show, write_results
from cases import Case
from lists import bolt, bolt_chains
from relax_graphs import ACCESS, graph, padded
from rich.table import Table

from tests.support.random_templates.draw import TemplateCase
from tests.support.random_templates.units import TemplateResult, compile_unit, unit_cases
from tvm_ext._tvm import Target, tvm
from tvm_ext.byoc_cutlass.selection import Candidate, candidates_of
from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import own_time_us
from tvm_ext.records.partition import PARTITION, CutlassPartition, CutlassRegion
from tvm_ext.records.persistent import PERSISTENT, PersistentRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.composites import as_module, composite_of, is_composite, region_of, with_prepared
from tvm_ext.relay_passes.pair_products import PairProducts
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains.cuda_toolchain import CompiledCuda
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend
from tvm_ext.toolchains.cutlass_toolchain import MOST_TOGETHER, compile_gemm

WORKLOAD = Path(__file__).resolve().parent.parent / "workloads" / "bolt_ops.csv"
DEVICES = ("nvidia-a100", "nvidia-h100")
EVERY = 10**6
WHAT = "templates of CUTLASS, predicted"
SECONDS_EACH = 300.0


@dataclass(kw_only=True)
class Verdict:
    """One product on one device; times in microseconds, predicted."""

    id: str
    table: str
    shape: str
    paper_speedup: str
    device: str
    pattern: str = ""
    refused: str = ""
    legal: int = 0
    template: str = ""
    kernel: str = ""
    time_us: float | None = None
    padded_us: float | None = None
    apart_us: float | None = None
    own_us: float | None = None
    architecture: str = ""
    compiled: bool | None = None
    registers: int | None = None
    spill_bytes: int | None = None

    @property
    def recognised(self) -> bool:
        return bool(self.pattern)


Chosen = tuple[Verdict, Candidate]
"""A verdict, and the template that it is about."""


def judge(case: Case, row: dict[str, str], device: DeviceSpec, chosen: list[Chosen]) -> Verdict:
    """What becomes of the case on ``device``."""
    verdict = Verdict(
        id=case.id, table=row["table"], shape=row["shape"], paper_speedup=row["paper_speedup"], device=device.name
    )
    region = region_in(case, device, verdict)
    if region is None:
        return verdict
    verdict = _with_best(region, device, verdict, chosen)
    verdict.padded_us = padded_us(region, device) if verdict.legal else None
    return verdict


def _with_best(region: CutlassRegion, device: DeviceSpec, verdict: Verdict, chosen: list[Chosen]) -> Verdict:
    """``verdict`` with the region's best template, which joins those ``chosen``."""
    verdict.pattern = region.pattern
    try:
        found = candidates_of(region, device, EVERY)
    except IllegalRewrite as error:
        verdict.refused = error.problem
        return verdict
    best = found[0]
    verdict.legal, verdict.template, verdict.time_us = len(found), best.name, best.time_us
    verdict.kernel, verdict.architecture = best.call.symbol, best.architecture
    chosen.append((verdict, best))
    return verdict


def region_in(case: Case, device: DeviceSpec, verdict: Verdict) -> CutlassRegion | None:
    """The one region of the case's graph; None, with the reason in ``verdict``, where partitioning refuses it."""
    with tvm.transform.PassContext():
        partition = from_json(CutlassPartition, str(PartitionCutlass(device)(graph(case)).attrs[PARTITION]))
    verdict.refused = "; ".join(item.reason for item in partition.refused)
    return partition.taken[0] if partition.taken else None


def judge_pair(case: Case, row: dict[str, str], device: DeviceSpec, chosen: list[Chosen]) -> Verdict:
    """What becomes of both products of ``case`` as one kernel on ``device``."""
    verdict = Verdict(
        id=case.id, table=row["table"], shape=row["shape"], paper_speedup=row["paper_speedup"], device=device.name
    )
    target = Target(dict(device.target))
    own_time = partial(own_time_us, target=target, device=device, options=BuildOptions(), most=1)
    with target, tvm.transform.PassContext():
        mod = PartitionCutlass(device)(graph(padded(case) or case))
        functions = [func for _, func in mod.functions_items() if is_composite(func)]
        verdict.apart_us = sum(candidates_of(region_of(func), device, 1)[0].time_us for func in functions)
        mod = PairProducts(device, CutlassBackend(device), lambda _mod: None, True)(mod)
        partition = from_json(CutlassPartition, str(mod.attrs[PARTITION]))
        record = from_json(PersistentRecord, str(mod.attrs[PERSISTENT]))
        verdict.refused = "" if record.fused else record.regions[0].reason
        if record.fused:
            inner = composite_of(next(func for _, func in mod.functions_items() if is_composite(func)))
            verdict.own_us = own_time(as_module(with_prepared(inner, range(len(inner.params)))))
    if verdict.refused:
        return verdict
    return _with_best(partition.taken[0], device, verdict, chosen)


def padded_us(region: CutlassRegion, device: DeviceSpec) -> float | None:
    """The predicted time with channels padded to whole copies; None where they are, or where nothing is padded."""
    window = region.problem.window
    if window is None or window.input_extents[3] % ACCESS == 0:
        return None
    channels = ceil_div(window.input_extents[3], ACCESS) * ACCESS
    wider = dataclasses.replace(window, input_extents=(*window.input_extents[:3], channels))
    alignment = gcd(wider.channels, ACCESS)
    layout = dataclasses.replace(region.problem.operands[0], leading_dimension=wider.channels, alignment=alignment)
    depth = wider.positions * wider.channels
    problem = dataclasses.replace(region.problem, window=wider, depth=depth, operands=(layout, layout))
    return candidates_of(dataclasses.replace(region, problem=problem), device, 1)[0].time_us


def compile_all(chosen: Sequence[Chosen], told: Callable[[], None]) -> None:
    """What the compiler makes of the verdicts' templates, several in one translation unit; ``told`` behind each.

    Verdicts of one template have one result.
    """
    cases = {_case(best).key: _case(best) for _, best in chosen}
    for unit in unit_cases(list(cases.values()), MOST_TOGETHER):
        found = {result.key: result for result in compile_unit(unit, _compile)}
        for verdict, best in chosen:
            result = found.get(_case(best).key)
            if result is not None:
                _describe(verdict, result)
        told()


def _case(best: Candidate) -> TemplateCase:
    return TemplateCase(
        index=0, kind="", architecture=best.architecture, template=best.name, epilogue="", source=best.source()
    )


def _compile(text: str, architecture: str, count: int) -> CompiledCuda:
    cache = KernelCache.for_build(BuildOptions.current())
    return compile_gemm(text, architecture, cache=cache, time_limit_s=SECONDS_EACH * (count + 1), output="fatbin")


def _describe(verdict: Verdict, result: TemplateResult) -> None:
    verdict.compiled, verdict.refused = result.compiled, result.problem[-1000:]
    verdict.registers = result.registers
    verdict.spill_bytes = result.spill_bytes if result.compiled else None


def table(verdicts: list[Verdict]) -> Table:
    """All rows."""
    times = "us", "padded", "apart", "own"
    titles = "case", "device", "recognised", "legal", "template", *times, "compiled", "registers"
    made = Table(*titles, title="predicted, not measured")
    for item in verdicts:
        compiled = {None: "-", True: "yes", False: "no"}[item.compiled]
        registers = f"{item.registers or '-'}" + (f", {item.spill_bytes} B spilled" if item.spill_bytes else "")
        values = [f"{value:.1f}" if value else "-" for value in _times(item)]
        made.add_row(
            f"{item.table} {item.id}", item.device, item.pattern or item.refused, str(item.legal), item.template,
            *values, compiled, registers,
        )  # fmt: skip
    return made


def _padded(case: Case) -> Case | None:
    """The case as padding makes it, under a name of its own; None where nothing is padded."""
    form = padded(case)
    return None if form is None else dataclasses.replace(form, id=f"{case.id}_padded")


def _times(item: Verdict) -> tuple[float | None, ...]:
    return item.time_us, item.padded_us, item.apart_us, item.own_us


def main(
    device: Annotated[list[str] | None, typer.Option(help="rows of the device tables")] = None,
    match: Annotated[str, typer.Option(help="a regular expression of table and case")] = "",
    compile: Annotated[bool, typer.Option(help="by nvcc, up to 20 seconds of a core each")] = True,
    output: Annotated[Path | None, typer.Option(help="instead of benchmarks/results")] = None,
) -> None:
    """Judge all rows, print and keep the verdicts."""
    with WORKLOAD.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    single = [form for case in bolt(WORKLOAD) for form in (case, _padded(case)) if form is not None]
    cases = [(case, rows[int(re.findall(r"\d+", case.id)[0])], judge) for case in single]
    cases += [(case, rows[int(case.id.rsplit("_", 1)[1])], judge_pair) for case in bolt_chains(WORKLOAD)]
    environment = current_environment()
    path = result_path("gpu-templates", environment, output)
    verdicts: list[Verdict] = []
    chosen: list[Chosen] = []
    with progress() as tell:
        for name in device or DEVICES:
            for case, row, judged in cases:
                if re.search(match, f"{row['table']} {case.id}"):
                    tell(f"{name} {case.id}")
                    verdicts.append(judged(case, row, lookup(name), chosen))
        if compile:
            tell(f"nvcc: {len(chosen)} templates")
            compile_all(chosen, lambda: write_results(path, WHAT, environment, verdicts))
        write_results(path, WHAT, environment, verdicts)
    show(table(verdicts))


if __name__ == "__main__":
    typer.run(main)
