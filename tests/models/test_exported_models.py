"""Networks exported from torch, each in a process of its own, against ONNX Runtime (see docs/testing.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.exported_models.networks import NETWORKS, missing_packages
from tests.support.exported_models.record import CPU
from tests.support.exported_models.runs import Run, run_one
from tvm_ext import options

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

GPUS = ("nvidia-a100", "nvidia-v100")
CASES = [(name, exporter) for name, network in NETWORKS.items() for exporter in network.exporters]


def _run(name: str, exporter: str, *devices: str) -> list[str]:
    run = Run(network=name, exporter=exporter, devices=devices, folder=_folder(), limit_s=600.0)
    if not run.model.is_file() and missing_packages():
        pytest.skip(f"{', '.join(missing_packages())} not installed (extra models)")
    return [f"{result.device}: {result.outcome}: {result.problem}" for result in run_one(run) if not result.passed]


def _folder() -> Path:
    return options.cache_directory() / "exported"


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_agrees_with_onnx_runtime(name: str, exporter: str) -> None:
    pytest.importorskip("onnxruntime", reason="the reference is ONNX Runtime")
    assert _run(name, exporter, CPU) == []


@pytest.mark.parametrize(("name", "exporter"), CASES)
def test_is_built_for_gpus(name: str, exporter: str) -> None:
    assert _run(name, exporter, *GPUS) == []
