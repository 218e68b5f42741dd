"""The predictions of ``benchmarks/gpu/pipelining_model.py`` have the shape of the paper's measurements (ALCOP §5.1)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tvm_ext.devices.device_db import lookup

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu"
CHOSEN = ("A7", "A17", "A38", "A45", "A46")
"""MM_BERT_FC2, a 1x1 convolution of many pixels and few channels, MM_RN50_FC, BMM_BERT_QK and BMM_BERT_SV."""


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The script as a module; its neighbours are imported by their bare names."""
    pytest.importorskip("scipy", reason="the benchmark correlates ranks with scipy")
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("pipelining_model")
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER.parent)):
            del sys.modules[name]


@pytest.fixture(scope="module")
def columns(script: Any) -> list[list[Any]]:
    names = script.paper_names()
    cases = [(case, names[case.id]) for case in script.alcop(script.WORKLOAD) if case.id in CHOSEN]
    found: list[list[Any]] = script.run_device(lookup("nvidia-a100"), cases, 40)
    return found


def test_guessed_names_are_marked(script: Any, columns: list[list[Any]]) -> None:
    """Of the names in the paper's figure its text confirms one."""
    names = script.paper_names()
    assert [name for name in names.values() if name and not name.endswith("?")] == ["MM_RN50_FC"]
    assert names["A38"] == "MM_RN50_FC" and names["A7"] == "MM_BERT_FC2?"
    assert {item.paper_name for item in columns[0]} == {names[id] for id in CHOSEN}


def test_every_form_and_choice_of_tiles_is_told_apart(columns: list[list[Any]]) -> None:
    assert len({(column[0].form, column[0].tiles, column[0].split_k) for column in columns}) == len(columns) == 8
    assert all([item.id for item in column] == list(CHOSEN) for column in columns)


def test_each_step_of_pipelining_pays_where_loads_are_waited_for(columns: list[list[Any]]) -> None:
    """More versions of tiles beside two, fragments beside tiles: long reductions gain by each, short ones by none.

    (A larger choice of stages is never slower by construction, whatever the model says.)
    """
    column = next(c for c in columns if (c[0].form, c[0].tiles, c[0].split_k) == ("loop", "best tile", False))
    speedups = {item.id: {mode: result.speedup for mode, result in item.modes.items()} for item in column}
    for long, more_versions, fragments in (("A38", 1.8, 1.2), ("A46", 1.1, 1.2), ("A7", 1.1, 1.2)):
        assert speedups[long]["multistage"] > more_versions * speedups[long]["double"]
        assert speedups[long]["full"] > fragments * speedups[long]["multistage"]
    assert max(speedups["A45"].values()) < 1.05


def test_small_outputs_of_long_reductions_gain_most(script: Any, columns: list[list[Any]]) -> None:
    """As in the paper, whose schedules have no split-K: RN50_FC before FC2, SV before QK, 1x1 convolutions little."""
    column = next(c for c in columns if (c[0].form, c[0].tiles, c[0].split_k) == ("loop", "best tile", False))
    gain = {item.id: item.speedup for item in column}
    assert gain["A38"] > gain["A7"] > 1.5
    assert gain["A46"] > 1.5 * gain["A45"]
    assert gain["A17"] < 1.2
    summary = script.summarise(lookup("nvidia-a100"), column)
    assert summary.rank_correlation_reduction_per_output > 0.8
    assert summary.fully_connected_rank == 1


def test_split_k_takes_the_place_of_stages(columns: list[list[Any]]) -> None:
    """Where blocks share a tile's reduction, there is less for stages to hide."""
    with_it, without = (
        next(c for c in columns if (c[0].form, c[0].tiles, c[0].split_k) == ("loop", "best tile", split))
        for split in (True, False)
    )
    before, after = ({item.id: item for item in column}["A38"] for column in (without, with_it))
    assert after.unpipelined_us < before.unpipelined_us
    assert after.speedup < before.speedup
