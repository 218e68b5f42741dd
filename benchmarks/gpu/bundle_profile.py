"""Sample programs for a bundle: what `profile_templates.py` measures of the products of its cases on the other machine.

The folder ``profile`` of the bundle has the programs' libraries, the launches of each product as JSON, and the three
files of tvm_ext that run them, which need the standard library alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from bundle_templates import steps_of
from cases import Case
from relax_graphs import PRODUCTS, graph

from tvm_ext._tvm import tvm
from tvm_ext.autotune.database_files import LINES_SCHEMA
from tvm_ext.byoc_cutlass import screening
from tvm_ext.byoc_cutlass.profiler import RegionPlan, launch_of, plan_region, share_programs
from tvm_ext.byoc_cutlass.screening import SampleLaunch, ScreeningLimits
from tvm_ext.byoc_cutlass.selection import Candidate, candidates_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.measurement import MeasuredWorkload, Verdict
from tvm_ext.records.partition import CutlassRegion
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains import sample_runner, sample_worker
from tvm_ext.toolchains.cutlass_samples import SamplePrograms, sample_versions

FOLDER, PLAN, SCRIPT = "profile", "profile.json", "profile_templates.py"
SPARE = 2
"""Templates of a region beside those that are screened, for where some do not run."""


class _Nothing:
    """A store that knows nothing: the other machine has its own."""

    def verdicts(self, _workload: MeasuredWorkload) -> Mapping[str, Verdict]:
        return {}

    def add(self, measurements: object) -> int:
        raise NotImplementedError


def add_profile(
    cases: Sequence[Case], device: DeviceSpec, folder: Path, cache: KernelCache, limits: ScreeningLimits | None = None
) -> str:
    """Put the programs for ``cases`` into the bundle ``folder``; answers how many, in a sentence."""
    limits = limits or ScreeningLimits()
    versions, store = sample_versions(), _Nothing()
    regions = {kind: candidates_of(kind, device) for kind in _regions(cases, device)}
    plans = share_programs([plan_region(kind, item, device, versions, store) for kind, item in regions.items()])
    target = folder / FOLDER
    target.mkdir(parents=True)
    programs = SamplePrograms(cache, target)
    wanted = {item.call.symbol: item for plan in plans for item in _listed(plan, limits)}
    failed = programs.prepare(wanted)
    described = [_described(plan, limits, failed) for plan in plans]
    libraries = {symbol: path.name for symbol, path in programs.libraries.items()}
    content = {
        "lines_schema": LINES_SCHEMA,
        "capability": list(device.compute_capability or ()),
        "limits": asdict(limits),
        "libraries": libraries,
        "failed": failed,
        "regions": described,
    }
    (target / PLAN).write_text(json.dumps(content))
    _copy_sources(target / "tvm_ext")
    shutil.copy2(Path(__file__).with_name(SCRIPT), folder / SCRIPT)
    return f"{len(libraries)} programs to profile {len(plans)} products, {len(failed)} that do not compile"


def _listed(plan: RegionPlan, limits: ScreeningLimits) -> tuple[Candidate, ...]:
    return plan.candidates[: limits.templates + SPARE]


def _regions(cases: Sequence[Case], device: DeviceSpec) -> list[CutlassRegion]:
    """All different ones of the cases that templates take as a whole."""
    found: dict[CutlassRegion, None] = {}
    for case in cases:
        if case.operator not in PRODUCTS:
            continue
        with tvm.transform.PassContext():
            mod = PartitionCutlass(device)(graph(case))
        try:
            _, _, regions = steps_of(mod, case)
        except IllegalRewrite:
            continue
        found.update(dict.fromkeys(region.kind for region in regions.values() if region.expression))
    return list(found)


def _described(plan: RegionPlan, limits: ScreeningLimits, failed: Mapping[str, str]) -> dict[str, object]:
    """A product for `profile_templates.py`: its key, its launches, and their forms at run time."""
    listed = [item for item in _listed(plan, limits) if item.call.symbol not in failed]
    return {
        "workload": asdict(plan.workload),
        "pattern": plan.region.pattern,
        "launches": [asdict(launch_of(item, plan.region)) for item in listed],
        "variants": {
            item.configuration: [asdict(launch) for launch in _variants(item, plan.region, limits)] for item in listed
        },
    }


def _variants(candidate: Candidate, region: CutlassRegion, limits: ScreeningLimits) -> list[SampleLaunch]:
    return [launch_of(item, region) for item in candidate.variants()[: limits.variants]]


def _copy_sources(package: Path) -> None:
    """The files that run programs, in a package of their name."""
    for module in (screening, sample_runner, sample_worker):
        source = Path(str(module.__file__))
        folder = package / source.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
        shutil.copy2(source, folder / source.name)
    (package / "__init__.py").touch()
