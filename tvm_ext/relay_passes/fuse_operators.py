"""Operator fusion as stock TVM does it, where it can."""

from __future__ import annotations

from typing import Any

from .._tvm import Sequential, module_pass, relax, structural_walk


@module_pass(opt_level=0, name="tvm_ext.FuseOperators")
class FuseOperators:
    """Stock FuseOps and FuseTIR, except where a shape depends on data (the length of a Range, say).

    A fused function takes such a size as an argument, which the VM's shape lowering then finds not yet computed and
    fails: those models run unfused.
    """

    def transform_module(self, mod: Any, _ctx: Any) -> Any:
        bound: list[bool] = []
        for _, function in mod.functions_items():
            if isinstance(function, relax.Function):
                structural_walk(function.body, (relax.MatchCast, lambda _: bound.append(True)))
        if bound:
            return mod
        fuse = Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])
        return fuse(mod)
