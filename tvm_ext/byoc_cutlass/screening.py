"""Which launches of sample programs are measured, in which order: templates first, then what is open at run time.

Bolt §3.2.2: programs are made beforehand, and profiling is running them. A region's best templates by the model run
first; of the fastest few, the arguments that need no compiler (swizzle, raster order, splits) follow in a second round,
in which those few run again, in turns with the rest, so that what is compared was measured together. A launch that
fails costs itself only: the next template takes its place.

The standard library alone, for this file travels with a bundle of programs to the machine that has the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

WARM_UP_RUNS = 2
"""Of each launch, before its times count."""

FLUSHED_BYTES = 256 << 20
"""Written before each timed launch, so that operands come from memory: five times an H200's second-level cache."""


@dataclass(frozen=True)
class ScreeningLimits:
    """``templates`` that run are screened, ``finalists`` of them refined by at most ``variants`` launches each."""

    templates: int = 12
    finalists: int = 2
    variants: int = 8
    screening_runs: int = 5
    final_runs: int = 15


@dataclass(frozen=True)
class SampleLaunch:
    """One way to run the sample program ``symbol``: ``configuration`` names it, ``arguments`` are the worker's."""

    symbol: str
    configuration: str
    predicted_us: float
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class TimedLaunch:
    """What came of a launch: ``times_us`` where the outcome is "ok"."""

    launch: SampleLaunch
    outcome: str
    times_us: tuple[float, ...] = ()
    reason: str = ""

    @property
    def time_us(self) -> float:
        """The median; infinite for a failure."""
        middle = sorted(self.times_us)[len(self.times_us) // 2 :]
        return middle[0] if middle else float("inf")


class LaunchTimer(Protocol):
    """What runs sample programs: a GPU's worker, or a test's fake."""

    def time(self, launches: Sequence[SampleLaunch], runs: int) -> Sequence[TimedLaunch]:
        """What came of each of ``launches``, which run in turns, ``runs`` times each."""


LaunchVariants = Callable[[SampleLaunch], Sequence[SampleLaunch]]
RecordRound = Callable[[Sequence[TimedLaunch]], None]


def screen(
    launches: Sequence[SampleLaunch],
    variants: LaunchVariants,
    timer: LaunchTimer,
    record: RecordRound,
    known_us: Mapping[str, float],
    limits: ScreeningLimits,
) -> int:
    """Measure a region; how many launches ran. ``launches``, best first by the model, are one of each program.

    ``known_us`` has the times of configurations that were measured before, infinite for failures: they are not run
    again. ``record`` is told of each round as soon as it is over, so that a run that is cut off goes on behind it.
    """
    times = dict(known_us)
    count = 0
    while batch := _next_batch(launches, times, limits.templates):
        count += _run(batch, limits.screening_runs, timer, record, times)
    works = [launch for launch in launches if times.get(launch.configuration, _FAILED) < _FAILED]
    finalists = sorted(works, key=lambda launch: times[launch.configuration])[: limits.finalists]
    refined = {launch.configuration: [*variants(launch)][: limits.variants] for launch in finalists}
    new = [launch for group in refined.values() for launch in group if launch.configuration not in times]
    if new:
        count += _run([*finalists, *new], limits.final_runs, timer, record, times)
    return count


_FAILED = float("inf")


def _next_batch(launches: Sequence[SampleLaunch], times: Mapping[str, float], wanted: int) -> list[SampleLaunch]:
    """As many untried launches as are missing to ``wanted`` that run."""
    works = sum(times.get(launch.configuration, _FAILED) < _FAILED for launch in launches)
    untried = [launch for launch in launches if launch.configuration not in times]
    return untried[: max(0, wanted - works)]


def _run(
    batch: Sequence[SampleLaunch], runs: int, timer: LaunchTimer, record: RecordRound, times: dict[str, float]
) -> int:
    done = timer.time(batch, runs)
    record(done)
    for timed in done:
        times[timed.launch.configuration] = timed.time_us
    return len(batch)
