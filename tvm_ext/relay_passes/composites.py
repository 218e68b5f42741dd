"""Composite functions as `PartitionCutlass` makes them: what they hold, their twins, the way back into the graph."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_ext._tvm import (
    Call,
    DataflowBlock,
    DataflowVar,
    Expr,
    GlobalVar,
    IRModule,
    RelaxFunction,
    Var,
    VarBinding,
    relax,
)
from tvm_ext.records.partition import CODEGEN, REGION, CutlassRegion
from tvm_ext.records.serialise import from_json


def inlined(mod: IRModule, only: frozenset[str] | None = None) -> IRModule:
    """``mod`` with the operators of its composite functions, or those that ``only`` names, in the place of calls."""
    functions = dict(mod.functions_items())
    composites = {
        gv: composite_of(func)
        for gv, func in functions.items()
        if is_composite(func) and (only is None or gv.name_hint in only)
    }
    kept = {gv: _inlined(func, composites) for gv, func in functions.items() if gv not in composites}
    # The new functions' bodies have no types yet.
    return relax.transform.Normalize()(IRModule(kept, attrs=mod.attrs))


def is_composite(func: RelaxFunction) -> bool:
    """Whether a function of the module is one for CUTLASS."""
    return isinstance(func, RelaxFunction) and bool(func.attrs) and str(func.attrs.get("Codegen", "")) == CODEGEN


def composite_of(func: RelaxFunction) -> RelaxFunction:
    """The function with attribute ``Composite``, the first that the outer one binds."""
    return func.body.blocks[0].bindings[0].value


def region_of(func: RelaxFunction) -> CutlassRegion:
    """The record of a function that `is_composite`."""
    return from_json(CutlassRegion, str(composite_of(func).attrs[REGION]))


def twin_of(func: RelaxFunction) -> IRModule:
    """A module whose ``main`` computes what a function does that `is_composite`, operator by operator."""
    inner = composite_of(func)
    main = RelaxFunction(inner.params, inner.body, inner.ret_ty, inner.is_pure)
    return IRModule({"main": main.with_attr("global_symbol", "main")})


def _inlined(func: RelaxFunction, composites: dict[GlobalVar, RelaxFunction]) -> RelaxFunction:
    if not isinstance(func, RelaxFunction) or not isinstance(func.body, relax.SeqExpr):
        return func
    blocks = []
    for block in func.body.blocks:
        bindings = [item for binding in block.bindings for item in _bindings(binding, composites)]
        blocks.append(DataflowBlock(bindings) if isinstance(block, DataflowBlock) else relax.BindingBlock(bindings))
    return RelaxFunction(func.params, relax.SeqExpr(blocks, func.body.body), func.ret_ty, func.is_pure, func.attrs)


def _bindings(binding: VarBinding, composites: dict[GlobalVar, RelaxFunction]) -> Iterator[VarBinding]:
    value = binding.value if isinstance(binding, VarBinding) else None
    if not isinstance(value, Call) or value.op not in composites:
        yield binding
        return
    inner = composites[value.op]
    new: dict[Expr, Expr] = dict(zip(inner.params, value.args, strict=True))
    steps = list(inner.body.blocks[0].bindings)
    for step in steps[:-1]:
        new[step.var] = DataflowVar(step.var.name, step.var.ty)
        yield VarBinding(new[step.var], _with_operands(step.value, new, step.var))
    yield VarBinding(binding.var, _with_operands(steps[-1].value, new, binding.var))


def _with_operands(call: Call, new: dict[Expr, Expr], result: Var) -> Call:
    operands = [new.get(operand, operand) for operand in call.args]
    return Call(call.op, operands, call.attrs, call.ty_args, ret_ty=result.ty)
