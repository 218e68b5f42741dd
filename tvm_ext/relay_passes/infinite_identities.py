"""The pass that lets maxima and minima begin at the infinities, where stock TVM has the extreme finite numbers."""

from __future__ import annotations

import math

import numpy as np

from tvm_ext._tvm import (
    BufferStore,
    Expr,
    IRModule,
    PassContext,
    PrimFunc,
    SBlock,
    copy_module,
    module_pass,
    structural_map,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of


@module_pass(opt_level=0, name="tvm_ext.InfiniteIdentities")
class InfiniteIdentities:
    """Let maxima start at -inf and minima at inf, with the padding of max pools, not at the extreme finite numbers.

    Must run before operators are fused: a model's own constant of -3.4e38, an attention mask's say, stays what it is.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            if isinstance(func, PrimFunc):
                result[gv] = _from_infinity(func)
        return result


def _from_infinity(func: PrimFunc) -> PrimFunc:
    starts: list[BufferStore] = []

    def visit(block: SBlock) -> None:
        if block.init is not None:
            structural_walk(block.init, (tirx.FloatImm, lambda value: starts.append(_infinity(value))))

    structural_walk(func.body, (SBlock, visit))
    infinities = {value.value for value in starts if value is not None}
    if not infinities:
        return func

    def change(value: Expr) -> Expr:
        infinite = _infinity(value)
        return infinite if infinite is not None and infinite.value in infinities else value

    return func.with_body(structural_map(func.body, (tirx.FloatImm, change)))


def _infinity(value: Expr) -> Expr:
    """The infinity for the extreme finite number of its sign; None for any other constant."""
    dtype = dtype_of(value)
    if dtype == "bfloat16":
        limit = 3.3895313892515355e38
    else:
        limit = float(np.finfo(dtype).max) if dtype in ("float16", "float32", "float64") else math.inf
    return tirx.FloatImm(dtype, math.copysign(math.inf, value.value)) if abs(value.value) == limit else None
