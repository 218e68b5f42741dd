"""The probe of this machine's CPU: what it reads, and what it makes of it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.unit.devices.measured_cpu import cpu_info_of
from tvm_ext.devices import probe
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.rows import cpus
from tvm_ext.errors import UnsupportedEnvironmentError


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
    info = cpu_info_of()
    assert info.bytes_per_core(1, 1) == 48 * 1024
    assert info.bytes_per_core(1, 2) == 24 * 1024
    assert info.bytes_per_core(3, 2) is None


@pytest.mark.skipif(read_cpu_info().machine != "x86_64", reason="x86-64 features")
def test_the_instruction_set_follows_the_features() -> None:
    assert probe.isa_of(cpu_info_of(features=frozenset({"avx2", "fma"}))) is cpus.AVX2
    assert probe.isa_of(cpu_info_of(features=frozenset(cpus.AVX512.features))) is cpus.AVX512
    assert probe.isa_of(cpu_info_of(machine="aarch64")) is cpus.NEON
    assert probe.isa_of(cpu_info_of(features=frozenset({"sse2", "sse4.2", "avx"}))) is cpus.SSE2
    with pytest.raises(UnsupportedEnvironmentError, match="neither SSE2, AVX2") as caught:
        probe.isa_of(cpu_info_of(features=frozenset({"mmx"})))
    assert "cpu-avx2" in caught.value.remedy


@pytest.mark.skipif(read_cpu_info().machine != "x86_64", reason="x86-64 features")
def test_a_wrong_guess_of_the_model_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    features = {name for name in read_cpu_info().checked_features if name.startswith(("avx", "fma", "sse"))}
    monkeypatch.setattr("tvm_ext._tvm.llvm_get_system_cpu", lambda: "rocketlake")
    pairs = dict(probe.host_target(cpu_info_of(features=frozenset(features - {"avx512fp16"})), 2))
    attributes = pairs["mattr"]
    assert isinstance(attributes, tuple)
    assert {"+avx512bf16", "-vaes", "-prefer-256-bit"} <= set(attributes)
    assert not {"+avx2", "+avx512f", "+avx512fp16", "-avx512fp16"} & set(attributes)
