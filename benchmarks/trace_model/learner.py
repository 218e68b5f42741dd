"""A cost model for stock TVM's MetaSchedule that knows something before the first trial.

For ``tune_tir(..., cost_model=...)`` and `tune_relax`. Stock TVM's XGBoost model proposes at random until it has seen
100 trials. This one is `cost_model.py`'s for traces (ALCOP §4.3). The first candidates that MetaSchedule samples of a
workload are read as loop nests and timed by the analytical model (`loop_nest_time.py`); an ensemble is taught
that, on MetaSchedule's own features of each store, so that the many candidates that follow need no reading. A second,
small ensemble learns from all trials, failures among them, by how much they differ, with analytical pairs among them.
Where candidates cannot be read (a GPU's, dynamic shapes) it is the second half alone, which learns from the first
batch on.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from tvm_ext._tvm import PrimFunc, structural_hash
from tvm_ext.autotune.cost_model import (
    ANCHOR_WEIGHT,
    ANCHORS,
    CORRECTION,
    CORRECTION_ROUNDS,
    FAILURE_FACTOR,
    TreeSettings,
)
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError, TargetError
from tvm_ext.support.files import write_atomically
from tvm_ext.support.quantities import Floats

from .loop_nest_time import loop_nests_s
from .loop_nests import read_nests

PRETRAINING: TreeSettings = {"max_depth": 7, "eta": 0.2, "tree_method": "hist", "max_bin": 64}
PRETRAINING_ROUNDS = 120

MOST_TAUGHT = 512
"""Candidates of a workload that are read and timed by the analytical model, in two or three seconds."""

HIGHEST_SCORE = 1e6


@dataclass(slots=True)
class _Lesson:
    """What the analytical model says of a workload's sampled candidates, and the ensemble that has learnt it."""

    rows: Floats
    predicted_s: Floats
    booster: Any = None

    @property
    def labels(self) -> Floats:
        """Logarithms of throughput, the best prediction 0."""
        return np.asarray(np.log(self.predicted_s.min() / self.predicted_s))


@dataclass(slots=True)
class _WorkloadTrials:
    """Trials of a workload: a row of features and seconds, None for a failure."""

    rows: list[Floats] = field(default_factory=list)
    times_s: list[float | None] = field(default_factory=list)


class TraceLearner:
    """What is predicted and what was measured of candidates of several workloads, and what that says of others."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._lessons: dict[str, _Lesson] = {}
        self._tried: dict[str, _WorkloadTrials] = {}
        self._correction: Any = None

    def __len__(self) -> int:
        """Trials."""
        return sum(len(item.times_s) for item in self._tried.values())

    def is_taught(self, workload: str) -> bool:
        return workload in self._lessons

    def teach(self, workload: str, stores: Sequence[Floats], predicted_s: Sequence[float]) -> None:
        """Have the features of candidates' stores, a row for each, mean what is predicted of them, in seconds."""
        known = [place for place, own in enumerate(stores) if len(own)]
        if not known:
            return
        rows = np.stack([summary_of(stores[place]) for place in known])
        lesson = _Lesson(rows, np.array([predicted_s[place] for place in known]))
        lesson.booster = self._trained(rows, lesson.labels, PRETRAINING, PRETRAINING_ROUNDS)
        self._lessons[workload] = lesson

    def learn(self, workload: str, stores: Sequence[Floats], times_s: Sequence[float | None]) -> None:
        """Trials of ``workload``: the features of each candidate's stores, a row for each, and its seconds.

        None in place of seconds: it failed.
        """
        for own, time_s in zip(stores, times_s, strict=True):
            if len(own):
                tried = self._tried.setdefault(workload, _WorkloadTrials())
                tried.rows.append(summary_of(own))
                tried.times_s.append(time_s)
        self._correct()

    def _correct(self) -> None:
        """Learn anew by how much all trials differ from what was predicted, and that nothing else does."""
        rows, labels, weights = [], [], []
        for workload, tried in self._tried.items():
            own = np.stack(tried.rows)
            off = _labels(tried.times_s) - self._base(workload, own)
            ran = [item is not None for item in tried.times_s]
            middle = np.median(off[ran]) if workload in self._lessons and any(ran) else 0.0
            rows.append(own)
            labels.append(off - middle)
            weights.append(np.ones(len(own)))
        for lesson in self._lessons.values():
            anchors = lesson.rows[np.random.default_rng(self.seed).permutation(len(lesson.rows))[:ANCHORS]]
            rows.append(anchors)
            labels.append(np.zeros(len(anchors)))
            weights.append(np.full(len(anchors), ANCHOR_WEIGHT))
        if self._tried:
            self._correction = self._trained(
                np.concatenate(rows), np.concatenate(labels), CORRECTION, CORRECTION_ROUNDS, np.concatenate(weights)
            )

    def _trained(
        self, rows: Floats, labels: Floats, settings: TreeSettings, rounds: int, weights: Floats | None = None
    ) -> Any:
        fixed = {**settings, "seed": self.seed, "nthread": 1, "base_score": 0.0, "objective": "reg:squarederror"}
        data = xgboost.DMatrix(rows, label=labels, weight=weights, nthread=1)
        return xgboost.train(fixed, data, num_boost_round=rounds)

    def _base(self, workload: str, rows: Floats) -> Floats:
        """What was taught; nothing where there was no lesson."""
        lesson = self._lessons.get(workload)
        return np.zeros(len(rows)) if lesson is None else _said(lesson.booster, rows)

    def scores(self, workload: str, stores: Sequence[Floats]) -> Floats:
        """Of each candidate, in proportion to its throughput; 0 without stores, all the same where nothing is known."""
        found = np.zeros(len(stores))
        known = [place for place, own in enumerate(stores) if len(own)]
        if not known:
            return found
        rows = np.stack([summary_of(stores[place]) for place in known])
        total = self._base(workload, rows)
        if self._correction is not None:
            total = total + _said(self._correction, rows)
        found[known] = np.minimum(np.exp(np.minimum(total, np.log(HIGHEST_SCORE))), HIGHEST_SCORE)
        return found

    def save(self, path: str | Path) -> None:
        """Keep what was taught and tried, to go on with by `load`; the whole file or none of it. Raises ExportError."""
        arrays: dict[str, Any] = {}
        for number, (workload, lesson) in enumerate(self._lessons.items()):
            kept = {"name": np.array(workload), "rows": lesson.rows, "predicted": lesson.predicted_s}
            arrays |= {f"lesson{number}.{key}": value for key, value in kept.items()}
        for number, (workload, tried) in enumerate(self._tried.items()):
            times = np.array([np.nan if time is None else time for time in tried.times_s])
            kept = {"name": np.array(workload), "rows": np.stack(tried.rows), "times": times}
            arrays |= {f"tried{number}.{key}": value for key, value in kept.items()}
        file = io.BytesIO()
        np.savez(file, **arrays)
        write_atomically(path, file.getvalue())

    def load(self, path: str | Path) -> None:
        """Learn from what `save` kept; raises InputError where the file is none of those."""
        try:
            with np.load(path, allow_pickle=False) as kept:
                lessons = [(str(name), rows, said) for name, rows, said in _groups(kept, "lesson", "predicted")]
                tried = [(str(name), rows, times) for name, rows, times in _groups(kept, "tried", "times")]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise InputError(
                f"{path} holds no trials of a cost model: {error}.", "name a file that it saved"
            ) from error
        self._lessons, self._tried = {}, {}
        for name, rows, said in lessons:
            lesson = self._lessons[name] = _Lesson(rows, said)
            lesson.booster = self._trained(rows, lesson.labels, PRETRAINING, PRETRAINING_ROUNDS)
        for name, rows, times in tried:
            self._tried[name] = _WorkloadTrials(list(rows), [None if np.isnan(item) else float(item) for item in times])
        self._correct()


def _groups(kept: Mapping[str, Any], what: str, last: str) -> list[tuple[Any, Any, Any]]:
    count = sum(name.startswith(what) for name in kept) // 3
    return [tuple(kept[f"{what}{number}.{key}"] for key in ("name", "rows", last)) for number in range(count)]


def _said(booster: Any, rows: Floats) -> Floats:
    return np.asarray(booster.predict(xgboost.DMatrix(rows, nthread=1)), dtype=np.float64)


def summary_of(stores: Floats) -> Floats:
    """One row for all stores of a candidate: the largest, the mean and the sum of each feature."""
    return np.concatenate([stores.max(axis=0), stores.mean(axis=0), stores.sum(axis=0)])


def _labels(times_s: Sequence[float | None]) -> Floats:
    """Logarithms of throughput, the fastest of the workload 0."""
    ran = [item for item in times_s if item is not None]
    if not ran:
        return np.full(len(times_s), -np.log(FAILURE_FACTOR))
    slowest = FAILURE_FACTOR * max(ran)
    return np.array([np.log(min(ran) / (slowest if item is None else item)) for item in times_s])


def predict_schedule(func: PrimFunc, device: DeviceSpec) -> float | None:
    """Seconds that the analytical model gives a scheduled function; None where it cannot read it."""
    if device.kind != "cpu":
        return None
    try:
        return loop_nests_s(read_nests(func), device)
    except IllegalRewrite:
        return None


def cost_model_for_metaschedule(learner: TraceLearner | None = None, *, pretrained: bool = True) -> Any:
    """A cost model to hand to ``tune_tir`` or ``tune_relax``; ``learner`` sees what it learns.

    ``pretrained=False``: without the analytical model.
    """
    from tvm.ir.utils import derived_object
    from tvm.s_tir.meta_schedule.cost_model import PyCostModel
    from tvm.s_tir.meta_schedule.feature_extractor import PerStoreFeature

    known = learner if learner is not None else TraceLearner()
    extractor = PerStoreFeature()
    unreadable: set[str] = set()

    def stores(context: Any, candidates: Sequence[Any]) -> list[Floats]:
        return [item.numpy().astype(np.float64) for item in extractor.extract_from(context, candidates)]

    def teach(workload: str, context: Any, candidates: Sequence[Any], features: Sequence[Floats]) -> None:
        """By the first candidates that come, which MetaSchedule has sampled at random."""
        predict = _predictor(context)
        chosen = np.random.default_rng(known.seed).permutation(len(candidates))[:MOST_TAUGHT]
        said = [(int(place), predict(candidates[int(place)])) for place in chosen]
        read = [(place, time_s) for place, time_s in said if time_s is not None]
        known.teach(workload, [features[place] for place, _ in read], [time_s for _, time_s in read])
        if not known.is_taught(workload):
            unreadable.add(workload)

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
            workload, features = str(structural_hash(context.mod)), stores(context, candidates)
            if pretrained and len(candidates) and not known.is_taught(workload) and workload not in unreadable:
                teach(workload, context, candidates, features)
            return known.scores(workload, features)

    return LearningCostModel()


def _predictor(context: Any) -> Callable[[Any], float | None]:
    """The analytical model of a tuning context's candidates, for its target."""
    try:
        device, _ = device_for_target(context.target)
    except TargetError:
        return lambda _candidate: None

    def predict(candidate: Any) -> float | None:
        funcs = [func for _, func in candidate.sch.mod.functions_items() if isinstance(func, PrimFunc)]
        said = [predict_schedule(func, device) for func in funcs]
        return None if not said or None in said else sum(item for item in said if item is not None)

    return predict
