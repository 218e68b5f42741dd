"""What a search moves in: kernels of one workload, numbered, with their features and an analytical model's predictions.

`cpu_space.CpuTileSpace` has the tiles of a CPU kernel, `listed_space.ListedSpace` what is listed. The searches
(`search.py`) and the cost model (`cost_model.py`) know neither, only `KernelSpace`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

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
