"""Fixtures for all tests. The environment is set here, before anything imports TVM."""

from __future__ import annotations

import difflib
import gc
import os
import platform
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import quick_imports, sampled

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"

# Measurements of this machine are worth keeping between runs, but apart from the user's own.
os.environ.setdefault("TVM_EXT_CACHE_DIR", str(ROOT / ".cache" / "tests"))
# Tests build what they test anew; those of the cache name a temporary folder.
os.environ["TVM_EXT_KERNEL_CACHE"] = "off"
os.environ["TVM_EXT_DATABASE"] = "off"  # what was measured on this machine chooses no kernel of a test


# Whatever the user's shell says: some hundred processes import the same modules, and would compile each of them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
quick_imports.leave_out_source_lines()
quick_imports.start_without_torch()

# Kernels are constructed for a CPU that was written down, so that a test gives the same verdict on every machine.
DEFAULT_CPU = {"wide": "cpu-epyc-zen5", "narrow": "cpu-cascade-lake-avx2"}


def pytest_configure(config: pytest.Config) -> None:
    """Name the recorded CPU before any test builds, and for the processes that tests start."""
    if config.getoption("--require-nvcc"):
        _require_nvcc()
    chosen = config.getoption("--cpu")
    if chosen == "host":
        os.environ.pop("TVM_EXT_CPU", None)
    elif chosen is not None or ("TVM_EXT_CPU" not in os.environ and platform.machine() == "x86_64"):
        os.environ["TVM_EXT_CPU"] = chosen or DEFAULT_CPU["wide" if _has_wide_registers() else "narrow"]


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers that were asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    sampled.mark_left_out(items)


def pytest_collection_finish() -> None:
    """What was imported stays: Python's collector need not look at these objects again and again."""
    gc.collect()
    gc.freeze()


def _require_nvcc() -> None:
    """Ends the run at once: skipped, the tests of CUDA kernels would pass on a machine that cannot run them."""
    from tvm_ext.errors import TvmExtError
    from tvm_ext.toolchains.cuda_toolchain import find_nvcc

    try:
        find_nvcc()
    except TvmExtError as error:
        raise pytest.UsageError(f"--require-nvcc: {error}") from error


def _has_wide_registers() -> bool:
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags.split())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu",
        help="the recorded CPU (see `tvm-ext devices`) to construct kernels for, or 'host' for this machine's own; "
        "default: cpu-epyc-zen5 where AVX-512 can run, else cpu-cascade-lake-avx2",
    )
    parser.addoption(
        "--require-nvcc", action="store_true", help="fail, instead of skipping tests, where there is no CUDA compiler"
    )
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing with them"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)`` compares ``text`` with the file ``tests/golden/name`` (see ``--update-golden``)."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8", newline="\n")
        assert path.is_file(), f"{path} is absent; make it with --update-golden"
        kept = path.read_text(encoding="utf-8")
        if kept != text:
            pytest.fail(_difference(name, kept, text), pytrace=False)

    return check


def _difference(name: str, kept: str, text: str) -> str:
    lines = [part.splitlines() for part in (kept, text)]
    changes = difflib.unified_diff(*lines, f"tests/golden/{name}", "as emitted now", lineterm="")
    return "\n".join([*changes, "", "if this is meant: python3 dev.py test tests/golden --update-golden"])


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that differ between tests and not between runs."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own CPU instead of a recorded one: for tests of how it is read and measured."""
    monkeypatch.delenv("TVM_EXT_CPU", raising=False)


@pytest.fixture
def immutable_modules() -> Iterator[None]:
    """A PassContext in which a pass that writes to its input fails (house rule: passes are pure)."""
    from tvm_ext._tvm import PassContext

    with PassContext(config={"testing.immutable_module": True}):
        yield


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_python(code, *interpreter_flags, **environment)`` in a process of its own, in an empty folder.

    An environment variable set to None is removed. The process finds this source tree, and neither the fixtures
    above nor PyTorch.
    """

    def run(code: str, *flags: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, **environment}
        kept = {name: value for name, value in variables.items() if value is not None}
        command = [sys.executable, *flags, "-c", code]
        return subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False, timeout=300)

    return run


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts this process and those that it starts, also where it was started to ignore it.

    As shells start what runs in the background, and pytest-xdist its workers.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
