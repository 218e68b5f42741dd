"""``benchmarks/gpu/ablation.py``: literal kernels are right, counts scale, and what has no kernel is said."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks._ablated import conflicts
from benchmarks.gpu.plain_storage import PlainPlanner, emit_literally
from tests.unit.tir_passes.emit.simt_operators import anchor_of, matmul, with_tiles
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.emit.simt_tiles.tiling import tile_threads
from tvm_ext.tir_passes.roller.construct import construct
from tvm_ext.verify import simt
from tvm_ext.verify.verification import random_array

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu"
NAMES = ("cases", "numpy_references", "ablation_variants", "ablation_summary", "ablation")
V100 = lookup("nvidia-v100")


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    """The scripts as modules, which import each other by their bare names."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER.parent)):
            del sys.modules[name]


# --- kernels to the letter ----------------------------------------------------------------------------------------
def _small_cases(scripts: SimpleNamespace) -> list[Any]:
    make = scripts.cases
    return [
        make.matmul("product", 70, 45, 37),
        make.convolution("same", (2, 5, 9, 8), (12, 5, 3, 3), stride=1, pads=(1, 1, 1, 1)),
        make.convolution("strided", (2, 6, 11, 11), (8, 6, 3, 3), stride=2, pads=(0, 0, 0, 0)),
        make.convolution("depthwise", (2, 6, 13, 13), (6, 1, 5, 5), stride=2, pads=(2, 2, 2, 2), groups=6),
    ]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("label", ["none", "+ bank"])
def test_literal_kernels_compute_what_the_operator_says(scripts: SimpleNamespace, label: str) -> None:
    """All blocks in the interpreter, whose outputs are poison until written, against float64."""
    names = scripts.ablation_variants
    for case in _small_cases(scripts):
        variant = next(item for item in names.variants(names.TABLE_3, case, V100) if item.label == label)
        assert variant.literal
        func = names.function(names.emit(variant, V100), V100, "test").with_attr("global_symbol", "main")
        generator = np.random.default_rng(0)
        arrays = {item.name: random_array(item.shape, item.dtype, generator) for item in case.inputs}
        kernels = simt.lower(func, "nvidia-v100")
        result = simt.run(kernels, arrays, device=V100)
        assert result.ok, [str(item) for item in result.findings]
        (output,) = (value for name, value in result.outputs.items() if name not in arrays)
        expected = scripts.numpy_references.reference(case, list(arrays.values()))
        error = np.linalg.norm(output.astype("float64") - expected) / np.linalg.norm(expected)
        assert error <= case.allowed_error, case.id


def _column_program(padding: int) -> tuple[Any, RProgram]:
    """32 lanes, each down another row of B[j, k]: Figure 5(b) with rows of 32 floats."""
    anchor = anchor_of(matmul(64, 64, 32, transpose_b=True).func)
    program = construct(anchor.expr, V100, k=1).programs[0]
    program = with_tiles(program, {"i": 1, "j": 1}, {"i": 4, "j": 32, "k": 32})
    tile = replace(program.tile("L1"), storage_padding=(("B", padding),) if padding else ())
    return anchor, replace(program, tiles=(("L0", program.tile("L0")), ("L1", tile)))


@pytest.mark.parametrize(("padding", "turns"), [(0, 32), (1, 1)])
def test_the_papers_padding_is_what_is_stored(scripts: SimpleNamespace, padding: int, turns: int) -> None:
    """Rows of 32 floats lie in one bank and take 32 turns; the formula's one element more puts them on 32 banks."""
    anchor, program = _column_program(padding)
    kernel = emit_literally(anchor.computation, anchor.expr, (), (), program, V100)
    tiling = tile_threads(anchor.computation, anchor.expr, program, V100)
    _, operands = PlainPlanner(V100, [0, padding]).plan(tiling, ())
    assert operands[1].box is not None and operands[1].box.strides == (32 + padding, 1)
    named = SimpleNamespace(operator=SimpleNamespace(name="column", params=anchor.params))
    emitted = scripts.ablation_variants.Emitted(anchor=named, rprogram=program, kernel=kernel)
    func = scripts.ablation_variants.function(emitted, V100, "test")
    arrays = {name: np.ones((64, 32), "float32") for name in ("A", "B")}
    kernels = simt.lower(func.with_attr("global_symbol", "main"), "nvidia-v100")
    counters = simt.run(kernels, arrays, device=V100, blocks=[0]).counters
    reads = [a for a in counters.select(scope="shared", store=False) if a.buffer.startswith("B")]
    assert sum(a.wavefronts for a in reads) == turns * sum(a.requests for a in reads) > 0


def test_without_padding_the_model_charges_the_rows_that_a_warp_reads() -> None:
    """A[i, k] in rows of 32 floats under 16 x 16 threads of 8 x 8 elements: 2 rows, 2 turns; 8 floats of B[k, j]: 4."""
    expr = anchor_of(matmul(512, 512, 512).func).expr
    model = PerfModel(expr, V100, "j")
    sizes = ({"i": 8, "j": 8, "k": 1}, {"i": 128, "j": 128, "k": 32})
    register, block = (tuple(size[name] for name in model.names) for size in sizes)
    assert conflicts(model, (register, block)) == (8 * 2 + 8 * 4) / (8 + 8)


# --- counting -----------------------------------------------------------------------------------------------------
def test_smaller_cases_keep_tiles_steps_and_alignment(scripts: SimpleNamespace) -> None:
    make, smaller = scripts.cases, scripts.ablation.smaller
    product = smaller(make.matmul("m", 65536, 1024, 4032), 48, 9, points=128, elements=4_000_000)
    assert product.inputs[0].shape == (3888, 288) and product.inputs[1].shape == (288, 1024)
    assert product.output.shape == (3888, 1024)
    window = make.convolution("c", (128, 256, 30, 30), (64, 256, 3, 3), stride=1, pads=(0, 0, 0, 0))
    assert smaller(window, 2, 8, points=128, elements=None).inputs[1].shape == (64, 32, 3, 3)
    assert smaller(window, 2, 8, points=None, elements=None) == window


def test_counts_of_a_part_scale_to_the_whole(
    scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Steps of a reduction cost the same: 128 of 512 points, times 4, are 512."""
    ablation, names = scripts.ablation, scripts.ablation_variants
    case = scripts.cases.matmul("m", 640, 512, 512)
    variant = next(item for item in names.variants(names.TABLE_3, case, V100) if item.label == "+ bank")
    part = ablation.evaluate(variant, V100)
    monkeypatch.setattr(ablation, "COUNTED_REDUCTIONS", ())
    whole = ablation.evaluate(variant, V100)
    assert part.counted_shape != whole.counted_shape == "640x512 512x512"
    assert part.sectors == pytest.approx(whole.sectors) and part.wavefronts == pytest.approx(whole.wavefronts)
    assert part.counted_s == pytest.approx(whole.counted_s)


def test_time_is_that_of_the_slowest_resource(scripts: SimpleNamespace) -> None:
    """1e6 sectors are 32 MB, 43 us at 750 GB/s; 80 of 81 blocks fill one of two waves: 81 / 160 of the time is used."""
    anchor = scripts.ablation_variants.anchor_of(scripts.cases.matmul("m", 64, 64, 64))
    outcome = scripts.ablation.Outcome(
        figure="", operator="m", group="", variant="", literal=True, programs=1, sectors=1e6, wavefronts=1.0,
        blocks=81, padded_points=1.0, lane_share=1.0,
    )  # fmt: skip
    scripts.ablation.model_time(outcome, anchor, V100)
    assert outcome.counted_bound == V100.lowest_layer.name
    launch = (V100.launch_overhead_us or 0.0) * 1e-6
    assert outcome.counted_s == pytest.approx(32e6 / 750e9 * 160 / 81 + launch)
    outcome.wavefronts = 1e9
    scripts.ablation.model_time(outcome, anchor, V100)
    assert outcome.counted_bound == "L1"


# --- what has no kernel -------------------------------------------------------------------------------------------
def test_every_operator_has_a_record(scripts: SimpleNamespace) -> None:
    names, ablation = scripts.ablation_variants, scripts.ablation
    by_id = {case.id: case for case in names.cases(names.TABLE_3)}
    (rows,) = ablation.outcomes(names.TABLE_3, by_id["E1"], V100)
    assert rows.error == ablation.ROWS_OF_THREADS and rows.counted_s is None
    refusals: dict[str, str] = {}
    functions = dict(names.contenders(by_id["C9"], V100, refusals))
    assert "no tile satisfies" in refusals["figure_17_fused_0"]
    assert {"table_3_none", "table_3_bank", "table_3_all_as_built", "figure_17_fused_1"} <= set(functions)
    assert {str(func.attrs["global_symbol"]) for func in functions.values()} == {"C9"}


def test_means_are_over_operators_with_every_kernel(scripts: SimpleNamespace) -> None:
    summary, labels = scripts.ablation_summary, [*scripts.ablation_variants.RULES, *scripts.ablation_variants.AS_BUILT]

    def outcome(operator: str, label: str, time_s: float, error: str = "") -> Any:
        return SimpleNamespace(
            figure="Table 3", operator=operator, variant=label, error=error, counted_s=time_s, predicted_s=time_s
        )

    results = [outcome("M", label, 4.0 if label == "none" else 1.0) for label in labels]
    results += [outcome("C", label, 1.0) for label in labels]
    results += [outcome("D", label, 1.0, "refused" if label == "none" else "") for label in labels]
    rows = summary.complete(results)
    assert list(rows) == ["M", "C"]
    assert summary.mean_speedup(list(rows.values()), "+ bank", lambda item: item.counted_s) == pytest.approx(2.0)
