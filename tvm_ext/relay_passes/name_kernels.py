"""Names for the kernels of one variant of a model, so that several variants fit into one library."""

from __future__ import annotations

from collections.abc import Mapping

from tvm_ext._tvm import CALL_TIR, Call, Expr, GlobalVar, IRModule

from .merge_operators import retargeted
from .rewriting import CallRewriter, call_pass

VARIANT = "tvm_ext.variant"
"""PrimFunc attribute: the variant of a model that the function belongs to."""


@call_pass("tvm_ext.NameKernels")
class NameKernels(CallRewriter):
    """Append ``variant`` to the names of all functions that are called as kernels; before they are constructed."""

    def prepare(self, variant: str) -> None:
        self.variant = variant

    def rewritten(self, call: Call) -> Expr:
        if call.op != CALL_TIR:
            return call
        old = call.args[0]
        if old not in self.renamed:
            func = self.mod[old].with_attr(VARIANT, self.variant)  # the builder would merge it with the old one
            self.renamed[old] = self.builder_.add_func(func, f"{old.name_hint}_{self.variant}")
        return retargeted(call, self.renamed[old], list(call.args[1].fields))


def merged(variants: Mapping[str, IRModule]) -> IRModule:
    """One lowered module of those of ``variants``, by name, whose ``main`` has the variant's name."""
    if len(variants) == 1 and "main" in variants:
        return variants["main"]
    functions: dict[GlobalVar, Expr] = {}
    for name, mod in variants.items():
        for variable, func in mod.functions_items():
            if variable.name_hint == "main":
                functions[GlobalVar(name)] = func.with_attr("global_symbol", name)
            else:
                functions[variable] = func
    assert len({variable.name_hint for variable in functions}) == len(functions), "NameKernels makes names distinct"
    first = next(iter(variants.values()))
    return IRModule(functions, attrs=first.attrs)
