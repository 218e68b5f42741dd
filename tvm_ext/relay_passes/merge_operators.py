"""Several calls of TensorIR functions as one function: what fuses operators beyond stock TVM's rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm_ext._tvm import (
    CALL_TIR,
    BlockBuilder,
    Call,
    Expr,
    GlobalVar,
    IRModule,
    PrimFunc,
    RelaxFunction,
    Var,
    VarBinding,
    relax,
)
from tvm_ext.relay_passes.annotate_constants import tir_calls


def retargeted(call: Call, callee: GlobalVar, arguments: Sequence[Expr]) -> Call:
    """A ``call_tir`` of another function with other arguments, and the results, one or several, of ``call``."""
    return Call(CALL_TIR, [callee, relax.Tuple(arguments), *call.args[2:]], call.attrs, call.ty_args)


def merge_calls(mod: IRModule, bindings: Sequence[VarBinding]) -> tuple[PrimFunc, tuple[Expr, ...]]:
    """One PrimFunc that computes the last of ``bindings``, each a ``call_tir``, and the arguments to call it with.

    The values of the others must be read by these bindings alone: they become buffers of the function. Stock TVM's
    FuseTIR does it, on a module of nothing else.
    """
    inside = {binding.var for binding in bindings}
    read = [field for binding in bindings for field in binding.value.args[1].fields if field not in inside]
    arguments = tuple(dict.fromkeys(read))
    builder = BlockBuilder(IRModule({binding.value.args[0]: mod[binding.value.args[0]] for binding in bindings}))
    primitive = _write(
        builder, "merged", arguments, {"Primitive": True}, lambda known: _calls(builder, bindings, known)
    )
    result = bindings[-1].var.ty
    _write(
        builder, "main", arguments, None, lambda known: Call(primitive, [known[a] for a in arguments], ret_ty=result)
    )
    fused = relax.transform.FuseTIR()(builder.get())
    call = _only_call(fused["main"])
    order = dict(zip(fused["main"].params, arguments, strict=True))
    return fused[call.args[0]], tuple(order[field] for field in call.args[1].fields)


def fused_function(mod: IRModule, func: RelaxFunction) -> PrimFunc:
    """One PrimFunc that computes ``func``, whose bindings all are ``call_tir`` of functions of ``mod``.

    Its parameters are those of ``func``, then the results.
    """
    builder = BlockBuilder(IRModule({call.args[0]: mod[call.args[0]] for call in tir_calls(func.body)}))
    primitive = builder.add_func(func.with_attr("Primitive", True), "fused")
    _write(
        builder,
        "main",
        func.params,
        None,
        lambda known: Call(primitive, [known[param] for param in func.params], ret_ty=func.ret_ty),
    )
    fused = relax.transform.FuseTIR()(builder.get())
    call = _only_call(fused["main"])
    assert list(call.args[1].fields) == list(fused["main"].params), "every parameter is read"
    return fused[call.args[0]]


def _write(
    builder: BlockBuilder,
    name: str,
    arguments: Sequence[Expr],
    attributes: dict[str, bool] | None,
    result: Callable[[dict[Expr, Expr]], Expr],
) -> GlobalVar:
    """Add a function ``name`` with a parameter for each of ``arguments``, whose value is the expression ``result``."""
    params = [Var(f"operand{i}", argument.ty) for i, argument in enumerate(arguments)]
    with builder.function(name, params, attrs=attributes, private=attributes is not None):
        with builder.dataflow():
            output = builder.emit_output(result(dict(zip(arguments, params, strict=True))))
        return builder.emit_func_output(output)


def _calls(builder: BlockBuilder, bindings: Sequence[VarBinding], known: dict[Expr, Expr]) -> Expr:
    """Emit the calls one after the other, but for the last, which is the result."""
    for binding in bindings:
        call = binding.value
        arguments = [known[field] for field in call.args[1].fields]
        made = retargeted(call, call.args[0], arguments)
        known[binding.var] = made if binding is bindings[-1] else builder.emit(made)
    return known[bindings[-1].var]


def _only_call(func: RelaxFunction) -> Call:
    (call,) = tir_calls(func.body)
    return call
