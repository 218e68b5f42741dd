"""``benchmarks/gpu/sweep_count.py``: kernels of full shapes counted in their first blocks."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.benchmarks.gpu_scripts import imported_scripts
from tvm_ext.devices import device_db
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.construct_kernels import construct_kernel

A100 = device_db.lookup("nvidia-a100")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported_scripts() as modules:
        modules.count, modules.sweep = (importlib.import_module(name) for name in ("sweep_count", "sweep"))
        yield modules


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "aligned"),
    [(100, 64, 64, True), (100, 60, 64, False), (100, 64, 60, False), (1, 16, 16, True)],
)
def test_aligned_rows_are_whole_sectors(
    scripts: SimpleNamespace, rows: int, depth: int, columns: int, aligned: bool
) -> None:
    case = scripts.cases.matmul("m", rows, columns, depth, "float16")
    assert scripts.count.is_aligned(case) is aligned


def test_weights_have_rows_of_all_that_belongs_to_a_filter(scripts: SimpleNamespace) -> None:
    make = scripts.cases.convolution
    whole = make("c", (1, 8, 56, 56), (16, 8, 3, 3), stride=1, pads=(1, 1, 1, 1), group="g")
    assert scripts.count.is_aligned(whole)  # 56 * 4 bytes of an image, 72 * 4 of a filter
    assert not scripts.count.is_aligned(make("c", (1, 8, 28, 28), (16, 8, 3, 3), stride=1, pads=(1,) * 4, group="g"))


def _output(result: Any) -> Any:
    (array,) = result.outputs.values()
    return array


def test_a_large_kernel_is_counted_without_its_later_rows(scripts: SimpleNamespace) -> None:
    case = scripts.cases.matmul("m", 1 << 20, 64, 64, "float16")
    kernel = construct_kernel(scripts.programs.program(case), "m", A100, BuildOptions(enable_pipelining=False))
    result = scripts.count.count_blocks(case, kernel, A100)
    assert result.findings == ()
    assert result.counters.bank_conflicts == 0
    assert result.counters.sector_efficiency(store=False) == 1.0
    assert _output(result).shape == (31250, 64)  # of a million, all that two million elements hold
    assert result.counters.mma_count > 0


def test_blocks_that_reach_beyond_the_first_rows_get_more(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = scripts.cases.matmul("m", 4096, 64, 64, "float16")
    kernel = construct_kernel(scripts.programs.program(case), "m", A100, BuildOptions(enable_pipelining=False))
    monkeypatch.setattr(scripts.count, "PART_ELEMENTS", (8 * 64, 1024 * 64))
    result = scripts.count.count_blocks(case, kernel, A100)
    assert result.findings == ()
    assert _output(result).shape == (1024, 64)
    monkeypatch.setattr(scripts.count, "PART_ELEMENTS", (8 * 64,))
    assert {finding.kind for finding in scripts.count.count_blocks(case, kernel, A100).findings} >= {"out of bounds"}


def test_what_has_other_rows_than_the_output_is_kept_whole(scripts: SimpleNamespace) -> None:
    case = scripts.cases.matmul("m", 1 << 20, 64, 64, "float16")
    weights, output = case.inputs[1], case.output
    assert scripts.count._part(weights, case, 100) is weights
    assert scripts.count._part(output, case, 100).shape == (100, 64)
    assert scripts.count._rows_of([*case.inputs, output], case, 6400) == 100


def test_results_of_chosen_operators_replace_their_own(scripts: SimpleNamespace) -> None:
    def outcome(name: str, conflicts: int) -> Any:
        return scripts.sweep.Outcome(
            id=name, group="g", dtype="float32", path="rtile", reason="", tensor_cores=False, construct_ms=1.0,
            conflicts=conflicts,
        )  # fmt: skip

    assert scripts.sweep._with_others([], [outcome("A", 1)]) == [outcome("A", 1)]
    before = [asdict(outcome(name, 0)) for name in "AB"]
    merged = scripts.sweep._with_others(before, [outcome("C", 3), outcome("B", 2)])
    assert [(item.id, item.conflicts) for item in merged] == [("A", 0), ("B", 2), ("C", 3)]


def test_summaries_name_what_is_not_as_it_should_be(scripts: SimpleNamespace) -> None:
    def lines(**fields: Any) -> list[str]:
        plain = {"id": "A", "group": "g", "dtype": "float32", "path": "rtile", "reason": "", "tensor_cores": False}
        return list(scripts.sweep.exceptions([scripts.sweep.Outcome(**plain, construct_ms=1.0, **fields)]))

    assert lines(conflicts=0, aligned=True, load_efficiency=1.0) == []
    assert lines(conflicts=3, wavefronts=10) == ["A (g): 3 conflicts in 10 wavefronts"]
    assert lines(aligned=True, load_efficiency=0.5) == ["A (g): uses 50% of the sectors that it loads"]
    assert lines(aligned=False, load_efficiency=0.5) == []
    assert lines(findings=["a race", "another"]) == ["A (g): a race"]
