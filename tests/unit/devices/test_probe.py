"""The probe of this machine's CPU: what it reads, and what it makes of it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.unit.devices.measured_cpu import cpu_info_of
from tvm_ext.devices import cpu_info, probe
from tvm_ext.devices.cpu_info import CpuNeeds, read_cpu_info
from tvm_ext.devices.rows import cpus
from tvm_ext.devices.rows.microarchitectures import MICROARCHITECTURES, microarchitecture_of
from tvm_ext.devices.tile_permission import tile_refusal
from tvm_ext.errors import UnsupportedEnvironmentError


def test_this_machine_without_measuring() -> None:
    spec = probe.probe_cpu()
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
        "processor : 0\nvendor_id : AuthenticAMD\ncpu family : 25\nmodel : 17\nmodel name : Test CPU\n"
        "flags : fma avx2 avx512_bf16 sse4_2\n\nprocessor : 1\n"
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
    assert (info.model, info.core_id) == ("Test CPU", ("AuthenticAMD", 25, 17))
    assert info.features == {"fma", "avx2", "avx512bf16", "sse4.2"}
    assert [(cache.level, cache.size_bytes, cache.line_bytes) for cache in info.caches] == [(1, 49152, 64)]


@pytest.mark.parametrize("refused", ["", "Operation not supported"])
def test_a_process_asks_for_tiles(refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose tiles the system refuses has none, and says why to code that needs them."""
    monkeypatch.setattr(cpu_info, "tile_refusal", lambda: refused)
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : A Xeon\nflags : avx2 amx_tile amx_int8\n")
    info = read_cpu_info(tmp_path / "cpuinfo", tmp_path)
    assert info.features == ({"avx2"} if refused else {"avx2", "amx-tile", "amx-int8"})
    unmet = CpuNeeds(features=("avx2", "amx-tile")).unmet_by(info)
    assert unmet == (f"lacks amx-tile (Linux refuses tiles: {refused})" if refused else "")
    assert CpuNeeds(features=("avx2", "avx512f")).unmet_by(info) == "lacks avx512f"


def test_tiles_are_refused_or_not_the_same_way_twice() -> None:
    assert tile_refusal() == tile_refusal()


def test_a_system_that_tells_nothing_falls_back_to_the_table(tmp_path: Path) -> None:
    info = read_cpu_info(tmp_path / "absent", tmp_path / "absent too")
    assert (info.features, info.core_id) == (None, ("", 0, 0))
    spec = probe.probe_cpu(info=dataclasses.replace(info, caches=()))
    row = next(row for row in cpus.CPU_ROWS if row.register_bytes == spec.register_bytes)
    assert (spec.clock_ghz, spec.row) == (row.clock_ghz, row.name)
    assert spec.layer("L1").capacity_bytes == row.layer("L1").capacity_bytes
    assert len(spec.layers) == 4  # registers, L1, L2, DRAM: no L3 was described


def test_an_arm_core_is_identified_by_implementer_and_part(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\nFeatures : asimd\n")
    assert read_cpu_info(tmp_path / "cpuinfo", tmp_path).core_id == ("arm", 0x41, 0xD40)


@pytest.mark.parametrize(
    ("core_id", "row"),
    [
        (("GenuineIntel", 6, 0x55), "cpu-skylake-x"),
        (("GenuineIntel", 6, 0x6A), "cpu-ice-lake-sp"),
        (("GenuineIntel", 6, 0xCF), "cpu-sapphire-rapids"),
        (("GenuineIntel", 6, 0xB7), "cpu-alder-lake"),
        (("AuthenticAMD", 0x17, 0x31), "cpu-zen2"),
        (("AuthenticAMD", 0x19, 0x21), "cpu-zen3"),
        (("AuthenticAMD", 0x19, 0x11), "cpu-zen4"),
        (("AuthenticAMD", 0x1A, 0x02), "cpu-zen5"),
        (("arm", 0x41, 0xD0C), "cpu-neoverse-n1"),
        (("arm", 0x41, 0xD4F), "cpu-neoverse-v2"),
        (("arm", 0x61, 0x23), "cpu-apple-m"),
    ],
)
def test_a_core_finds_its_row(core_id: tuple[str, int, int], row: str) -> None:
    found = microarchitecture_of(core_id)
    assert found is not None
    assert found.row.name == row


def test_no_core_has_two_rows() -> None:
    every = [core_id for item in MICROARCHITECTURES for core_id in item.core_ids]
    assert len(every) == len(set(every))


@pytest.mark.skipif(read_cpu_info().machine != "x86_64", reason="x86-64 features")
def test_a_core_without_its_widest_instructions_has_its_own_rates() -> None:
    """A hypervisor may hide AVX-512 of a Zen 4: its row's rates with AVX2, not those of any AVX2 CPU."""
    zen4 = cpu_info_of(features=frozenset({"avx2", "fma"}), core_id=("AuthenticAMD", 0x19, 0x11))
    unknown = dataclasses.replace(zen4, core_id=("AuthenticAMD", 0x7F, 1))
    known, generic = probe.probe_cpu(info=zen4), probe.probe_cpu(info=unknown)
    assert (known.row, known.register_bytes, known.l2_ways) == ("cpu-zen4", 32, 8)
    assert (generic.row, generic.register_bytes) == ("cpu-avx2", 32)
    assert (
        known.layer("L3" if len(known.layers) > 4 else "L2").bandwidth_gb_per_s
        != generic.layer("L2").bandwidth_gb_per_s
    )


def test_two_hyper_threads_are_one_core() -> None:
    """Pipes and caches are shared by those that sysfs has on one first cache; two cores have twice of all."""
    alone = tuple(dataclasses.replace(cache, sharer_count=1) for cache in cpu_info_of().caches)
    shared, own = cpu_info_of(), cpu_info_of(caches=alone)
    assert (shared.cores_of(2), own.cores_of(2), shared.cores_of(1)) == (1, 2, 1)


def test_memory_feeds_few_cores_at_their_rate_and_many_at_the_boards() -> None:
    zen4 = next(item for item in MICROARCHITECTURES if item.name == "cpu-zen4")
    assert zen4.dram_gb_per_s(2) == 2 * zen4.dram_gb_per_s_per_core
    assert zen4.dram_gb_per_s(96) == zen4.shape.dram_gb_per_s


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
