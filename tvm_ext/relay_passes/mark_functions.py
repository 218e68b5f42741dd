"""Functions that say what they compute: of stock TVM's loops for a scatter or a sort no planner learns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from tvm_ext._tvm import BlockBuilder, Call, Expr, topi
from tvm_ext.analysis.relax_values import static_shape
from tvm_ext.ir.build_ir import INDEX_DTYPE
from tvm_ext.records.scatter import SCATTER, Scatter
from tvm_ext.records.selection import SCAN, TOP_K, Scan, TopK
from tvm_ext.records.serialise import to_json

from .rewriting import is_for_gpu, stock_way

Description: TypeAlias = Scatter | TopK | Scan


def marked(
    attribute: str,
    parameters: int,
    describe: Callable[[Call], Description | None],
    stock: Callable[[BlockBuilder, Call], Expr] | None = None,
) -> Callable[[Any, Any], Any]:
    """Stock TVM's legalization; on CPUs what ``describe`` says of a call of known shapes is in ``attribute``.

    The function has ``parameters``, operands and results together. ``stock``: stock TVM's way where the operator does
    not name one.
    """

    def legalize(builder: BlockBuilder, call: Call) -> Expr:
        made = (stock or stock_way)(builder, call)
        if is_for_gpu():
            return made  # its loops are bound to threads
        func = builder.get()[made.args[0]]
        described = describe(call) if all(static_shape(argument) is not None for argument in call.args) else None
        if described is not None and len(func.params) == parameters:
            builder.update_func(made.args[0], func.with_attr(attribute, to_json(described)))
        return made

    return legalize


def _scatter_nd(call: Call) -> Scatter:
    length = int(call.args[1].ty.shape.values[-1])
    return Scatter(axes=tuple(range(length)), by_tuple=True, reduction=call.attrs.reduction)


def _scatter_elements(call: Call) -> Scatter:
    rank = int(call.args[0].ty.ndim)
    return Scatter(axes=(int(call.attrs.axis) % rank,), by_tuple=False, reduction=call.attrs.reduction)


def _stock_top_k(builder: BlockBuilder, call: Call) -> Expr:
    """What DispatchSortScan makes of it on a CPU."""
    attrs = call.attrs
    options = (int(attrs.k), int(attrs.axis), attrs.ret_type, not attrs.largest, str(attrs.dtype))
    return builder.call_te(topi.topk, call.args[0], *options, primfunc_name_hint="topk")


def _top_k(call: Call) -> TopK | None:
    if call.attrs.ret_type != "both" or str(call.attrs.dtype) != INDEX_DTYPE:
        return None
    return TopK(axis=int(call.attrs.axis) % int(call.args[0].ty.ndim), largest=call.attrs.largest)


def _stock_scan(builder: BlockBuilder, call: Call) -> Expr:
    """What DispatchSortScan makes of it on a CPU."""
    attrs, name = call.attrs, call.op.name.removeprefix("relax.")
    axis = None if attrs.axis is None else int(attrs.axis)
    way = topi.cumsum if name == "cumsum" else topi.cumprod
    dtype = str(call.ty.dtype)
    return builder.call_te(way, call.args[0], axis, dtype, bool(attrs.exclusive), primfunc_name_hint=name)


def _scan(call: Call) -> Scan | None:
    if call.attrs.axis is None or str(call.args[0].ty.dtype) == "bool":
        return None
    axis = int(call.attrs.axis) % int(call.args[0].ty.ndim)
    combiner: Literal["sum", "prod"] = "sum" if call.op.name == "relax.cumsum" else "prod"
    return Scan(axis=axis, combiner=combiner, exclusive=bool(call.attrs.exclusive))


MARKED = {
    "relax.scatter_nd": marked(SCATTER, 4, _scatter_nd),
    "relax.scatter_elements": marked(SCATTER, 4, _scatter_elements),
    **{name: marked(SCAN, 2, _scan, _stock_scan) for name in ("relax.cumsum", "relax.cumprod")},
    "relax.topk": marked(TOP_K, 3, _top_k, _stock_top_k),
}
