"""Concatenations of very many tensors become concatenations of concatenations."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Call, Expr, IRModule, PassContext, PyExprMutator, expr_mutator, ir, module_pass, relax, topi
from tvm_ext.support.limits import limits, with_notes

_OPAQUE = 8  # TVM's OpPatternKind: not to be fused with anything


@expr_mutator
class _Split(PyExprMutator):  # type: ignore[misc]
    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.notes: list[str] = []

    def visit_call_(self, call: Call) -> Expr:
        call = self.visit_expr_post_order(call)
        if (
            not isinstance(call.op, ir.Op)
            or call.op.name != "relax.concat"
            or not isinstance(call.args[0], relax.Tuple)
        ):
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
            primfunc_attrs={"op_pattern": _OPAQUE},
        )


@module_pass(opt_level=0, name="tvm_ext.SplitConcatenations")
class SplitConcatenations:
    """Join more tensors than `limits` allow at once in several steps.

    Each step is a copy more instead of a condition more for each element and operand.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        mutator = _Split(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function):
                mutator.builder_.update_func(gv, mutator.visit_expr(func))
        return with_notes(mutator.builder_.get(), mutator.notes)
