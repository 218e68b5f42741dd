"""The bench that builds and times any rProgram: whatever legal tile it is given, the kernel computes the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.networks.roller_models import BUILDERS
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.device_facts import with_unit_count

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
M, K, N = 21, 24, 70


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark scripts as modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _tiles  # type: ignore[import-not-found]
    import ablation  # type: ignore[import-not-found]
    import model_quality  # type: ignore[import-not-found]

    return _tiles, model_quality, ablation


def case_of(tiles: Any, model: Any, **how: Any) -> Any:
    device, target = device_for_target("llvm")
    return tiles.prepare("small", model, with_unit_count(device, 1), target, 5, **how)


def convolution() -> Any:
    row = {
        "id": "small", "op": "Conv2D", "C": "5", "F": "20", "H": "9", "W": "9", "KH": "3", "KW": "3",
        "stride": "2", "dilation": "1", "padding": "VALID",
    }  # fmt: skip
    return BUILDERS["Conv2D"](row, 1, 0).model


def test_random_programs_are_legal_distinct_and_right(scripts: Any) -> None:
    tiles, quality, _ = scripts
    case = case_of(tiles, tiles.matmul_model("small", M, K, N))
    programs = quality.random_programs(case, 12, seed=3)
    assert len({(p.vector_axis, p.tiles) for p in programs}) == 12
    for program in programs:
        model = PerfModel(case.expr, case.device, program.vector_axis)
        shape = tuple(program.tile("L0").sizes[name] for name in model.names)
        assert model.footprint_bytes(0, shape) <= model.capacity_bytes(0)
    bench = tiles.Bench(case, programs)
    x, w = (array.astype("float64") for array in bench.inputs)
    for number in range(len(programs)):
        assert np.allclose(bench.output(number), x @ w, rtol=1e-4, atol=1e-4)


def test_roller_and_random_programs_of_a_convolution_agree(scripts: Any) -> None:
    tiles, quality, _ = scripts
    case = case_of(tiles, convolution())
    bench = tiles.Bench(case, [*case.construction.programs, *quality.random_programs(case, 6, seed=1)])
    first = bench.output(0)
    assert not np.isnan(first).any()
    for number in range(1, len(bench.programs)):
        assert np.allclose(bench.output(number), first, rtol=1e-4, atol=1e-4)


def test_evaluation_reports_each_program(scripts: Any) -> None:
    tiles, quality, _ = scripts
    result = quality.evaluate(case_of(tiles, tiles.matmul_model("small", M, K, N)), count=3, rounds=2, seed=0)
    assert len(result["programs"]) >= 4
    assert all(row["measured_us"] > 0 and row["predicted_us"] > 0 for row in result["programs"])
    assert result["regret"] <= result["first"]  # the best of ten is no worse than the first
    assert "small" in [cell for column in quality.table([result]).columns for cell in column.cells]


def test_every_variant_of_the_ablations_computes_the_same(scripts: Any) -> None:
    """`ablation.measure` raises where two variants disagree."""
    tiles, _, ablation = scripts
    device, target = device_for_target("llvm")
    one = with_unit_count(device, 1)
    rules = ablation.alignment("small", convolution(), one, target, 1)
    assert [item.variant for item in rules] == list(ablation.RULES)
    shapes = ablation.irregular("small", tiles.matmul_model("small", M, K, N), one, target, 1)
    shrunk = ablation.small("small", tiles.matmul_model("small", M, K, N), with_unit_count(device, 2), target, 1)
    for figure in ("Table 3", "Figure 17", "Figure 16"):
        assert ablation.summary(figure, [*rules, *shapes, *shrunk]).row_count == 2
