"""Code objects for AMD GPUs on a machine without ROCm.

The LLVM in TVM's wheel has the AMDGPU back end; stock TVM stops for want of two things that ROCm brings. Its library of
mathematical functions is needed by kernels that call one: without it these are refused by the linker, which names the
function. Its linker is LLVM's ld.lld; any recent one will do: from the PATH, or from the Python package
``ziglang`` (``pip install tvm-ext[rocm]``). The result is checked as far as the linker goes; it was never run.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from typing import Any

from tvm_ext._tvm import tvm_ffi
from tvm_ext.errors import CompileError
from tvm_ext.support.files import temporary_folder
from tvm_ext.support.limited_process import run_limited

from .remedies import AMD_LINKER
from .rocm_math import enable_rocm_math

_BITCODE = "tvm_callback_rocm_bitcode_path"
_LINK = "tvm_callback_rocm_link"
_LINKERS = ("ld.lld", *(f"ld.lld-{major}" for major in range(22, 13, -1)), "/opt/rocm/llvm/bin/ld.lld")
_TIME_LIMIT_S = 60.0  # a choice: linking takes a second
_UNDEFINED = re.compile(r"undefined symbol: (\S+)")
_stock: dict[str, Any] = {}


def enable_rocm() -> None:
    """Let TVM compile for target "rocm" here. Where ROCm is installed its own library is used, as stock TVM does."""
    if _stock:
        return
    _stock[_BITCODE] = tvm_ffi.get_global_func(_BITCODE)
    _stock[_LINK] = tvm_ffi.get_global_func(_LINK)
    replacements: dict[str, Callable[..., Any]] = {_BITCODE: _device_libraries, _LINK: link}
    for name, function in replacements.items():
        tvm_ffi.register_global_func(name, function, override=True)
    enable_rocm_math()


def _device_libraries(folder: str | None = None) -> Any:
    """ROCm's bitcode files; none where ROCm is not installed."""
    try:
        return _stock[_BITCODE](folder)
    except RuntimeError:
        return []


def find_linker() -> list[str]:
    """The command that starts ld.lld; raises CompileError where there is none."""
    for name in _LINKERS:
        found = shutil.which(name)
        if found:
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "ld.lld"]
    raise CompileError(
        "code for AMD GPUs needs the linker ld.lld, which was not found.",
        "install it with `pip install tvm-ext[rocm]`, from your system's package lld, or with ROCm",
    )


def link(relocatable: Any) -> bytearray:
    """The code object of the object file ``relocatable`` (bytes); raises CompileError where the linker refuses it."""
    command = [*find_linker(), "--no-undefined", "-shared", "-o", "kernels.hsaco", "kernels.o"]
    with temporary_folder("rocm") as folder:
        (folder / "kernels.o").write_bytes(bytes(relocatable))
        try:
            run_limited(command, _TIME_LIMIT_S, folder, remedies=AMD_LINKER)
        except CompileError as error:
            raise _explained(error) from error
        return bytearray((folder / "kernels.hsaco").read_bytes())


def _explained(error: CompileError) -> CompileError:
    missing = sorted(set(_UNDEFINED.findall(error.problem)))
    if not missing:
        return error
    return CompileError(
        f"a kernel for AMD GPUs calls {', '.join(missing)} of ROCm's device library, which is not installed.",
        "install ROCm and set ROCM_PATH, or leave this operator to another device",
    )
