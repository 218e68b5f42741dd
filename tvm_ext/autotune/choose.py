"""The one place that decides between ways to run a kernel: on measurements where there are any, else on the models.

| decision | by measurements | by the models |
|---|---|---|
| constructed tile or a tuned one | `choose_tuned` | the constructed one |
| CUTLASS's templates among themselves | `by_measurements` | the model's order |
| a template or a kernel of our own | (no measurement of ours yet) | `why_own_kernel` |

Each gives its reason, which goes into the build's report. What is no question of speed is not decided here: whether an
operator runs in tiles, row by row or by stock TVM is what its emitters can take (`tir_passes/construct_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm_ext.analysis.tile_workload import GPU_TILES, KERNELS, tile_machine
from tvm_ext.byoc_cutlass.profiler import fails
from tvm_ext.byoc_cutlass.selection import Candidate
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import Verdict

from .standings import Standing, Standings, standings_of
from .store import MeasurementStore

CONFIRMATIONS = 3
"""So many batches must have measured a candidate beside the constructed kernel before it replaces it."""

LEAST_GAIN = 0.02
"""And it must be faster by this share at least, whatever the noise: less does not outlive the next change of clocks."""


LONE_GAIN = 0.05
"""A GPU's kernel that was measured in fewer batches must be faster by this share in each: its runs are timed by the
device's own events, and a bundle is one batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedChoice:
    """The configuration to take, None for the constructed kernel; why; and its time over the constructed kernel's."""

    configuration: str | None
    reason: str
    ratio: float | None = None


def choose_tuned(standings: Standings, *, lone: bool = False) -> TunedChoice:
    """The fastest that was measured faster than the constructed kernel by more than the noise, often enough.

    ``lone``: one batch is enough for what is faster by `LONE_GAIN`. Where the constructed kernel is known to fail, the
    fastest of those that run.
    """
    if standings.constructed_us is None:
        return _beside_a_failure(standings)
    ran = [item for item in standings.by_configuration.values() if item.ratio is not None]
    others = sorted((item for item in ran if item.configuration != standings.constructed), key=_order)
    proven = next((other for other in others if _is_faster(other, lone)), None)
    if proven is not None:
        return TunedChoice(configuration=proven.configuration, reason=_won(proven, standings), ratio=proven.ratio)
    return TunedChoice(configuration=None, reason=_kept(others, standings))


def _beside_a_failure(standings: Standings) -> TunedChoice:
    """Of a workload whose constructed kernel gave no time."""
    timed = [(item.verdict.time_us, name) for name, item in standings.by_configuration.items()]
    ran = sorted((time_us, name) for time_us, name in timed if time_us is not None)
    failed = [name for name in standings.tried_first if fails(standings.by_configuration[name].verdict)]
    if not ran or not failed:
        return TunedChoice(configuration=None, reason=_kept([], standings))
    what = standings.by_configuration[failed[0]].verdict.outcome
    reason = f"tile by measurement: {ran[0][0]:.3g} us, the fastest of {len(ran)}; the constructed kernel is {what}"
    return TunedChoice(configuration=ran[0][1], reason=reason)


def _order(standing: Standing) -> tuple[float, str]:
    assert standing.ratio is not None
    return standing.ratio, standing.configuration


def _is_faster(standing: Standing, lone: bool) -> bool:
    """By the least gain or twice the standard error, whichever is more, and in all batches but a quarter of them.

    Worked example: ratios of 0.93, 0.95 and 1.01 are 5 % faster with a noise of 3 %, but one of three is slower: no.
    """
    ratio, count = standing.ratio, len(standing.ratios)
    if ratio is None or count < CONFIRMATIONS:
        return ratio is not None and lone and max(standing.ratios) <= 1.0 - LONE_GAIN
    slower = sum(ratio >= 1.0 for ratio in standing.ratios)
    return 1.0 - ratio >= max(LEAST_GAIN, standing.noise) and 4 * slower <= count


def _won(standing: Standing, standings: Standings) -> str:
    assert standing.ratio is not None
    count = len(standings.by_configuration)
    beside = f"{standings.constructed_us or 0.0:.3g} us constructed"
    return (
        f"tile by measurement: {100 * (1 - standing.ratio):.0f} % faster than the {beside}, "
        f"in {len(standing.ratios)} batches, of {count} configurations tried"
    )


def _kept(others: Sequence[Standing], standings: Standings) -> str:
    if standings.constructed_us is None:
        return "the constructed tile: nothing was measured beside it"
    if not others:
        return f"the constructed tile, {standings.constructed_us:.3g} us: no other configuration ran"
    best = others[0]
    assert best.ratio is not None
    seldom = f", measured in {len(best.ratios)} of {CONFIRMATIONS} batches" if len(best.ratios) < CONFIRMATIONS else ""
    noise = f", noise {100 * best.noise:.0f} %" if best.noise else ""
    return (
        f"the constructed tile, {standings.constructed_us:.3g} us: the best of {len(others)} others takes "
        f"{best.ratio:.2f} times as long{seldom}{noise}"
    )


# --- CUTLASS's templates ---------------------------------------------------------------------------------------------
def by_measurements(candidates: Sequence[Candidate], verdicts: Mapping[str, Verdict]) -> tuple[Candidate, ...]:
    """``candidates`` with what is measured of them, and of their run-time variants: fastest first.

    Where one is measured, those that are not are left out: a prediction of one and a time of another do not compare.
    Where none is, they stay in the model's order, without those that are known to fail.
    """
    alive = [candidate for candidate in candidates if not fails(verdicts.get(candidate.configuration))]
    variants = [item for candidate in alive for item in (candidate, *candidate.variants())] if verdicts else []
    known = {variant.configuration: variant for variant in variants}
    measured = [
        replace(item, measured_us=verdict.time_us)
        for configuration, item in known.items()
        if (verdict := verdicts.get(configuration)) is not None and verdict.time_us is not None
    ]
    return tuple(sorted(measured, key=lambda item: item.known_us)) or tuple(alive) or tuple(candidates)


def why_own_kernel(own_us: float, template_us: float) -> str:
    """Why a product is left to a kernel of our own; empty where the template is to have it."""
    if own_us > template_us:
        return ""
    return f"the model: a kernel of our own takes {own_us:.1f} us, a template {template_us:.1f} us"


# --- The tiles that builds take by measurement: what `choose_tuned` says of all that a store knows of one device ------
@dataclass(frozen=True, kw_only=True, slots=True)
class TunedTiles:
    """Configurations by their workloads' keys, why they were chosen, and what was wrong with the store.

    ``failed`` are GPU kernels that were measured not to run or to be wrong: (key of the workload, configuration).
    """

    configurations: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    failed: frozenset[tuple[str, str]] = frozenset()
    notes: tuple[str, ...] = ()


NOTHING_TUNED = TunedTiles()


def tiles_for_build(device: DeviceSpec, options: BuildOptions) -> TunedTiles:
    """Of the database and the bases that ``options`` name; none where nothing is constructed."""
    if options.enable_roller is False:
        return NOTHING_TUNED
    store = MeasurementStore.for_build(options)
    try:
        return tuned_tiles(store, device)
    finally:
        store.close()


def tuned_tiles(store: MeasurementStore, device: DeviceSpec) -> TunedTiles:
    """What ``store`` gives ``device``.

    Nothing is looked at that was measured on another device, with other instructions, threads or versions.
    """
    machines = {kind: tile_machine(device, kind) for kind in KERNELS}
    configurations, reasons, failed = {}, {}, set[tuple[str, str]]()
    for key, workload in store.workloads(machines).items():
        if replace(workload, structure="", dtype="") != machines[workload.kind]:
            continue
        standings, on_gpu = standings_of(store.trials(workload)), workload.kind == GPU_TILES
        choice = choose_tuned(standings, lone=on_gpu)
        if on_gpu:
            failed |= {(key, name) for name, item in standings.by_configuration.items() if fails(item.verdict)}
        if choice.configuration is not None:
            configurations[key], reasons[key] = choice.configuration, choice.reason
    return TunedTiles(
        configurations=configurations, reasons=reasons, failed=frozenset(failed), notes=tuple(store.notes.values())
    )
