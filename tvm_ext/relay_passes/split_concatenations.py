"""Concatenations of very many tensors become concatenations of concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._tvm import PyExprMutator, expr_mutator, ir, module_pass, relax

MOST_AT_ONCE = 32
"""Operands of one concatenation. Its kernel asks of each element in which operand it lies, one condition inside the
other: stock TVM's recursion over 2,000 of them overflows the stack, and over 1,000 takes minutes. Each level here is a
copy more instead of as many conditions for each element."""


@expr_mutator
class _Split(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: Any) -> Any:
        call = self.visit_expr_post_order(call)
        if (
            not isinstance(call.op, ir.Op)
            or call.op.name != "relax.concat"
            or not isinstance(call.args[0], relax.Tuple)
        ):
            return call
        fields = list(call.args[0].fields)
        return call if len(fields) <= MOST_AT_ONCE else self._joined(fields, call.attrs.axis)

    def _joined(self, fields: Sequence[Any], axis: Any) -> Any:
        if len(fields) <= MOST_AT_ONCE:
            return relax.op.concat(list(fields), axis=axis)
        parts = [fields[first : first + MOST_AT_ONCE] for first in range(0, len(fields), MOST_AT_ONCE)]
        joined = [relax.op.concat(part, axis=axis) if len(part) > 1 else part[0] for part in parts]
        return self._joined([self.builder_.emit(part) for part in joined], axis)


@module_pass(opt_level=0, name="tvm_ext.SplitConcatenations")
class SplitConcatenations:
    """Join more than `MOST_AT_ONCE` tensors in several steps."""

    def transform_module(self, mod: Any, _ctx: Any) -> Any:
        mutator = _Split(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function):
                mutator.builder_.update_func(gv, mutator.visit_expr(func))
        return mutator.builder_.get()
