"""Families of kernels: the order of the tiles is data, and the results are those of kernels with loops of their own."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.records.tuning import CpuTile

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark scripts as modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _tile_families  # type: ignore[import-not-found]
    import _tiles  # type: ignore[import-not-found]
    import tuning_measured  # type: ignore[import-not-found]

    return _tiles, _tile_families, tuning_measured


def walked(tile: CpuTile, counts: tuple[int, int]) -> list[tuple[int, int]]:
    """The tiles in the order of three nests of loops, written out."""
    found = []
    levels = [range(0, counts[axis], tile.outer[axis]) for axis in tile.order]
    for task in itertools.product(*levels):
        ends = [min(base + tile.outer[axis], counts[axis]) for base, axis in zip(task, tile.order, strict=True)]
        blocks = [range(base, end, tile.inner[axis]) for base, end, axis in zip(task, ends, tile.order, strict=True)]
        for block in itertools.product(*blocks):
            own = [
                range(base, min(base + tile.inner[axis], end))
                for base, end, axis in zip(block, ends, tile.order, strict=True)
            ]
            for place in itertools.product(*own):
                by_axis = dict(zip(tile.order, place, strict=True))
                found.append((by_axis[0], by_axis[1]))
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("inner", "outer"), [((1, 1), (1, 1)), ((2, 1), (4, 3)), ((2, 2), (6, 2)), ((1, 3), (7, 3))])
def test_visits_are_those_of_the_loops(scripts: Any, inner: Any, outer: Any, order: Any) -> None:
    _, families, _ = scripts
    tile = CpuTile(vector=1, register=(3, 16), inner=inner, outer=outer, order=order)
    assert [tuple(row) for row in families.visits_of(tile, (21, 76)).tolist()] == walked(tile, (7, 5))


def test_measured_candidates_compute_the_operator(scripts: Any, tmp_path: Path) -> None:
    tiles, families, measured = scripts
    device, target = device_for_target("llvm")
    case = tiles.prepare("small", tiles.matmul_model("small", 21, 24, 70), with_unit_count(device, 1), target, 3)
    space = families.space_of(case)
    keys = sorted({families.key_of(space[place]) for place in range(len(space))})[:3]
    measured._compile_chunk(case, tmp_path, keys, 0)
    before = (tmp_path / "0.so").stat().st_mtime_ns
    measured._compile_chunk(case, tmp_path, keys, 0)
    assert (tmp_path / "0.so").stat().st_mtime_ns == before
    few = [place for place in range(len(space)) if families.key_of(space[place]) in keys][:20]
    candidates = measured.Candidates(case, [space[place] for place in few], tmp_path)
    x, w = (array.astype("float64") for array in candidates._arrays)
    for run in candidates.runs:
        candidates.output.copyfrom(np.full(candidates.output.shape, np.nan, "float32"))
        run()
        assert np.allclose(candidates.output.numpy(), x @ w, rtol=1e-4, atol=1e-4)


def test_slow_candidates_drop_out_and_every_one_is_sampled(scripts: Any) -> None:
    _, _, measured = scripts
    assert measured.time_of([3.0, 1.0, 2.0]) == 2.0
    assert measured.time_of([3.0]) == 3.0
    ran = [0, 0]

    def work(which: int) -> None:
        ran[which] += 1
        sum(range(400 if which == 0 else 40_000))

    samples: list[list[float]] = [[], []]
    import time

    measured.measure_rounds([lambda: work(0), lambda: work(1)], samples, time.monotonic() + 0.4, 1)
    assert len(samples[0]) > len(samples[1]) >= 2


def test_rankings_of_a_measured_space_find_its_best(scripts: Any) -> None:
    """Times that are the model's own: its ranking finds the best at once, the simpler model within all candidates."""
    import tuning_curves  # type: ignore[import-not-found]

    tiles, families, measured = scripts
    device, target = device_for_target("llvm")
    case = tiles.prepare("small", tiles.matmul_model("small", 21, 24, 70), with_unit_count(device, 1), target, 3)
    space = families.space_of(case)
    seconds = space.predictions.time_s
    record = measured._record("held_out", case, space, [[own * 1e6] for own in seconds])
    for method in ("bottleneck ranking", "analytical ranking"):
        curve = tuning_curves.measured_curve(record, method, 1)
        assert curve.held_out
        assert 0.0 < curve.best_in_k[1] <= curve.best_in_k[50] <= 1.0
    assert curve.best_in_k[1] > 0.999
