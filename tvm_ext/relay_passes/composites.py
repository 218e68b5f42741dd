"""Composite functions as `PartitionCutlass` makes them: what they hold, their twins, the way back into the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from tvm_ext._tvm import (
    BlockBuilder,
    Call,
    DataflowBlock,
    DataflowVar,
    Expr,
    GlobalVar,
    IRModule,
    RelaxFunction,
    Var,
    VarBinding,
    ir,
    relax,
)
from tvm_ext.records.partition import CODEGEN, REGION, CutlassRegion, operand_name
from tvm_ext.records.serialise import from_json, to_json

from .rewriting import with_bindings

_PERMUTE = ir.Op.get("relax.permute_dims")

OwnTime = Callable[[IRModule], float | None]
"""Microseconds that kernels of our own are predicted to take for a module; None where they have no prediction."""


class Predictor(Protocol):
    """What ranks templates; `toolchains/cutlass_codegen.py` has it."""

    def predict(self, region: CutlassRegion) -> float:
        """Microseconds of the region's best template; raises IllegalRewrite, with the reason, where it has none."""


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
    return as_module(composite_of(func))


def as_module(inner: RelaxFunction) -> IRModule:
    """A function with attribute ``Composite`` as ``main`` of a module."""
    main = RelaxFunction(inner.params, inner.body, inner.ret_ty, inner.is_pure)
    return IRModule({"main": main.with_attr("global_symbol", "main")})


def with_prepared(inner: RelaxFunction, known: Collection[int]) -> RelaxFunction:
    """``inner`` whose parameters at the places ``known`` are given transposed where it transposes them.

    So a build has them that are constants: what is computed of them is computed once, at compile time.
    """
    params, steps = list(inner.params), []
    new: dict[Expr, Expr] = {}
    for step in inner.body.blocks[0].bindings:
        source = step.value.args[0] if step.value.op == _PERMUTE else None
        position = params.index(source) if source in params else -1
        others = [other for other in inner.body.blocks[0].bindings if other.var != step.var]
        if position in known and all(source not in other.value.args for other in others):
            new[step.var] = params[position] = Var(params[position].name, step.var.ty)
        else:
            steps.append(VarBinding(step.var, _with_operands(step.value, new, step.var)))
    body = relax.SeqExpr([DataflowBlock(steps)], inner.body.body)
    return RelaxFunction(params, body, inner.ret_ty, inner.is_pure)


def new_composite(
    region: CutlassRegion, operands: Sequence[Expr], steps: Callable[[dict[Expr, Expr]], list[VarBinding]]
) -> RelaxFunction:
    """The function of ``operands`` that ``region`` is; ``steps`` writes what it computes of its parameters."""
    params = [Var(operand_name(index), operand.ty) for index, operand in enumerate(operands)]
    bindings = steps(dict(zip(operands, params, strict=True)))
    result = bindings[-1].var
    func = RelaxFunction(params, relax.SeqExpr([DataflowBlock(bindings)], result), result.ty)
    return func.with_attrs({"Composite": f"{CODEGEN}.{region.pattern}", REGION: to_json(region)})


def call_of_composite(inner: RelaxFunction, operands: Sequence[Expr], pattern: str, builder: BlockBuilder) -> Call:
    """The call of a function around ``inner``, as stock FuseOpsByPattern makes it, which is added to the module."""
    params = [Var(operand_name(index), operand.ty) for index, operand in enumerate(operands)]
    local, result = Var("composite", inner.ty), Var("result", inner.ret_ty)
    call = Call(local, params, ret_ty=inner.ret_ty)
    block = relax.BindingBlock([VarBinding(local, inner), VarBinding(result, call)])
    outer = RelaxFunction(params, relax.SeqExpr([block], result), inner.ret_ty).with_attr("Codegen", CODEGEN)
    gv = builder.add_func(outer, f"cutlass_{pattern}")
    builder.update_func(gv, outer.with_attr("global_symbol", gv.name_hint))
    return Call(gv, operands, ret_ty=inner.ret_ty)


def _inlined(func: RelaxFunction, composites: dict[GlobalVar, RelaxFunction]) -> RelaxFunction:
    if not isinstance(func, RelaxFunction) or not isinstance(func.body, relax.SeqExpr):
        return func

    def steps(binding: VarBinding) -> list[VarBinding]:
        value = binding.value if isinstance(binding, VarBinding) else None
        if not isinstance(value, Call) or value.op not in composites:
            return [binding]
        return list(steps_of(composites[value.op], value.args, binding.var))

    return with_bindings(func, steps)


def steps_of(inner: RelaxFunction, arguments: Sequence[Expr], result: Var) -> Iterator[VarBinding]:
    """The bindings of a function with attribute ``Composite``, of ``arguments``, the last one's variable ``result``."""
    new: dict[Expr, Expr] = dict(zip(inner.params, arguments, strict=True))
    steps = list(inner.body.blocks[0].bindings)
    for step in steps[:-1]:
        new[step.var] = DataflowVar(step.var.name, step.var.ty)
        yield VarBinding(new[step.var], _with_operands(step.value, new, step.var))
    yield VarBinding(result, _with_operands(steps[-1].value, new, result))


def _with_operands(call: Call, new: dict[Expr, Expr], result: Var) -> Call:
    operands = [new.get(operand, operand) for operand in call.args]
    return Call(call.op, operands, call.attrs, call.ty_args, ret_ty=result.ty)
