"""A cost model for stock TVM's MetaSchedule that learns from the first batch on: `tune_tir(..., cost_model=...)`.

Stock TVM's XGBoost model proposes at random until it has seen 100 trials. This one is the correcting half of
`cost_model.py`: a small ensemble on logarithms of throughput, trained anew from all trials, failures among them. What
it is told of a candidate are MetaSchedule's own features of each store in its loops; there is no analytical prediction
of a trace's loops that could teach it beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from tvm_ext._tvm import structural_hash
from tvm_ext.errors import InputError

from .cost_model import CORRECTION, CORRECTION_ROUNDS, FAILURE_FACTOR
from .spaces import Floats


class TraceLearner:
    """What was measured of candidates of several workloads, by their features, and what that says of others."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._features: dict[str, list[Floats]] = {}
        self._times: dict[str, list[float | None]] = {}
        self._booster: Any = None

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def learn(self, workload: str, stores: Sequence[Floats], times_s: Sequence[float | None]) -> None:
        """Trials of ``workload``: the features of each candidate's stores, a row for each, and its seconds.

        None in place of seconds: it failed.
        """
        for own, time_s in zip(stores, times_s, strict=True):
            if len(own):
                self._features.setdefault(workload, []).append(summary_of(own))
                self._times.setdefault(workload, []).append(time_s)
        labels = [label for times in self._times.values() for label in _labels(times)]
        if not labels:
            return
        rows = np.stack([row for rows in self._features.values() for row in rows])
        settings = {**CORRECTION, "seed": self.seed, "nthread": 1, "base_score": 0.0, "objective": "reg:squarederror"}
        data = xgboost.DMatrix(rows, label=np.array(labels), nthread=1)
        self._booster = xgboost.train(settings, data, num_boost_round=CORRECTION_ROUNDS)

    def scores(self, stores: Sequence[Floats]) -> Floats:
        """Of each candidate, 0 to 1, higher is better; all the same where nothing was learnt yet."""
        found = np.zeros(len(stores))
        known = [place for place, own in enumerate(stores) if len(own)]
        if self._booster is None or not known:
            return found
        rows = np.stack([summary_of(stores[place]) for place in known])
        found[known] = np.exp(np.minimum(self._booster.predict(xgboost.DMatrix(rows, nthread=1)), 0.0))
        return found

    def save(self, path: str | Path) -> None:
        """Keep what was learnt from, to go on with by `load`."""
        arrays: dict[str, Any] = {}
        for number, (workload, rows) in enumerate(self._features.items()):
            arrays[f"name{number}"] = np.array(workload)
            arrays[f"rows{number}"] = np.stack(rows)
            times = self._times[workload]
            arrays[f"times{number}"] = np.array([np.nan if time is None else time for time in times])
        with Path(path).open("wb") as file:
            np.savez(file, **arrays)

    def load(self, path: str | Path) -> None:
        """Learn from what `save` kept; raises InputError where the file is none of those."""
        try:
            with np.load(path, allow_pickle=False) as kept:
                count = len(kept.files) // 3
                names = [str(kept[f"name{number}"]) for number in range(count)]
                rows = [list(kept[f"rows{number}"]) for number in range(count)]
                times = [list(kept[f"times{number}"]) for number in range(count)]
        except (OSError, ValueError, KeyError) as error:
            raise InputError(
                f"{path} holds no trials of a cost model: {error}.", "name a file that it saved"
            ) from error
        self._features = dict(zip(names, rows, strict=True))
        self._times = {
            name: [None if np.isnan(item) else float(item) for item in own]
            for name, own in zip(names, times, strict=True)
        }
        self.learn("", [], [])


def summary_of(stores: Floats) -> Floats:
    """One row for all stores of a candidate: the largest, the mean and the sum of each feature."""
    return np.concatenate([stores.max(axis=0), stores.mean(axis=0), stores.sum(axis=0)])


def _labels(times_s: Sequence[float | None]) -> list[float]:
    """Logarithms of throughput, the fastest of the workload 0."""
    ran = [item for item in times_s if item is not None]
    if not ran:
        return [-float(np.log(FAILURE_FACTOR))] * len(times_s)
    slowest = FAILURE_FACTOR * max(ran)
    return [float(np.log(min(ran) / (slowest if item is None else item))) for item in times_s]


def cost_model_for_metaschedule(learner: TraceLearner | None = None) -> Any:
    """A cost model to hand to ``tune_tir``, ``tune_relax`` or ``TuneContext``; ``learner`` sees what it learns."""
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.cost_model import PyCostModel
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

    known = learner if learner is not None else TraceLearner()
    extractor = PerStoreFeature()

    def stores(context: Any, candidates: Sequence[Any]) -> list[Floats]:
        return [item.numpy().astype(np.float64) for item in extractor.extract_from(context, candidates)]

    @derived_object
    class LearningCostModel(PyCostModel):  # type: ignore[misc]
        def load(self, path: str) -> None:
            known.load(path)

        def save(self, path: str) -> None:
            known.save(path)

        def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
            times = [float(np.median([float(t) for t in item.run_secs])) if item.run_secs else None for item in results]
            known.learn(str(structural_hash(context.mod)), stores(context, candidates), times)

        def predict(self, context: Any, candidates: Sequence[Any]) -> Floats:
            return known.scores(stores(context, candidates))

    return LearningCostModel()
