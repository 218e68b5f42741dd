"""Tells each TensorIR function which of its parameters are compile-time constants, so that kernels may repack them."""

from __future__ import annotations

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    PrimFunc,
    copy_module,
    module_pass,
    nodes_in,
)
from tvm_ext.records.choice import CONSTANT_PARAMS


def tir_calls(root: IRModule | Expr) -> list[Call]:
    """Every ``call_tir`` of an expression, or of a module's Relax functions, in program order."""
    return [call for call in nodes_in(root, Call, "pre") if call.op == CALL_TIR]


@module_pass(opt_level=0, name="tvm_ext.AnnotateConstants")
class AnnotateConstants:
    """Set `CONSTANT_PARAMS` on every PrimFunc that Relax calls; a variable at any call is not in it."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        constant: dict[GlobalVar, set[int]] = {}
        for call in tir_calls(mod):
            callee = call.args[0]
            assert isinstance(callee, GlobalVar)
            own = {i for i, arg in enumerate(call.args[1].fields) if isinstance(arg, Constant)}
            constant[callee] = constant[callee] & own if callee in constant else own
        result = copy_module(mod)
        for callee, indices in constant.items():
            if isinstance(mod[callee], PrimFunc) and indices:
                result[callee] = mod[callee].with_attr(CONSTANT_PARAMS, sorted(indices))
        return result
