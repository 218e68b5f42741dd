"""Calls in the place of several bindings: how passes that join operators leave a function."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tvm_ext._tvm import DataflowBlock, Expr, RelaxFunction, Var, VarBinding, relax


def with_calls(func: RelaxFunction, calls: Mapping[Var, Expr], gone: Collection[Var]) -> RelaxFunction:
    """``func`` in which the variables of ``calls`` are bound to these, and those of ``gone`` not at all."""
    blocks = []
    for block in func.body.blocks:
        bindings = [
            VarBinding(binding.var, calls[binding.var]) if binding.var in calls else binding
            for binding in block.bindings
            if binding.var not in gone
        ]
        blocks.append(DataflowBlock(bindings) if isinstance(block, DataflowBlock) else relax.BindingBlock(bindings))
    return RelaxFunction(func.params, relax.SeqExpr(blocks, func.body.body), func.ret_ty, func.is_pure, func.attrs)
