"""Concatenations of very many tensors become concatenations of concatenations."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import OPAQUE, Call, Expr, relax, topi
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.support.limits import limits

from .rewriting import CallRewriter, call_pass


@call_pass("tvm_ext.SplitConcatenations")
class SplitConcatenations(CallRewriter):
    """Join more tensors than `limits` allow at once in several steps.

    Each step is a copy more instead of a condition more for each element and operand.
    """

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
