"""A CUDA driver without a device, so that what is shipped to GPUs can be loaded and launched where there is none.

`build_stub_driver` compiles ``stub_driver.c`` into the two libraries that TVM's CUDA runtime is linked against. A
process that finds them first loads exported libraries as on a machine with a GPU: the stub takes the image of its
architecture from the fatbin, knows the kernels in it, holds memory, checks the limits of each launch, and writes a log.
It computes nothing. Libraries are chosen when a process starts, hence always a process of its own::

    stub = build_stub_driver(folder)
    subprocess.run([sys.executable, ...], env={**os.environ, **stub.environment(folder / "log")})
    stub_events(folder / "log")
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_ext.errors import UnsupportedEnvironmentError

_SOURCE = Path(__file__).with_name("stub_driver.c")
_LIBRARIES = ("libcuda.so.1", "libcudart.so.13")
_TIME_LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StubDriver:
    """The folder of the built libraries."""

    folder: Path

    def environment(self, log: Path, architecture: int = 90, driver: int = 13000) -> Mapping[str, str]:
        """Variables of a process that shall see a device of ``architecture`` (sm_90) under ``driver`` (13000: 13.0)."""
        return {
            "LD_LIBRARY_PATH": str(self.folder),
            "TVM_EXT_STUB_LOG": str(log),
            "TVM_EXT_STUB_ARCH": str(architecture),
            "TVM_EXT_STUB_DRIVER": str(driver),
        }


def build_stub_driver(folder: Path, compiler: str = "cc") -> StubDriver:
    """Compile the stub into ``folder``; raises UnsupportedEnvironmentError without a working C compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = folder / "versions.map"
    versions.write_text("libcudart.so.13 { global: *; };\n")  # TVM asks for the runtime's symbols in this version
    for name in _LIBRARIES:
        version = [f"-Wl,--version-script={versions}"] if name.startswith("libcudart") else []
        flags = ["-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", *version]
        _compile([compiler, *flags, "-o", str(folder / name), str(_SOURCE)])
    return StubDriver(folder=folder)


def _compile(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIME_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        problem = f"the stub driver cannot be compiled: {said}"
        raise UnsupportedEnvironmentError(problem, "install a C compiler") from error


def stub_events(log: Path) -> list[dict[str, Any]]:
    """The events that a stub wrote to ``log``: ``{"event": "load" | "launch", ...}``; none where it wrote nothing."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
