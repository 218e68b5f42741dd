"""Keeps gathers inside their tensors: a wrong index may give a wrong value, but never crash."""

from __future__ import annotations

from typing import Any

from .._tvm import PyExprMutator, expr_mutator, ir, module_pass, relax

TAKE = "relax.take"


@expr_mutator
class _WrapIndices(PyExprMutator):  # type: ignore[misc]
    def visit_call_(self, call: Any) -> Any:
        call = self.visit_expr_post_order(call)
        if isinstance(call.op, ir.Op) and call.op.name == TAKE and call.attrs.mode == "fast":
            return relax.op.take(call.args[0], call.args[1], axis=call.attrs.axis, mode="wrap")
        return call


@module_pass(opt_level=0, name="tvm_ext.BoundGathers")
class BoundGathers:
    """Turn every ``take`` of mode "fast", which reads any address its index asks for, into mode "wrap".

    Wrapping also gives -1 its ONNX meaning, the last element; an index out of range, which ONNX forbids, reads some
    other element.
    """

    def transform_module(self, mod: Any, _ctx: Any) -> Any:
        mutator = _WrapIndices(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, relax.Function):
                mutator.builder_.update_func(gv, mutator.visit_expr(func))
        return mutator.builder_.get()
