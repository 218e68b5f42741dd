"""Composite functions back into the graph: what CUTLASS was given is computed by kernels of this package instead."""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, module_pass
from tvm_ext.relay_passes.composites import inlined


@module_pass(opt_level=0, name="tvm_ext.InlineComposites")
class InlineComposites:
    """The operators of every composite function that `PartitionCutlass` made, in the place of its calls.

    Each region computes what it did in the graph, operator by operator, so that it can be compared with what a template
    makes of it.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return inlined(mod)
