"""Sample programs of CUTLASS's templates: compiled once, kept, and run by a process of their own on the GPU.

A program is the object file that a model would link to, as a shared library with CUDA's runtime in it. The cache of
kernels keeps it under the digest of its text, compiler and architecture: which programs were compiled together, and for
which network, does not matter. `sample_worker` runs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tvm_ext.byoc_cutlass._cutlass import VERSION
from tvm_ext.byoc_cutlass.profiler import TEXTS, RegionPlan, Versions, profile
from tvm_ext.byoc_cutlass.screening import ScreeningLimits
from tvm_ext.byoc_cutlass.selection import Candidate
from tvm_ext.devices.capabilities import is_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import CompileError, UnsupportedEnvironmentError
from tvm_ext.records.measurement import TrialStore
from tvm_ext.records.partition import CutlassProfile
from tvm_ext.support.files import produce_atomically, temporary_folder
from tvm_ext.support.kernel_cache import CachedKernel, KernelCache, KernelRecord
from tvm_ext.support.limited_process import run_limited

from . import cutlass_toolchain, host_compiler
from .cuda_toolchain import find_nvcc
from .cutlass_toolchain import TemplateCompiler
from .remedies import HOST
from .sample_runner import WORKER, SampleRunner

_LINK_LIMIT_S = 60.0  # a choice: linking takes a second
_DEVICE_LIMIT_S = 30.0  # a choice: starting CUDA takes a second or two


def sample_versions() -> Versions:
    """What makes the programs, for the keys of their measurements."""
    try:
        nvcc = find_nvcc()
    except UnsupportedEnvironmentError:
        nvcc = None
    release = "none" if nvcc is None else ".".join(map(str, nvcc.release))
    return (("nvcc", release), ("nvidia-cutlass", VERSION), ("texts", TEXTS))


class SamplePrograms:
    """Makes programs: `profiler.SampleProgrammer`. ``libraries`` are those that are made, by symbol, in ``folder``."""

    def __init__(self, cache: KernelCache, folder: Path) -> None:
        self.cache, self.folder = cache, folder
        self.libraries: dict[str, Path] = {}
        self.compiled = 0
        self._versions = repr(sample_versions())

    def prepare(self, candidates: Mapping[str, Candidate]) -> dict[str, str]:
        """Why some of ``candidates`` cannot be made; the others are in ``libraries`` then."""
        missing = {symbol: item for symbol, item in candidates.items() if symbol not in self.libraries}
        images = {symbol: image for symbol, item in missing.items() if (image := self._kept(item)) is not None}
        new = {symbol: (item,) for symbol, item in missing.items() if symbol not in images}
        failed: dict[str, str] = {}
        if new:
            compiled, errors = TemplateCompiler().compile_regions(new)
            self.compiled += len(compiled)
            failed = {symbol: error.problem for symbol, error in errors.items()}
            for symbol, done in compiled.items():
                images[symbol] = done.kernel.image
                self._keep(missing[symbol], done.kernel.image)
        linked = {symbol: self._linked(image) for symbol, image in images.items()}
        self.libraries |= {symbol: path for symbol, path in linked.items() if isinstance(path, Path)}
        return failed | {symbol: path for symbol, path in linked.items() if isinstance(path, str)}

    def is_ready(self, candidate: Candidate) -> bool:
        return candidate.call.symbol in self.libraries or self._kept(candidate) is not None

    def _kept(self, candidate: Candidate) -> bytes | None:
        """The object file that has the program; several programs may lie in one."""
        if not self.cache.is_on:
            return None
        alias = self.cache.get(self._key(candidate))
        unit = self.cache.get(alias.record.symbol) if alias is not None else None
        return None if unit is None else unit.code

    def _keep(self, candidate: Candidate, image: bytes) -> None:
        unit = _digest(b"sample unit", image)
        self.cache.put(unit, CachedKernel(KernelRecord(symbol="", choice="", params=()), image))
        alias = KernelRecord(symbol=unit, choice=candidate.call.symbol, params=())
        self.cache.put(self._key(candidate), CachedKernel(alias, b""))

    def _key(self, candidate: Candidate) -> str:
        parts = ("sample program", candidate.source(), candidate.architecture, self._versions)
        return _digest(*(part.encode() for part in parts))

    def _linked(self, image: bytes) -> Path | str:
        """The library of ``image``, or why there is none."""
        path = self.folder / f"{_digest(image)[:16]}.so"
        try:
            if not path.exists():  # under this name there is never half of one: a linker may be killed
                produce_atomically(path, lambda temporary: link_samples([image], temporary), durable=False)
        except CompileError as error:
            return error.problem
        return path


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


_RUNTIME_SOURCE = """// CUDA's runtime by names of ours: those of its static library are hidden in what it is linked to.
#include <stddef.h>
#define FORWARD(result, name, parameters, arguments) \\
  result name parameters; \\
  result tvm_ext_##name parameters { return name arguments; }
FORWARD(int, cudaMalloc, (void** address, size_t size), (address, size))
FORWARD(int, cudaFree, (void* address), (address))
FORWARD(int, cudaMemcpy, (void* to, void const* from, size_t size, int kind), (to, from, size, kind))
FORWARD(int, cudaMemsetAsync, (void* to, int value, size_t size, void* stream), (to, value, size, stream))
FORWARD(int, cudaEventCreate, (void** event), (event))
FORWARD(int, cudaEventRecord, (void* event, void* stream), (event, stream))
FORWARD(int, cudaEventSynchronize, (void* event), (event))
FORWARD(int, cudaEventElapsedTime, (float* milliseconds, void* start, void* end), (milliseconds, start, end))
FORWARD(int, cudaGetLastError, (void), ())
FORWARD(char const*, cudaGetErrorString, (int error), (error))
"""


def link_samples(images: Sequence[bytes], path: Path) -> None:
    """A shared library of ``images`` with CUDA's runtime at ``path``; it needs a driver and nothing else of CUDA.

    Raises CompileError where the linker fails, UnsupportedEnvironmentError where CUDA's runtime is missing.
    """
    runtime = cutlass_toolchain.cuda_runtime_archive(find_nvcc())
    with temporary_folder("samples") as folder:
        objects = []
        for number, image in enumerate(images):
            objects.append(f"unit{number}.o")
            (folder / objects[-1]).write_bytes(image)
        (folder / "runtime.c").write_text(_RUNTIME_SOURCE)
        link = ["-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", str(path)]
        command = [host_compiler.compiler(), *link, *objects, "-x", "c", "runtime.c", "-x", "none", str(runtime)]
        run_limited([*command, "-lpthread", "-ldl", "-lrt"], _LINK_LIMIT_S, folder, remedies=HOST)


# --- this machine's GPU -----------------------------------------------------------------------------------------------
def why_no_gpu(device: DeviceSpec) -> str:
    """Why nothing can be measured for ``device`` on this machine; "" where it can."""
    command = [sys.executable, "-I", str(WORKER), "--device"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=_DEVICE_LIMIT_S, check=False).stdout
        found = json.loads(text)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return f"this machine's GPU does not answer ({error})"
    if "why" in found:
        return str(found["why"])
    if not is_of(device, tuple(found["capability"])):
        return f"this machine's GPU is {found['name']}, of another compute capability than {device.name}"
    return ""


@contextlib.contextmanager
def sample_programs(cache: KernelCache) -> Iterator[SamplePrograms]:
    """Programs that are there as long as this lasts; what was compiled stays in ``cache``."""
    with temporary_folder("samples") as folder:
        yield SamplePrograms(cache, folder)
        cache.trim()


def profile_on_gpu(
    plans: Sequence[RegionPlan],
    device: DeviceSpec,
    cache: KernelCache,
    store: TrialStore,
    limits: ScreeningLimits | None = None,
) -> CutlassProfile:
    """Measure ``plans`` on this machine's GPU; where there is none, a profile that says so."""
    why = why_no_gpu(device)
    if why:
        note = f"nothing was measured: {why}. Templates are ranked by the model, and by what the database has"
        return CutlassProfile(regions=len(plans), note=note)
    with sample_programs(cache) as programs, contextlib.closing(SampleRunner(programs.libraries)) as runner:
        return profile(plans, programs, runner, store, sample_versions(), limits)
