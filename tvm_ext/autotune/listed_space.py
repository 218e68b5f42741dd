"""A space whose candidates are so few that they are listed: window kernels' and attention's tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import zip_longest
from typing import Any, Generic, TypeAlias

import numpy as np

from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.serialise import from_json
from tvm_ext.support.quantities import Floats, Integers

from .spaces import CandidateType, SharedGroups

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
