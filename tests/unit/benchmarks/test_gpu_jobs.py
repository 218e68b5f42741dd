"""Folders of jobs for a GPU elsewhere: written here, run by the bundle under a driver without a device, imported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tvm_ext
from tests.support.stub_driver import build_stub_driver, stub_events
from tests.unit.benchmarks.gpu_scripts import bundled, imported_scripts
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext.autotune.batch_files import read_batch, write_batch
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.turns import Artifact, BatchEntry
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import InputError
from tvm_ext.records.kernel_job import TimingPlan
from tvm_ext.support.kernel_cache import KernelCache

PLAN = TimingPlan(least_rounds=2, most_rounds=2)


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported_scripts() as modules:
        for name in ("bundle", "bundle_runtime", "jobs"):
            setattr(modules, name, importlib.import_module(name))
        yield modules


def test_what_serves_jobs_needs_no_compiler(scripts: SimpleNamespace) -> None:
    package = Path(tvm_ext.__file__).parent
    needed = scripts.bundle_runtime._needed(package, scripts.bundle_runtime.JOB_MODULES)
    assert {"autotune/job_folder.py", "autotune/kernel_worker.py", "autotune/turns.py", "support/arrays.py"} <= needed
    assert "_tvm.py" not in needed and "autotune/builders.py" not in needed
    assert all((package / name).is_file() for name in needed)
    of_devices = {name for name in needed if name.startswith("devices/")}
    assert of_devices == {"devices/__init__.py", "devices/cpu_info.py", "devices/tile_permission.py"}
    assert {name.partition("/")[0] for name in needed} <= {
        "autotune", "devices", "records", "support", "errors.py", "options.py", "core_count.py", "_native.py",
    }  # fmt: skip


def run_jobs(bundle: Path, jobs: Path, tmp_path: Path, log: Path) -> subprocess.CompletedProcess[str]:
    """``run.py --jobs`` by a Python that knows nothing of this checkout, whose driver is a stub."""
    stub = build_stub_driver(tmp_path / "stub")
    packages = Path(np.__file__).parents[1]
    python = getattr(sys, "_base_executable", sys.executable)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "TVM"))}
    there = {**environment, "PYTHONPATH": str(packages), **stub.environment(log, architecture=80)}
    command = [python, str(bundle / "run.py"), "--jobs", str(jobs)]
    return subprocess.run(command, env=there, capture_output=True, text=True, timeout=120)


@needs_nvcc
@needs_cc
def test_a_folder_of_jobs_runs_in_a_bundle(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """The stub computes nothing: what is compared is wrong, what is not has times by its events; another is no code."""
    device, folder = lookup("nvidia-a100"), tmp_path / "jobs"
    case = scripts.cases.matmul("product", 64, 64, 32)
    batch, said = scripts.jobs.write_jobs(case, device, 1, folder, KernelCache(tmp_path / "cache"))
    assert batch is not None and "forms, 0 do not compile" in said and "not compared" not in said
    first = read_batch(batch).kernels[0]
    library = batch / first.library
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    unchecked = [replace(first.job, configuration=name) for name in ("unchecked", "broken")]
    artifacts = [Artifact(unchecked[0], library), Artifact(unchecked[1], broken)]
    write_batch(folder, [BatchEntry(item) for item in artifacts], PLAN)

    bundle, _ = bundled(tmp_path)
    done = run_jobs(bundle, folder, tmp_path, tmp_path / "log")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["2 batches run"]), done.stderr
    assert any(event["event"] == "launch" for event in stub_events(tmp_path / "log"))
    assert "stub" in json.loads((folder / "batch-1" / "results.json").read_text())["device"].lower()
    with MeasurementDatabase(tmp_path / "store.db") as store:
        scripts.import_results.main(folder, database=tmp_path / "store.db")
        found = store.verdicts(first.job.workload)
    assert found[first.job.configuration].outcome == "wrong"
    assert found["broken"].outcome == "launch_failed"
    assert found["unchecked"].outcome == "ok" and (found["unchecked"].time_us or 0) > 0

    library.write_bytes(b"damaged")
    (folder / "batch-1" / "results.json").unlink()
    done = run_jobs(bundle, folder, tmp_path, tmp_path / "log")
    assert done.returncode == 2 and "is damaged" in done.stderr and "0 batches run" in done.stdout


def test_a_folder_without_batches_is_refused(scripts: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no batches"):
        scripts.import_results.main(tmp_path, database=tmp_path / "store.db")
