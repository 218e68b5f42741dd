"""Computes at build what is known at build: calls whose operands are constants, by NumPy.

Stock TVM's FoldConstant compiles a kernel for every such call, 40 to 100 ms each, and waits as long as that kernel
takes: masks and shapes of a Swin transformer are two hundred calls, a product of two constant 2000 x 2000 matrices is
half a minute. Here the computations of the operator's tensor expression are evaluated on arrays (`computation_values`),
so that every operator with computations is known without a rule of its own; those without have one in
`indexing_values`.
"""

from __future__ import annotations

from tvm_ext._tvm import CALL_TIR, Call, Constant, Expr, Var, relax
from tvm_ext.errors import IllegalRewrite, LimitPassed

from .call_values import all_known, folded, is_known
from .rewriting import CallRewriter, call_pass


@call_pass("tvm_ext.FoldCalls")
class FoldCalls(CallRewriter):
    """Replace calls of operators and of unscheduled PrimFuncs on constants by their values, where `limits` allow it.

    What cannot be computed here stays a call, whatever the reason: an index outside its axis for example, which
    `CheckValues` reports.
    """

    def rewritten(self, call: Call) -> Expr:
        arguments = [self._resolved(argument) for argument in call.args]
        if all(new is old for new, old in zip(arguments, call.args, strict=True)) and not all_known(arguments):
            return call
        try:
            return folded(call, arguments, self.mod)
        except IllegalRewrite as refusal:
            if isinstance(refusal, LimitPassed):
                self.notes.append(f"{_name_of(call)} of constants is computed by each run: {refusal.problem}")
            return type(call)(call.op, arguments, call.attrs, call.ty_args)

    def visit_tuple_getitem_(self, expr: Expr) -> Expr:
        expr = self.visit_expr_post_order(expr)
        source = self._resolved(expr.tuple_value)
        return source.fields[int(expr.index)] if isinstance(source, relax.Tuple) else expr

    def _resolved(self, argument: Expr) -> Expr:
        """What ``argument`` is bound to, where that is a constant, a shape, or a tuple of constants."""
        if isinstance(argument, relax.Tuple):
            fields = [self._resolved(field) for field in argument.fields]
            same = all(new is old for new, old in zip(fields, argument.fields, strict=True))
            return argument if same else relax.Tuple(fields)
        if not isinstance(argument, Var):
            return argument
        bound = self.builder_.lookup_binding(argument)
        if isinstance(bound, Var):
            return self._resolved(bound)
        return bound if isinstance(bound, relax.Tuple | Constant | relax.ShapeExpr) and is_known(bound) else argument


def _name_of(call: Call) -> str:
    return str(call.args[0].name_hint if call.op == CALL_TIR else call.op.name).removeprefix("relax.")
