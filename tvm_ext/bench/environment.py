"""What a measurement must state to be worth keeping: machine, versions, date and commit, as one record.

Its `Placement` gives each thread of a contender one core, so that two never share one while another idles. TVM binds
the workers of its pool to cores of their own and leaves the calling thread, which works too, unbound; ONNX Runtime and
OpenBLAS leave every thread unbound. A kernel that packs threads on few cores then runs either contender on one core for
many milliseconds: a convolution took 250 or 490 us. Here the calling thread keeps to one core while times are taken,
and each contender's workers to the cores that TVM's pool uses.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tvm_ext import options
from tvm_ext._environment import installed_version
from tvm_ext._tvm import tvm_ffi
from tvm_ext.devices.cpu_info import read_cpu_info

AFFINITY_KEY = "session.intra_op_thread_affinities"
"""ONNX Runtime's session option that binds the workers of a session."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where threads belong: the calling thread on ``main_core``, each further thread on its own of ``worker_cores``."""

    main_core: int
    worker_cores: tuple[int, ...]

    def __post_init__(self) -> None:
        cores = (self.main_core, *self.worker_cores)
        assert len(set(cores)) == len(cores), f"a core has two threads: {self}"
        assert min(cores) >= 0, f"no such core: {self}"

    def __str__(self) -> str:
        workers = ", ".join(map(str, self.worker_cores))
        return f"main thread on core {self.main_core}" + (f", workers on {workers}" if workers else "")

    @property
    def onnx_runtime_affinities(self) -> str:
        """The value of `AFFINITY_KEY`: a core per worker, counted from 1. Workers on cores 1 and 3: "2;4"."""
        return ";".join(str(core + 1) for core in self.worker_cores)


def place_threads(threads: int) -> Placement | None:
    """Cores for ``threads`` threads, the caller's included; None where each cannot have one, or where the system knows
    no affinity.

    The workers get the cores to which threads of this process are bound already (TVM's pool, once started), the caller
    the first one that is left. Worked example: cores 0 to 3, a pool of two threads whose worker is bound to core 1, two
    threads: caller on 0, worker on 1.
    """
    allowed = _affinity(0)
    if not 1 < len(allowed) >= threads:
        return None
    bound = _bound_cores() & allowed
    main = min(allowed - bound or allowed)
    workers = sorted(allowed - {main}, key=lambda core: (core not in bound, core))
    return Placement(main_core=main, worker_cores=tuple(workers[: threads - 1]))


@contextlib.contextmanager
def on_main_core(placement: Placement | None) -> Iterator[None]:
    """Keep the calling thread to its core; afterwards, also after an error, it may run where it could before.

    A thread inherits the cores of the one that starts it, so start sessions and pools before. Does nothing for None, or
    where the system refuses.
    """
    before = _affinity(0)
    pinned = placement is not None and _bind(0, {placement.main_core})
    try:
        yield
    finally:
        if pinned:
            _bind(0, before)


def _affinity(thread: int) -> set[int]:
    """Cores that a thread may run on; 0 is the calling one. Empty where the system cannot tell."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    try:
        return os.sched_getaffinity(thread)
    except OSError:  # the thread has ended meanwhile
        return set()


def _bind(thread: int, cores: set[int]) -> bool:
    try:
        os.sched_setaffinity(thread, cores)
    except OSError:  # forbidden here, or a core has gone
        return False
    return True


def _bound_cores() -> set[int]:
    """Cores to which some thread of this process is bound alone."""
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except FileNotFoundError:
        return set()
    return {min(cores) for cores in map(_affinity, threads) if len(cores) == 1}


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
        device=read_cpu_info().model,
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


def _versions() -> list[tuple[str, str]]:
    found = [(package, installed_version(package)) for package in _PACKAGES]
    return [(package, version) for package, version in found if version is not None]


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
