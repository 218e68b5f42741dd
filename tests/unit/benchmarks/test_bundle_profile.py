"""The profiler in a bundle: programs packed here, run by plain Python there, and taken into a database again."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.cutlass_on_cpu import put_on_cpu
from tests.support.stub_driver import build_stub_driver
from tests.unit.benchmarks.gpu_scripts import FOLDER, imported_scripts
from tests.unit.byoc_cutlass.graphs import decided, product
from tests.unit.compilers import needs_cc
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.database_files import merge
from tvm_ext.byoc_cutlass import screening
from tvm_ext.byoc_cutlass.profiler import workload_of
from tvm_ext.byoc_cutlass.screening import ScreeningLimits
from tvm_ext.devices.device_db import lookup
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.toolchains import sample_runner, sample_worker
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend
from tvm_ext.toolchains.cutlass_samples import sample_versions

LIMITS = ScreeningLimits(templates=2, finalists=1, variants=2, screening_runs=2, final_runs=2)
SCRIPT = FOLDER / "profile_templates.py"


@pytest.fixture(scope="module")
def scripts() -> Iterator[SimpleNamespace]:
    with imported_scripts() as modules:
        modules.profile = importlib.import_module("bundle_profile")
        yield modules


def start_there(folder: Path, *arguments: str, architecture: int | None = 80) -> subprocess.CompletedProcess[str]:
    """The script as the other machine runs it: without this package, and without its packages.

    Its driver is a stub for ``architecture``; None: it has none.
    """
    command = [sys.executable, "-I", "-S", str(folder / SCRIPT.name), *arguments]
    there = dict(os.environ)
    if architecture is not None:
        stub = build_stub_driver(folder.parent / "stub")
        there |= stub.environment(folder.parent / "log", architecture=architecture)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=there, check=False)


def run_there(folder: Path, *arguments: str) -> str:
    done = start_there(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_cc
def test_a_bundle_is_profiled_and_its_measurements_choose(
    scripts: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_cpu(monkeypatch, tmp_path)
    cases = [scripts.cases.matmul("halves", 64, 48, 32, "float16"), scripts.cases.matmul("odd", 63, 47, 31, "float16")]
    device, folder = lookup("nvidia-a100"), tmp_path / "bundle"
    said = scripts.profile.add_profile(cases, device, folder, KernelCache(None), LIMITS)
    assert "programs to profile 1 products" in said  # rows of 31 halves have no template
    for architecture, reason in (
        (None, "no CUDA device to measure on"),
        (90, "capability 9.0, the programs are for 8.0"),
    ):
        refused = start_there(folder, "--output", "m.jsonl", architecture=architecture)
        assert refused.returncode == 2 and reason in refused.stderr
        assert not (folder / "m.jsonl").exists()  # nothing that an import would take for a template's failure
    assert ", in m.jsonl" in run_there(folder, "--output", "m.jsonl")
    first = (folder / "m.jsonl").read_text().splitlines()
    assert len(first) >= 2 and all(json.loads(line)["trial"]["outcome"] == "ok" for line in first)
    (folder / "m.jsonl").write_text("\n".join(first) + '\n{"schema":1,"work')  # killed while it wrote
    assert "0 launches" in run_there(folder, "--output", "m.jsonl")
    database = MeasurementDatabase(tmp_path / "m.db")
    done = merge(database, folder / "m.jsonl")
    assert (done.added, len(done.refused)) == (len(first), 1)
    (region,) = decided(product((64, 32), (32, 48))).taken
    verdicts = database.verdicts(workload_of(region, device, sample_versions()))
    assert len(verdicts) >= 2
    kernels, _ = CutlassBackend(device, KernelCache(None), store=database).kernels({"region": region})
    assert kernels["region"].measured_us == min(item.time_us or 0 for item in verdicts.values())


def test_a_bundle_without_programs_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--bundle", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "make it with --profile" in done.stderr


@pytest.mark.parametrize(
    "path", [SCRIPT, *(Path(str(module.__file__)) for module in (screening, sample_runner, sample_worker))], ids=str
)
def test_what_travels_needs_the_standard_library_alone(path: Path) -> None:
    allowed = {"tvm_ext.byoc_cutlass.screening", "tvm_ext.toolchains.sample_runner"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert all(name in allowed or name.split(".")[0] in sys.stdlib_module_names for name in names), names
