"""How a kernel's configurations stand against the constructed one, by what was measured side by side.

A batch measures the constructed kernel and some candidates in turns, and its trials bear its name: ``origin`` is
``<batch>.<place>``, with place 0 for the constructed kernel. Only times of one batch are compared, since between two
batches the machine may have become slower. A candidate's ratio is the median over its batches; nothing depends on the
order of trials or on a clock, so that merged databases come to the same.

Worked example: in batch a the constructed kernel took 100 us and a candidate 90, in batch b, on a busier machine, 140
and 119. The ratios are 0.90 and 0.85, the candidate stands at 0.875; compared across batches it might have lost.
"""

from __future__ import annotations

import math
import re
import secrets
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tvm_ext.records.measurement import Trial, Verdict, verdicts_of

_ORIGIN = re.compile(r"([0-9a-f]{24})\.([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Of one configuration: its time over the constructed kernel's, in each batch that had both."""

    configuration: str
    verdict: Verdict
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """The median; None where it was never measured beside the constructed kernel, or does not run."""
        return statistics.median(self.ratios) if self.ratios and self.verdict.outcome == "ok" else None

    @property
    def noise(self) -> float:
        """Two standard errors of the ratio, by the median of what the batches differ."""
        if len(self.ratios) < 2:
            return 0.0
        middle = statistics.median(self.ratios)
        spread = 1.4826 * statistics.median(abs(ratio - middle) for ratio in self.ratios)
        return 2.0 * spread / math.sqrt(len(self.ratios))


@dataclass(frozen=True, kw_only=True, slots=True)
class Standings:
    """All that is known of a workload. ``constructed`` is the kernel that the others were measured beside.

    ``constructed_us`` is the median of its trials; None where it never ran. ``tried_first`` are those that began a
    batch, whether they ran or not.
    """

    by_configuration: Mapping[str, Standing]
    constructed: str | None
    constructed_us: float | None
    tried_first: tuple[str, ...] = ()

    def time_us(self, configuration: str) -> float | None:
        """Microseconds on the scale of ``constructed_us``; as it was measured where there is no ratio; None: failed."""
        standing = self.by_configuration[configuration]
        if standing.ratio is not None and self.constructed_us is not None:
            return standing.ratio * self.constructed_us
        return standing.verdict.time_us


def standings_of(trials: Iterable[Trial], constructed: str | None = None) -> Standings:
    """What ``trials``, all of one workload, come to, measured beside ``constructed``.

    Left out, it is the configuration that most batches were measured beside; batches beside another do not count.
    """
    kept = tuple(trials)
    batches = batches_of(kept)
    beside = {name: batch[0] for name, batch in batches.items() if 0 in batch and batch[0].time_us is not None}
    constructed = constructed or _most_common(beside.values())
    references = {name: trial for name, trial in beside.items() if trial.configuration == constructed}
    standings = {
        configuration: Standing(
            configuration=configuration,
            verdict=verdict,
            ratios=tuple(sorted(_ratios(configuration, references, batches))),
        )
        for configuration, verdict in verdicts_of(kept).items()
    }
    times = [trial.time_us for trial in references.values() if trial.time_us is not None]
    return Standings(
        by_configuration=standings,
        constructed=constructed,
        constructed_us=statistics.median(times) if times else None,
        tried_first=tuple(sorted({batch[0].configuration for batch in batches.values() if 0 in batch})),
    )


def batches_of(trials: Iterable[Trial]) -> dict[str, dict[int, Trial]]:
    """By the batch's name the trials that were measured side by side, by place; those of no batch are left out."""
    batches: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        found = _ORIGIN.fullmatch(trial.origin)
        if found is not None:
            batches.setdefault(found[1], {})[int(found[2])] = trial
    return batches


def _ratios(
    configuration: str, references: Mapping[str, Trial], batches: Mapping[str, Mapping[int, Trial]]
) -> Iterator[float]:
    for name, reference in references.items():
        for place, trial in batches[name].items():
            if place and trial.configuration == configuration and trial.time_us is not None:
                assert reference.time_us is not None
                yield trial.time_us / reference.time_us


def _most_common(trials: Iterable[Trial]) -> str | None:
    counts = Counter(trial.configuration for trial in trials)
    return min(counts, key=lambda count: (-counts[count], count), default=None)


def in_batches(trials: Iterable[Trial], constructed: str) -> tuple[Trial, ...]:
    """``trials`` in the order in which they were measured, with the origins of their batches.

    A trial of the ``constructed`` kernel begins a batch, and those behind it were measured beside it.
    """
    found = []
    name, place = secrets.token_hex(12), 0
    for trial in trials:
        begins = trial.configuration == constructed
        name, place = (secrets.token_hex(12), 0) if begins else (name, place + 1)
        found.append(replace(trial, origin=f"{name}.{place}"))
    return tuple(found)
