"""The cache of measurements: measured once for a machine, and anew where a file is bad."""

from __future__ import annotations

import dataclasses
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.unit.devices.measured_cpu import FIGURES, plan_of
from tvm_ext.devices import measurement_cache, microbench, probe
from tvm_ext.devices.cpu_measurement import CpuMeasurement
from tvm_ext.devices.microbench import BenchPlan


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path / "cache"))
    measurement_cache.measured.cache_clear()
    yield tmp_path / "cache"
    measurement_cache.measured.cache_clear()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[BenchPlan]:
    """Replaces the micro-benchmarks by `FIGURES`; lists the plans they were called with."""
    calls: list[BenchPlan] = []

    def measure(plan: BenchPlan) -> CpuMeasurement:
        calls.append(plan)
        return FIGURES

    monkeypatch.setattr(microbench, "measure", measure)
    return calls


def test_measured_figures_overrule_arithmetic(cache_folder: Path, counted: list[BenchPlan]) -> None:
    spec = probe.probe_cpu()
    assert len(counted) == 1
    assert spec.peak_gflops_of("float32") == 250.0
    assert spec.peak_gflops_of("int8") == 125.0
    assert spec.layer("L1").bandwidth_gb_per_s == 500.0
    assert spec.launch_overhead_us == 2.0
    # 128 GFLOP/s of one core at 2 GHz: 128 / (2 x lanes x 2) pipes
    assert spec.fma_pipes == max(1, round(128.0 / (2.0 * spec.teu_lanes * 2)))
    peaks = [item for item in spec.facts if item.field == "peak_gflops.float32"]
    assert [item.used for item in peaks] == [True, False]
    assert "measured" in peaks[0].source


def test_measured_once_and_kept(cache_folder: Path, counted: list[BenchPlan]) -> None:
    plan = plan_of()
    assert measurement_cache.measured(plan, "model") == FIGURES
    measurement_cache.measured.cache_clear()
    assert measurement_cache.measured(plan, "model") == FIGURES
    assert len(counted) == 1
    measurement_cache.measured(plan, "another model")
    measurement_cache.measured(dataclasses.replace(plan, core_count=plan.core_count + 1), "model")
    assert len(counted) == 3
    assert measurement_cache.forget() == 3
    measurement_cache.measured(plan, "model")
    assert len(counted) == 4


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "corrupt"),
        (b"not json", "corrupt"),
        (b"[]", "corrupt"),
        (b"5", "corrupt"),
        (b'{"schema": 1, "key": "x"', "corrupt"),
        (b'{"schema": 1, "key": "x"}', "corrupt"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("negative", "corrupt"),
        ("other key", "another machine or version"),
        ("other schema", "another machine or version"),
    ],
)
def test_a_bad_cache_file_is_measured_anew(
    cache_folder: Path, counted: list[BenchPlan], content: bytes | str, word: str
) -> None:
    plan = plan_of()
    measurement_cache.measured(plan, "model")
    measurement_cache.measured.cache_clear()
    path = measurement_cache.cache_file(measurement_cache.cache_key(plan, "model"))
    record = json.loads(path.read_text())
    if content == "negative":
        record["measurement"]["clock_ghz"] = -1.0
    elif content == "other key":
        record["key"] = "something else"
    elif content == "other schema":
        record["schema"] += 1
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(record).encode())
    with pytest.warns(RuntimeWarning, match=word):
        assert measurement_cache.measured(plan, "model") == FIGURES
    assert len(counted) == 2
    measurement_cache.measured.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the new file is sound
        measurement_cache.measured(plan, "model")
    assert len(counted) == 2


@pytest.mark.parametrize(
    ("rounds", "disagreement", "age_s", "measured"),
    [(2, 0.05, 1e7, 1), (6, 0.5, 60.0, 1), (6, 0.5, 7200.0, 2), (1, 0.0, 7200.0, 2), (6, 0.5, -1e6, 1)],
    ids=["settled", "unsettled and fresh", "unsettled and old", "one round", "the clock jumped back"],
)
def test_a_measurement_that_did_not_settle_is_taken_again(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, disagreement: float, age_s: float, measured: int
) -> None:
    calls: list[BenchPlan] = []

    def measure(plan: BenchPlan) -> CpuMeasurement:
        calls.append(plan)
        return dataclasses.replace(FIGURES, rounds=rounds, disagreement=disagreement)

    monkeypatch.setattr(microbench, "measure", measure)
    plan = plan_of()
    measurement_cache.measured(plan, "model")
    measurement_cache.measured.cache_clear()
    path = measurement_cache.cache_file(measurement_cache.cache_key(plan, "model"))
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "taken_at_s": record["taken_at_s"] - age_s}))
    measurement_cache.measured(plan, "model")
    assert len(calls) == measured
    kept = measurement_cache.kept(plan, "model")
    assert kept is not None
    assert kept.is_settled == (rounds == 2)


def test_an_unwritable_cache_is_no_obstacle(
    cache_folder: Path, counted: list[BenchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder.parent.joinpath("file").write_text("")
    monkeypatch.setattr("tvm_ext.options.cache_directory", lambda: cache_folder.parent / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="cannot"):
        assert measurement_cache.measured(plan_of(), "model") == FIGURES
    assert measurement_cache.measured(plan_of(), "model") == FIGURES
    assert len(counted) == 1


def test_concurrent_callers_measure_once(cache_folder: Path, counted: list[BenchPlan]) -> None:
    plan, found = plan_of(), []
    measure = measurement_cache.measured.__wrapped__  # without the memory of this process: each caller sees the file
    threads = [threading.Thread(target=lambda: found.append(measure(plan, "model"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [FIGURES] * 4
    assert len(counted) == 1


def test_concurrent_processes_share_one_file(run_python: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    code = (
        "from tvm_ext.devices import microbench, measurement_cache, probe\n"
        "from tvm_ext.devices.cpu_info import read_cpu_info\n"
        "import dataclasses, os, pathlib\n"
        f"log = pathlib.Path({str(tmp_path / 'log')!r})\n"
        "def measure(plan):\n"
        "    with log.open('a') as stream: stream.write('measured\\n')\n"
        f"    return microbench.{FIGURES!r}\n"
        "microbench.measure = measure\n"
        "spec = probe.probe_cpu(measure=False)\n"
        "plan = probe.bench_plan(spec, read_cpu_info())\n"
        "print(measurement_cache.measured(plan, 'model').clock_ghz)\n"
    )
    results: list[CompletedProcess[str]] = []
    folder = str(tmp_path / "cache")
    threads = [
        threading.Thread(target=lambda: results.append(run_python(code, TVM_EXT_CACHE_DIR=folder))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(result.returncode, result.stdout.strip()) for result in results] == [(0, "2.0")] * 3, results
    assert (tmp_path / "log").read_text() == "measured\n"
