"""How operators on floating-point numbers become tensor expressions where stock TVM's way gives other values.

Stock TVM writes scalar constants into the expression and computes with them at once, as if floats were reals: ``x * 0``
becomes 0, whatever x is. Its Sign makes 0 of NaN, its ArgMax gives -1 for a row of -inf, and its maxima start at the
lowest finite number, so that the maximum of such a row is not in the row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tvm_ext._tvm import BlockBuilder, Call, Constant, Expr, Sequential, TeTensor, relax, te, tirx
from tvm_ext._tvm import topi as stock
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import HALF_TYPES
from tvm_ext.ir.float_ir import hidden, is_float, is_number

from .infinite_identities import InfiniteIdentities
from .legalize_sampling import SAMPLING
from .mark_functions import MARKED
from .rewriting import stock_way

Legalization = Callable[[Any, Any], Any]


def legalize_operators() -> Any:
    """Stock TVM's LegalizeOps with the operators below legalised our way."""
    return Sequential([relax.transform.LegalizeOps(LEGALIZATIONS), InfiniteIdentities()])


def _arithmetic(function: Callable[[Expr, Expr], TeTensor]) -> Legalization:
    """The operator with a scalar constant of 0 that TVM does not see; stock TVM's way for all other constants."""

    def legalize(builder: BlockBuilder, call: Call) -> Expr:
        zeros = [_zero(argument) for argument in call.args]
        if zeros == [None, None] or None not in zeros:
            return stock_way(builder, call)
        name = str(call.op.name).removeprefix("relax.")
        if zeros[0] is not None:
            return builder.call_te(lambda x: function(zeros[0], x), call.args[1], primfunc_name_hint=name)
        return builder.call_te(lambda x: function(x, zeros[1]), call.args[0], primfunc_name_hint=name)

    return legalize


def _zero(argument: Expr) -> Expr:
    """The hidden zero for a scalar constant of 0; None for anything else."""
    if not isinstance(argument, Constant) or argument.ty.ndim != 0 or not is_float(argument):
        return None
    value = float(argument.value.numpy())
    return hidden(value, dtype_of(argument)) if value == 0 else None


def _sign(builder: BlockBuilder, call: Call) -> Expr:
    """1, -1, or x itself: zeros and NaN are their own signs, and so are unsigned numbers below 2."""

    def sign(x: TeTensor) -> TeTensor:
        one, zero = tirx.const(1, x.dtype), tirx.const(0, x.dtype)
        if str(x.dtype).startswith("uint"):
            return te.compute(x.shape, lambda *i: tirx.Select(x(*i) > zero, one, zero), name="T_sign")
        minus = tirx.const(-1, x.dtype)
        return te.compute(
            x.shape, lambda *i: tirx.Select(x(*i) > zero, one, tirx.Select(x(*i) < zero, minus, x(*i))), name="T_sign"
        )

    return builder.call_te(sign, call.args[0], primfunc_name_hint="tir_sign")


def _erf(builder: BlockBuilder, call: Call) -> Expr:
    """In float64 the C library's: stock TVM's polynomial has the accuracy of float32."""
    if dtype_of(call.args[0]) != "float64":
        return stock_way(builder, call)

    def erf(x: TeTensor) -> TeTensor:
        return te.compute(x.shape, lambda *i: tirx.call_pure_extern("float64", "erf", x(*i)), name="T_erf")

    return builder.call_te(erf, call.args[0], primfunc_name_hint="erf")


def _in_float32(types: Collection[str]) -> Legalization:
    """Results of ``types`` are rounded once.

    Stock TVM's sum of a mean is, too, and beyond 65504 it is infinite; its norms take no bfloat16.
    """

    def legalize(builder: BlockBuilder, call: Call) -> Expr:
        dtype = dtype_of(call)
        if dtype not in types:
            return stock_way(builder, call)
        wide = [builder.normalize(relax.op.astype(argument, "float32")) for argument in call.args]
        result = builder.normalize(Call(call.op, wide, call.attrs, call.ty_args))
        return relax.op.astype(builder.normalize(stock_way(builder, result)), dtype)

    return legalize


def _equality(comparison: Callable[[Expr, Expr], Expr]) -> Legalization:
    """Truth values are compared as bytes: the LLVM code generator takes vectors of them for floats."""

    def legalize(builder: BlockBuilder, call: Call) -> Expr:
        if dtype_of(call.args[0]) != "bool":
            return stock_way(builder, call)
        a, b = (builder.normalize(relax.op.astype(argument, "uint8")) for argument in call.args)
        name = str(call.op.name).removeprefix("relax.")
        return builder.call_te(comparison, a, b, primfunc_name_hint=name)

    return legalize


def _arg_reduction(extreme: Callable[..., Expr]) -> Legalization:
    """The first position of the extreme value, or of NaN where there is one: the least of the positions that hold it.

    Two plain reductions, which Roller constructs; stock TVM's single one over pairs it leaves to the fallback.
    """

    def legalize(builder: BlockBuilder, call: Call) -> Expr:
        axis, keepdims = call.attrs.axis, bool(call.attrs.keepdims)
        rank = int(call.args[0].ty.ndim)
        if rank == 0 or call.args[0].ty.shape is None:
            return stock_way(builder, call)
        axes = list(range(rank)) if axis is None else [int(axis) % rank]
        hint = str(call.op.name).removeprefix("relax.")
        dtype = "int64"  # as ONNX and stock TVM have it
        return builder.call_te(
            lambda x: _first_position(x, extreme, axes, keepdims, dtype), call.args[0], primfunc_name_hint=hint
        )

    return legalize


def _first_position(
    x: TeTensor, extreme: Callable[..., Expr], axes: Sequence[int], keepdims: bool, dtype: str
) -> TeTensor:
    best = extreme(x, axis=list(axes), keepdims=True)
    length: Expr = 1
    for axis in axes:
        length = length * x.shape[axis]

    def position(*indices: Expr) -> Expr:
        at: Expr = tirx.const(0, dtype)
        for axis in axes:
            at = at * tirx.Cast(dtype, x.shape[axis]) + tirx.Cast(dtype, indices[axis])
        value, wanted = x(*indices), best(*[0 if axis in axes else index for axis, index in enumerate(indices)])
        found = tirx.EQ(value, wanted)
        if is_float(value):
            found = tirx.Or(found, tirx.EQ(tirx.Cast("int32", is_number(value)), tirx.const(0, "int32")))
        return tirx.Select(found, at, tirx.Cast(dtype, length))

    return stock.min(te.compute(x.shape, position, name="position"), axis=list(axes), keepdims=keepdims)


_MEANS = (
    "relax.mean",
    "relax.variance",
    "relax.std",
    *(f"relax.nn.{kind}avg_pool{rank}d" for kind in ("", "adaptive_") for rank in (1, 2, 3)),
)
LEGALIZATIONS: dict[str, Legalization] = {
    "relax.add": _arithmetic(stock.add),
    "relax.subtract": _arithmetic(stock.subtract),
    "relax.multiply": _arithmetic(stock.multiply),
    "relax.divide": _arithmetic(stock.divide),
    "relax.equal": _equality(stock.equal),
    "relax.not_equal": _equality(stock.not_equal),
    "relax.erf": _erf,
    "relax.sign": _sign,
    "relax.argmax": _arg_reduction(stock.max),
    "relax.argmin": _arg_reduction(stock.min),
    **MARKED,
    **SAMPLING,
    **dict.fromkeys(_MEANS, _in_float32(HALF_TYPES)),
    **dict.fromkeys(("relax.nn.layer_norm", "relax.nn.instance_norm"), _in_float32(("bfloat16",))),
}
