"""What works where there is no native part and not all of POSIX: macOS, Windows, Linux on AArch64.

A process takes away what a platform lacks, and says that it is one, before it imports this package. TVM is the one of
this machine: what it does elsewhere is not seen here.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PLATFORMS = {
    "macos": ("darwin", "arm64", ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fallocate")),
    "windows": (
        "win32", "AMD64",
        ("memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fallocate", "geteuid", "getuid", "killpg",
         "register_at_fork", "fork", "sysconf", "sysconf_names", "getloadavg", "O_DIRECTORY", "O_NOFOLLOW",
         "O_NONBLOCK", "O_CLOEXEC", "setsid", "chroot", "mkfifo"),
    ),
    "linux-aarch64": ("linux", "aarch64", ()),
}  # fmt: skip
"""`sys.platform`, `platform.machine()`, and names that `os` lacks there."""

PROGRAM = """
import asyncio, ctypes, importlib, multiprocessing, os, pkgutil, platform, signal, sqlite3, subprocess, sys, tempfile
import filelock, numpy as np, onnx, platformdirs, rich.console, rich.progress, typer, xgboost  # each knows its platform
name, machine, lacking = sys.argv[1], sys.argv[2], sys.argv[3:]
os.environ["TVM_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of the machine that this is
import tvm
if name != "linux":
    sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["pwd"] = None
for item in lacking:
    delattr(os, item)
sys.platform, platform.machine, platform.system = name, lambda: machine, lambda: name
from tvm_ext import _native
if name != "linux":
    _native.library_path = lambda _name: None  # a wheel in pure Python has none
import tvm_ext
from tvm_ext import BuildOptions, InferenceSession, SessionOptions, relay
from tvm_ext.bench import models
for package in ("cli", "reports", "session", "devices", "records", "relay_passes.onnx"):
    found = importlib.import_module(f"tvm_ext.{package}")
    for module in pkgutil.iter_modules(found.__path__):
        if module.name not in ("__main__", "serving"):  # which needs MLServer
            importlib.import_module(f"tvm_ext.{package}.{module.name}")
"""

BUILD = """
import tvm_ext.options
model = models.build_model("mlp", 1)
mod, params = relay.frontend.from_onnx(model)
host = {"kind": "llvm", "mcpu": "x86-64-v3", "mtriple": "x86_64-linux-gnu"}  # which runs whatever it says that it is
platform.machine = lambda: "x86_64"
library = relay.build(mod, host, params=params)
module = relay.GraphModule(library)
values = models.random_inputs(model, 0)
module.run(**values)
expected = np.maximum(module.get_output(0).numpy(), -np.inf)
assert np.isfinite(expected).all()
assert library.report.kernel_cache.folder is None or hasattr(os, "geteuid")
"""

EXPORT = """
folder = tempfile.mkdtemp()
library.export_library(os.path.join(folder, "model.so"))
again = relay.GraphModule(relay.load(os.path.join(folder, "model.so")))
again.run(**values)
np.testing.assert_array_equal(again.get_output(0).numpy(), expected)
"""


def _run(platform: str, program: str) -> None:
    name, machine, lacking = PLATFORMS[platform]
    command = [sys.executable, "-c", program, name, machine, *lacking]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("platform", "more"), [("macos", EXPORT), ("windows", "")])
def test_it_builds_and_runs_without_what_the_platform_lacks(platform: str, more: str) -> None:
    """On Windows there is no linker that it knows how to call: no exported libraries."""
    _run(platform, PROGRAM + BUILD + more)


def test_it_is_imported_on_aarch64() -> None:
    _run("linux-aarch64", PROGRAM)
