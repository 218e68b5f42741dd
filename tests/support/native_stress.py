"""Builds and runs ``tests/native/stress.cc``, the test program of the native runtime's core, with a sanitizer.

    python -m tests.support.native_stress --sanitizer thread --seconds 20
    python -m tests.support.native_stress --sanitizer address --seconds 20 --seed 7
    python -m tests.support.native_stress --define RAMMER_EPOCH_ERROR=1      # a mutant: must fail

Each of its parts runs for so many seconds. It exits with what the program exits with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "": "beside,bytes,epoch,fail,fork,hang,loops,threads,walk",
    "address": "beside,bytes,epoch,fail,fork,hang,loops,threads,walk",
    "thread": "beside,epoch,fail,hang,loops,threads,walk",  # ThreadSanitizer knows nothing of threads after a fork
}


def can_build() -> bool:
    return shutil.which("cmake") is not None


def build(sanitizer: str = "", definitions: Sequence[str] = (), folder: Path | None = None) -> Path:
    """The program, in ``folder`` or ``build/stress-<sanitizer>``; CalledProcessError where it does not compile."""
    folder = folder or ROOT / "build" / f"stress-{sanitizer or 'plain'}"
    settings = {
        "TVM_EXT_NATIVE_TESTS": "ON",
        "TVM_EXT_SANITIZER": sanitizer,
        "TVM_EXT_STRESS_DEFINITIONS": ";".join(definitions),
        "Python_EXECUTABLE": sys.executable,
    }
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), *(f"-D{key}={value}" for key, value in settings.items())]
    jobs = str(min(4, os.cpu_count() or 1))
    compile_it = ["cmake", "--build", str(folder), "--target", "rammer_stress", "--parallel", jobs]
    for command in (configure, compile_it):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "tvm_ext" / "csrc" / "rammer" / "rammer_stress"


def run(program: Path, sanitizer: str, seconds: float, seed: int, parts: str = "") -> subprocess.CompletedProcess[str]:
    """One run; its standard error says what was wrong."""
    options = ["TSAN_OPTIONS=halt_on_error=1", "ASAN_OPTIONS=detect_leaks=0"]  # teams live for ever on purpose
    command = ["env", *options, str(program), str(seconds), str(seed), parts or PARTS[sanitizer]]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main(
    sanitizer: Annotated[str, typer.Option(help="thread, address, or nothing.")] = "",
    seconds: Annotated[float, typer.Option(help="Of each part.")] = 2.0,
    seed: int = 0,
    define: Annotated[list[str] | None, typer.Option(help="Makes a mutant.")] = None,
) -> None:
    """Build the program and run it."""
    result = run(build(sanitizer, define or ()), sanitizer, seconds, seed)
    print(result.stdout + result.stderr, end="")
    raise typer.Exit(result.returncode)


if __name__ == "__main__":
    typer.run(main)
