"""Batches of kernels timed in turns, until the interval of each median is tight or it is plain that a kernel is slow.

In every round each kernel that has not had enough has a turn, so that a slow minute of the machine hits all of them. A
kernel that fails, crashes its process or hangs is out; the others go on with the times that they have.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tvm_ext.records.kernel_job import Failure, KernelJob, TimingPlan

from .kernel_host import KernelError

NORMAL_95 = 1.96  # the normal distribution's quantile of 97.5 %: two sides of a 95 % interval
MOST_CRASHES = 2
"""A kernel that crashes a process in which others were loaded may be their victim: it is tried once more, first."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A job that was built: its library, and the file of what it should compute (None: nothing to compare with)."""

    job: KernelJob
    library: Path
    expected: Path | None = None


@dataclass(slots=True)
class BatchEntry:
    """An artifact in a batch and what has come of it so far. ``companion``: it is there for others to compare with."""

    artifact: Artifact
    companion: bool = False
    times_us: list[float] = field(default_factory=list)
    rounds: int = 0
    failure: Failure | None = None
    crashes: int = 0
    losses: int = 0
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us) if self.times_us else math.inf

    def has_enough(self, fastest_us: float, plan: TimingPlan) -> bool:
        """Whether more turns would tell nothing new, beside a kernel of ``fastest_us``."""
        if self.failure is not None or self.rounds >= plan.most_rounds:
            return True
        if self.rounds < plan.least_rounds:
            return False
        low, high = median_interval(self.times_us)
        middle = self.median_us
        return low > plan.hopeless * fastest_us or max(high - middle, middle - low) <= plan.interval * middle


class DeviceLost(Exception):  # noqa: N818 - what happened, not an error of ours
    """The device went away; ``at`` is the kernel that it was at."""

    def __init__(self, reason: str, at: BatchEntry | None = None) -> None:
        super().__init__(reason)
        self.at = at


class KernelPlace(Protocol):
    """Where a batch runs: this process, another one, another machine. A kernel is loaded where it is not."""

    def load(self, entry: BatchEntry) -> None:
        """Have the kernel ready and found right; raises KernelError, or DeviceLost."""

    def time(self, entry: BatchEntry) -> list[float]:
        """Microseconds per run, a turn's samples; raises KernelError, or DeviceLost."""


def take_turns(entries: Sequence[BatchEntry], place: KernelPlace, plan: TimingPlan) -> None:
    """Fill in times and failures of ``entries``; raises DeviceLost, what is there by then stays."""
    for entry in entries:
        _attempt(entry, place, timed=False)
    while True:
        fastest = min((entry.median_us for entry in entries), default=math.inf)
        open_ones = [entry for entry in entries if not entry.has_enough(fastest, plan)]
        if not open_ones:
            return
        for entry in entries:  # companions run beside whatever still runs
            if entry in open_ones or (entry.companion and entry.failure is None):
                _attempt(entry, place, timed=True)


def _attempt(entry: BatchEntry, place: KernelPlace, *, timed: bool) -> None:
    while entry.failure is None:
        try:
            place.load(entry)
            if timed:
                entry.times_us += place.time(entry)
                entry.rounds += 1
        except KernelError as error:
            entry.crashes += error.outcome == "crashed"
            if error.outcome != "crashed" or entry.crashes >= MOST_CRASHES:
                entry.failure = Failure(outcome=error.outcome, reason=str(error))
            continue
        except DeviceLost as lost:
            lost.at = entry
            raise
        return


def median_interval(times: Sequence[float]) -> tuple[float, float]:
    """Between which two of ``times`` the median lies in 95 of 100 cases, whatever their distribution.

    Worked example: of 30 times, the 10th and the 22nd: 30 / 2 -+ 1.96 * sqrt(30) / 2 is 9.6 and 20.4, so that 9 times
    are certainly below and 21 not above. Of five and fewer, the fastest and the slowest, which say less.
    """
    ordered, count = sorted(times), len(times)
    reach = NORMAL_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach))
    return ordered[low], ordered[high]
