"""Has kernels for CPUs compute in the processor's mode in which subnormal numbers are 0 (FTZ and DAZ).

Each kernel sets the mode itself and restores its caller's, so that a library flushes wherever it runs: in Python, in
ONNX Runtime, in a program in C++. What that costs was not seen beside the time of a kernel (EPYC Zen 4).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm_ext._tvm import (
    Expr,
    For,
    ForKind,
    GlobalVar,
    IRModule,
    PassContext,
    PrimFunc,
    Stmt,
    Target,
    Var,
    copy_module,
    module_pass,
    prim_func_pass,
    structural_mutate,
    tirx,
)
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import OptionError
from tvm_ext.ir.llvm_functions import failed, llvm_call, with_texts
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import FLUSHES_DENORMALS

_INNER = "_flushing"
"""What the name of the function that computes ends in."""

_X86_BITS = 0x8040
"""Of MXCSR: FTZ, subnormal results become 0, and DAZ, so do operands."""
_ARM_BITS = 1 << 24
"""Of FPCR: FZ does both."""


@prim_func_pass(opt_level=0, name="tvm_ext.MarkFlushing")
class MarkFlushing:
    """Before construction, whose cache keys hold it: ask every TensorIR function for that mode."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        return func.with_attr(FLUSHES_DENORMALS, True)


def flushing_passes(device: DeviceSpec, options: BuildOptions) -> list[Any]:
    """What ``flush_denormals`` adds before construction; raises OptionError for a device that is no CPU."""
    if options.flush_denormals and device.kind != "cpu":
        raise OptionError(f"option 'flush_denormals' is for CPUs, and {device.name} is none.", "leave it out")
    return [MarkFlushing()] if options.flush_denormals else []


@module_pass(opt_level=0, name="tvm_ext.FlushDenormals")
class FlushDenormals:
    """Behind stock TVM's pipeline: functions with `FLUSHES_DENORMALS` compute in a second one, called in the mode.

    A kernel's errors return from its middle, so that the first function restores the mode behind any way out. A worker
    sets it for its part of a parallel loop.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            if not (isinstance(func, PrimFunc) and func.attrs and FLUSHES_DENORMALS in func.attrs):
                continue
            symbol = f"{func.attrs['global_symbol']}{_INNER}"
            body = structural_mutate(func.body, [(For, partial(_parallel, func.attrs["target"]))])
            inner = func.with_body(with_texts(body)).with_attr("global_symbol", symbol)
            result[GlobalVar(symbol)] = inner.without_attr("tirx.is_entry_func")
            result[gv] = _calling(func, symbol)
        return result


def _mode(target: Target, kept: int, bits: Expr) -> Expr:
    """Sets the thread's mode to (the mode & ``kept``) | ``bits``; its value is the mode before."""
    kind = "arm" if _is_arm(target) else "x86"
    return llvm_call("int32", f"float_mode_{kind}", 1, tirx.const(kept, "int32"), bits)


def _is_arm(target: Target) -> bool:
    return str(target.attrs.get("mtriple", "")).startswith(("aarch64", "arm64"))


def _parallel(target: Target, loop: For, mutator: Any) -> Stmt:
    """A parallel loop each of whose threads sets the mode once; loops inside stay."""
    if loop.kind != ForKind.PARALLEL:
        return mutator.default_mutate(loop)
    body = tirx.stmt_seq(*_in_mode(target, loop))
    return tirx.AttrStmt(tirx.IntImm("int32", 0), "pragma_parallel_launch_point", tirx.IntImm("int32", 1), body)


def _in_mode(target: Target, *statements: Stmt) -> list[Stmt]:
    before = Var("mode", "int32")
    flushing = tirx.const(_ARM_BITS if _is_arm(target) else _X86_BITS, "int32")
    restored = tirx.Evaluate(_mode(target, 0, before))
    return [tirx.Bind(before, _mode(target, -1, flushing)), *statements, restored]


def _calling(func: PrimFunc, symbol: str) -> PrimFunc:
    """A function with the signature of ``func`` that calls ``symbol``."""
    params, code = [Var(param.name, param.ty) for param in func.params], Var("code", "int32")
    call = tirx.Bind(code, tirx.call_extern("int32", symbol, *params))
    ended = tirx.IfThenElse(code != 0, tirx.Evaluate(failed(params[1])), None)
    body = tirx.stmt_seq(*_in_mode(func.attrs["target"], call), ended, tirx.Return(tirx.const(0, "int32")))
    return PrimFunc(params, with_texts(body), func.ret_type).with_attrs(dict(func.attrs))
