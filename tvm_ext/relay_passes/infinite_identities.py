"""The pass that lets maxima and minima begin at the infinities, where stock TVM has the extreme finite numbers."""

from __future__ import annotations

import math

import numpy as np

from tvm_ext._tvm import Expr, IRModule, PassContext, PrimFunc, SBlock, nodes_in, prim_func_pass, structural_map, tirx
from tvm_ext.analysis.computations import dtype_of


@prim_func_pass(opt_level=0, name="tvm_ext.InfiniteIdentities")
class InfiniteIdentities:
    """Let maxima start at -inf and minima at inf, with the padding of max pools, not at the extreme finite numbers.

    Must run before operators are fused: a model's own constant of -3.4e38, an attention mask's say, stays what it is.
    """

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        return _from_infinity(func)


def _from_infinity(func: PrimFunc) -> PrimFunc:
    starts = [block.init for block in nodes_in(func.body, SBlock) if block.init is not None]
    found = map(_infinity, nodes_in(starts, tirx.FloatImm))
    infinities = {value.value for value in found if value is not None}
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
