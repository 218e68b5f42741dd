"""A GPU that does not exist: "times" for tests and curves of searches, where no GPU is at hand. Never a measurement.

A simulated time is the analytical model's, times factors that the model does not know of: barriers of each iteration,
bank conflicts of narrow tiles, the issue rate of small warp tiles, spilled registers, and a smooth random function of
tile and stages, drawn once for a product and a seed; and noise for each trial. Some kernels do not compile. How large
these are is an assumption: the random function's `SPREAD` was chosen so that the analytical ranking does about as well
as ALCOP measured on an A100 (its first 10 have 79 % of the best, its first 50 92 %, §5.4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.records.measurement import Trial
from tvm_ext.records.tuning import GpuTile

SPREAD = 0.18
"""Standard deviation of the random function, in logarithms of time."""
NOISE = 0.02
WAVES = 24
"""Cosines that the random function is a sum of."""
BARRIER_S = 40e-9
FAILING = 0.03


class SimulatedGpu:
    """Simulated times of the candidates of ``space``; the same for the same product and ``seed``."""

    def __init__(self, space: MatrixTileSpace, *, seed: int = 0, spread: float = SPREAD, noise: float = NOISE) -> None:
        self.space, self.noise, self.seed = space, noise, seed
        digest = hashlib.sha256(f"{space.product} {space.device.name} {seed}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
        predictions, tiles = space.predictions, space.tiles
        loops = predictions.loops
        batches = np.ceil(loops.blocks / (loops.resident * space.device.unit_count))
        barriers = BARRIER_S * batches * loops.shared_trips
        conflicts = 1.0 + 0.12 * (tiles.depth == 16)
        issue = 1.0 + 4.0 / (tiles.warp_rows + tiles.warp_columns)
        registers = loops.registers_per_thread + (tiles.register_stages - 1) * loops.register_stage_registers
        spilled = 1.0 + np.maximum(0, registers - 200) / 100
        wobble = np.exp(spread * _smooth(space.features, rng))
        self.time_s = (predictions.time_s + barriers) * conflicts * issue * spilled * wobble
        self.fails = rng.random(len(space)) < FAILING
        self.best_s = float(self.time_s[~self.fails].min())

    def measure(self, candidates: Sequence[GpuTile]) -> list[Trial]:
        """Simulated trials, noise included; a candidate has the same noise each time."""
        return [self._trial(candidate) for candidate in candidates]

    def share_of_best(self, candidate: GpuTile) -> float:
        """The best time of the space over the candidate's, without noise; 0 for one that fails."""
        place = self.space.index(candidate.configuration)
        assert place is not None, candidate
        return 0.0 if self.fails[place] else self.best_s / float(self.time_s[place])

    def _trial(self, candidate: GpuTile) -> Trial:
        place = self.space.index(candidate.configuration)
        assert place is not None, candidate
        configuration = candidate.configuration
        if self.fails[place]:
            return Trial(configuration=configuration, outcome="compile_failed", reason="simulated")
        noise = np.random.default_rng([self.seed, place]).normal(0.0, self.noise, size=3)
        times = tuple(float(1e6 * self.time_s[place] * np.exp(item)) for item in noise)
        return Trial(configuration=configuration, outcome="ok", times_us=times)


def _smooth(features: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """A function of ``features`` with mean 0 and deviation 1 over them: cosines of a few of their combinations."""
    scaled = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)
    weights = rng.normal(0.0, 0.35, size=(scaled.shape[1], WAVES))
    found = np.cos(scaled @ weights + rng.uniform(0, 2 * np.pi, WAVES)) @ rng.normal(size=WAVES)
    return np.asarray((found - found.mean()) / found.std(), dtype=np.float64)
