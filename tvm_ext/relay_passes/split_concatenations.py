"""Concatenations of very many tensors become concatenations of concatenations."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import (
    OPAQUE,
    Call,
    Expr,
    IRModule,
    PassContext,
    expr_mutator,
    module_pass,
    relax,
    topi,
)
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.support.limits import limits, with_notes

from .rewriting import CallRewriter


@expr_mutator
class _Split(CallRewriter):
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.notes: list[str] = []

    def rewritten(self, call: Call) -> Expr:
        if operator_name(call) != "relax.concat" or not isinstance(call.args[0], relax.Tuple):
            return call
        fields, most = list(call.args[0].fields), limits().joined_tensors
        if len(fields) <= most:
            return call
        self.notes.append(f"a concatenation of {len(fields)} tensors is made in steps of {most}")
        return self._joined(fields, 0 if call.attrs.axis is None else int(call.attrs.axis), most)

    def _joined(self, fields: Sequence[Expr], axis: int, most: int) -> Expr:
        """Parts that have their operands' functions fused, as ever; what joins the parts is a kernel of its own.

        Fused with the parts, it would hold all the conditions again.
        """
        while len(fields) > most:
            parts = [fields[first : first + most] for first in range(0, len(fields), most)]
            joined = [relax.op.concat(part, axis=axis) if len(part) > 1 else part[0] for part in parts]
            fields = [self.builder_.emit(part) for part in joined]
        return self.builder_.call_te(
            topi.concatenate,
            list(fields),
            axis,
            primfunc_name_hint="concatenate",
            primfunc_attrs={"op_pattern": OPAQUE},
        )


@module_pass(opt_level=0, name="tvm_ext.SplitConcatenations")
class SplitConcatenations:
    """Join more tensors than `limits` allow at once in several steps.

    Each step is a copy more instead of a condition more for each element and operand.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        split = _Split(mod)
        return with_notes(split.run(), split.notes)
