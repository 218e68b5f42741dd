"""The pass that keeps indices right where stock TVM simplifies the indices of a tensor together."""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, copy_module, module_pass

from .expressions.guard_indices import guarded


@module_pass(opt_level=0, name="tvm_ext.GuardIndices")
class GuardIndices:
    """Before stock TVM's pipeline: rewrite the divisions of offset values in indices that it would get wrong."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, PrimFunc):
                result[gv] = guarded(func)
        return result
