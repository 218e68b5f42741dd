"""Scatters as functions that say what they are: stock TVM's loops, which fork for each update, tell no planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_ext._tvm import BlockBuilder, Call, Expr, Target, ir
from tvm_ext.analysis.relax_values import static_shape
from tvm_ext.records.scatter import SCATTER, Scatter
from tvm_ext.records.serialise import to_json

PARAMETERS = 4  # data, indices, updates, output


def marked(scatter: Callable[[Call], Scatter]) -> Callable[[Any, Any], Any]:
    """Stock TVM's legalization; on CPUs what ``scatter`` says of a call of known shapes is in `SCATTER`."""

    def legalize(builder: BlockBuilder, call: Call) -> Expr:
        made = ir.Op.get(call.op.name).get_attr("FLegalize")(builder, call)
        func, target = builder.get()[made.args[0]], Target.current(allow_none=True)
        if target is not None and "gpu" in target.keys:
            return made  # its loops are bound to threads
        if len(func.params) == PARAMETERS and all(static_shape(argument) is not None for argument in call.args):
            builder.update_func(made.args[0], func.with_attr(SCATTER, to_json(scatter(call))))
        return made

    return legalize


def scatter_nd(call: Call) -> Scatter:
    length = int(call.args[1].ty.shape.values[-1])
    return Scatter(axes=tuple(range(length)), by_tuple=True, reduction=call.attrs.reduction)


def scatter_elements(call: Call) -> Scatter:
    rank = int(call.args[0].ty.ndim)
    return Scatter(axes=(int(call.attrs.axis) % rank,), by_tuple=False, reduction=call.attrs.reduction)
