"""What a measurement must state to be worth keeping: machine, versions, date and commit, as one record."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tvm_ext import options
from tvm_ext._tvm import tvm_ffi

from .placement import place_threads

_PACKAGES = ("tvm-ext", "apache-tvm", "apache-tvm-ffi", "numpy", "onnx", "onnxruntime", "openvino")
_GIT_TIMEOUT_S = 10.0  # a choice: git answers in milliseconds; a folder on a slow network in seconds

DIRTY = "+"
_NOT_MEASURED = ("benchmarks/results", "docs", "*.md")
"""Changes here leave a measurement what it is: a series of benchmarks writes its results one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where and when a measurement was taken. ``commit`` is None outside a checkout.

    A commit ends in `DIRTY` where a file of the checkout is changed or new, other than results and documentation.
    """

    device: str
    cores: int  # that this process may use
    threads: int  # that TVM's pool runs
    placement: str  # which core each contender's threads are kept on while times are taken; "unbound" if on none
    system: str
    versions: tuple[tuple[str, str], ...]  # (package, version), "python" first; absent packages are left out
    load_average: float | None  # runnable processes over the last minute; a busy machine's times mean little
    date: str  # ISO 8601, UTC
    commit: str | None


def is_clean(commit: str | None) -> bool:
    """Whether `Environment.commit` names the sources that were measured: there is one, and nothing differs from it."""
    return bool(commit) and not str(commit).endswith(DIRTY)


def current_environment() -> Environment:
    """This machine, process and checkout now. Starts TVM's thread pool."""
    threads = thread_count()
    return Environment(
        device=_processor_name(Path("/proc/cpuinfo")),
        cores=options.usable_core_count(),
        threads=threads,
        placement=str(place_threads(threads) or "unbound"),
        system=f"{platform.system()} {platform.machine()}",
        versions=(("python", platform.python_version()), *_versions()),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=_commit(Path(__file__).resolve().parents[2]),
    )


def thread_count() -> int:
    """Threads of TVM's pool in this process; asking starts the pool."""
    return int(tvm_ffi.get_global_func("runtime.NumThreads")())


def _processor_name(cpuinfo: Path) -> str:
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> list[tuple[str, str]]:
    found = [(package, _version(package)) for package in _PACKAGES]
    return [(package, version) for package, version in found if version is not None]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(checkout: Path) -> str | None:
    """Short hash of the checkout that this file lies in; None for an installed package or where git is absent."""
    if not (checkout / ".git").exists():
        return None
    head = _git(checkout, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    others = [f":(exclude){path}" for path in _NOT_MEASURED]
    return head + (DIRTY if _git(checkout, "status", "--porcelain", "--", ".", *others) else "")


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
