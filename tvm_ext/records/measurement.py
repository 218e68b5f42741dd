"""What was measured: a workload, one configuration of it, and what came of that.

A store of measurements (`autotune/database.py`) is keyed by the workload and the configuration, never by a list of
candidates, so that a new configuration takes nothing away from what is known. Failures are trials too. What several
trials of a configuration come to does not depend on their order, nor on any clock: files can be merged in any order,
and twice.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

TrialOutcome = Literal["ok", "wrong", "compile_failed", "launch_failed", "crashed", "timed_out", "lost"]
"""Of these, "timed_out" says as much about the machine as about the configuration, and "lost" (the machine went away)
nothing about the configuration: either may be tried again."""

SESSION_KIND = "tuning_session"
"""`MeasuredWorkload.kind` of the time that tuning has spent on a model, for people: one trial a batch."""

FINAL_FAILURES: tuple[TrialOutcome, ...] = ("wrong", "compile_failed", "launch_failed", "crashed")

MOST_TEXT = 1 << 22
"""Characters of a structure or a configuration: a TIR module with its constants left out takes a hundredth of that."""
MOST_REASON = 4000  # a choice: characters; a compiler's last words, not its whole log
MOST_SAMPLES = 10_000  # a choice: bounds what one record may hold


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWorkload:
    """All that decides how long a configuration takes, but the configuration.

    ``structure`` is text that ``kind`` says how to read: a product of CUTLASS's with its epilogue as JSON, a line of
    MetaSchedule's for a TIR module. ``instructions`` is the device's instruction set ("sm_80"), ``threads`` how many of
    a CPU's take part (0 on GPUs), ``versions`` names what makes the code.
    """

    kind: str
    structure: str
    layout: str
    dtype: str
    device: str
    instructions: str
    threads: int = 0
    versions: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in ("kind", "structure", "layout", "dtype", "device", "instructions"):
            _check_text(name, getattr(self, name), MOST_TEXT)
        for pair in self.versions:
            _check_text("versions", " ".join(pair), MOST_TEXT)
        if self.threads < 0:
            raise ValueError(f"{self.threads} threads")

    @property
    def key(self) -> str:
        """SHA-256 of all its fields."""
        return _digest(canonical(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One attempt at a configuration: ``times_us`` of its runs in microseconds where the outcome is "ok".

    ``origin`` is this trial's own name, by which a merge knows it again; ``taken_at_s`` (Unix time) is for people:
    nothing is decided by it, since clocks jump. Raises ValueError for what cannot have been measured.
    """

    configuration: str
    outcome: TrialOutcome
    times_us: tuple[float, ...] = ()
    reason: str = ""
    origin: str = field(default_factory=lambda: secrets.token_hex(12))
    taken_at_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        _check_text("configuration", self.configuration, MOST_TEXT)
        _check_text("reason", self.reason, MOST_REASON)
        _check_text("origin", self.origin, MOST_REASON)
        if not math.isfinite(self.taken_at_s):
            raise ValueError("taken_at_s is no time")
        if (self.outcome == "ok") != bool(self.times_us):
            raise ValueError(f"{len(self.times_us)} times with outcome {self.outcome}")
        if len(self.times_us) > MOST_SAMPLES:
            raise ValueError(f"{len(self.times_us)} times, more than {MOST_SAMPLES}")
        if not all(math.isfinite(item) and item > 0 for item in self.times_us):
            raise ValueError("a time that is not positive and finite")
        object.__setattr__(self, "times_us", tuple(map(float, self.times_us)))  # 5 and 5.0 are one time
        object.__setattr__(self, "taken_at_s", float(self.taken_at_s))

    @property
    def time_us(self) -> float | None:
        """The median of its runs; None for a failure."""
        return statistics.median(self.times_us) if self.times_us else None


def _check_text(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise ValueError(f"{name} has {len(text)} characters, more than {most}")
    if "\0" in text:
        raise ValueError(f"{name} has a NUL in it")
    text.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A trial of a workload."""

    workload: MeasuredWorkload
    trial: Trial

    @property
    def identity(self) -> str:
        """Two measurements with the same identity are one."""
        return identity_of(self.workload.key, canonical(self.trial))


def canonical(record: MeasuredWorkload | Trial) -> str:
    """The record as one line of JSON that every machine writes alike."""
    return json.dumps(asdict(record), separators=(",", ":"), sort_keys=True)


def identity_of(workload: str, trial: str) -> str:
    """`Measurement.identity`, of a workload's key and a trial's canonical text."""
    return _digest(f"{workload}\n{trial}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What all ``trials`` of a configuration come to: ``time_us`` where it runs, else why it does not."""

    configuration: str
    outcome: TrialOutcome
    time_us: float | None
    trials: int
    reason: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to gain by trying it again."""
        return self.outcome == "ok" or self.outcome in FINAL_FAILURES


def verdicts_of(trials: Iterable[Trial]) -> dict[str, Verdict]:
    """By configuration. A wrong result condemns it; otherwise one time that it ran counts more than any failure.

    Its time is the median of its trials' medians, so that one slow evening does not decide.
    """
    grouped: dict[str, list[Trial]] = {}
    for trial in trials:
        grouped.setdefault(trial.configuration, []).append(trial)
    return {configuration: _verdict(configuration, items) for configuration, items in grouped.items()}


def _verdict(configuration: str, trials: list[Trial]) -> Verdict:
    order: tuple[TrialOutcome, ...] = ("wrong", "ok", "crashed", "launch_failed", "compile_failed", "timed_out", "lost")
    outcome = min((trial.outcome for trial in trials), key=order.index)
    times = [trial.time_us for trial in trials if trial.time_us is not None]
    return Verdict(
        configuration=configuration,
        outcome=outcome,
        time_us=statistics.median(times) if outcome == "ok" else None,
        trials=len(trials),
        reason=min((trial.reason for trial in trials if trial.outcome == outcome), default=""),
    )


class TrialStore(Protocol):
    """What a profiler asks of a store; `autotune.database` has it."""

    def verdicts(self, workload: MeasuredWorkload) -> Mapping[str, Verdict]:
        """What is known of ``workload``, by configuration."""

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Keep ``measurements``; how many were new."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedRecord:
    """A record that is no measurement: where it stands, and why it was left out."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"
