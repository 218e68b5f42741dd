"""Roller's operators as ONNX models, and the benchmark over them; how long things take is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import onnx
import pytest

from benchmarks.networks import roller_models

ROOT = Path(__file__).resolve().parents[3]
WORKLOAD = ROOT / "benchmarks" / "workloads" / "roller_ops.csv"


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("batch", [1, 8])
def test_all_119_operators_are_valid_models(batch: int) -> None:
    """ONNX's own shape inference agrees with the output shapes stated."""
    kinds: Counter[str] = Counter()
    for item in roller_models.read_models(WORKLOAD, batch=batch, ids=SMALL):
        onnx.checker.check_model(item.model)
        onnx.shape_inference.infer_shapes(item.model, strict_mode=True, check_type=True)
        assert len(item.model.graph.node) == 1
        assert item.flops > 0
        assert item.bytes > 0
        kinds[item.operator] += 1
    assert kinds["Conv2D"] == 44
    assert kinds["DepthwiseConv"] == 23
    assert kinds["Elementwise(ReLU)"] == 28
    assert kinds["AvgPool"] == 13
    assert kinds["ReduceMean"] == 4


IDS = roller_models.read_ids(WORKLOAD)
SMALL = frozenset(name for name in IDS if not name.startswith("M"))  # the matmuls' weights are up to 125 MB


def test_the_table_has_119_operators() -> None:
    assert len(set(IDS)) == len(IDS) == 119


def _one(name: str, batch: int) -> roller_models.RollerModel:
    (item,) = roller_models.read_models(WORKLOAD, batch=batch, ids=frozenset({name}))
    return item


@pytest.mark.parametrize(
    ("name", "batch", "x", "y", "flops"),
    [
        ("M1", 1, (1, 4032), (1, 1000), 2 * 4032 * 1000),
        ("C0", 1, (1, 128, 28, 28), (1, 128, 28, 28), 2 * 128 * 28 * 28 * 128 * 9),
        ("C1", 2, (2, 128, 58, 58), (2, 128, 28, 28), 2 * 2 * 128 * 28 * 28 * 128 * 9),
        ("D0", 1, (1, 84, 83, 83), (1, 84, 42, 42), 2 * 84 * 42 * 42 * 25),
        ("E1", 3, (3, 256, 14, 14), (3, 256, 14, 14), 3 * 256 * 14 * 14),
        ("P1", 1, (1, 672, 21, 21), (1, 672, 11, 11), 672 * 11 * 11 * 9),
        ("R1", 1, (512, 1024), (512,), 512 * 1024),
        ("R2", 1, (1, 4032, 11, 11), (1, 4032), 4032 * 121),
    ],
)
def test_shapes_and_work_by_hand(name: str, batch: int, x: tuple[int, ...], y: tuple[int, ...], flops: float) -> None:
    item = _one(name, batch)
    assert _shape(item.model.graph.input[0]) == x
    assert _shape(item.model.graph.output[0]) == y
    assert item.flops == flops


def test_same_padding_by_hand() -> None:
    assert roller_models.same_padding(83, 5, 2) == (42, 2, 2)
    assert roller_models.same_padding(42, 5, 2) == (21, 1, 2)
    assert roller_models.same_padding(28, 3, 1) == (28, 1, 1)
    assert roller_models.same_padding(14, 1, 2) == (7, 0, 0)


@pytest.mark.slow  # as models.py of test_benchmarks.py
def test_the_benchmark_writes_what_it_measured(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="the benchmark's peer is ONNX Runtime")
    output = tmp_path / "operators.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "operators.py"), "P12", "R3"]
    command += ["--rounds", "1", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    document = json.loads(output.read_text())
    assert document["environment"]["versions"]
    assert [item["id"] for item in document["results"]] == ["P12", "R3"]
    for item in document["results"]:
        assert item["gflops"] > 0
        assert item["gb_per_s"] > 0
        assert set(item["speedup"]) == {"onnxruntime"}
        assert item["timings"][0]["relative_error"] < 1e-5
