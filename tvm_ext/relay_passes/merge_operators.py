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
    structural_walk,
)


def merge_calls(mod: IRModule, bindings: Sequence[VarBinding]) -> tuple[PrimFunc, tuple[Expr, ...]]:
    """One PrimFunc that computes the last of ``bindings``, each a ``call_tir``, and the arguments to call it with.

    The values of the others must be read by these bindings alone: they become buffers of the function. Stock TVM's
    FuseTIR does it, on a module of nothing else.
    """
    inside = {binding.var for binding in bindings}
    read = [item for binding in bindings for item in binding.value.args[1].fields if item not in inside]
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
    return fused[call.args[0]], tuple(order[item] for item in call.args[1].fields)


def _write(
    builder: BlockBuilder,
    name: str,
    arguments: Sequence[Expr],
    attributes: dict[str, bool] | None,
    result: Callable[[dict[Expr, Expr]], Expr],
) -> GlobalVar:
    """Add a function ``name`` with a parameter for each of ``arguments``, whose value is the expression ``result``."""
    params = [Var(f"operand{i}", item.ty) for i, item in enumerate(arguments)]
    with builder.function(name, params, attrs=attributes, private=attributes is not None):
        with builder.dataflow():
            output = builder.emit_output(result(dict(zip(arguments, params, strict=True))))
        return builder.emit_func_output(output)


def _calls(builder: BlockBuilder, bindings: Sequence[VarBinding], known: dict[Expr, Expr]) -> Expr:
    """Emit the calls one after the other, but for the last, which is the result."""
    for binding in bindings:
        call = binding.value
        arguments = [known[item] for item in call.args[1].fields]
        made = relax.call_tir(call.args[0], arguments, call.ty_args[0])
        known[binding.var] = made if binding is bindings[-1] else builder.emit(made)
    return known[bindings[-1].var]


def _only_call(func: RelaxFunction) -> Call:
    calls: list[Call] = []
    structural_walk(func.body, (Call, lambda call: calls.append(call) if call.op == CALL_TIR else None), order="pre")
    assert len(calls) == 1
    return calls[0]
