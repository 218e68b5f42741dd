"""What a search moves in: kernels of one workload, numbered, with their features and an analytical model's predictions.

`cpu_space.CpuTileSpace` has the tiles of a CPU kernel, `ListedSpace` what is listed. The searches
(`search.py`) and the cost model (`cost_model.py`) know neither, only `KernelSpace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import from_json
from tvm_ext.support.quantities import Floats, Integers


class SpaceCandidate(Protocol):
    """One way to compute a workload."""

    @property
    def configuration(self) -> str:
        """Its canonical text, by which a store of measurements knows it."""


class Predictions(Protocol):
    """What analytical models say of all candidates of a space."""

    @property
    def time_s(self) -> Floats:
        """Seconds by candidate, infinite for one that does not fit the device."""

    @property
    def ranking(self) -> Integers:
        """Places of those that fit, best predicted first."""


CandidateType = TypeVar("CandidateType", bound=SpaceCandidate)
CandidateType_co = TypeVar("CandidateType_co", bound=SpaceCandidate, covariant=True)


class KernelSpace(Protocol[CandidateType_co]):
    """The legal candidates of one workload on one device. Places are numbers from 0."""

    @property
    def predictions(self) -> Predictions: ...

    @property
    def features(self) -> Floats:
        """A row of numbers for each candidate: what a cost model learns from. No prediction is among them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> CandidateType_co: ...

    def index(self, configuration: str, /) -> int | None:
        """The place of a candidate by its text; None for any text that is no candidate of this space."""

    def neighbours(self, places: Integers, rng: np.random.Generator, /) -> Integers:
        """For each place one that differs little; itself where the change that was drawn is not legal."""


class SharedGroups:
    """Candidates that have the same row of ``keys``: from each to another of its group, all as likely."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        _, group, self._size = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        self._group = group.ravel()
        self._members = np.argsort(self._group, kind="stable")
        self._first = np.cumsum(self._size) - self._size

    def draw(self, places: Integers, rng: np.random.Generator) -> Integers:
        """For each place one of its group, itself among them."""
        mine = self._group[places]
        drawn = self._first[mine] + (rng.random(len(places)) * self._size[mine]).astype(np.int64)
        return np.asarray(self._members[drawn], dtype=np.int64)


# --- A space whose candidates are so few that they are listed: window kernels' and attention's tiles ------------------
FieldLevel: TypeAlias = int | float | bool | str


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedPredictions:
    """Seconds by candidate."""

    time_s: Floats

    @property
    def ranking(self) -> Integers:
        """Places, best predicted first; of equal ones those that were listed first."""
        return np.argsort(self.time_s, kind="stable")


class ListedSpace(Generic[CandidateType]):
    """``candidates``, frozen records of one class with numbers, truths and words for fields, and their predictions.

    ``levels`` are what they differ in, where their fields are no such values; the shorter ones count as followed by 0.
    Neighbours differ in one level, or share one. Raises IllegalRewrite where there are fewer than two candidates:
    nothing is to be chosen.
    """

    def __init__(
        self,
        candidates: Sequence[CandidateType],
        time_s: Sequence[float],
        levels: Sequence[Sequence[FieldLevel]] | None = None,
    ) -> None:
        if len(candidates) < 2:
            raise IllegalRewrite("one tile alone is legal")
        self.candidates = tuple(candidates)
        self.predictions = ListedPredictions(time_s=np.asarray(time_s, dtype=np.float64))
        rows = levels or [[getattr(candidate, field.name) for field in fields(candidate)] for candidate in candidates]  # type: ignore[arg-type] # records
        self._columns = [column for column in zip_longest(*rows, fillvalue=0) if len(set(column)) > 1]
        self._places = {candidate: position for position, candidate in enumerate(self.candidates)}
        assert len(self._places) == len(self.candidates) == len(time_s)

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: int) -> CandidateType:
        return self.candidates[index]

    def index(self, configuration: str) -> int | None:
        """The place of the candidate of this text; None where there is none."""
        try:
            return self._places.get(from_json(type(self.candidates[0]), configuration))
        except ValueError:
            return None

    @cached_property
    def features(self) -> Floats:
        """Numbers by their logarithms, truths, and words by whether they are each of those that occur."""
        columns: list[Any] = []
        for values in self._columns:
            if isinstance(values[0], str):
                columns += [[float(value == word) for value in values] for word in sorted(set(values))[1:]]
            elif isinstance(values[0], bool):
                columns.append(np.asarray(values, dtype=np.float64))
            else:
                columns.append(np.log2(np.maximum(np.asarray(values, dtype=np.float64), 1e-9)))
        return np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)

    def neighbours(self, places: Integers, rng: np.random.Generator) -> Integers:
        """For each place one that has all fields but one in common or, where that is itself, one field."""
        levels = len(self._groups)
        drawn = np.stack([groups.draw(places, rng) for groups in self._groups])
        found = drawn[rng.integers(levels // 2, size=len(places)), np.arange(len(places))]
        wider = drawn[rng.integers(levels // 2, levels, size=len(places)), np.arange(len(places))]
        return np.where(found == places, wider, found)

    @cached_property
    def _groups(self) -> tuple[SharedGroups, ...]:
        """Those that share all fields but one, then those that share one."""
        codes = [np.unique(np.asarray(values), return_inverse=True)[1].ravel() for values in self._columns]
        keys = np.stack(codes, axis=1)
        but_one = [SharedGroups(np.delete(keys, column, axis=1)) for column in range(keys.shape[1])]
        return (*but_one, *(SharedGroups(keys[:, [column]]) for column in range(keys.shape[1])))


# --- A model's distinct tunable kernels: what there is to choose in each, how often it runs, its share of the time ----
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TuningTask:
    """One kernel that a search can make faster.

    ``calls`` counts its call sites in a run of the model, ``predicted_us`` is of one call of the constructed kernel,
    whose configuration is ``constructed``, and ``share`` is what all its calls have of the model's time, 0 to 1.
    """

    name: str
    workload: MeasuredWorkload
    space: KernelSpace[SpaceCandidate]
    constructed: str
    calls: int
    predicted_us: float
    share: float = 0.0


def distinct(tasks: Sequence[TuningTask], other_us: float = 0.0) -> tuple[TuningTask, ...]:
    """One task for each workload of ``tasks``, with the calls of all, the one with most of the time first.

    ``other_us``: what the model's other kernels are predicted to take in one run. Worked example: two layers of the
    same convolution, called twice and once at 100 us, beside other kernels of 700 us, are one task of three calls and
    30 % of the time.
    """
    merged: dict[str, TuningTask] = {}
    for task in tasks:
        known = merged.get(task.workload.key)
        merged[task.workload.key] = task if known is None else replace(known, calls=known.calls + task.calls)
    total = other_us + sum(task.calls * task.predicted_us for task in merged.values())
    shared = [replace(task, share=task.calls * task.predicted_us / total if total else 0.0) for task in merged.values()]
    return tuple(sorted(shared, key=lambda task: (-task.share, task.workload.key)))
