"""Making a base: the little of a database that gives its tuned kernels to those who have not tuned.

A base has one line for each kernel that is worth its place: the workload, and as many batches of the constructed kernel
beside the adopted one as a build asks for, each with one time. Everything else that was tried stays behind. Origins are
kept, so that a base and the database that it was made of do not count twice when they are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm_ext.analysis.tile_workload import KERNELS
from tvm_ext.records.measurement import Trial
from tvm_ext.support.files import write_atomically

from .choose import CONFIRMATIONS, choose_tuned
from .database import MeasurementDatabase
from .database_files import to_base_line
from .standings import Standings, batches_of, standings_of

WORTH = 0.03
"""A kernel is in a base from this gain on: below it, it would make way for the next change of a compiler's mood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeBase:
    """What became of a database's workloads."""

    kept: int
    left_out: int
    size_bytes: int


def make_base(database: MeasurementDatabase, path: Path) -> MadeBase:
    """Write what of ``database`` is worth it to ``path``, whole or not at all. Raises DatabaseError, ExportError."""
    lines, left_out = [], 0
    for workload in database.workloads().values():
        trials = _worth_keeping(database.trials(workload)) if workload.kind in KERNELS else ()
        if trials:
            lines.append(f"{to_base_line(workload, trials)}\n")
        elif workload.kind in KERNELS:
            left_out += 1
    content = "".join(sorted(lines)).encode()
    write_atomically(path, content)
    return MadeBase(kept=len(lines), left_out=left_out, size_bytes=len(content))


def _worth_keeping(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The batches whose ratios are nearest the adopted kernel's; none where it gains too little."""
    standings = standings_of(trials)
    choice = choose_tuned(standings)
    if choice.configuration is None or choice.ratio is None or 1.0 - choice.ratio < WORTH:
        return ()
    pairs = sorted(_pairs(trials, standings, choice.configuration), key=lambda pair: _distance(pair, choice.ratio or 1))
    return tuple(_plain(trial) for pair in pairs[:CONFIRMATIONS] for trial in pair)


def _pairs(trials: Sequence[Trial], standings: Standings, configuration: str) -> list[tuple[Trial, Trial]]:
    """The constructed kernel's trial and the other's, of each batch that has both."""
    beside = [batch for batch in batches_of(trials).values() if 0 in batch]
    both = [
        (batch[0], trial)
        for batch in beside
        for place, trial in batch.items()
        if place and batch[0].configuration == standings.constructed and trial.configuration == configuration
    ]
    return [pair for pair in both if all(trial.times_us for trial in pair)]


def _distance(pair: tuple[Trial, Trial], ratio: float) -> tuple[float, str]:
    constructed, other = pair
    return abs((other.time_us or 0.0) / (constructed.time_us or 1.0) - ratio), constructed.origin


def _plain(trial: Trial) -> Trial:
    """With its median alone."""
    return replace(trial, times_us=(round(trial.time_us or 0.0, 3),), reason="", taken_at_s=0.0)
