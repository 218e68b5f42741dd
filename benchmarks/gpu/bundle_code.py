"""What all code of a bundle is made with, and libraries with machine code in them for a GPU that is elsewhere."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_ext._tvm import pack_imports
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.support.shared_library import LIBRARY_SYMBOL
from tvm_ext.toolchains.cuda_toolchain import CompiledCuda, compile_cuda
from tvm_ext.toolchains.device_modules import assembly, replace_source

OURS, DLIGHT = "ours", "dlight"
PIPELINING_MODES: Mapping[str, Mapping[str, Any]] = {
    "ours_unpipelined": {"enable_pipelining": False},
    "ours_double": {"enable_pipelining": True, "pipelining": "double"},
    "ours_multistage": {"enable_pipelining": True, "pipelining": "multistage"},
    "ours_full": {"enable_pipelining": True, "pipelining": "full"},
}
"""The same tiles with each part of pipelining (ALCOP §5.1); "ours" is what a build makes, which may be any of them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all kernels of a bundle are made with."""

    device: DeviceSpec
    target: Any
    architectures: tuple[str, ...]
    candidates: int
    folder: Path
    cache: KernelCache
    ablation: bool = False
    pipelining: bool = False
    templates: int = 0
    profile: bool = False
    microbench: bool = False


def export(executable: Any, path: Path, architectures: Sequence[str], cache: KernelCache) -> list[CompiledCuda]:
    """Write ``executable`` as a shared library with machine code in it; answers what the compiler made."""
    compiled: list[CompiledCuda] = []

    def compile_source(source: str) -> bytes:
        compiled.append(compile_cuda(source, architectures, cache=cache))
        return compiled[-1].image

    def pack(module: Any, _is_system: bool, _prefix: str, workspace: str) -> str:
        (Path(workspace) / "modules.bin").write_bytes(replace_source(pack_imports(module), compile_source))
        result = Path(workspace) / "modules.S"
        result.write_text(assembly(LIBRARY_SYMBOL, str(Path(workspace) / "modules.bin")))
        return str(result)

    with tempfile.TemporaryDirectory(prefix="tvm_ext-bundle-") as workspace:
        executable.export_library(str(path), workspace_dir=workspace, fpack_imports=pack, options=["-s"])
    return compiled


def first_line(error: Exception) -> str:
    """What the manifest has of an error."""
    text = getattr(error, "problem", str(error)).strip()
    return (text.splitlines() or [type(error).__name__])[-1][:500]
