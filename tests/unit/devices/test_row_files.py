"""Row files, what a measurement makes of a row, and that both name the machine that kernels were constructed for."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path

import pytest

from tests.unit.devices.measured_cpu import FIGURES
from tvm_ext.devices import device_db, microbench, probe, row_files
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.cpu_measurement import CpuMeasurement, measured_row
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import ExportError, TargetError

WHEN = "2026-11-23"


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[CpuMeasurement]:
    """The micro-benchmarks answer these, one after another."""
    answers = [FIGURES]
    monkeypatch.setattr(microbench, "measure", lambda _plan, **_words: answers.pop(0))
    return answers


def as_measured(spec: DeviceSpec, **changes: float) -> CpuMeasurement:
    """What a quiet machine with exactly the rates of ``spec`` would measure."""
    one_core = (spec.clock_ghz or 0) * spec.teu_lanes * 2 * (spec.fma_pipes or 1)
    found = CpuMeasurement(
        clock_ghz=spec.clock_ghz or 0,
        float32_gflops_one_core=one_core,
        float32_gflops=spec.peak_gflops_of("float32") or 0,
        float64_gflops=spec.peak_gflops_of("float64") or 0,
        streams_gb_per_s=tuple((layer.name, layer.bandwidth_gb_per_s or 0) for layer in spec.layers[1:]),
        launch_overhead_us=spec.launch_overhead_us or 0,
        function_cycles=spec.function_cycles,
        spread=0.05,
        rounds=2,
    )
    return dataclasses.replace(found, **changes)


def perturbed(found: CpuMeasurement, seed: int, share: float = 0.05) -> CpuMeasurement:
    """``found`` with each figure off by up to ``share``, as another day has it."""
    draw = random.Random(seed)

    def off(value: float) -> float:
        return value * draw.uniform(1 - share, 1 + share)

    return dataclasses.replace(
        found,
        clock_ghz=off(found.clock_ghz),
        float32_gflops_one_core=off(found.float32_gflops_one_core),
        float32_gflops=off(found.float32_gflops),
        float64_gflops=off(found.float64_gflops),
        streams_gb_per_s=tuple((layer, off(rate)) for layer, rate in found.streams_gb_per_s),
        launch_overhead_us=off(found.launch_overhead_us),
    )


# --- what a measurement makes of a row --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["cpu-zen4", "cpu-skylake-x", "cpu-neoverse-v2"])
def test_measurements_of_a_known_processor_give_its_row(name: str) -> None:
    row = device_db.lookup(name)
    rows = [measured_row(row, perturbed(as_measured(row), seed), WHEN) for seed in range(10)]
    assert {_unnamed(item) for item in rows} == {_unnamed(row)}
    assert rows[0].row == f"{name} as measured on {WHEN}"


def test_measurements_of_an_unknown_processor_give_the_row_of_the_first() -> None:
    """A Zen 5 that the tables did not know would be any AVX-512 CPU, whose rates are others."""
    generic, zen5 = device_db.lookup("cpu-avx512"), device_db.lookup("cpu-epyc-zen5")
    found = as_measured(zen5)
    first = measured_row(generic, perturbed(found, 0), WHEN)
    again = [measured_row(generic, perturbed(found, seed), "2027-01-01", first) for seed in range(1, 10)]
    assert _unnamed(first) != _unnamed(generic)
    assert all(row is first for row in again)


def test_what_stands_above_the_noise_overrules_and_is_rounded() -> None:
    row = device_db.lookup("cpu-zen4")
    layer = row.lowest_layer.name
    streams = dict(as_measured(row).streams_gb_per_s) | {layer: 47.3}
    found = as_measured(row, streams_gb_per_s=tuple(streams.items()))
    made = measured_row(row, found, WHEN)
    assert made.lowest_layer.bandwidth_gb_per_s == 50.1  # R10: 50.1, between 39.8 and 63.1
    assert made.layers[:-1] == row.layers[:-1]
    assert "47.3, rounded" in next(
        item.source for item in made.facts if item.used and item.field == f"layers.{layer}.bandwidth_gb_per_s"
    )
    moved = measured_row(row, as_measured(row), "2027-01-01", made)
    assert moved.lowest_layer.bandwidth_gb_per_s != 50.1, "the memory became as the tables have it"


def test_short_rows_of_a_processor_whose_row_has_none_are_measured_and_kept() -> None:
    row = device_db.lookup("cpu-zen4")
    rows = (("L2.64", 90.0), ("L2.4096", 100.0), ("L3.64", 10.0), ("L3.256", 22.0), ("L3.4096", 25.0))
    found = as_measured(row, streams_gb_per_s=(*as_measured(row).streams_gb_per_s, *rows))
    made = measured_row(row, found, WHEN)
    assert made.row_shares == (("L3.64", 0.398),)  # rounded; the others are no further than the noise from all of it
    assert measured_row(row, found, "2027-01-01", made) is made
    assert measured_row(row, dataclasses.replace(found, disagreement=0.5), WHEN).row_shares == ()
    slower = dataclasses.replace(found, launch_overhead_us=2 * found.launch_overhead_us)
    assert measured_row(row, slower, "2027-01-01", made).row_shares == made.row_shares


def test_of_a_busy_machine_only_what_is_better_counts() -> None:
    """Rates that were halved by a neighbour do not overrule the row, where two rounds did not agree on them."""
    spec = device_db.lookup("cpu-zen4")
    rates = {layer.name: layer.bandwidth_gb_per_s or 0.0 for layer in spec.layers[1:]}
    found = as_measured(spec, launch_overhead_us=2 * (spec.launch_overhead_us or 0))
    streams = rates | {"L1": rates["L1"] / 2, "L2": rates["L2"] * 2}
    found = dataclasses.replace(found, streams_gb_per_s=tuple(streams.items()))
    busy = measured_row(spec, dataclasses.replace(found, rounds=6, disagreement=5.0), WHEN)
    quiet = measured_row(spec, dataclasses.replace(found, rounds=2, disagreement=0.05), WHEN)
    assert busy.layer("L1").bandwidth_gb_per_s == rates["L1"]
    assert (quiet.layer("L1").bandwidth_gb_per_s or 0) == pytest.approx(rates["L1"] / 2, rel=0.13)
    assert busy.layer("L2") == quiet.layer("L2")
    assert (busy.layer("L2").bandwidth_gb_per_s or 0) == pytest.approx(rates["L2"] * 2, rel=0.13)
    assert busy.launch_overhead_us == spec.launch_overhead_us != quiet.launch_overhead_us


def _unnamed(spec: DeviceSpec) -> DeviceSpec:
    return dataclasses.replace(spec, row=None)


# --- this machine's measured row --------------------------------------------------------------------------------------
def test_a_measured_row_is_this_machines_until_it_is_forgotten(
    cache_folder: Path, figures: list[CpuMeasurement]
) -> None:
    before = probe.probe_cpu()
    measured = probe.measure_cpu()
    assert probe.probe_cpu() == measured != before
    assert measured.row is not None and measured.row.startswith(f"{before.row} as measured on ")
    one = probe.probe_cpu(unit_count=1)
    assert one.unit_count == 1
    assert one.row == measured.row
    assert row_files.forget() == 1
    assert probe.probe_cpu() == before


def test_a_machine_with_other_features_does_not_take_the_row(cache_folder: Path, figures: list[CpuMeasurement]) -> None:
    """A folder that two machines of one name share: code for what the other's hypervisor hides would be SIGILL."""
    probe.measure_cpu()
    info = read_cpu_info()
    assert info.features is not None
    hidden = next(name for name in ("gfni", "vaes", "bmi2", "dotprod") if name in info.features)
    other = dataclasses.replace(info, features=info.features - {hidden})
    assert probe.probe_cpu(info=info).row != probe.probe_cpu(info=other).row
    assert "measured" not in (probe.probe_cpu(info=other).row or "")


def test_a_cache_folder_that_cannot_be_made_is_named(
    tmp_path: Path, figures: list[CpuMeasurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ExportError, match="cannot make the folder") as caught:
        probe.measure_cpu()
    assert "TVM_EXT_CACHE_DIR" in caught.value.remedy


def test_nothing_is_measured_unasked(cache_folder: Path, figures: list[CpuMeasurement]) -> None:
    probe.probe_cpu()
    device_db.device_for_target({"kind": "llvm", "mcpu": "x86-64-v3"} if os.uname().machine == "x86_64" else "llvm")
    assert figures == [FIGURES]
    assert not cache_folder.exists()


def test_a_damaged_measured_row_is_left_out_with_a_warning(cache_folder: Path, figures: list[CpuMeasurement]) -> None:
    before = probe.probe_cpu()
    probe.measure_cpu()
    (path,) = cache_folder.glob("cpu-*.json")
    path.write_text(path.read_text()[:-40])
    with pytest.warns(RuntimeWarning, match="the measured row is ignored"):
        assert probe.probe_cpu() == before


# --- files ------------------------------------------------------------------------------------------------------------
def test_every_row_survives_its_file(tmp_path: Path) -> None:
    for name in device_db.names():
        row_files.write_row(tmp_path / "row.json", device_db.lookup(name))
        again = device_db.lookup(str(tmp_path / "row.json"))
        assert again == device_db.lookup(name)
        assert again.facts == device_db.lookup(name).facts


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda content: content.update(name=5), "no row of a device"),
        (lambda content: content.update(surprise=1), "surprise"),
        (lambda content: content.pop("layers"), "no row of a device"),
        (lambda content: content.update(clock_ghz=9.9), "not the values of its facts"),
        (lambda content: content["facts"][0].update(value=-1), "unit_count is -1"),
        (lambda content: content["facts"][0].update(value=float("nan")), "unit_count is nan"),
    ],
)
def test_a_bad_row_file_is_refused(edit: object, problem: str, tmp_path: Path) -> None:
    assert callable(edit)
    path = tmp_path / "row.json"
    row_files.write_row(path, device_db.lookup("cpu-zen4"))
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(TargetError, match=problem) as caught:
        device_db.lookup(str(path))
    assert "tvm-ext devices" in caught.value.remedy


@pytest.mark.parametrize("content", ["", "[]", "5", "null", "{", '{"operators": [], "row": null}'])
def test_a_file_that_is_no_row_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text(content)
    with pytest.raises(TargetError, match="no row of a device"):
        device_db.device_for_target(str(tmp_path / "row.json"))


def test_no_file_and_no_plain_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("absent.json", "pipe.json"):
        with pytest.raises(TargetError, match="no plain file"):
            device_db.lookup(str(tmp_path / name))
