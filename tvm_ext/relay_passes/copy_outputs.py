"""Outputs that are constants of the library are handed out as copies, so that whoever gets one may write to it."""

from __future__ import annotations

from collections.abc import Mapping

from tvm_ext._tvm import (
    BlockBuilder,
    Call,
    Constant,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    PrimFunc,
    RelaxFunction,
    Type,
    Var,
    VarBinding,
    ir,
    module_pass,
    relax,
    te,
)


@module_pass(opt_level=0, name="tvm_ext.CopyConstantOutputs")
class CopyConstantOutputs:
    """Let a function return no constant itself and no view of one, but what a kernel has copied from it.

    What comes out of a branch or of another function may be a constant there, and is copied as well. Has to come
    after whatever computes calls on constants, which would make a constant of the copy, and after views are views.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        builder = relax.BlockBuilder(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function) and isinstance(func.body, relax.SeqExpr):
                _Outputs(builder, func).rewrite(gv)
        return builder.get()


class _Outputs:
    """The results of one function of the builder's module, which it rewrites where that is needed."""

    def __init__(self, builder: BlockBuilder, func: RelaxFunction) -> None:
        self.builder, self.func = builder, func
        self.values: Mapping[Var, Expr] = {
            binding.var: binding.value for block in func.body.blocks for binding in block.bindings
        }
        self.bindings: list[VarBinding] = []

    def rewrite(self, name: GlobalVar) -> None:
        seq = self.func.body
        result = self._returned(seq.body)
        if not self.bindings:
            return
        block = relax.BindingBlock(self.bindings)
        body = relax.SeqExpr([*seq.blocks, block], result)
        func = self.func
        self.builder.update_func(
            name, relax.Function(func.params, body, func.ret_ty, is_pure=func.is_pure, attrs=func.attrs)
        )

    def _returned(self, result: Expr) -> Expr:
        value = self._origin(result)
        if not isinstance(value, relax.Tuple):
            return self._copied(result, value)
        if not any(self._is_shared(self._origin(field)) for field in value.fields):
            return result
        fields = [self._field(result, position, field) for position, field in enumerate(value.fields)]
        return self._bound(relax.Tuple(fields), result.ty)

    def _field(self, result: Expr, position: int, field: Expr) -> Expr:
        """A field of the tuple ``result``, read from there: a variable of a dataflow block is unknown behind it."""
        if not isinstance(field, Constant):
            item = self._bound(relax.TupleGetItem(result, position), field.ty)
            return self._copied(item, self._origin(field))
        return self._copied(field, field)

    def _origin(self, expr: Expr) -> Expr:
        """What ``expr`` is bound to, seen through names and views."""
        while True:
            if isinstance(expr, Var) and expr in self.values:
                expr = self.values[expr]
            elif isinstance(expr, Call) and isinstance(expr.op, ir.Op) and expr.op.name == "relax.reshape":
                expr = expr.args[0]
            else:
                return expr

    def _is_shared(self, origin: Expr) -> bool:
        calls_function = isinstance(origin, Call) and isinstance(origin.op, GlobalVar | Var)
        return isinstance(origin, Constant | relax.If) or calls_function

    def _copied(self, expr: Expr, origin: Expr) -> Expr:
        static = isinstance(expr.ty, relax.TensorType) and isinstance(expr.ty.shape, relax.ShapeExpr)
        if not static or not self._is_shared(origin):
            return expr
        return self._bound(relax.call_tir(self._kernel(expr), [expr], expr.ty), expr.ty)

    def _bound(self, value: Expr, kind: Type) -> Expr:
        variable = Var(f"returned{len(self.bindings)}", kind)
        # A later pass would give it its type in place, and the builder no longer find the function under its hash.
        self.bindings.append(relax.VarBinding(variable, self.builder.normalize(value)))
        return variable

    def _kernel(self, expr: Expr) -> PrimFunc:
        source = te.placeholder(list(expr.ty.shape.values), str(expr.ty.dtype), name="constant")
        copy = te.compute(source.shape, lambda *place: source(*place), name="copied")
        func = te.create_prim_func([source, copy]).without_attr("global_symbol")
        return self.builder.add_func(func, "copy_constant")
