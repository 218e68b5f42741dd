"""Tells each kernel whether its arguments are the graph's own: what kernels wrote, constants, and views of these.

Stock TVM has every kernel look at its arguments: count, types, devices, ranks, shapes, strides. Of tensors that come
from outside it is the only look at strides and offsets. Those that the virtual machine allocated by this very graph
fit; the look was a third of LLVM's time for the kernels of MobileNetV2.
"""

from __future__ import annotations

from collections import Counter

from tvm_ext._tvm import (
    CALL_TIR,
    Call,
    Constant,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    PrimFunc,
    RelaxFunction,
    Var,
    VarBinding,
    copy_module,
    functions_of,
    ir,
    module_pass,
    nodes_in,
    relax,
)
from tvm_ext.records.choice import TRUSTED_ARGUMENTS
from tvm_ext.support.kernel_cache import params_of

_RESHAPE = ir.Op.get("relax.reshape")


@module_pass(opt_level=0, name="tvm_ext.TrustArguments")
class TrustArguments:
    """Set `TRUSTED_ARGUMENTS` on every PrimFunc of fixed shapes that nothing calls with a tensor from outside."""

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        uses: Counter[GlobalVar] = Counter()
        trusted: Counter[GlobalVar] = Counter()
        for func in functions_of(mod, RelaxFunction).values():
            _count(func, uses, trusted)
        result = copy_module(mod)
        for callee, count in trusted.items():
            func = mod[callee]
            if isinstance(func, PrimFunc) and count == uses[callee] and params_of(func) is not None:
                result[callee] = func.with_attr(TRUSTED_ARGUMENTS, True)
        return result


def _count(func: relax.Function, uses: Counter[GlobalVar], trusted: Counter[GlobalVar]) -> None:
    """Count how often ``func`` names each function, and how often it calls one with nothing but tensors of its own."""
    own: set[Var] = set()
    for binding in nodes_in(func.body, VarBinding, "pre"):
        value = binding.value
        if _is_own(value, own):
            own.add(binding.var)
        if isinstance(value, Call) and value.op == CALL_TIR and all(_is_own(arg, own) for arg in value.args[1].fields):
            trusted[value.args[0]] += 1
    uses.update(nodes_in(func.body, GlobalVar))


def _is_own(value: Expr, own: set[Var]) -> bool:
    """Whether ``value`` lies in memory of the graph, in the shape that its type says; ``own`` are the variables so far.

    What other calls give is not: a packed function may be anybody's.
    """
    if isinstance(value, Constant):
        return True
    if isinstance(value, Var):
        return value in own
    if isinstance(value, relax.TupleGetItem):
        return _is_own(value.tuple_value, own)
    return isinstance(value, Call) and (value.op == CALL_TIR or (value.op == _RESHAPE and _is_own(value.args[0], own)))
