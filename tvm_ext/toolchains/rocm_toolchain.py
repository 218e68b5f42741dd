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
from pathlib import Path
from typing import Any

from tvm_ext._tvm import (
    ROCM_PIPELINE,
    Call,
    IRModule,
    PassContext,
    PrimFunc,
    Target,
    copy_module,
    module_pass,
    structural_map,
    tirx,
    tvm,
    tvm_ffi,
)
from tvm_ext.analysis.device_code import op_name
from tvm_ext.errors import CompileError
from tvm_ext.ir.device_sync import CALL
from tvm_ext.records.merged import CompiledUse
from tvm_ext.support.files import temporary_folder
from tvm_ext.support.limited_process import run_limited

from .remedies import AMD_LINKER
from .rocm_math import enable_rocm_math

_BITCODE = "tvm_callback_rocm_bitcode_path"
_LINK = "tvm_callback_rocm_link"
_LINKERS = ("ld.lld", *(f"ld.lld-{major}" for major in range(22, 13, -1)), "/opt/rocm/llvm/bin/ld.lld")
_TIME_LIMIT_S = 60.0  # a choice: linking takes a second
_UNDEFINED = re.compile(r"undefined symbol: (\S+)")
_SYNC = Path(__file__).with_name("rocm_sync.ll")
_BARRIER = "tirx.tvm_storage_sync"
_COUNT = re.compile(r"^\s*\.(vgpr_count|vgpr_spill_count|group_segment_fixed_size):\s*(\d+)", re.MULTILINE)
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


@module_pass(opt_level=0, name="tvm_ext.LinkSync")
class LinkSync:
    """Let device functions call those of rocm_sync.ll: `ir.device_sync`, and a barrier that orders memory.

    Stock TVM's barrier is s_barrier alone, before which LLVM waits for no store from gfx90a on.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            result[gv] = func.with_body(structural_map(func.body, (Call, _linked)))
        return result


def _linked(call: Call) -> Call:
    if op_name(call) == CALL:
        return tirx.call_extern("int32", str(call.args[0].value), *call.args[1:-1])
    is_barrier = op_name(call) == _BARRIER and str(call.args[0].value) == "shared"
    return tirx.call_extern("int32", "tvm_ext_block_barrier") if is_barrier else call


def _device_libraries(folder: str | None = None) -> Any:
    """What is linked into each module: our functions, and ROCm's where it is installed."""
    try:
        return [str(_SYNC), *_stock[_BITCODE](folder)]
    except RuntimeError:
        return [str(_SYNC)]


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


def rocm_use(func: PrimFunc) -> CompiledUse | str:
    """What LLVM says of ``func``, a function of one launch, for the current target; else why it does not."""
    target = Target.current()
    enable_rocm()
    try:
        module = IRModule({"main": func.with_attr("global_symbol", "main")})
        library = tvm.tirx.build(module, target=target, pipeline=ROCM_PIPELINE)
    except CompileError as error:
        return f"unknown registers: {error.problem.rstrip('.')}"
    counts = {name: int(count) for name, count in _COUNT.findall(str(library.imports[0].inspect_source("asm")))}
    return CompiledUse(
        registers=counts["vgpr_count"],
        spill_bytes=4 * counts["vgpr_spill_count"],
        shared_bytes=counts["group_segment_fixed_size"],
    )
