"""A device that is simulated: sample programs that are never compiled, and times that the model knows nothing of.

A launch takes what the model predicts, times factors that are hidden from it: one of its template, one of its run-time
arguments, one of the shape; and noise that differs from run to run.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tvm_ext.byoc_cutlass.screening import SampleLaunch, TimedLaunch
from tvm_ext.byoc_cutlass.selection import Candidate


@dataclass
class FakePrograms:
    """Makes nothing; ``refused`` are templates' names that do not compile. ``made`` is what was asked for, by run."""

    refused: Collection[str] = ()
    reason: str = "static assertion failed"
    made: list[set[str]] = field(default_factory=list)

    def prepare(self, candidates: Mapping[str, Candidate]) -> dict[str, str]:
        new = set(candidates) - self.all
        if new:
            self.made.append(new)
        return {symbol: self.reason for symbol, item in candidates.items() if item.name in self.refused}

    def is_ready(self, candidate: Candidate) -> bool:
        return candidate.call.symbol in self.all

    @property
    def all(self) -> set[str]:
        return {symbol for symbols in self.made for symbol in symbols}


@dataclass
class FakeGpu:
    """``launched`` has every launch: its buffers and configuration. Those of ``broken`` symbols fail.

    After ``ends_after`` launches the power is gone.
    """

    noise: float = 0.03
    hidden: float = 0.4
    broken: Collection[str] = ()
    ends_after: int | None = None
    launched: list[tuple[str, str]] = field(default_factory=list)
    runs: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def true_us(self, launch: SampleLaunch) -> float:
        """Without noise."""
        shape = json.dumps(launch.arguments["buffers"])
        parts = (launch.symbol, f"{launch.symbol}{shape}", f"{launch.configuration}")
        factors = [1 + self.hidden * (_drawn(part) - 0.3) for part in parts]
        return launch.predicted_us * factors[0] * (1 + (factors[1] - 1) / 2) * (1 + (factors[2] - 1) / 4)

    def time(self, launches: Sequence[SampleLaunch], runs: int) -> list[TimedLaunch]:
        done = []
        for item in launches:
            if self.ends_after is not None and len(self.launched) >= self.ends_after:
                raise KeyboardInterrupt
            self.launched.append((json.dumps(item.arguments["buffers"]), item.configuration))
            self.runs += runs
            if item.symbol in self.broken:
                done.append(TimedLaunch(item, "launch_failed", reason="an illegal memory access"))
            else:
                drawn = [self.true_us(item) * (1 + abs(self._random.gauss(0, self.noise))) for _ in range(runs)]
                done.append(TimedLaunch(item, "ok", tuple(drawn)))
        return done


def _drawn(text: str) -> float:
    """From 0 to 1, the same for the same text."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 0xFFFFFFFF
