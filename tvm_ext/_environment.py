"""Refuses an environment that this plugin cannot work in, before TVM's libraries are touched.

The plugin's native part is built against one TVM's C++ ABI and its passes against one TVM's Python names, so the
versions are exact. Nothing here imports TVM: a wrong tvm-ffi can break `import tvm` itself, with a message that
names neither package.
"""

from __future__ import annotations

import functools
import platform
import sys
from importlib import metadata

from tvm_ext.errors import UnsupportedEnvironmentError

SUPPORTED_VERSIONS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}
"""Distribution name to the one version that is supported; `pyproject.toml` pins the same."""

SUPPORTED_MACHINES = ("x86_64", "amd64", "aarch64", "arm64")
"""What `platform.machine()` may answer, in lower case. Vector extensions belong to the target: see device_db."""

_MINIMUM_PYTHON = (3, 10)  # `requires-python` of pyproject.toml


@functools.cache  # importlib.metadata keeps two more tables with each look
def installed_version(distribution: str) -> str | None:
    """The installed version of ``distribution``, or None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_environment() -> None:
    """Raise `UnsupportedEnvironmentError`, with a remedy, unless Python, CPU, TVM and tvm-ffi are supported ones."""
    _check_python(sys.version_info[:2])
    _check_machine(platform.machine())
    for distribution, supported in SUPPORTED_VERSIONS.items():
        _check_version(distribution, installed_version(distribution), supported)


def _check_python(version: tuple[int, ...]) -> None:
    if version < _MINIMUM_PYTHON:
        found, needed = (".".join(map(str, v)) for v in (version, _MINIMUM_PYTHON))
        raise UnsupportedEnvironmentError(
            f"tvm_ext needs Python {needed} or newer, this is Python {found}.", "use a newer Python"
        )


def _check_machine(machine: str) -> None:
    if machine.lower() not in SUPPORTED_MACHINES:
        raise UnsupportedEnvironmentError(
            f"tvm_ext supports x86-64 and AArch64 processors, this machine is {machine or 'of an unknown kind'}.",
            "run it on a supported machine",
        )


def _check_version(distribution: str, found: str | None, supported: str) -> None:
    if found == supported:
        return
    state = "is not installed" if found is None else f"{found} is installed"
    requirements = " ".join(f'"{name}=={version}"' for name, version in SUPPORTED_VERSIONS.items())
    raise UnsupportedEnvironmentError(
        f"tvm_ext works with {distribution} {supported}, but {distribution} {state}.",
        f"python -m pip install {requirements}",
    )
