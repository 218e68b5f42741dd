"""One machine, measured on ten days, or another machine with its row: the same kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import tvm
from tvm_ffi import structural_hash

from benchmarks.networks.models import build_model
from tests.unit.devices.test_row_files import as_measured, perturbed
from tvm_ext import relay
from tvm_ext.devices import device_db, row_files
from tvm_ext.devices.cpu_measurement import measured_row
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build

EVERYDAY = ("mlp", "mobilenet_block")
NETWORKS = ("resnet50", "mobilenet_v2", "bert_base_layer", "nasnet", "deepspeech2", "squeezenet")
DAYS = 10


def kernels_under(model: str, device: Path | None) -> int:
    """A hash of all that construction makes of ``model`` for ``device``: kernels with their records, and calls."""
    mod, params = relay.frontend.from_onnx(build_model(model))
    plan = plan_build("llvm", BuildOptions.create(device=device and str(device), kernel_cache="off", database="off"))
    with plan.target, tvm.transform.PassContext(opt_level=3):
        made = plan.construct(relay.prepare(mod, params))
    return int(structural_hash(tvm.IRModule(dict(made.functions_items()))))  # its attributes say how long imports took


def measured_rows(folder: Path, tables: str, machine: str) -> list[Path]:
    """Row files of ``machine``, which the tables take for ``tables``, measured on ten days with 5 % of noise."""
    known, truth = (with_unit_count(device_db.lookup(name), 2) for name in (tables, machine))
    rows: list[DeviceSpec] = []
    for day in range(DAYS):
        found = perturbed(as_measured(truth), day)
        rows.append(measured_row(known, found, f"2026-11-{day + 10}", rows[0] if rows else None))
        row_files.write_row(folder / f"{tables}-{day}.json", rows[-1])
    return sorted(folder.glob(f"{tables}-*.json"))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("model", [*EVERYDAY, *(pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS)])
def test_kernels_do_not_depend_on_the_day(model: str, tmp_path: Path) -> None:
    days = range(DAYS) if model in NETWORKS else (0, DAYS - 1)
    row_files.write_row(tmp_path / "tables.json", with_unit_count(device_db.lookup("cpu-skylake-x"), 2))
    known = measured_rows(tmp_path, "cpu-skylake-x", "cpu-skylake-x")
    unknown = measured_rows(tmp_path, "cpu-avx512", "cpu-epyc-zen5")
    assert {kernels_under(model, known[day]) for day in days} == {kernels_under(model, tmp_path / "tables.json")}
    assert len({kernels_under(model, unknown[day]) for day in days}) == 1


def test_a_report_names_its_row_and_reproduces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built on one machine is constructed on another from the report alone."""
    mod, params = relay.frontend.from_onnx(build_model("mlp"))
    monkeypatch.setenv("TVM_EXT_CPU", "cpu-cascade-lake-avx2")
    report = relay.build(mod, "llvm", params=params).report
    (tmp_path / "report.json").write_text(report.to_json())
    there = kernels_under("mlp", None)
    monkeypatch.setenv("TVM_EXT_CPU", "cpu-zen2")
    assert kernels_under("mlp", tmp_path / "report.json") == there
    assert (
        device_db.lookup(str(tmp_path / "report.json")).peak_gflops
        == device_db.lookup("cpu-cascade-lake-avx2").peak_gflops
    )
