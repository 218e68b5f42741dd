"""From CUDA source to machine code, on a machine that need not have a GPU.

`compile_cuda` runs nvcc for the architectures asked for and answers a fatbin with ptxas' report of it. Runs are limited
in time, results are kept in the kernel cache. nvcc comes from a CUDA toolkit or from Python packages alone
(``pip install tvm-ext[cuda]``); what it no longer compiles for (CUDA 13: sm_70), NVRTC 12.9 does (`cuda_nvrtc`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tvm_ext import options
from tvm_ext.devices.capabilities import architecture_number, architecture_suffix
from tvm_ext.errors import CompileError, OptionError, TvmExtError, UnsupportedEnvironmentError
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.files import temporary_folder
from tvm_ext.support.kernel_cache import CachedKernel, KernelCache, KernelRecord
from tvm_ext.support.limited_process import run_limited

from . import cuda_nvrtc
from .cuda_fatbin import write_fatbin
from .ptxas_report import KernelUse, parse_report
from .remedies import INSTALL_CUDA, NVCC, NVRTC

SCHEMA = 1  # of what the cache keeps
_VERSION = re.compile(r"release (\d+)\.(\d+), V([\d.]+)")
_QUERY_TIME_LIMIT_S = 20.0  # a choice: nvcc says its version in milliseconds

Output = Literal["fatbin", "object"]
"""What nvcc makes: machine code of the kernels alone, or an object file with the host code that starts them as well."""

_OUTPUT_FLAGS: dict[Output, tuple[str, ...]] = {"fatbin": ("-fatbin",), "object": ("-c", "-Xcompiler", "-fPIC")}

_FLAGS = (
    "-O3", "-std=c++17", "-Xptxas", "-v", "--expt-relaxed-constexpr",
    "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
)  # fmt: skip
"""TVM's code relies on the half-precision operators. Not ``--use_fast_math``: it would flush denormals to zero and
replace division and square roots by approximations, which stock TVM does silently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvcc:
    """A CUDA compiler: where it is, how it was found, "13.0.88", and the architectures it compiles for."""

    path: Path
    origin: str
    version: str
    architectures: tuple[str, ...]

    @property
    def release(self) -> tuple[int, int]:
        """(13, 0): a fatbin needs a driver of this major version at least."""
        major, minor, *_ = (int(part) for part in self.version.split("."))
        return major, minor


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCuda:
    """Machine code: ``image`` is a fatbin or an object file for ``architectures``; ``uses`` has every kernel on each.

    ``command`` is what made it, with temporary files by their last names; ``seconds`` 0.0 where the cache had it.
    """

    image: bytes
    architectures: tuple[str, ...]
    uses: tuple[KernelUse, ...]
    compiler: str
    command: str
    seconds: float
    cached: bool = False


# --- finding the compiler -----------------------------------------------------------------------------------------
def find_nvcc() -> Nvcc:
    """The CUDA compiler of this machine, in the order that `options` documents.

    Raises UnsupportedEnvironmentError where there is none, where it does not run, or where ``TVM_EXT_NVCC`` is "off".
    """
    settings = options.cuda_settings()
    if settings.nvcc == "off":
        raise UnsupportedEnvironmentError("CUDA compilers are switched off (TVM_EXT_NVCC=off).", "unset TVM_EXT_NVCC")
    for path, origin in _candidates(settings):
        if path.is_file() and os.access(path, os.X_OK):
            state = path.stat()
            return _examine(path, origin, state.st_mtime_ns, state.st_size)
        if settings.nvcc:
            raise UnsupportedEnvironmentError(f"TVM_EXT_NVCC names {path}, which is no program.", "correct or unset it")
    raise UnsupportedEnvironmentError("no CUDA compiler (nvcc) was found.", INSTALL_CUDA)


def _candidates(settings: options.CudaSettings) -> Iterator[tuple[Path, str]]:
    if settings.nvcc:
        yield Path(settings.nvcc).expanduser(), "TVM_EXT_NVCC"
        return
    yield from ((folder / "bin" / "nvcc", "CUDA_HOME") for folder in settings.toolkits)
    on_path = shutil.which("nvcc")
    if on_path:
        yield Path(on_path), "PATH"
    yield from ((folder / "bin" / "nvcc", "Python package nvidia-cuda-nvcc") for folder in package_folders())
    yield Path("/usr/local/cuda/bin/nvcc"), "/usr/local/cuda"


def package_folders() -> tuple[Path, ...]:
    """Folders ``nvidia/cu13``, ``nvidia/cu12``, ... that NVIDIA's Python packages install into, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [folder for root in roots for folder in Path(root).glob("cu[0-9]*") if folder.is_dir()]
    return tuple(sorted(found, key=lambda folder: folder.name, reverse=True))


@functools.lru_cache(maxsize=8)
def _examine(path: Path, origin: str, _modified_ns: int, _size: int) -> Nvcc:
    """What the program ``path`` says of itself; kept for as long as the file is the same."""
    version = _VERSION.search(_query(path, "--version"))
    if version is None:
        raise UnsupportedEnvironmentError(f"{path} ({origin}) does not say its version: it is not nvcc.", INSTALL_CUDA)
    listed = _query(path, "--list-gpu-code").split()
    architectures = tuple(sorted({item for item in listed if item.startswith("sm_")}, key=architecture_number))
    return Nvcc(path=path, origin=origin, version=version[3], architectures=architectures)


def toolkit_folder(nvcc: Nvcc) -> Path:
    """The folder of the toolkit that ``nvcc``, which may be a script that calls another one, belongs to."""
    command = [str(nvcc.path), "--dryrun", "-E", "-x", "cu", os.devnull]
    said = run_limited(command, _QUERY_TIME_LIMIT_S, remedies=NVCC)
    named = re.search(r"^#\$ _HERE_=(.+)$", said, re.MULTILINE)
    return (Path(named[1]) if named else nvcc.path.resolve().parent).parent


def _query(path: Path, argument: str) -> str:
    try:
        return run_limited([str(path), argument], _QUERY_TIME_LIMIT_S, remedies=NVCC)
    except CompileError as error:
        problem = f"the CUDA compiler {path} does not work: {error.problem}"
        raise UnsupportedEnvironmentError(problem, INSTALL_CUDA) from error


_OLDER = "; `pip install tvm-ext[cuda12]` brings NVRTC 12.9, which compiles for it"
_TOO_OLD = "; no compiler after CUDA 11.8 does: name its nvcc in TVM_EXT_NVCC, or export the source (TVM_EXT_NVCC=off)"


def check_architectures(architectures: Sequence[str], nvcc: Nvcc) -> None:
    """Raise OptionError, naming the nearest, unless ``nvcc`` compiles for all ``architectures``."""
    if not architectures:
        raise OptionError("no CUDA architecture is asked for.", 'name at least one, e.g. ("sm_80",)')
    known = {architecture_number(architecture) for architecture in nvcc.architectures}
    for architecture in architectures:
        number = architecture_number(architecture)
        if known and number not in known:
            nearest = min(known, key=lambda other: (abs(other - number), other))
            older = _OLDER if number >= cuda_nvrtc.OLDEST else _TOO_OLD
            raise OptionError(
                f"nvcc {nvcc.version} ({nvcc.path}) does not compile for {architecture}, only "
                f"{', '.join(nvcc.architectures)}.",
                f"the nearest is sm_{nearest}{older if number < min(known) else ''}",
            )


# --- compiling ----------------------------------------------------------------------------------------------------
def compile_cuda(
    source: str,
    architectures: Sequence[str],
    *,
    nvcc: Nvcc | None = None,
    cache: KernelCache | None = None,
    time_limit_s: float | None = None,
    extra_flags: Sequence[str] = (),
    with_ptx: bool = False,
    output: Output = "fatbin",
) -> CompiledCuda:
    """Machine code of CUDA C++ ``source`` for every one of ``architectures`` (``"sm_80"``, ``"sm_90a"``).

    ``with_ptx`` adds PTX of the newest architecture, for devices that are newer still. ``cache`` keeps results. Without
    ``nvcc`` the machine's is taken; architectures older than it knows are compiled by NVRTC 12.9 where that is
    installed. The compiler is stopped after ``time_limit_s`` (default: `options.cuda_settings`). An "object" is one
    for a shared library, of kernels and host code; only nvcc makes those.

    Raises CompileError where the compiler refuses the source or runs too long: with the command and its first error
    lines; UnsupportedEnvironmentError, OptionError where there is no compiler; where it does not compile for one of
    ``architectures``.
    """
    limit = options.cuda_settings().time_limit_s if time_limit_s is None else time_limit_s
    old = _for_nvrtc(architectures, nvcc) if output == "fatbin" else None
    if old is not None:
        return _compile_old(source, architectures, old, cache, limit)
    nvcc = nvcc or find_nvcc()
    check_architectures(architectures, nvcc)
    flags = [*_OUTPUT_FLAGS[output], *_FLAGS, *extra_flags, *gencode(architectures, with_ptx=with_ptx)]
    key = _key(source, " ".join(flags), f"nvcc {nvcc.version}")
    found = _cached(cache, key)
    if found is not None:
        return found
    return _keep(cache, key, _run_nvcc(source, tuple(architectures), nvcc, flags, limit))


def gencode(architectures: Sequence[str], *, with_ptx: bool = False) -> list[str]:
    """nvcc's arguments for ``architectures``: sm_90a is ``-gencode arch=compute_90a,code=sm_90a``."""
    suffixes = [architecture_suffix(architecture) for architecture in architectures]
    codes = {suffix: f"sm_{suffix}" for suffix in suffixes}
    if with_ptx:
        newest = architecture_suffix(max(architectures, key=architecture_number))
        codes[newest] = f"[sm_{newest},compute_{newest}]"
    return [item for suffix, code in codes.items() for item in ("-gencode", f"arch=compute_{suffix},code={code}")]


def _run_nvcc(
    source: str, architectures: tuple[str, ...], nvcc: Nvcc, flags: Sequence[str], limit: float
) -> CompiledCuda:
    start = time.perf_counter()
    with temporary_folder("nvcc") as folder:
        (folder / "kernels.cu").write_text(source)
        image_name = "kernels.o" if "-c" in flags else "kernels.fatbin"
        command = [str(nvcc.path), *flags, "-o", image_name, "kernels.cu"]
        messages = run_limited(command, limit, folder, remedies=NVCC)
        image = _result(folder / image_name, command)
    return CompiledCuda(
        image=image,
        architectures=architectures,
        uses=parse_report(messages),
        compiler=f"nvcc {nvcc.version}",
        command=shlex.join(command),
        seconds=time.perf_counter() - start,
    )


def _result(path: Path, command: Sequence[str]) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        problem = f"`{shlex.join(command)}` succeeded but left no {path.name}: {error.strerror or error}."
        raise CompileError(problem, "check the compiler, and that the disk is not full") from error


# --- NVRTC for what nvcc has dropped ------------------------------------------------------------------------------
def _for_nvrtc(architectures: Sequence[str], nvcc: Nvcc | None) -> cuda_nvrtc.Nvrtc | None:
    """NVRTC 12.9, where one of ``architectures`` is older than nvcc knows (or there is no nvcc) and it is installed."""
    if nvcc is not None:
        known = nvcc.architectures
    else:
        try:
            known = find_nvcc().architectures
        except UnsupportedEnvironmentError:
            known = ()
    numbers = [architecture_number(architecture) for architecture in architectures]
    oldest = min((architecture_number(item) for item in known), default=None)
    if not numbers or (oldest is not None and min(numbers) >= oldest) or min(numbers) < cuda_nvrtc.OLDEST:
        return None
    return cuda_nvrtc.find_nvrtc()


def _compile_old(
    source: str, architectures: Sequence[str], nvrtc: cuda_nvrtc.Nvrtc, cache: KernelCache | None, limit: float
) -> CompiledCuda:
    key = _key(source, " ".join(architectures), f"nvrtc {nvrtc.version}")
    found = _cached(cache, key)
    if found is not None:
        return found
    start = time.perf_counter()
    cubins: list[tuple[int, bytes]] = []
    uses: list[KernelUse] = []
    command = ""
    for architecture in architectures:
        number = architecture_number(architecture)
        with temporary_folder("nvrtc") as folder:
            command_line = cuda_nvrtc.prepare(source, architecture, nvrtc, folder)
            messages = run_limited(command_line, limit, folder, remedies=NVRTC)
            cubins.append((number, _result(folder / cuda_nvrtc.CUBIN, command_line)))
        uses += parse_report(messages)
        command = shlex.join(command_line)
    done = CompiledCuda(
        image=write_fatbin(cubins),
        architectures=tuple(architectures),
        uses=tuple(uses),
        compiler=f"nvrtc {nvrtc.version}",
        command=command,
        seconds=time.perf_counter() - start,
    )
    return _keep(cache, key, done)


# --- keeping results ----------------------------------------------------------------------------------------------
def _key(source: str, flags: str, compiler: str) -> str:
    digest = hashlib.sha256()
    for part in (f"cuda {SCHEMA}", compiler, flags, source):
        digest.update(b"%d:" % len(part.encode()) + part.encode())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class _About:
    """What the cache keeps of a `CompiledCuda` beside its image."""

    architectures: tuple[str, ...]
    uses: tuple[KernelUse, ...]
    compiler: str
    command: str


def _keep(cache: KernelCache | None, key: str, done: CompiledCuda) -> CompiledCuda:
    if cache is not None:
        about = _About(architectures=done.architectures, uses=done.uses, compiler=done.compiler, command=done.command)
        cache.put(key, CachedKernel(KernelRecord(symbol="fatbin", choice=to_json(about), params=()), done.image))
    return done


def _cached(cache: KernelCache | None, key: str) -> CompiledCuda | None:
    entry = cache.get(key) if cache is not None else None
    if entry is None:
        return None
    try:
        about = from_json(_About, entry.record.choice)
    except ValueError as error:
        assert cache is not None
        cache.reject(key, str(error))
        return None
    return CompiledCuda(
        image=entry.code,
        architectures=about.architectures,
        uses=about.uses,
        compiler=about.compiler,
        command=about.command,
        seconds=0.0,
        cached=True,
    )


def describe() -> tuple[str, str, str]:
    """What `tvm-ext doctor` says of CUDA compilers: "ok" or "note", a sentence, a remedy."""
    try:
        nvcc = find_nvcc()
    except TvmExtError as error:
        return "note", error.problem, error.remedy
    span = f"{nvcc.architectures[0]} to {nvcc.architectures[-1]}" if nvcc.architectures else "unknown architectures"
    nvrtc = cuda_nvrtc.find_nvrtc()
    older = f"; NVRTC {nvrtc.version} for older ones" if nvrtc else ""
    return "ok", f"nvcc {nvcc.version} from {nvcc.origin} ({nvcc.path}): {span}{older}", ""
