"""The pass that keeps indices right where stock TVM simplifies the indices of a tensor together."""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, prim_func_pass

from .expressions.guard_indices import guarded


@prim_func_pass(opt_level=0, name="tvm_ext.GuardIndices")
class GuardIndices:
    """Before stock TVM's pipeline: rewrite the divisions of offset values in indices that it would get wrong."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        return guarded(func)
