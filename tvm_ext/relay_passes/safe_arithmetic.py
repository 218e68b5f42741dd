"""Integer divisions and shifts that have a result for all operands, as tensor expressions.

ONNX Runtime's results where it has one: the smallest integer divided by -1 is itself, and its remainder 0. Left open by
ONNX, and defined here: anything divided by 0 is 0, its remainder too; shifted by its width or more it is 0 (a negative
number shifted to the right: -1).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import Expr, TeTensor, te, tirx, topi

DIVISIONS = {
    "relax.divide": "Div",
    "relax.floor_divide": "floor division",
    "relax.mod": "Mod",
    "relax.floor_mod": "Mod",
}
SHIFTS = ("relax.left_shift", "relax.right_shift")

_DIVIDE: dict[str, Callable[[TeTensor, TeTensor], TeTensor]] = {
    "relax.divide": topi.divide,
    "relax.floor_divide": topi.floor_divide,
    "relax.mod": topi.mod,
    "relax.floor_mod": topi.floor_mod,
}


def safe_division(name: str) -> Callable[[TeTensor, TeTensor], TeTensor]:
    """Relax operator ``name`` of `DIVISIONS` on integers, without what makes a processor trap: by 0, and min / -1."""
    quotient = name in ("relax.divide", "relax.floor_divide")

    def divide(dividend: TeTensor, divisor: TeTensor) -> TeTensor:
        one = tirx.const(1, divisor.dtype)
        safe = _each(divisor, lambda d: tirx.Select(_traps(d), one, d))
        result = _DIVIDE[name](dividend, safe)
        if not quotient:
            return result  # the remainder of a division by 1 is 0
        result = topi.where(topi.equal(divisor, tirx.const(0, divisor.dtype)), topi.full_like(result, 0), result)
        if not str(divisor.dtype).startswith("int"):
            return result
        return topi.where(topi.equal(divisor, tirx.const(-1, divisor.dtype)), _negative(dividend), result)

    return divide


def _traps(divisor: Expr) -> Expr:
    zero = tirx.EQ(divisor, tirx.const(0, divisor.ty.dtype))
    signed = str(divisor.ty.dtype).startswith("int")
    return tirx.Or(zero, tirx.EQ(divisor, tirx.const(-1, divisor.ty.dtype))) if signed else zero


def _negative(tensor: TeTensor) -> TeTensor:
    """Minus ``tensor``; of the smallest integer itself, for LLVM leaves open what an overflow gives, unsigned too."""
    smallest = tirx.min_value(str(tensor.dtype))
    zero = tirx.const(0, tensor.dtype)
    return _each(tensor, lambda value: tirx.Select(tirx.EQ(value, smallest), value, zero - value))


def _each(tensor: TeTensor, function: Callable[[Expr], Expr]) -> TeTensor:
    return te.compute(tensor.shape, lambda *place: function(tensor(*place)), tag=topi.tag.ELEMWISE)


def safe_shift(name: str) -> Callable[[TeTensor, TeTensor], TeTensor]:
    """Relax operator ``name`` of `SHIFTS`, which LLVM leaves open for shifts by the width or more."""

    def shift(value: TeTensor, amount: TeTensor) -> TeTensor:
        last = int(tirx.const(0, value.dtype).ty.dtype.bits) - 1

        def bounded(a: Expr) -> Expr:
            most = tirx.const(last, amount.dtype)
            return tirx.Select(_beyond(a, last), most, a)

        inside = _each(amount, bounded)
        if name == "relax.right_shift" and str(value.dtype).startswith("int"):
            return topi.right_shift(value, inside)
        result = (topi.left_shift if name == "relax.left_shift" else topi.right_shift)(value, inside)
        return topi.where(_each(amount, lambda a: _beyond(a, last)), topi.full_like(result, 0), result)

    return shift


def _beyond(amount: Expr, last: int) -> Expr:
    high = tirx.GT(amount, tirx.const(last, amount.ty.dtype))
    return tirx.Or(high, amount < 0) if str(amount.ty.dtype).startswith("int") else high
