"""The rPrograms that construction kept for a kernel, as a space to search: Roller's own profiler (paper §4, Figure 14).

Small, and always there: its candidates are the K that construction ranks first, and every one of them is legal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_ext.records.tuning import CpuTile

from .spaces import Floats, Integers


@dataclass(frozen=True, slots=True)
class ProgramPredictions:
    """Seconds of each by Roller's model, which knows but one time."""

    time_s: Floats

    @property
    def ranking(self) -> Integers:
        return np.argsort(self.time_s, kind="stable")

    @property
    def bottleneck_ranking(self) -> Integers:
        return self.ranking


class ProgramSpace:
    """The distinct ``tiles``, the best predicted first, with their predicted times in seconds."""

    def __init__(self, tiles: Sequence[CpuTile], times_s: Sequence[float]) -> None:
        known = {
            tile.configuration: (tile, time_s) for tile, time_s in reversed(list(zip(tiles, times_s, strict=True)))
        }
        found = list(reversed(known.values()))
        self.tiles = tuple(tile for tile, _ in found)
        self.predictions = ProgramPredictions(np.array([time_s for _, time_s in found], dtype=np.float64))
        self._places = {tile.configuration: place for place, tile in enumerate(self.tiles)}

    @property
    def features(self) -> Floats:
        """Sizes by their logarithms, and which axis lies along the registers."""
        rows = [[item.vector, *np.log2([*item.register, *item.inner, *item.outer])] for item in self.tiles]
        return np.array(rows, dtype=np.float64)

    def __len__(self) -> int:
        return len(self.tiles)

    def __getitem__(self, index: int, /) -> CpuTile:
        return self.tiles[index]

    def index(self, configuration: str, /) -> int | None:
        return self._places.get(configuration)

    def neighbours(self, places: Integers, rng: np.random.Generator, /) -> Integers:
        """Any others: of a handful none is nearer than the rest."""
        return rng.integers(len(self.tiles), size=len(places))
