"""The tests marked ``gpu`` (tests/models/test_on_a_gpu.py) on machines without a GPU: what they need, what they see."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.stub_driver import build_stub_driver, stub_events
from tests.unit.compilers import needs_cc, needs_nvcc

ROOT = Path(__file__).resolve().parents[3]
ONE = "test_a_random_operator_agrees_with_numpy and 0-"


def _pytest(environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", ONE, "-x", "tests/models/test_on_a_gpu.py"]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.slow  # a run of pytest of its own
@needs_cc
@needs_nvcc
def test_a_gpu_that_computes_nothing_fails_them(tmp_path: Path) -> None:
    """The stub of a driver has a device and takes launches; the results stay as they were."""
    log = tmp_path / "log"
    done = _pytest(build_stub_driver(tmp_path / "stub").environment(log, architecture=80))
    assert done.returncode == 1, done.stdout
    assert "WrongResultError" in done.stdout, done.stdout
    assert {event["event"] for event in stub_events(log)} >= {"load", "launch"}


@pytest.mark.slow  # a run of pytest of its own
def test_without_a_device_they_are_skipped_with_the_reason() -> None:
    done = _pytest({})
    if "no CUDA device: " not in done.stdout:
        pytest.skip("this machine has a CUDA device")
    assert done.returncode == 0 and "passed" not in done.stdout, done.stdout
