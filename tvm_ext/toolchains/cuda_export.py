"""Machine code in exported libraries, for a GPU that this machine does not have.

Stock TVM compiles CUDA for the device at hand, and embeds source where there is none: the receiver then needs a CUDA
compiler, and waits for it at every start. `embed_machine_code` compiles the source here, for every architecture asked
for, so that the receiver needs a driver and TVM's runtime alone.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tvm_ext._tvm import Module, Target, cuda_compute_version, pack_imports
from tvm_ext.devices.capabilities import ARCHITECTURE, architecture_number
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions, cuda_settings
from tvm_ext.records.build_profile import DeviceCode
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.support.shared_library import LIBRARY_SYMBOL

from .cuda_toolchain import CompiledCuda, compile_cuda
from .device_modules import as_kind, assembly, replace_source

WHOLE_MODULE_FACTOR = 10.0
"""A module holds all kernels of a model: so many times the limit of one kernel may compiling it take."""

LANGUAGE = "CUDA C++"
EXECUTABLE_KIND = "relax.VMExecutable"


def architecture_of(target: str) -> str | None:
    """``"sm_80"`` from a CUDA target's text (JSON, or ``... arch=sm_80 ...``); None for any other target."""
    try:
        attributes: Any = json.loads(target)
    except json.JSONDecodeError:
        attributes = {}
    if isinstance(attributes, dict) and attributes.get("kind") == "cuda":
        return attributes.get("arch")
    match = ARCHITECTURE.search(target) if "cuda" in target else None
    return match[0] if match else None


def compile_sources(
    sources: Iterable[str],
    architectures: Sequence[str],
    *,
    cache: KernelCache | None = None,
    time_limit_s: float | None = None,
) -> dict[str, CompiledCuda]:
    """Machine code by source, for `embed_machine_code`; raises as `compile_cuda` does.

    ``time_limit_s`` is for each (default: `WHOLE_MODULE_FACTOR` times one kernel's).
    """
    for architecture in architectures:
        architecture_number(architecture)
    limit = WHOLE_MODULE_FACTOR * cuda_settings().time_limit_s if time_limit_s is None else time_limit_s
    return {
        source: compile_cuda(source, architectures, cache=cache, time_limit_s=limit)
        for source in dict.fromkeys(sources)
    }


def compile_for_target(source: str) -> bytes:
    """Machine code for the current target's architecture, without one the first device's; raises as `compile_cuda`."""
    architecture = "sm_" + cuda_compute_version(Target.current()).replace(".", "")  # of "8.0", "9.0.a"
    return compile_sources([source], [architecture], cache=KernelCache.for_build(BuildOptions.current()))[source].image


def export_sources(sources: Sequence[str], architectures: Sequence[str]) -> tuple[dict[str, CompiledCuda], DeviceCode]:
    """`compile_sources` with the cache of builds, and what to say of it: only source where there is no compiler."""
    try:
        made = compile_sources(sources, architectures, cache=KernelCache.for_build(BuildOptions.current()))
    except UnsupportedEnvironmentError as error:
        return {}, DeviceCode(language=LANGUAGE, note=error.problem.rstrip("."))
    uses = [use for item in made.values() for use in item.uses]
    spills = ((use.name, use.spill_store_bytes + use.spill_load_bytes) for use in uses)
    about = DeviceCode(
        language=LANGUAGE,
        architectures=tuple(architectures) if made else (),
        compiler=", ".join(dict.fromkeys(item.compiler for item in made.values())),
        size_bytes=sum(len(item.image) for item in made.values()),
        seconds=sum(item.seconds for item in made.values()),
        spills=tuple((name, size) for name, size in spills if size),
    )
    return made, about


def embed_machine_code(
    data: bytes,
    architectures: Sequence[str],
    *,
    cache: KernelCache | None = None,
    time_limit_s: float | None = None,
    known: Mapping[str, CompiledCuda] = MappingProxyType({}),
) -> bytes:
    """``data``, the modules of a library, with machine code for ``architectures`` in place of CUDA source.

    ``time_limit_s`` is for each source (default: `WHOLE_MODULE_FACTOR` times one kernel's); ``cache`` keeps results;
    ``known`` has what was compiled already. Where this machine has no CUDA compiler the source stays, with a warning.
    Raises CompileError where the compiler refuses it, OptionError for an architecture that no installed compiler knows.
    """
    for architecture in architectures:
        architecture_number(architecture)

    def compile_source(source: str) -> bytes:
        made = (
            known
            if source in known
            else compile_sources([source], architectures, cache=cache, time_limit_s=time_limit_s)
        )
        return made[source].image

    try:
        return replace_source(data, compile_source)
    except UnsupportedEnvironmentError as error:
        text = f"the library carries CUDA source, not machine code: {error.problem} To embed it, {error.remedy}."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return data


def write_imports(
    module: Module, architectures: Sequence[str], folder: Path, executable_kind: str = EXECUTABLE_KIND, **settings: Any
) -> Path:
    """Write what ``module`` imports into ``folder`` as a file that the linker takes, whose path is returned.

    A Relax executable among it becomes a module of ``executable_kind``.

    CUDA source becomes machine code for ``architectures``; where these are none, it stays.
    ``settings`` are those of `embed_machine_code`; the cache is the one of builds. For TVM's ``fpack_imports``.
    """
    content = pack_imports(module)
    if executable_kind != EXECUTABLE_KIND:
        content = as_kind(content, EXECUTABLE_KIND, executable_kind)
    if architectures:
        settings = {"cache": KernelCache.for_build(BuildOptions.current()), **settings}
        content = embed_machine_code(content, architectures, **settings)
    (folder / "modules.bin").write_bytes(content)
    path = folder / "modules.S"
    path.write_text(assembly(LIBRARY_SYMBOL, str(folder / "modules.bin")))
    return path
