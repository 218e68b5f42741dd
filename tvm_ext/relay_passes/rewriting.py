"""How passes leave a module: calls in the place of calls, bindings in the place of a binding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tvm_ext._tvm import (
    Call,
    DataflowBlock,
    Expr,
    IRModule,
    PyExprMutator,
    RelaxFunction,
    Var,
    VarBinding,
    relax,
)


class CallRewriter(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of all Relax functions, operands first: `rewritten` says what takes the place of one."""

    def __init__(self, mod: IRModule) -> None:
        super().__init__(mod)
        self.mod = mod

    def run(self) -> IRModule:
        for gv, func in self.mod.functions_items():
            if isinstance(func, relax.Function):
                self.builder_.update_func(gv, self.visit_expr(func))
        return self.builder_.get()

    def visit_call_(self, call: Call) -> Expr:
        return self.rewritten(self.visit_expr_post_order(call))

    def rewritten(self, call: Call) -> Expr:
        raise NotImplementedError


def with_blocks(func: RelaxFunction, blocks: Sequence[relax.BindingBlock]) -> RelaxFunction:
    """``func`` with other blocks, whose result and attributes are the same."""
    return RelaxFunction(func.params, relax.SeqExpr(blocks, func.body.body), func.ret_ty, func.is_pure, func.attrs)


def with_bindings(func: RelaxFunction, made: Callable[[VarBinding], Collection[VarBinding]]) -> RelaxFunction:
    """``func`` with the bindings ``made`` of each binding in its place."""
    blocks = []
    for block in func.body.blocks:
        bindings = [new for old in block.bindings for new in made(old)]
        blocks.append(DataflowBlock(bindings) if isinstance(block, DataflowBlock) else relax.BindingBlock(bindings))
    return with_blocks(func, blocks)


def with_calls(func: RelaxFunction, calls: Mapping[Var, Expr], gone: Collection[Var]) -> RelaxFunction:
    """``func`` in which the variables of ``calls`` are bound to these, and those of ``gone`` not at all."""

    def made(binding: VarBinding) -> list[VarBinding]:
        if binding.var in gone:
            return []
        return [VarBinding(binding.var, calls[binding.var]) if binding.var in calls else binding]

    return with_bindings(func, made)
