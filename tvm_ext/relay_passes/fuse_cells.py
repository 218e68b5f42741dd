"""Each recurrent cell becomes one TensorIR function, which the graph calls once per step."""

from __future__ import annotations

from collections.abc import Mapping

from tvm_ext._tvm import (
    CALL_TIR,
    OPAQUE,
    Call,
    Expr,
    GlobalVar,
    IRModule,
    PassContext,
    PrimFunc,
    RelaxFunction,
    Var,
    expr_mutator,
    module_pass,
    relax,
)
from tvm_ext.records.recurrent import CELL, RecurrentCell
from tvm_ext.records.serialise import from_json

from .merge_operators import fused_function
from .recurrent.cell_function import is_cell
from .rewriting import CallRewriter


@module_pass(opt_level=0, name="tvm_ext.FuseCells")
class FuseCells:
    """Replace each function with attribute `CELL` by one PrimFunc with that attribute; run behind LegalizeOps.

    A cell with anything else in it than calls of TensorIR functions (a product that was cut out for CUTLASS, say) stays
    a function of the graph.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        cells = {gv: func for gv, func in mod.functions_items() if is_cell(func) and _is_legalized(func)}
        if not cells:
            return mod
        result = _Calls(mod, {gv: _primitive(mod, func) for gv, func in cells.items()}).run()
        for gv in cells:
            del result[gv]
        return result


def _is_legalized(func: RelaxFunction) -> bool:
    values = [binding.value for block in func.body.blocks for binding in block.bindings]
    return all(isinstance(value, relax.Tuple | Var) or _is_tir_call(value) for value in values)


def _is_tir_call(value: Expr) -> bool:
    return isinstance(value, Call) and value.op == CALL_TIR


def _primitive(mod: IRModule, func: RelaxFunction) -> PrimFunc:
    return fused_function(mod, func).with_attr(CELL, func.attrs[CELL]).with_attr("op_pattern", OPAQUE)


@expr_mutator
class _Calls(CallRewriter):
    """Calls the PrimFuncs in the place of the graph's functions."""

    def prepare(self, primitives: Mapping[GlobalVar, PrimFunc]) -> None:
        self.primitives = primitives
        self.new: dict[GlobalVar, GlobalVar] = {}

    def rewritten(self, call: Call) -> Expr:
        if not isinstance(call.op, GlobalVar) or call.op not in self.primitives:
            return call
        if call.op not in self.new:
            primitive = self.primitives[call.op]
            cell = from_json(RecurrentCell, str(primitive.attrs[CELL]))
            self.new[call.op] = self.builder_.add_func(primitive, f"{cell.kind}_cell")
        result = call.op.ty.ret
        types = list(result.fields) if isinstance(result, relax.TupleType) else result
        return relax.call_tir(self.new[call.op], list(call.args), types)
