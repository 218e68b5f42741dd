"""Checks that everything this plugin needs is there and works: the command ``tvm-ext doctor``."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import tvm
from tvm import relax

from tvm_ext import _environment, _native, relay
from tvm_ext._native import OPTIONS_LIBRARY, PROVIDER_LIBRARY, RUNTIME_LIBRARY, WEIGHTS_LIBRARY
from tvm_ext._tvm import PIPELINE_NAME
from tvm_ext.devices import device_db
from tvm_ext.devices.rows.cpus import CPU_ROWS
from tvm_ext.errors import TvmExtError
from tvm_ext.options import BuildOptions, cache_directory, kernel_cache_directory, recorded_cpu, usable_core_count
from tvm_ext.runtime.export import check_library, compile_metadata
from tvm_ext.support.files import temporary_folder
from tvm_ext.support.kernel_cache import entries
from tvm_ext.toolchains import cuda_toolchain

State = Literal["ok", "note", "problem"]

_OPTIONAL = {
    "onnxruntime": "comparisons with ONNX Runtime",
    "matplotlib": "plots in the notebooks",
    "safetensors": "the MiniLM model",
    "tokenizers": "the MiniLM model",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthCheck:
    """One checked thing: ``note`` limits something optional, ``problem`` keeps the plugin from working."""

    name: str
    state: State
    detail: str
    remedy: str = ""


def examine(libraries: Sequence[Path] = ()) -> Iterator[HealthCheck]:
    """Every finding, one after the other: some take a second. Of ``libraries`` the digest is checked."""
    checks: tuple[Callable[[], Iterator[HealthCheck]], ...] = (
        _versions, _import_time, _native_part, _pipelines, _processor, _device_row, _threads, _cache, _compiler,
        _cuda_compiler, _small_build,
    )  # fmt: skip
    for check in checks:
        yield from _guarded(check)
    for path in libraries:
        yield _library(path)


def _library(path: Path) -> HealthCheck:
    name = f"library {path.name}"
    try:
        digest = check_library(path)
    except OSError as error:
        return HealthCheck(name=name, state="problem", detail=f"{path} cannot be read: {error.strerror or error}")
    except TvmExtError as error:
        return HealthCheck(name=name, state="problem", detail=error.problem, remedy=error.remedy)
    if not digest:
        return HealthCheck(name=name, state="note", detail="not exported by tvm_ext: it carries no digest")
    return HealthCheck(name=name, state="ok", detail=f"as it was exported: SHA-256 {digest}")


def _guarded(check: Callable[[], Iterator[HealthCheck]]) -> Iterator[HealthCheck]:
    """``check``'s findings; what it fails with becomes a finding, so that the other checks still run."""
    try:
        yield from check()
    except (TvmExtError, RuntimeError, OSError, ImportError, ValueError) as error:
        problem, remedy = getattr(error, "problem", str(error)), getattr(error, "remedy", "")
        yield HealthCheck(
            name=check.__name__.strip("_").replace("_", " "), state="problem", detail=problem, remedy=remedy
        )


def _versions() -> Iterator[HealthCheck]:
    _environment.check_environment()
    for name, supported in _environment.SUPPORTED_VERSIONS.items():
        yield HealthCheck(name=name, state="ok", detail=f"{supported}, the supported version")
    yield HealthCheck(
        name="python", state="ok", detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    for name, use in _OPTIONAL.items():
        yield _optional(name, use)


def _optional(name: str, use: str) -> HealthCheck:
    version = _environment.installed_version(name)
    if version is None:
        return HealthCheck(
            name=name,
            state="note",
            detail=f"not installed; needed for {use} only",
            remedy="pip install 'tvm-ext[bench]'",
        )
    return HealthCheck(name=name, state="ok", detail=version)


_IMPORTS = (
    "import time, importlib.metadata as metadata\n"
    "if {without}:\n"
    "    found = metadata.entry_points\n"
    "    metadata.entry_points = lambda **asked: () if asked.get('group') == 'tvm.backends' else found(**asked)\n"
    "start = time.process_time()\n"
    "import tvm\n"
    "print(time.process_time() - start)\n"
)


def _import_time() -> Iterator[HealthCheck]:
    """What the plugin adds to ``import tvm``, in processor time, of a process with its entry point and one without.

    This process has brought their files into memory.
    """
    detail = f"{_imported(False):.2f} s of processor time, {_imported(True):.2f} s without this plugin"
    yield HealthCheck(name="import tvm", state="ok", detail=detail)


def _imported(without: bool) -> float:
    text = _IMPORTS.format(without=without)
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    return float(ran.stdout.split()[-1])


def _native_part() -> Iterator[HealthCheck]:
    path = _native.library_path(OPTIONS_LIBRARY)
    if path is None:
        yield HealthCheck(
            name="native part",
            state="note",
            detail="not built: PassContext options tvm_ext.* are not accepted, arguments of relay.build are",
            remedy="install the package (pip install .) instead of using its sources",
        )
        return
    _native.load(OPTIONS_LIBRARY)
    with tvm.transform.PassContext(config={"tvm_ext.candidates": 3}):
        works = BuildOptions.current().candidates == 3
    yield HealthCheck(
        name="native part", state="ok" if works else "problem", detail=f"{path.name}: typed PassContext options"
    )
    for library in (OPTIONS_LIBRARY, RUNTIME_LIBRARY, PROVIDER_LIBRARY, WEIGHTS_LIBRARY):
        problem = _native.outdated(library)
        if problem is not None:
            yield HealthCheck(name="native part", state="note", detail=problem[0], remedy=problem[1])


def _pipelines() -> Iterator[HealthCheck]:
    relax.get_pipeline(PIPELINE_NAME)
    tvm.tirx.get_tir_pipeline(PIPELINE_NAME)
    points = [point.name for point in metadata.entry_points(group="tvm.backends")]
    how = "by `import tvm` alone" if PIPELINE_NAME in points else "by `import tvm_ext` (the package is not installed)"
    yield HealthCheck(name="pass pipelines", state="ok", detail=f"{PIPELINE_NAME!r} is registered with TVM {how}")


def _processor() -> Iterator[HealthCheck]:
    device, target = device_db.device_for_target("llvm")
    model = target.attrs.get("mcpu", "generic")
    lanes = f"{device.register_limit} registers of {8 * device.register_bytes} bits"
    yield HealthCheck(
        name="processor",
        state="ok",
        detail=f"{device.description}; {device.unit_count} core(s), {lanes}; LLVM: {model}",
    )


def _device_row() -> Iterator[HealthCheck]:
    """Which row of the tables shapes kernels, and whether this machine was measured."""
    stand_in = recorded_cpu()
    if stand_in is not None:
        yield HealthCheck(name="device row", state="note", detail=f"TVM_EXT_CPU names {stand_in}")
        return
    row = device_db.lookup("cpu").row
    known = row not in {generic.name for generic in CPU_ROWS}
    remedy = "" if known else "measure it on a quiet machine: tvm-ext devices cpu --measure"
    detail = f"{row}" if known else f"{row}: the tables do not know this microarchitecture"
    yield HealthCheck(name="device row", state="ok" if known else "note", detail=detail, remedy=remedy)


def _threads() -> Iterator[HealthCheck]:
    used, usable = int(tvm.runtime.num_threads()), usable_core_count()
    state: State = "ok" if used == usable else "note"
    remedy = "" if used == usable else "unset TVM_NUM_THREADS and OMP_NUM_THREADS, or set them to the core count"
    yield HealthCheck(name="threads", state=state, detail=f"TVM uses {used} of {usable} usable cores", remedy=remedy)


def _cache() -> Iterator[HealthCheck]:
    folder = cache_directory()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        yield HealthCheck(name="cache", state="ok", detail=f"{folder} is writable")
    kernels = kernel_cache_directory()
    size = "switched off" if kernels is None else f"{kernels}, {sum(s for _, s, _ in entries(kernels)) / 1e6:.1f} MB"
    yield HealthCheck(name="kernel cache", state="note" if kernels is None else "ok", detail=size)


def _compiler() -> Iterator[HealthCheck]:
    with temporary_folder("doctor") as folder:
        compile_metadata("{}", folder)
    yield HealthCheck(
        name="C++ compiler",
        state="ok",
        detail=f"{tvm.support.cc.get_cc()} compiles against tvm-ffi (needed to export libraries)",
    )


def _cuda_compiler() -> Iterator[HealthCheck]:
    state, detail, remedy = cuda_toolchain.describe()
    yield HealthCheck(name="CUDA compiler", state="ok" if state == "ok" else "note", detail=detail, remedy=remedy)


def _small_build() -> Iterator[HealthCheck]:
    """Build, run and check a 33 x 17 by 17 x 29 product: sizes that no vector length divides."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((33, 17), "float32"))
    y = relax.Var("y", relax.TensorType((17, 29), "float32"))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            product = builder.emit_output(relax.op.matmul(x, y))
        builder.emit_func_output(product)
    library = relay.build(builder.finalize())
    random = np.random.default_rng(0)
    left, right = random.standard_normal((33, 17)).astype("float32"), random.standard_normal((17, 29)).astype("float32")
    module = relay.GraphModule(library)
    module.run(x=left, y=right)
    error = float(np.abs(module.get_output(0).numpy() - left.astype("float64") @ right.astype("float64")).max())
    paths = ", ".join(library.report.path_counts())
    state: State = "ok" if error < 1e-4 else "problem"
    yield HealthCheck(
        name="small build", state=state, detail=f"a matrix product was built ({paths}); largest error {error:.1e}"
    )
