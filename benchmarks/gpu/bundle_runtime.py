"""What a bundle carries besides kernels: TVM's runtime, tvm-ffi, and what of this package runs folders of jobs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import tvm_ext
from tvm_ext._tvm import tvm, tvm_ffi
from tvm_ext.errors import OptionError

_TVM_LIBRARIES = ("libtvm_runtime.so", "libtvm_runtime_cuda.so")
_TVM_LEFT_OUT = ("3rdparty", "include", "src", "lib", "web", "cmake", "exec", "licenses", "topi", "__pycache__")


def copy_runtime(folder: Path, python: str) -> None:
    """TVM's Python code and runtime libraries, without its compiler, and tvm-ffi for Python ``python`` ("3.12")."""
    package, ffi = Path(tvm.__file__).resolve().parent, Path(tvm_ffi.__file__).resolve().parent
    target = folder / "runtime"
    shutil.copytree(package, target / "tvm", ignore=_only_runtime(package))
    (target / "tvm" / "lib").mkdir()
    for name in _TVM_LIBRARIES:
        shutil.copy2(package / "lib" / name, target / "tvm" / "lib" / name)
    ignore = shutil.ignore_patterns("include", "src", "3rdparty", "share", "stub", "__pycache__")
    shutil.copytree(ffi, target / "tvm_ffi", ignore=ignore)
    if python != f"{sys.version_info.major}.{sys.version_info.minor}":
        _add_ffi_core(target / "tvm_ffi", python)


JOB_MODULES = ("autotune.job_folder", "autotune.kernel_worker")
"""What serves folders of jobs there: the server, and the process that has the device."""


def copy_job_server(target: Path) -> None:
    """Those modules of this package that `JOB_MODULES` need, which is none that needs TVM's compiler."""
    package = Path(tvm_ext.__file__).resolve().parent
    for name in sorted(_needed(package, JOB_MODULES)):
        (target / "tvm_ext" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(package / name, target / "tvm_ext" / name)
    (target / "tvm_ext" / "__init__.py").write_text('"""Of the package tvm_ext, what runs kernels."""\n')


def _needed(package: Path, modules: Sequence[str]) -> set[str]:
    """Files of the package that ``modules`` import when they are imported, theirs and those of their folders."""
    found: set[str] = set()
    waiting = [_file(package, module) for module in modules]
    while waiting:
        name = waiting.pop()
        if name is None or name in found:
            continue
        found.add(name)
        parts = Path(name).parent.parts
        found |= {"/".join((*parts[: depth + 1], "__init__.py")) for depth in range(len(parts))}
        waiting += [_file(package, module) for module in _imported(package, name)]
    return found


def _file(package: Path, module: str) -> str | None:
    """The file of a module by its dotted name below the package; None where that is no module."""
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if (package / name).is_file()), None)


def _imported(package: Path, name: str) -> Iterator[str]:
    """Dotted names below the package that its file ``name`` imports at its top, and names that may be modules there."""
    for node in ast.parse((package / name).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        above = Path(name).parts[: -node.level] if node.level else ()
        base = ".".join((*above, *filter(None, [node.module])))
        if not node.level:
            if base.partition(".")[0] != "tvm_ext":
                continue
            base = base.partition(".")[2]
        yield base
        yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _only_runtime(package: Path) -> Any:
    def ignore(folder: str, names: list[str]) -> set[str]:
        top = _TVM_LEFT_OUT if Path(folder) == package else ("__pycache__",)
        return {name for name in names if name in top or name.endswith((".cc", ".h"))}

    return ignore


def _add_ffi_core(folder: Path, python: str) -> None:
    """tvm-ffi's one file that depends on Python's version, from its wheel for that version."""
    version = metadata.version("apache-tvm-ffi")
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", name]
        command += [f"--python-version={python}", f"apache-tvm-ffi=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        wheels = list(Path(name).glob("*.whl"))
        if done.returncode or not wheels:
            raise OptionError(
                f"apache-tvm-ffi {version} has no wheel for Python {python}: {done.stderr.strip()[-300:]}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            for member in wheel.namelist():
                if member.startswith("tvm_ffi/core.") and member.endswith(".so"):
                    (folder / Path(member).name).write_bytes(wheel.read(member))
