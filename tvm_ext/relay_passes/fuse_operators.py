"""Operator fusion as stock TVM does it, where it can."""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, RelaxFunction, Sequential, copy_module, module_pass, nodes_in, relax
from tvm_ext.records.choice import TABLE
from tvm_ext.support.limits import limits, with_notes

from .node_names import named_like

_ELEMENT_WISE = 0
"""Its pattern kind, in attribute ``op_pattern``, which stock TVM would set again."""


@module_pass(opt_level=0, name="tvm_ext.FuseOperators")
class FuseOperators:
    """Stock FuseOps and FuseTIR, of so many operators at most as `limits` say.

    Except where a shape depends on data (the length of a Range, say).

    A fused function takes such a size as an argument, which the VM's shape lowering then finds not yet computed and
    fails: those models run unfused.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        mod = copy_module(mod)
        if nodes_in(mod, relax.MatchCast):
            return mod
        for gv, function in mod.functions_items():
            if function.attrs and TABLE in function.attrs:
                mod[gv] = function.with_attr("op_pattern", _ELEMENT_WISE)
        grouped, note = _grouped(mod)
        grouped = named_like(mod, grouped)
        fused = Sequential([relax.transform.FuseTIR()])(grouped)
        return with_notes(fused, [note] if note else [])


def _grouped(mod: IRModule) -> tuple[IRModule, str]:
    """``mod`` by FuseOps, and what the limit has changed; FuseOps runs again only where that is anything."""
    most = limits().fused_operators
    grouped = relax.transform.FuseOps()(mod)
    if all(size <= most for size in _sizes(grouped)):
        return grouped, ""
    with _context_with(_DEPTH, most):
        grouped = relax.transform.FuseOps()(mod)
    full = sum(size >= most for size in _sizes(grouped))
    return grouped, f"{full} kernels are of {most} operators, and no more are fused"


_DEPTH = "relax.FuseOps.max_depth"


def _context_with(name: str, value: int) -> PassContext:
    """The PassContext that holds now, with one more setting; instruments would take a second entry for their end."""
    current = PassContext.current()
    return PassContext(
        opt_level=current.opt_level,
        required_pass=list(current.required_pass),
        disabled_pass=list(current.disabled_pass),
        config={**dict(current.config), name: value},
    )


def _sizes(mod: IRModule) -> list[int]:
    return [_size_of(func) for _, func in mod.functions_items() if isinstance(func, relax.Function)]


def _size_of(func: RelaxFunction) -> int:
    """How many operators were put into a fused function; 0 for any other."""
    if not func.attrs or "Primitive" not in func.attrs or not isinstance(func.body, relax.SeqExpr):
        return 0
    return sum(len(block.bindings) for block in func.body.blocks)
