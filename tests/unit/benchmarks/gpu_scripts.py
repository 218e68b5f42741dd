"""The scripts of ``benchmarks/gpu`` as modules, a GPU of NumPy arrays, and a process whose driver is a stub."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from tests.support.quick_imports import WITHOUT_TORCH
from tests.support.stub_driver import build_stub_driver
from tvm_ext._tvm import Target
from tvm_ext.devices.device_db import lookup
from tvm_ext.support.kernel_cache import KernelCache

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "benchmarks" / "gpu"
WORKLOAD = ROOT / "benchmarks" / "workloads" / "roller_ops.csv"
NAMES = (
    "cases", "manifest", "numpy_references", "references", "graph_references", "gpu", "run", "import_results",
    "programs", "lists", "models", "model_graphs",
)  # fmt: skip


@contextmanager
def imported_scripts() -> Iterator[SimpleNamespace]:
    """The scripts as modules, which import each other by their bare names."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def fake_gpu(scripts: SimpleNamespace, broken: Callable[[], None] = lambda: None) -> Any:
    class FakeGpu(scripts.gpu.Gpu):  # type: ignore[misc, name-defined]
        """NumPy arrays; every call takes two microseconds."""

        name, capability = "fake", (9, 0)

        def inputs(self, case: Any) -> list[Any]:
            generator = np.random.default_rng(case.seed)
            return [scripts.gpu._random(item, generator) for item in case.inputs]

        def poisoned(self, tensor: Any) -> Any:
            return scripts.gpu._poison(tensor.shape, tensor.dtype)

        def poison(self, output: Any) -> None:
            output[...] = np.nan

        def arranged(self, tensor: Any, form: Any) -> Any:
            return scripts.gpu.arranged(tensor, form)

        def adopt(self, results: Any) -> tuple[Any, ...]:
            return scripts.gpu._flat(results)

        def expected(self, case: Any, inputs: Sequence[Any]) -> Any:
            return scripts.numpy_references.reference(case, inputs)

        def error(self, actual: Any, expected: Any) -> float:
            value = float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
            return value if np.isfinite(value) else float("inf")

        def check(self) -> None:
            broken()

        def time(self, call: Callable[[], object]) -> list[float]:
            call()
            return [2.0, 3.0, 2.0]

    return FakeGpu()


def bundled(
    tmp_path: Path, cases: Sequence[Any] = (), models: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> tuple[Path, Any]:
    """A bundle for an A100 in a folder of ``tmp_path``, and its manifest; within `imported_scripts`."""
    bundle, device, folder = importlib.import_module("bundle"), lookup("nvidia-a100"), tmp_path / "bundle"
    folder.mkdir()
    chosen = bundle.Settings(
        device=device, target=Target(dict(device.target)), architectures=("sm_80",), candidates=1, folder=folder,
        cache=KernelCache(tmp_path / "cache"), **settings,
    )  # fmt: skip
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return folder, bundle.write_bundle(list(cases), chosen, python, tell=lambda _text: None, models=models)


def start_there(folder: Path, tmp_path: Path, log: Path, **driver: int) -> subprocess.CompletedProcess[str]:
    """The bundle in a process whose driver is a stub, without PyTorch."""
    stub = build_stub_driver(tmp_path / "stub")
    command = [sys.executable, str(folder / "run.py"), "--backend", "runtime", "--output", str(tmp_path / "out.jsonl")]
    environment = {key: value for key, value in os.environ.items() if key != "TVM_EXT_STUB_LOG"}
    there = {**environment, "PYTHONPATH": WITHOUT_TORCH, **stub.environment(log, architecture=80, **driver)}
    return subprocess.run(command, env=there, capture_output=True, text=True, timeout=120)


def run_there(folder: Path, tmp_path: Path, log: Path) -> Any:
    """The one record of a run that finds results wrong: nothing was computed."""
    done = start_there(folder, tmp_path, log)
    assert done.returncode == 1, done.stderr
    return json.loads((tmp_path / "out.jsonl").read_text())
