"""bfloat16 of CPU kernels around stock TVM's pipeline: conversions before it, functions in LLVM IR behind it."""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, prim_func_pass
from tvm_ext.ir.bfloat16 import in_bits, link_functions


@prim_func_pass(opt_level=0, name="tvm_ext.ConvertBfloat16")
class ConvertBfloat16:
    """Before stock TVM's pipeline: buffers of bfloat16 as uint16, and conversions, see `ir/bfloat16.py`."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        return in_bits(func)


@prim_func_pass(opt_level=0, name="tvm_ext.LinkFunctions")
class LinkFunctions:
    """Behind it: put the functions in LLVM IR that a function for a CPU calls into its module."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        target = func.attrs.get("target") if func.attrs else None
        is_for_cpu = target is not None and str(target.kind.name) == "llvm"
        return link_functions(func, target) if is_for_cpu else func
