"""From the sources of CUTLASS kernels (`byoc_cutlass.emit`) to one object file that a model links to.

Sources are compiled by nvcc as our own kernels are, several at a time; what the cache of kernels has is not compiled.
Most of the time goes into CUTLASS's headers, so sources are compiled together, as many to a translation unit as leaves
one for each core; where the compiler refuses such a unit, each of them alone. A template
that it refuses alone, or takes too long for, gives way to the region's next candidate.

`link_objects` joins the kernels, their host functions and CUDA's runtime into one object file of which nothing but the
host functions is visible: whoever links it needs no CUDA.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tvm_ffi

from tvm_ext import options
from tvm_ext.byoc_cutlass._cutlass import include_folders
from tvm_ext.byoc_cutlass.host import HostFunction, emit_host
from tvm_ext.byoc_cutlass.selection import Candidate
from tvm_ext.errors import CompileError, UnsupportedEnvironmentError
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.files import temporary_folder, write_objects
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.support.limited_process import run_limited, worker_threads

from . import host_compiler
from .cuda_toolchain import CompiledCuda, Nvcc, Output, compile_cuda, find_nvcc, toolkit_folder
from .remedies import HOST

TIME_FACTOR = 5.0
"""A template takes nvcc 9 to 34 s here where one of our kernels takes one or two: so many times their limit it has."""

MOST_COMPILERS = 8
"""nvcc takes up to 2 GB for a collective."""

MOST_TOGETHER = 8
"""Sources of one translation unit: so many are compiled again where it fails, and the compiler's memory holds them."""

APART = "#include <cutlass/conv/kernel/conv_universal.hpp>"
"""What no matrix product is compiled beside: this header says what a convolution's universal GEMM is, and so, of any
problem shape, does the matrix products' own (CUTLASS 4.2: "more than one partial specialization matches")."""

_LINK_TIME_LIMIT_S = 60.0  # a choice: linking takes a second
_RUNTIME = "libcudart_static.a"


def compile_gemm(
    source: str,
    architecture: str,
    *,
    cache: KernelCache | None = None,
    time_limit_s: float | None = None,
    output: Output = "object",
) -> CompiledCuda:
    """An object file of ``source`` for ``architecture``, "sm_80" or "sm_90a": kernels and entry points.

    As a "fatbin", which takes nvcc less time, the kernels alone.

    ``cache`` keeps it under the digest of source, options and compiler; the source names the headers' version. Raises
    as `compile_cuda`, and UnsupportedEnvironmentError where the package is absent or of another version.
    """
    flags = [item for path in include_folders() for item in ("-I", str(path))]
    limit = TIME_FACTOR * options.cuda_settings().time_limit_s if time_limit_s is None else time_limit_s
    return compile_cuda(
        source, (architecture,), cache=cache, time_limit_s=limit, extra_flags=("-w", "-DNDEBUG", *flags), output=output
    )


Source = tuple[str, str]
"""Text of a kernel, and the architecture that it is compiled for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledRegion:
    """The candidate that compiled, its kernel, and what the compiler said of those before it."""

    candidate: Candidate
    kernel: CompiledCuda
    refused: tuple[str, ...] = ()


@dataclass(slots=True)
class TemplateCompiler:
    """Compiles templates, each once; ``cache`` keeps them for other builds."""

    cache: KernelCache | None = None
    threads: int | None = None
    done: dict[Source, CompiledCuda | CompileError] = field(default_factory=dict)

    def compile_regions(
        self, regions: Mapping[str, Sequence[Candidate]]
    ) -> tuple[dict[str, CompiledRegion], dict[str, CompileError]]:
        """By region, the first of its candidates that compiles; and of regions without one, why the last did not.

        Raises UnsupportedEnvironmentError, OptionError where there is no compiler for the architecture.
        """
        compiled: dict[str, CompiledRegion] = {}
        failed: dict[str, CompileError] = {}
        refused: dict[str, list[str]] = {name: [] for name in regions}
        pending = dict.fromkeys(regions, 0)
        while pending:
            current = {name: regions[name][place] for name, place in pending.items()}
            self._compile_sources({name: (item.source(), item.architecture) for name, item in current.items()})
            for name, candidate in current.items():
                result = self.done[candidate.source(), candidate.architecture]
                if isinstance(result, CompiledCuda):
                    compiled[name] = CompiledRegion(candidate=candidate, kernel=result, refused=tuple(refused[name]))
                elif pending[name] + 1 < len(regions[name]):
                    refused[name].append(f"{candidate.name}: {result.problem}")
                    pending[name] += 1
                    continue
                else:
                    failed[name] = result
                del pending[name]
        return compiled, failed

    def _compile_sources(self, sources: Mapping[str, Source]) -> None:
        """Compile what is not done yet, together where that saves time; what fails together, alone."""
        new = [source for source in dict.fromkeys(sources.values()) if source not in self.done]
        units = units_of(new, self._workers())
        self._compile_units(units)
        failed = [unit for unit in units if isinstance(self.done[unit[0]], CompileError) and len(unit) > 1]
        self._compile_units([(item,) for unit in failed for item in unit])

    def _compile_units(self, units: Sequence[tuple[Source, ...]]) -> None:
        workers = min(len(units), self._workers())
        if workers <= 1:
            results = [self._attempt(unit) for unit in units]
        else:
            with worker_threads(workers, "tvm_ext-cutlass") as pool:
                results = list(pool.map(self._attempt, units))
        for unit, result in zip(units, results, strict=True):
            self.done |= dict.fromkeys(unit, result)

    def _workers(self) -> int:
        return self.threads or min(options.usable_core_count(), MOST_COMPILERS)

    def _attempt(self, unit: tuple[Source, ...]) -> CompiledCuda | CompileError:
        """The object file of all sources of ``unit``, whose time is divided among them."""
        text, limit = "".join(source for source, _ in unit), TIME_FACTOR * options.cuda_settings().time_limit_s
        try:
            done = compile_gemm(text, unit[0][1], cache=self.cache, time_limit_s=limit * len(unit))
        except CompileError as error:
            return error
        return replace(done, seconds=done.seconds / len(unit))


def units_of(sources: Sequence[Source], workers: int, most: int = MOST_TOGETHER) -> list[tuple[Source, ...]]:
    """``sources`` in translation units: as many as ``workers`` but of at most ``most``, like headers side by side.

    A unit that has two kinds of headers takes less time than two units of one kind each, for most headers are common
    to all: of ResNet-50 on an A100, three convolutions and a product take 44 s of processor time together, 41 and 28 s
    apart. Convolutions of collectives have units of their own, though (`APART`).
    """
    kinds: dict[tuple[str, bool], list[Source]] = {}
    for source in sorted(sources, key=_headers):
        kinds.setdefault((source[1], APART in source[0]), []).append(source)
    size = min(most, ceil_div(len(sources), workers)) if sources else 1
    return [tuple(alike[start : start + size]) for alike in kinds.values() for start in range(0, len(alike), size)]


def _headers(source: Source) -> list[str]:
    return [line for line in source[0].splitlines() if line.startswith("#include")]


# --- linking ---------------------------------------------------------------------------------------------------------
def link_objects(functions: Sequence[HostFunction], kernels: Sequence[bytes], architecture: str) -> bytes:
    """One object file of ``functions`` and the ``kernels`` that they start, with CUDA's runtime inside.

    Raises CompileError where the host's compiler or linker fails, UnsupportedEnvironmentError where one is missing.
    """
    runtime = cuda_runtime_archive(find_nvcc())
    with temporary_folder("cutlass") as folder:
        host = _compile_host(emit_host(functions, architecture), folder)
        objects = [*write_objects(list(dict.fromkeys(kernels)), folder), str(host), str(runtime)]
        joined, result = folder / "joined.o", folder / "cutlass.o"
        # Groups of functions that are allowed to be there twice are dissolved, for their names do not stay visible.
        # A template that two units hold is the same in both.
        link = ["-r", "-nostdlib", "-Wl,--force-group-allocation,-z,muldefs", "-o", str(joined)]
        run_limited([host_compiler.compiler(), *link, *objects], _LINK_TIME_LIMIT_S, folder, remedies=HOST)
        hide = ["--wildcard", "--keep-global-symbol=__tvm_ffi_*", str(joined), str(result)]
        run_limited([_tool("objcopy"), *hide], _LINK_TIME_LIMIT_S, folder, remedies=HOST)
        return result.read_bytes()


def _compile_host(source: str, folder: Path) -> Path:
    path, result = folder / "host.cc", folder / "host.o"
    path.write_text(source)
    includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    command = [host_compiler.compiler(), "-c", "-fPIC", "-O2", "-std=c++17", *includes, "-o", str(result), str(path)]
    run_limited(command, _LINK_TIME_LIMIT_S, folder, remedies=HOST)
    return result


def cuda_runtime_archive(nvcc: Nvcc) -> Path:
    """CUDA's runtime as a static library of the toolkit that ``nvcc`` belongs to.

    Raises UnsupportedEnvironmentError where the toolkit is without it.
    """
    root = toolkit_folder(nvcc)
    places = [*(root / name for name in ("lib64", "lib")), *sorted(root.glob("targets/*/lib"))]
    for place in places:
        if (place / _RUNTIME).is_file():
            return place / _RUNTIME
    searched = ", ".join(map(str, places))
    raise UnsupportedEnvironmentError(
        f"{_RUNTIME} is in none of {searched}, and kernels of CUTLASS are linked to it.",
        "install it: `pip install nvidia-cuda-runtime==13.0.*` beside nvcc's packages, or a whole CUDA toolkit",
    )


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise UnsupportedEnvironmentError(f"{name} is not on the PATH.", "install your system's package binutils")
    return found
