"""The probe of this machine's CPU: what it reads, what it measures, and the cache of measurements."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from tvm_ext._tvm import IRModule, Target, tensor, tvm
from tvm_ext.devices import measurement_cache, microbench, microbench_kernels, probe
from tvm_ext.devices.cpu_info import CacheInfo, CpuInfo, read_cpu_info
from tvm_ext.devices.cpu_measurement import CpuMeasurement, with_measurement
from tvm_ext.devices.microbench import BenchPlan, StreamSize
from tvm_ext.devices.rows import cpus
from tvm_ext.errors import UnsupportedEnvironmentError

FIGURES = CpuMeasurement(
    clock_ghz=2.0,
    float32_gflops_one_core=128.0,
    float32_gflops=250.0,
    float64_gflops=125.0,
    streams_gb_per_s=(("L1", 500.0), ("L2", 200.0), ("L3", 100.0)),
    launch_overhead_us=2.0,
    spread=0.1,
)


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


def _plan(**changes: object) -> BenchPlan:
    spec = probe.probe_cpu(measure=False)
    return dataclasses.replace(probe.bench_plan(spec, read_cpu_info()), **changes)


def _info(**changes: object) -> CpuInfo:
    caches = (
        CacheInfo(level=1, size_bytes=48 * 1024, line_bytes=64, sharer_count=2),
        CacheInfo(level=2, size_bytes=1024 * 1024, line_bytes=64, sharer_count=2),
    )
    info = CpuInfo(
        machine=read_cpu_info().machine,
        model="a test's CPU",
        features=read_cpu_info().features,
        clock_ghz=2.0,
        clock_source="a test",
        caches=caches,
    )
    return dataclasses.replace(info, **changes)


def test_this_machine_without_measuring() -> None:
    spec = probe.probe_cpu(measure=False)
    assert spec.clock_ghz is not None
    assert spec.fma_pipes is not None
    lanes = spec.register_bytes // 4
    expected = spec.clock_ghz * lanes * 2 * spec.fma_pipes * spec.unit_count
    assert spec.peak_gflops_of("float32") == pytest.approx(expected)
    assert spec.unit_count <= (os.cpu_count() or 1)
    assert (spec.teu_lanes, spec.register_limit) in {(16, 32), (8, 16), (4, 32)}


def test_reading_cpuinfo_and_sysfs(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor : 0\nmodel name : Test CPU\ncpu MHz : 2500.0\nflags : fma avx2 avx512_bf16 sse4_2\n\nprocessor : 1\n"
    )
    folder = tmp_path / "sysfs" / "cpu0" / "cache" / "index0"
    folder.mkdir(parents=True)
    for name, text in {"level": "1", "type": "Data", "size": "48K", "coherency_line_size": "64"}.items():
        (folder / name).write_text(text + "\n")
    (folder / "shared_cpu_list").write_text("0\n")
    code = folder.parent / "index1"
    code.mkdir()
    for name, text in {"level": "1", "type": "Instruction", "size": "32K", "coherency_line_size": "64"}.items():
        (code / name).write_text(text + "\n")
    info = read_cpu_info(cpuinfo, tmp_path / "sysfs")
    assert (info.model, info.clock_ghz) == ("Test CPU", 2.5)
    assert info.features == {"fma", "avx2", "avx512bf16", "sse4.2"}
    assert [(cache.level, cache.size_bytes, cache.line_bytes) for cache in info.caches] == [(1, 49152, 64)]


def test_cpufreq_overrules_the_current_clock(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("cpu MHz : 800.0\n")
    folder = tmp_path / "cpu0" / "cpufreq"
    folder.mkdir(parents=True)
    (folder / "cpuinfo_max_freq").write_text("3400000\n")
    assert read_cpu_info(tmp_path / "cpuinfo", tmp_path).clock_ghz == pytest.approx(3.4)


def test_a_system_that_tells_nothing_falls_back_to_the_table(tmp_path: Path) -> None:
    info = read_cpu_info(tmp_path / "absent", tmp_path / "absent too")
    assert (info.features, info.clock_ghz) == (None, None)
    spec = probe.probe_cpu(measure=False, info=dataclasses.replace(info, caches=()))
    row = next(row for row in cpus.CPU_ROWS if row.register_bytes == spec.register_bytes)
    assert spec.clock_ghz == row.clock_ghz
    assert spec.layer("L1").capacity_bytes == row.layer("L1").capacity_bytes
    assert len(spec.layers) == 4  # registers, L1, L2, DRAM: no L3 was described


def test_hyper_threads_share_their_caches() -> None:
    info = _info()
    assert info.bytes_per_core(1, 1) == 48 * 1024
    assert info.bytes_per_core(1, 2) == 24 * 1024
    assert info.bytes_per_core(3, 2) is None


@pytest.mark.skipif(read_cpu_info().machine != "x86_64", reason="x86-64 features")
def test_the_instruction_set_follows_the_features() -> None:
    assert probe.isa_of(_info(features=frozenset({"avx2", "fma"}))) is cpus.AVX2
    assert probe.isa_of(_info(features=frozenset(cpus.AVX512.features))) is cpus.AVX512
    assert probe.isa_of(_info(machine="aarch64")) is cpus.NEON
    assert probe.isa_of(_info(features=frozenset({"sse2", "sse4.2", "avx"}))) is cpus.SSE2
    with pytest.raises(UnsupportedEnvironmentError, match="neither SSE2, AVX2") as caught:
        probe.isa_of(_info(features=frozenset({"mmx"})))
    assert "cpu-avx2" in caught.value.remedy


@pytest.mark.skipif(read_cpu_info().machine != "x86_64", reason="x86-64 features")
def test_a_wrong_guess_of_the_model_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {name for name in read_cpu_info().checked_features if name.startswith(("avx", "fma", "sse"))}
    monkeypatch.setattr("tvm_ext._tvm.llvm_get_system_cpu", lambda: "rocketlake")
    pairs = dict(probe.host_target(_info(features=frozenset(features - {"avx512fp16"})), 2))
    attributes = pairs["mattr"]
    assert isinstance(attributes, tuple)
    assert {"+avx512bf16", "-vaes", "-prefer-256-bit"} <= set(attributes)
    assert not {"+avx2", "+avx512f", "+avx512fp16", "-avx512fp16"} & set(attributes)


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
    plan = _plan()
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
    plan = _plan()
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


def _round(**figures: float) -> CpuMeasurement:
    return dataclasses.replace(FIGURES, **figures)


def test_rounds_are_repeated_until_two_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour takes half of the first two rounds; the third and fourth agree, so there is no fifth."""
    peaks = iter([100.0, 180.0, 250.0, 240.0, 999.0])
    monkeypatch.setattr(microbench, "measure_once", lambda plan: _round(float32_gflops=next(peaks)))
    found = microbench.measure(_plan())
    assert (found.float32_gflops, found.rounds) == (250.0, 4)
    assert found.disagreement == pytest.approx(250 / 240 - 1)


def test_a_machine_that_never_agrees_with_itself_is_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = iter([1.0, 1.2, 1.5, 1.9, 2.4, 3.0, 4.0])
    monkeypatch.setattr(microbench, "measure_once", lambda plan: _round(clock_ghz=next(clocks)))
    found = microbench.measure(_plan())
    assert (found.clock_ghz, found.rounds) == (3.0, microbench.MOST_ROUNDS)
    assert found.disagreement == pytest.approx(3.0 / 2.4 - 1)


def test_the_best_of_each_figure_counts() -> None:
    slow = _round(float64_gflops=120.0, streams_gb_per_s=(("L1", 510.0), ("L2", 190.0), ("L3", 90.0)))
    found = microbench.best_of([FIGURES, dataclasses.replace(slow, launch_overhead_us=1.0)])
    assert found.float64_gflops == 125.0
    assert found.streams_gb_per_s == (("L1", 510.0), ("L2", 200.0), ("L3", 100.0))
    assert found.launch_overhead_us == 1.0
    assert found.disagreement == pytest.approx(100 / 90 - 1)


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
    plan = _plan()
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


def test_of_a_busy_machine_only_what_is_better_counts() -> None:
    """Rates that were halved by a neighbour do not overrule arithmetic, where two rounds did not agree on them."""
    spec = probe.probe_cpu(measure=False)
    rates = {layer.name: layer.bandwidth_gb_per_s or 0.0 for layer in spec.layers[1:]}
    slow, fast = spec.layers[1].name, spec.layers[2].name
    figures = dataclasses.replace(
        FIGURES,
        streams_gb_per_s=((slow, rates[slow] / 2), (fast, rates[fast] * 2)),
        launch_overhead_us=2 * (spec.launch_overhead_us or 0.0),
    )
    busy = with_measurement(spec, dataclasses.replace(figures, rounds=6, disagreement=5.0), "in a test")
    quiet = with_measurement(spec, dataclasses.replace(figures, rounds=2, disagreement=0.05), "in a test")
    assert busy.layer(slow).bandwidth_gb_per_s == rates[slow]
    assert quiet.layer(slow).bandwidth_gb_per_s == rates[slow] / 2
    assert busy.layer(fast).bandwidth_gb_per_s == quiet.layer(fast).bandwidth_gb_per_s == rates[fast] * 2
    assert busy.launch_overhead_us == spec.launch_overhead_us
    assert quiet.launch_overhead_us == figures.launch_overhead_us


def test_an_unwritable_cache_is_no_obstacle(
    cache_folder: Path, counted: list[BenchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_folder.parent.joinpath("file").write_text("")
    monkeypatch.setattr("tvm_ext.options.cache_directory", lambda: cache_folder.parent / "file" / "folder")
    with pytest.warns(RuntimeWarning, match="cannot"):
        assert measurement_cache.measured(_plan(), "model") == FIGURES
    assert measurement_cache.measured(_plan(), "model") == FIGURES
    assert len(counted) == 1


def test_concurrent_callers_measure_once(cache_folder: Path, counted: list[BenchPlan]) -> None:
    plan, found = _plan(), []
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


def test_micro_benchmarks_are_plausible() -> None:
    """The real thing, once: measured rates against what arithmetic with the measured clock allows."""
    spec = probe.probe_cpu()
    assert spec.clock_ghz is not None
    assert spec.fma_pipes is not None
    assert 0.5 < spec.clock_ghz < 8
    assert 1 <= spec.fma_pipes <= 4
    arithmetic = spec.clock_ghz * spec.teu_lanes * 2 * spec.fma_pipes * spec.unit_count
    assert 0.1 * arithmetic < (spec.peak_gflops_of("float32") or 0) < 1.5 * arithmetic
    assert (spec.peak_gflops_of("float64") or 0) < (spec.peak_gflops_of("float32") or 0)
    first, last = spec.layer("L1").bandwidth_gb_per_s, spec.lowest_layer.bandwidth_gb_per_s
    assert first is not None
    assert last is not None
    # At most four loads of a register per cycle and core; DRAM is the slowest of all.
    assert last < first < spec.clock_ghz * spec.register_bytes * 4 * spec.unit_count * 1.5


def test_the_benchmarks_compute_what_they_say() -> None:
    """A kernel whose work the compiler removed would report a rate that means nothing."""
    target = Target({"kind": "llvm"})

    def run(kernel: object, *arrays: np.ndarray) -> np.ndarray:
        tensors = [tensor(array) for array in arrays]
        tvm.compile(IRModule({"main": kernel}), target=target)["main"](*tensors)
        return np.asarray(tensors[-1].numpy())

    operands = np.array([[0.5] * 4, [3.0] * 4], "float32")
    poison = np.full((2, 8), np.nan, "float32")
    x = 0.5
    for _ in range(3):
        x = x * 0.5 + 3.0
    np.testing.assert_allclose(run(microbench_kernels.fma_kernel("float32", 4, 2, 2, 3), operands, poison), x)
    width = microbench_kernels.LOAD_CHAINS * 4
    data = np.random.default_rng(0).random((2, 3 * width), "float32")
    expected = 2 * data.reshape(2, 3, width).sum(axis=1, dtype="float64")
    sums = run(microbench_kernels.load_kernel(4, 2, 3, 2), data, np.full((2, width), np.nan, "float32"))
    np.testing.assert_allclose(sums, expected, rtol=1e-5)
    state = 88172645463325252
    for _ in range(5):
        state ^= state << 13 & (1 << 64) - 1
        state ^= state >> 7
        state ^= state << 17 & (1 << 64) - 1
    seed, result = np.array([88172645463325252], "uint64"), np.zeros(1, "uint64")
    assert run(microbench_kernels.clock_kernel(5), seed, result)[0] == state


def test_the_plan_fits_each_layer() -> None:
    caches = (*_info().caches, CacheInfo(level=3, size_bytes=32 * 1024 * 1024, line_bytes=64, sharer_count=2))
    info = _info(caches=tuple(dataclasses.replace(cache, sharer_count=1) for cache in caches))
    spec = probe.probe_cpu(measure=False, info=info)
    plan = probe.bench_plan(spec, info)
    sizes = {stream.layer: stream.bytes_per_core for stream in plan.streams}
    assert sizes["L1"] == 24 * 1024
    assert sizes["L2"] == 512 * 1024
    assert 1024 * 1024 < sizes["L3"] <= 32 * 1024 * 1024
    assert sizes["L4"] * spec.unit_count >= 4 * 32 * 1024 * 1024
    assert StreamSize(layer="L1", bytes_per_core=24 * 1024) in plan.streams
    assert plan.chains + 2 <= plan.register_count
