"""Bolt's light-weight profiler (§3.2.2): regions by measurements of sample programs, not of their models alone.

A sample program is a template with its epilogue, and knows no shape: what was compiled for one layer, or for one
network, is run for all others with it. Programs come from a `SampleProgrammer`, times from a `LaunchTimer` and are kept
in a `TrialStore`, which are passed in: nothing here knows a compiler, a GPU or a database. What the store knows is not
measured again, and what a template's compiler refused is not tried again for another shape.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.attention import Attention
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial, TrialOutcome, TrialStore, Verdict
from tvm_ext.records.partition import (
    LINK,
    CutlassProblem,
    CutlassProfile,
    CutlassRegion,
    ImplicitWindow,
    MatrixLayout,
    parameter_of,
)
from tvm_ext.records.serialise import to_json

from .elements import ELEMENTS
from .family import shared_epilogue
from .ranking import global_gb_per_s
from .screening import FLUSHED_BYTES, WARM_UP_RUNS, LaunchTimer, SampleLaunch, ScreeningLimits, TimedLaunch, screen
from .selection import Candidate, architecture_of

KIND, TEMPLATE_KIND = "cutlass", "cutlass_template"
"""`MeasuredWorkload.kind` of regions, and of templates alone, of which only is known that they do not compile."""

TEXTS = "1"
"""Version of our texts: a new one where `emit` makes other kernels of the same configuration."""

_KEPT: dict[str, TrialOutcome] = {
    "ok": "ok", "launch_failed": "launch_failed", "crashed": "crashed", "timed_out": "timed_out", "wrong": "wrong"
}  # fmt: skip
"""What a launch came to that is kept; that there was no program is known of the template."""

Versions = tuple[tuple[str, str], ...]


class SampleProgrammer(Protocol):
    """What makes sample programs; `toolchains/cutlass_samples.py` has it."""

    def prepare(self, candidates: Mapping[str, Candidate]) -> Mapping[str, str]:
        """Make the programs of ``candidates``, by symbol, unless they are there; why some cannot be made."""

    def is_ready(self, candidate: Candidate) -> bool:
        """Whether the candidate's program was compiled before."""


# --- keys ------------------------------------------------------------------------------------------------------------
def workload_of(region: CutlassRegion, device: DeviceSpec, versions: Versions) -> MeasuredWorkload:
    """The key of a region's measurements: its problem and epilogue, with whatever else decides its time.

    Of two products in one kernel, both problems and epilogues.
    """
    problem, last = region.problem, region.then or region
    first, second = problem.operands
    return MeasuredWorkload(
        kind=KIND,
        structure=_structure(region),
        layout=layout_of(problem.window) if problem.window is not None else f"{first.order},{second.order}",
        dtype=",".join((*problem.dtypes[:2], last.out_dtype)),
        device=device.name,
        instructions=architecture_of(device),
        versions=versions,
    )


def _structure(region: CutlassRegion) -> str:
    if region.attention is not None:
        return to_json(region.attention)
    then = "" if region.then is None else f',"then":{_structure(region.then)}'
    epilogue, _ = shared_epilogue(region)
    return f'{{"problem":{to_json(region.problem)},"epilogue":{to_json(epilogue)}{then}}}'


def template_workload(candidate: Candidate, versions: Versions) -> MeasuredWorkload:
    """The key of what is known of a template by itself."""
    return MeasuredWorkload(
        kind=TEMPLATE_KIND,
        structure=candidate.call.symbol,
        layout="",
        dtype="",
        device="",
        instructions=candidate.architecture,
        versions=versions,
    )


def fails(verdict: Verdict | None) -> bool:
    """Whether it is known that something does not run."""
    return verdict is not None and verdict.is_settled and verdict.time_us is None


# --- launches --------------------------------------------------------------------------------------------------------
def launch_of(candidate: Candidate, region: CutlassRegion) -> SampleLaunch:
    """The candidate's launch on buffers that are as large as the region's tensors."""
    call = candidate.call
    arguments = {
        "symbol": call.symbol,
        "packing": call.form.packing,
        "numbers": list(call.numbers),
        "factors": list(call.factors),
        "operands": list(call.operands),
        "distances": list(call.distances) if call.form.has_distances else None,
        "buffers": [{"bytes": size, "dtype": dtype} for dtype, size in buffers_of(region)],
    }
    return SampleLaunch(call.symbol, candidate.configuration, candidate.time_us, arguments)


def buffers_of(region: CutlassRegion) -> list[tuple[str, int]]:
    """Type and bytes of the region's parameters in their order, and of its result."""
    if region.attention is not None:
        return _attention_buffers(region, region.attention)
    needs = [need for part in region.parts for need in _needs(part)]
    buffers: dict[int, tuple[str, int]] = {}
    for parameter, dtype, elements in needs:
        buffers[parameter] = (dtype, max(buffers.get(parameter, ("", 0))[1], elements * ELEMENTS[dtype].bits // 8))
    unread = ("float16", VECTOR_BYTES)  # a parameter that no kernel reads
    last = region.then or region
    problem, dtype = last.problem, last.out_dtype
    stored = shared_epilogue(last)[0].stored_elements(problem.rows, problem.columns, problem.batch)
    result = (dtype, stored * ELEMENTS[dtype].bits // 8)
    return [*(buffers.get(parameter, unread) for parameter in range(max(buffers) + 1)), result]


def _attention_buffers(region: CutlassRegion, work: Attention) -> list[tuple[str, int]]:
    places = (*region.factors, region.values, *(parameter_of(operand.name) for operand in region.operands))
    found = {
        place: (item.dtype, item.size * ELEMENTS[item.dtype].bits // 8)
        for place, item in zip(places, work.operands[:-1], strict=True)
    }
    result = work.output.dtype, work.output.size * ELEMENTS[work.output.dtype].bits // 8
    return [*(found[place] for place in sorted(found)), result]


def _needs(region: CutlassRegion) -> Iterator[tuple[int, str, int]]:
    """Place, type and elements of each tensor that one product and its epilogue read."""
    problem, (epilogue, parameters) = region.problem, shared_epilogue(region)
    dtypes = (problem.window.planes_of if problem.window else "") or problem.dtypes[0], problem.dtypes[1]
    for parameter, dtype, elements in zip(region.factors, dtypes, _factor_elements(problem), strict=True):
        if parameter != LINK:
            yield parameter, dtype, elements
    for parameter, operand, original in zip(parameters, epilogue.operands, region.operands, strict=True):
        elements = prod(operand.shape(problem.rows, problem.columns))
        yield parameter, operand.dtype, elements + (problem.batch - 1) * original.batch_stride


def layout_of(window: ImplicitWindow) -> str:
    """Of a convolution's activations and filters, and of its result where that is another."""
    read = f"NCHW {window.planes_of},OIHW" if window.planes_of else "NHWC,OHWI"
    return f"{read},NCHW" if window.stores_planes else read


def _factor_elements(problem: CutlassProblem) -> tuple[int, int]:
    if problem.window is not None:
        return problem.factor_elements
    a, b = problem.operands
    return (
        _span(a, problem.rows, problem.depth, problem.batch),
        _span(b, problem.depth, problem.columns, problem.batch),
    )


def _span(layout: MatrixLayout, rows: int, columns: int, batch: int) -> int:
    """Elements from the first to the last of a batch of matrices."""
    lines, within = (rows, columns) if layout.order == "row" else (columns, rows)
    return (batch - 1) * layout.batch_stride + (lines - 1) * layout.leading_dimension + within


# --- planning --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class RegionPlan:
    """What would be measured of a region: one launch of each program, best first, and what is known already."""

    region: CutlassRegion
    workload: MeasuredWorkload
    candidates: tuple[Candidate, ...]
    verdicts: Mapping[str, Verdict]

    def tried(self, limits: ScreeningLimits) -> tuple[Candidate, ...]:
        """Those that are screened where none fails."""
        return self.candidates[: limits.templates]

    def missing(self, limits: ScreeningLimits) -> tuple[Candidate, ...]:
        """Of these, those that nothing is known of."""
        return tuple(one for one in self.tried(limits) if not _is_known(self.verdicts, one.configuration))


def _is_known(verdicts: Mapping[str, Verdict], configuration: str) -> bool:
    return configuration in verdicts and verdicts[configuration].is_settled


def plan_region(
    region: CutlassRegion, candidates: Sequence[Candidate], device: DeviceSpec, versions: Versions, store: TrialStore
) -> RegionPlan:
    """One candidate of each program, without those whose template is known not to compile."""
    programs: dict[str, Candidate] = {}
    for candidate in candidates:
        programs.setdefault(candidate.call.symbol, candidate)
    workload = workload_of(region, device, versions)
    compiles = [
        program
        for program in programs.values()
        if not fails(store.verdicts(template_workload(program, versions)).get(program.call.symbol))
    ]
    return RegionPlan(region=region, workload=workload, candidates=tuple(compiles), verdicts=store.verdicts(workload))


OWN_TEMPLATES = 4
"""Of a region's list, those that are the model's first choices whatever other regions have."""

SHARED_WITHIN = 1.3
"""So much longer than a region's fastest, by the model, may a template be predicted that takes a place in its list
because other regions have it: each program costs its compiler seconds, and the model is not right to a third."""


def share_programs(plans: Sequence[RegionPlan]) -> list[RegionPlan]:
    """``plans`` whose lists have more programs in common: behind a region's own first ones those that serve most."""
    near = [
        {one.call.symbol for one in plan.candidates if one.time_us <= plan.candidates[0].time_us * SHARED_WITHIN}
        for plan in plans
    ]
    served = Counter(symbol for symbols in near for symbol in symbols)
    shared = []
    for plan, symbols in zip(plans, near, strict=True):
        own, rest = plan.candidates[:OWN_TEMPLATES], plan.candidates[OWN_TEMPLATES:]
        rest = tuple(sorted(rest, key=lambda one: 1 - served[one.call.symbol] if one.call.symbol in symbols else 0))
        shared.append(replace(plan, candidates=(*own, *rest)))
    return shared


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileEstimate:
    """What profiling would take: counts, and seconds by the model. Nothing of it is measured.

    ``programs`` are all that are needed, ``to_compile`` those that are not there; ``launches`` are ways to run them,
    ``runs`` how often these run in all.
    """

    regions: int
    programs: int
    to_compile: int
    launches: int
    runs: int
    device_seconds: float


_HOST_US = 60.0
"""Of one timed launch beside the device's work: arguments, two events, waiting for the second. An
estimate, as all that is said beforehand."""


def estimate(
    plans: Sequence[RegionPlan], device: DeviceSpec, limits: ScreeningLimits, programmer: SampleProgrammer | None
) -> ProfileEstimate:
    """Runs times predicted times, with what writing the cache over costs before each of them."""
    plans = share_programs(plans)
    flush_us = FLUSHED_BYTES / (global_gb_per_s(device) * 1e3)
    programs: dict[str, Candidate] = {}
    regions = launches = runs = 0
    total_us = 0.0
    for plan in plans:
        regions += 1
        groups = [(plan.missing(limits), limits.screening_runs), (_finals(plan, limits), limits.final_runs)]
        for candidates, each in groups:
            programs |= {candidate.call.symbol: candidate for candidate in candidates}
            launches += len(candidates)
            runs += len(candidates) * (each + WARM_UP_RUNS)
            total_us += sum(candidate.time_us + flush_us + _HOST_US for candidate in candidates) * (each + WARM_UP_RUNS)
    ready = 0 if programmer is None else sum(map(programmer.is_ready, programs.values()))
    return ProfileEstimate(
        regions=regions,
        programs=len(programs),
        to_compile=len(programs) - ready,
        launches=launches,
        runs=runs,
        device_seconds=total_us / 1e6,
    )


def _finals(plan: RegionPlan, limits: ScreeningLimits) -> tuple[Candidate, ...]:
    """The second round of a region, if the model is right about who gets there."""
    finalists = plan.tried(limits)[: limits.finalists]
    variants = [list(candidate.variants())[: limits.variants] for candidate in finalists]
    new = [one for group in variants for one in group if not _is_known(plan.verdicts, one.configuration)]
    return (*finalists, *new) if new else ()


# --- profiling -------------------------------------------------------------------------------------------------------
def profile(
    plans: Sequence[RegionPlan],
    programmer: SampleProgrammer,
    timer: LaunchTimer,
    store: TrialStore,
    versions: Versions,
    limits: ScreeningLimits | None = None,
) -> CutlassProfile:
    """Measure what the store does not know of ``plans``, with the programs of all of them made at once."""
    limits = limits or ScreeningLimits()
    plans = share_programs(plans)
    profiling = _Profiling(programmer, timer, store, versions)
    foreseen = {candidate.call.symbol: candidate for plan in plans for candidate in plan.missing(limits)}
    profiling.prepare(foreseen)
    launches = [profiling.measure(plan, limits) for plan in plans]
    return CutlassProfile(
        regions=len(plans),
        measured_regions=sum(map(bool, launches)),
        programs=len(foreseen),
        failed_programs=tuple(f"{symbol}: {reason}" for symbol, reason in sorted(profiling.failed.items())),
        launches=sum(launches),
    )


@dataclass(slots=True)
class _Profiling:
    """What measures regions; a `LaunchTimer` that has programs made which were not foreseen, since others failed."""

    programmer: SampleProgrammer
    timer: LaunchTimer
    store: TrialStore
    versions: Versions
    candidates: dict[str, Candidate] = field(default_factory=dict)  # by symbol
    failed: dict[str, str] = field(default_factory=dict)  # why a program cannot be made, by symbol

    def prepare(self, candidates: Mapping[str, Candidate]) -> None:
        """Make programs, and keep what cannot be made."""
        failed = self.programmer.prepare(candidates) if candidates else {}
        self.store.add(
            Measurement(
                workload=template_workload(candidates[symbol], self.versions),
                trial=Trial(configuration=symbol, outcome=_compile_outcome(reason), reason=_short(reason)),
            )
            for symbol, reason in failed.items()
        )
        self.failed |= failed

    def measure(self, plan: RegionPlan, limits: ScreeningLimits) -> int:
        """How many launches ran. A template without a program, or that does not run, gives way to the next one."""
        by_configuration = {one.configuration: one for one in plan.candidates}
        settled = {name: verdict.time_us for name, verdict in plan.verdicts.items() if verdict.is_settled}
        known = {name: math.inf if time_us is None else time_us for name, time_us in settled.items()}

        def variants(launch: SampleLaunch) -> list[SampleLaunch]:
            return [launch_of(one, plan.region) for one in by_configuration[launch.configuration].variants()]

        def record(done: Sequence[TimedLaunch]) -> None:
            trials = [_trial(timed, _KEPT[timed.outcome]) for timed in done if timed.outcome in _KEPT]
            self.store.add(Measurement(workload=plan.workload, trial=trial) for trial in trials)

        self.candidates = {one.call.symbol: one for one in plan.candidates}
        launches = [launch_of(one, plan.region) for one in plan.candidates]
        return screen(launches, variants, self, record, known, limits)

    def time(self, launches: Sequence[SampleLaunch], runs: int) -> list[TimedLaunch]:
        self.prepare({one.symbol: self.candidates[one.symbol] for one in launches if one.symbol not in self.failed})
        alive = [launch for launch in launches if launch.symbol not in self.failed]
        done = {timed.launch.configuration: timed for timed in (self.timer.time(alive, runs) if alive else ())}
        missing = [launch for launch in launches if launch.symbol in self.failed]
        none = [TimedLaunch(launch, "no program", reason=self.failed[launch.symbol]) for launch in missing]
        return [*(done[launch.configuration] for launch in alive), *none]


_BY_THE_MACHINE = (
    "took longer than", "cannot be started", "exit status -9", "exit status 137", "Killed", "No space left",
)  # fmt: skip


def _compile_outcome(reason: str) -> TrialOutcome:
    """What a compiler says that had no time, memory or disk is nothing about the template: it is tried again."""
    return "timed_out" if any(words in reason for words in _BY_THE_MACHINE) else "compile_failed"


def _short(reason: str) -> str:
    return reason[:1000].replace("\0", "?")


def _trial(timed: TimedLaunch, outcome: TrialOutcome) -> Trial:
    configuration, reason = timed.launch.configuration, _short(timed.reason)
    return Trial(configuration=configuration, outcome=outcome, times_us=timed.times_us, reason=reason)
