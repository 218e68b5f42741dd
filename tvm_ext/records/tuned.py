"""What a tuning run is asked for and what came of it: the budget, each task's end, the curve of the best so far."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tvm_ext.errors import OptionError

TuneLike: TypeAlias = "int | str | datetime.timedelta"
"""What ``relay.build(tune=...)`` takes: a number of trials, or a time: ``"120s"``, ``"5min"``, ``"1h"``, timedelta."""

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}  # units, by definition
_TIME = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|min|h)\s*", re.ASCII)
MOST_TRIALS, MOST_SECONDS = 1_000_000, 30 * 86_400.0  # a choice: bounds what a typing error asks for, a month at most


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningBudget:
    """How much may be tried, of either or of both: trials that a database knows already count, seconds are a run's own.

    So a run of some trials that was killed, and is started again, goes on to the same end; seconds are searched anew.
    """

    trials: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.trials is None and self.seconds is None:
            raise _wrong("nothing")
        if self.trials is not None and not (type(self.trials) is int and 1 <= self.trials <= MOST_TRIALS):
            raise _wrong(self.trials)
        if self.seconds is not None and not (math.isfinite(self.seconds) and 0 < self.seconds <= MOST_SECONDS):
            raise _wrong(f"{self.seconds} s")

    @classmethod
    def of(cls, tune: TuneLike) -> TuningBudget:
        """Raises OptionError for what is neither a number of trials nor a time."""
        if isinstance(tune, datetime.timedelta):
            return cls(seconds=tune.total_seconds())
        if isinstance(tune, int) and not isinstance(tune, bool):
            return cls(trials=tune)
        found = _TIME.fullmatch(tune) if isinstance(tune, str) else None
        if found is None:
            raise _wrong(tune)
        return cls(seconds=float(found[1]) * _SECONDS[found[2]])

    def __str__(self) -> str:
        trials = [] if self.trials is None else [f"{self.trials} trials"]
        seconds = [] if self.seconds is None else [f"{self.seconds:g} s"]
        return " or ".join([*trials, *seconds])


def _wrong(tune: object) -> OptionError:
    return OptionError(
        f"option 'tune' is {tune!r}, which is no budget.",
        f"pass a number of trials from 1 to {MOST_TRIALS}, or a time: '120s', '5min', a timedelta, up to 30 days",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TileUse:
    """The kernels of a build whose tiles are by measurement: why, one text each; what was wrong with the database."""

    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """After so many ``trials`` and ``seconds`` (of this run): what all tasks take in one run of the model.

    ``best_us``: with each task's fastest kernel so far; ``limit_us``: with the fastest that the model still expects.
    """

    trials: int
    seconds: float
    best_us: float
    limit_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningStatus:
    """Where a run stands, for whoever watches it: ``point`` and ``constructed_us`` are of one run of the model."""

    task: str
    point: CurvePoint
    constructed_us: float
    known: int
    spent_s: float
    budget: TuningBudget

    @property
    def share_done(self) -> float:
        """Of the budget, 0 to 1."""
        shares = [0.0]
        if self.budget.trials is not None:
            shares.append(self.known / self.budget.trials)
        if self.budget.seconds is not None:
            shares.append(self.spent_s / self.budget.seconds)
        return min(1.0, max(shares))

    def __str__(self) -> str:
        best, limit = self.point.best_us, self.point.limit_us
        left = "" if self.left_s is None else f", {self.left_s:.0f} s left"
        return f"{self.known} candidates, best {best:.0f} of {self.constructed_us:.0f} us, limit {limit:.0f}{left}"

    @property
    def left_s(self) -> float | None:
        """Seconds until the budget is spent, at the pace of this run; None before the first batch."""
        left = []
        if self.budget.seconds is not None:
            left.append(max(0.0, self.budget.seconds - self.spent_s))
        if self.budget.trials is not None and self.point.trials:
            pace = self.point.seconds / self.point.trials
            left.append(max(0, self.budget.trials - self.known) * pace)
        return min(left, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRequest:
    """What a build asks of a tuning run.

    ``tracker`` is "host:port" of a TVM RPC tracker, behind which servers of ``key`` (None: the kind of the device)
    measure. ``jobs`` is a folder that a machine with the device serves. With neither, this machine measures.
    ``progress`` is told where the run stands after each batch.
    """

    budget: TuningBudget
    seed: int = 0
    progress: Callable[[TuningStatus], None] | None = None
    tracker: str | None = None
    key: str | None = None
    jobs: Path | None = None

    @classmethod
    def of(cls, tune: TuneLike | TuningRequest | None, tell: Callable[[str], None] | None) -> TuningRequest | None:
        """``tune`` as a request that tells its progress; raises OptionError where it is none."""
        if tune is None or isinstance(tune, TuningRequest):
            return tune
        progress = None if tell is None else lambda status: tell(f"tuning: {status}")
        return cls(budget=TuningBudget.of(tune), progress=progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedTask:
    """One kernel of the model after tuning; microseconds of one call, measured but for ``predicted_us``.

    ``configuration`` is what later builds take, None where they keep the constructed kernel; ``reason`` says why.
    ``known`` are the candidates that something is known of, of the space's ``candidates``.
    """

    name: str
    workload: str  # its key in the database
    calls: int
    share: float  # of the model's predicted time, 0 to 1
    candidates: int
    known: int
    failed: int
    predicted_us: float
    constructed_us: float | None
    best_us: float | None
    configuration: str | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningRecord:
    """What one tuning run did. ``trials`` were measured now, ``known`` before; ``stopped`` says why it ended."""

    device: str
    budget: str
    seed: int
    trials: int
    known: int
    seconds: float
    stopped: str
    tasks: tuple[TunedTask, ...]
    curve: tuple[CurvePoint, ...]
    untuned: tuple[tuple[str, str], ...] = ()  # (operator, why there is nothing to choose)
    notes: tuple[str, ...] = ()

    @property
    def adopted(self) -> tuple[TunedTask, ...]:
        return tuple(task for task in self.tasks if task.configuration is not None)

    @property
    def constructed_us(self) -> float:
        """What the constructed kernels of all tasks take in one run of the model; predicted where not measured."""
        return sum((task.constructed_us or task.predicted_us) * task.calls for task in self.tasks)

    @property
    def tuned_us(self) -> float:
        """The same with what was adopted."""
        return self.constructed_us - sum(
            ((task.constructed_us or 0.0) - (task.best_us or 0.0)) * task.calls for task in self.adopted
        )

    def __str__(self) -> str:
        before, after = self.constructed_us, self.tuned_us
        gain = f", {before / after:.2f} times as fast" if after and before > after else ""
        return (
            f"{len(self.adopted)} of {len(self.tasks)} kernels by measurement: {before:.0f} us a run to {after:.0f} us"
            f"{gain}; {self.trials} trials in {self.seconds:.0f} s, {self.known} known before; {self.stopped}"
        )
