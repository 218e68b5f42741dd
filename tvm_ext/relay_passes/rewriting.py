"""How passes leave a module: calls in the place of calls, bindings in the place of a binding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tvm_ext._tvm import (
    BlockBuilder,
    Call,
    DataflowBlock,
    Expr,
    GlobalVar,
    IRModule,
    Pass,
    PassContext,
    PyExprMutator,
    RelaxFunction,
    Target,
    Var,
    VarBinding,
    expr_mutator,
    functions_of,
    ir,
    module_pass,
    relax,
)
from tvm_ext.support.limits import with_notes


class CallRewriter(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of all Relax functions, operands first: `rewritten` says what takes the place of one.

    It is made of the module and what `prepare` takes; passes (`call_pass`) get the module when they run.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(arguments[0])
        self.mod: IRModule = arguments[0]
        self.notes: list[str] = []
        self.renamed: dict[GlobalVar, GlobalVar] = {}  # old functions, which go, to those in their places
        self.prepare(*arguments[1:], **options)

    def prepare(self, *arguments: Any, **options: Any) -> None:
        """Keep what is needed of the arguments; nothing here."""

    def run(self) -> IRModule:
        for gv, func in functions_of(self.mod, RelaxFunction).items():
            self.builder_.update_func(gv, self.visit_expr(func))
        result = self.builder_.get()
        for old in self.renamed:
            del result[old]
        return with_notes(result, self.notes)

    def visit_call_(self, call: Call) -> Expr:
        return self.rewritten(self.visit_expr_post_order(call))

    def rewritten(self, call: Call) -> Expr:
        raise NotImplementedError

    def bound(self, value: Expr) -> Expr:
        """What the variable ``value`` is bound to; what is none, or a parameter, itself."""
        bound = self.lookup_binding(value) if isinstance(value, Var) else None
        return value if bound is None else bound


def call_pass(name: str) -> Callable[[type[CallRewriter]], Callable[..., Pass]]:
    """Of a `CallRewriter`, what makes the pass ``name`` by the arguments of `prepare`."""

    def decorated(kind: type[CallRewriter]) -> Callable[..., Pass]:
        rewriter = expr_mutator(kind)

        @functools.wraps(kind, updated=())
        def made(*arguments: Any, **options: Any) -> Pass:
            def run(mod: IRModule, _ctx: PassContext) -> IRModule:
                return rewriter(mod, *arguments, **options).run()

            return module_pass(run, opt_level=0, name=name)

        return made

    return decorated


def is_for_gpu() -> bool:
    """Whether the target in force is a GPU; none is not."""
    target = Target.current(allow_none=True)
    return target is not None and "gpu" in target.keys


def stock_way(builder: BlockBuilder, call: Call) -> Any:
    """What stock TVM legalises ``call`` to."""
    return ir.Op.get(call.op.name).get_attr("FLegalize")(builder, call)


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
