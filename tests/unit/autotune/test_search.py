"""Searches on a simulated GPU: what they know, that they repeat nothing, and that they go on after a kill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.alcop.products import product_of_matmul
from benchmarks.alcop.searches import Drafted, InOrder, LikelihoodFree, PlainAnnealed, PlainModel, tune
from benchmarks.alcop.simulated_gpu import SimulatedGpu
from tvm_ext.autotune.cost_model import FAILURE_FACTOR, TileCostModel
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.autotune.search import Annealed, AtRandom, Proposer, SpaceSearch
from tvm_ext.devices import device_db
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial
from tvm_ext.records.tuning import GpuTile

SPACE = MatrixTileSpace(product_of_matmul(512, 512, 64, batch=12), device_db.lookup("nvidia-a100"))
GPU = SimulatedGpu(SPACE)
TAUGHT = TileCostModel(SPACE)
WORKLOAD = MeasuredWorkload(
    kind="product", structure=str(SPACE.product), layout="row-major", dtype="float16", device="simulated",
    instructions="sm_80",
)  # fmt: skip

PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ranking": lambda: InOrder(SPACE.predictions.ranking),
    "random": AtRandom,
    "plain XGB": lambda: PlainAnnealed(PlainModel(SPACE), chains=32, steps=40),
    "analytical + XGB": lambda: Annealed(TileCostModel(SPACE)),
    "drafted": lambda: Drafted(TileCostModel(SPACE)),
    "likelihood-free": lambda: LikelihoodFree(SPACE.features),
}


class KilledError(Exception):
    """What ends a run at an arbitrary point."""


def run(proposer: Proposer, store: MeasurementDatabase, trials: int, *, killed_after: int | None = None) -> SpaceSearch:
    """A tuning run; ``killed_after`` so many batches it ends before the next one's trials are kept."""
    search, batches = SpaceSearch(SPACE, proposer, seed=5), iter(range(10_000))

    def measure(candidates: Sequence[GpuTile]) -> list[Trial]:
        if next(batches) == killed_after:
            raise KilledError
        return GPU.measure(candidates)

    tune(search, measure, WORKLOAD, store, trials=trials)
    return search


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_killed_search_goes_on_where_it_stood_and_repeats_nothing(name: str, tmp_path: Path) -> None:
    with MeasurementDatabase(tmp_path / "whole.db") as whole, MeasurementDatabase(tmp_path / "killed.db") as killed:
        unbroken = run(PROPOSERS[name](), whole, 20)
        with pytest.raises(KilledError):
            run(PROPOSERS[name](), killed, 20, killed_after=2)
        assert len(killed) == 10
        resumed = run(PROPOSERS[name](), killed, 20)
        assert resumed.known == unbroken.known
        assert len(killed) == len(resumed.known) == 20
        assert all(verdict.trials == 1 for verdict in killed.verdicts(WORKLOAD).values())
        assert resumed.best is not None
        times = [time for time in resumed.known.values() if time is not None]
        assert resumed.best[1] == min(times)


def test_exhaustive_search_ends_with_the_best() -> None:
    search = SpaceSearch(SPACE, InOrder(np.arange(len(SPACE))))
    while batch := search.ask(200):
        search.tell(GPU.measure(batch))
    assert len(search.known) == len(SPACE)
    assert sum(time is None for time in search.known.values()) == GPU.fails.sum() > 0
    assert search.best is not None
    assert GPU.share_of_best(search.best[0]) > 0.9


def test_what_is_no_candidate_is_left_out() -> None:
    search = SpaceSearch(SPACE, InOrder(np.arange(len(SPACE))))
    texts = ("{}", "no JSON", "[1]", SPACE[1].configuration.replace('"rows":', '"rows":7'))
    search.tell(Trial(configuration=text, outcome="crashed") for text in (*texts, SPACE[1].configuration))
    assert list(search.known) == [1]
    assert search.ask(2) == [SPACE[0], SPACE[2]]


def test_unsettled_verdicts_are_not_recalled(tmp_path: Path) -> None:
    """A time limit says as much of the machine as of the candidate; other failures are final."""
    late = Trial(configuration=SPACE[0].configuration, outcome="timed_out")
    with MeasurementDatabase(tmp_path / "one.db") as store:
        crashed = Trial(configuration=SPACE[1].configuration, outcome="crashed")
        store.add(Measurement(workload=WORKLOAD, trial=trial) for trial in (late, crashed))
        search = SpaceSearch(SPACE, AtRandom())
        assert search.recall(store.verdicts(WORKLOAD)) == 1
        assert search.known == {1: None}


def test_the_analytical_model_teaches_its_order() -> None:
    def ranks(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.argsort(np.argsort(values))

    assert np.corrcoef(ranks(TAUGHT.scores), ranks(-SPACE.predictions.time_s))[0, 1] > 0.99
    assert np.array_equal(TileCostModel(SPACE).scores, TAUGHT.scores)


def test_measurements_correct_the_model_and_do_not_replace_it() -> None:
    model = TileCostModel(SPACE)
    before, slow = model.scores, SPACE.tiles.depth == 16
    times = {int(place): 1e6 * SPACE.predictions.time_s[place] for place in range(0, len(SPACE), 9)}
    model.update({place: time * (3.0 if slow[place] else 1.0) for place, time in times.items()})
    change = model.scores - before
    assert np.median(change[~slow]) - np.median(change[slow]) == pytest.approx(np.log(3.0), rel=0.3)
    again = TileCostModel(SPACE)
    again.update(dict(reversed([(place, time * (3.0 if slow[place] else 1.0)) for place, time in times.items()])))
    assert np.array_equal(again.scores, model.scores)


def test_failures_teach_as_well() -> None:
    model, slow = TileCostModel(SPACE), SPACE.tiles.shared_stages == 1
    before = model.scores
    model.update({int(place): None for place in np.flatnonzero(slow)[::4]})
    change = model.scores - before
    assert np.median(change[slow]) < 0.5 * -np.log(FAILURE_FACTOR)
    assert np.median(change[~slow]) > np.median(change[slow]) / 3


def test_measurements_help_the_analytical_model_and_it_helps_them() -> None:
    """On simulated GPUs; ALCOP's Figure 13 has the same order."""
    shares: dict[str, list[float]] = {}
    for seed in range(3):
        gpu = SimulatedGpu(SPACE, seed=seed)
        for name in ("ranking", "random", "analytical + XGB"):
            search = SpaceSearch(SPACE, PROPOSERS[name](), seed=seed)
            while len(search.known) < 30:
                search.tell(gpu.measure(search.ask(5)))
            assert search.best is not None
            shares.setdefault(name, []).append(gpu.share_of_best(search.best[0]))
    mean = {name: float(np.mean(items)) for name, items in shares.items()}
    assert mean["analytical + XGB"] > mean["random"]
    assert mean["analytical + XGB"] >= mean["ranking"]
