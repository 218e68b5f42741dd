"""Circular functions, their inverses, sinh and cosh in float32 as arithmetic; `vector_math` says why and how near."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm_ext._tvm import Expr, tirx
from tvm_ext.ir.float_ir import bound, f32, polynomial

SIN_TAIL = (-0.16666666641606454, 0.008333329383537312, -0.00019839334071631667, 2.718304139386908e-06)
"""(sin(t) / t - 1) / t^2 in t^2 over |t| <= pi / 4, relative error of the sine 5e-12."""
COS_TAIL = (-0.49999999724883065, 0.04166662329793081, -0.001388676293566814, 2.4390368069484947e-05)
"""(cos(t) - 1) / t^2 in t^2 over |t| <= pi / 4, error of the cosine 5e-11."""
TAN_PI_8 = math.tan(math.pi / 8)
ATAN_TAIL = (-0.3333331550123741, 0.1999848917950915, -0.14243843661044783, 0.10595962389691385, -0.06083350118815158)
"""(atan(r) / r - 1) / r^2 in r^2 over |r| <= tan(pi / 8), relative error of the arc 7e-10."""
ASIN_TAIL = (
    0.16666659852888063,
    0.07500512133091393,
    0.044515471013228704,
    0.03181981928821498,
    0.014393805668753056,
    0.037578156763841415,
)
"""(asin(s) / s - 1) / s^2 in s^2 over |s| <= 1/2, relative error of the arc 3e-10."""
SINH_TAIL = (0.16666666488717832, 0.008333350598076899, 0.00019836066245509983, 2.817439652074349e-06)
"""(sinh(x) / x - 1) / x^2 in x^2 over |x| <= 1, relative error 6e-11."""
PI_LOW = -8.742278e-8  # pi less the float32 next to it

QUARTERS = (
    (0.6366197690367699, 3.3308114738561656e-09, 2.276010073078396e-18),
    (3.447053946554661, 2.168126039814311e-09, 1.0330342399379403e-17),
    (1.291000947356224, 5.111805381763368e-09, 3.0053182646326145e-18),
    (2.6860949024558067, 2.2660121279383105e-09, 1.0688538751642284e-17),
)
"""2^(27 j) 2/pi modulo 4 as three float64: 29 bits, the next 29 bits, the rest."""


def _with_sign(size: Expr, x: Expr) -> Expr:
    """``size`` with its sign turned where ``x`` has one: -0 too."""
    sign = tirx.bitwise_and(tirx.reinterpret("uint32", x), tirx.const(1 << 31, "uint32"))
    return tirx.reinterpret("float32", tirx.bitwise_xor(tirx.reinterpret("uint32", size), sign))


def _size(x: Expr) -> Expr:
    return tirx.reinterpret(
        "float32", tirx.bitwise_and(tirx.reinterpret("uint32", x), tirx.const((1 << 31) - 1, "uint32"))
    )


def _odd(r: Expr, tail: Sequence[float]) -> Expr:
    """r + r^3 p(r^2)."""
    return bound(r, lambda s: bound(s * s, lambda z: s + s * z * polynomial(z, tail)))


def atan(arguments: Sequence[Expr]) -> Expr:
    """The arc is a multiple of pi / 4 and at most pi / 8 beyond it: atan(a) = pi / 4 + atan((a - 1) / (a + 1))."""

    def of_size(a: Expr) -> Expr:
        steep, middle = a > f32(1 / TAN_PI_8), a > f32(TAN_PI_8)
        over = tirx.Select(steep, f32(-1.0), tirx.Select(middle, a - f32(1.0), a))
        under = tirx.Select(steep, a, tirx.Select(middle, a + f32(1.0), f32(1.0)))
        start = tirx.Select(steep, f32(math.pi / 2), tirx.Select(middle, f32(math.pi / 4), f32(0.0)))
        low = tirx.Select(steep, f32(PI_LOW / 2), tirx.Select(middle, f32(PI_LOW / 4), f32(0.0)))
        return start + (_odd(over / under, ATAN_TAIL) + low)

    return bound(arguments[0], lambda x: _with_sign(bound(_size(x), of_size), x))


def _half_arc(a: Expr, finish: Callable[[Expr, Expr], Expr]) -> Expr:
    """``finish(near, arc)`` for a from 0 to 1: arc is asin(a) where ``near``, up to 1/2.

    Elsewhere it is asin(sqrt((1 - a) / 2)), which is half of acos(a); beyond 1 the root is NaN.
    """
    near = a <= f32(0.5)
    sine = tirx.Select(near, a, tirx.sqrt((f32(1.0) - a) * f32(0.5)))
    return bound(_odd(sine, ASIN_TAIL), lambda arc: finish(near, arc))


def asin(arguments: Sequence[Expr]) -> Expr:
    def finish(near: Expr, arc: Expr) -> Expr:
        return tirx.Select(near, arc, f32(math.pi / 2) - (arc + arc - f32(PI_LOW / 2)))

    return bound(arguments[0], lambda x: _with_sign(bound(_size(x), lambda a: _half_arc(a, finish)), x))


def acos(arguments: Sequence[Expr]) -> Expr:
    def of(x: Expr) -> Expr:
        def finish(near: Expr, arc: Expr) -> Expr:
            negative = x < f32(0.0)
            far = tirx.Select(negative, f32(math.pi) - (arc + arc - f32(PI_LOW)), arc + arc)
            return tirx.Select(near, f32(math.pi / 2) - (_with_sign(arc, x) - f32(PI_LOW / 2)), far)

        return bound(_size(x), lambda a: _half_arc(a, finish))

    return bound(arguments[0], of)


def sin(arguments: Sequence[Expr]) -> Expr:
    def of(x: Expr) -> Expr:
        return _with_sign(_turned(_size(x), _sine), x)

    return bound(arguments[0], of)


def cos(arguments: Sequence[Expr]) -> Expr:
    """cos(x) = sin(x + pi / 2): the sine of the next quarter."""
    return bound(arguments[0], lambda x: _turned(_size(x), lambda quarter, t: _sine(quarter + f32(1.0), t)))


def tan(arguments: Sequence[Expr]) -> Expr:
    def of(x: Expr) -> Expr:
        return _with_sign(_turned(_size(x), lambda q, t: _sine(q, t) / _sine(q + f32(1.0), t)), x)

    return bound(arguments[0], of)


def _turned(a: Expr, body: Callable[[Expr, Expr], Expr]) -> Expr:
    """``body(quarter, t)`` with a = 2 pi m + quarter pi / 2 + t for a from 0 up, quarter from 0 to 3, |t| <= pi / 4.

    After Payne and Hanek, in float64: of a / (pi / 2) the multiples of 4 do not matter, so a = y 2^(27 j), y an integer
    for j > 0, is multiplied by what 2^(27 j) 2 / pi leaves of them. y has 24 bits and the first two parts of that 29
    each: both products are exact, and so are their differences to the nearest integers and the sum of those. Worked
    example: the a nearest to a multiple of pi / 2 is 16367173 * 2^72, which is 1.6e-9 away; y is below 2^50, and y
    times the third part, below 2^-6, is right to 2^-59 or 1.7e-18.
    """
    is_in = [a < f32(2.0 ** (23 + 27 * j)) for j in (1, 2, 3)]

    def of_class(values: Sequence[float], dtype: str) -> Expr:
        chosen: Expr = tirx.const(values[3], dtype)
        for condition, value in reversed(list(zip(is_in, values[:3], strict=True))):
            chosen = tirx.Select(condition, tirx.const(value, dtype), chosen)
        return chosen

    def nearest(value: Expr) -> Expr:
        return tirx.floor(value + _f64(0.5))

    def rest(y: Expr, high: Expr, middle: Expr) -> Expr:
        low = y * of_class([parts[2] for parts in QUARTERS], "float64")
        return bound(
            nearest(high),
            lambda n: bound(nearest(middle), lambda k: bound((high - n) + (middle - k), lambda r: last(n + k, r, low))),
        )

    def last(count: Expr, r: Expr, low: Expr) -> Expr:
        def angle(k: Expr) -> Expr:
            return tirx.Cast("float32", ((r - k) + low) * _f64(math.pi / 2))

        return bound(nearest(r), lambda k: quarter_of(count + k, angle(k)))

    def quarter_of(count: Expr, t: Expr) -> Expr:
        quarter = count - _f64(4.0) * tirx.floor(count * _f64(0.25))
        return bound(tirx.Cast("float32", quarter), lambda q: bound(t, lambda u: body(q, u)))

    def parts(y: Expr) -> Expr:
        products = [y * of_class([each[place] for each in QUARTERS], "float64") for place in (0, 1)]
        return bound(products[0], lambda high: bound(products[1], lambda middle: rest(y, high, middle)))

    scaled = a * of_class([2.0 ** (-27 * j) for j in range(4)], "float32")
    return bound(tirx.Cast("float64", scaled), parts)


def _sine(quarter: Expr, t: Expr) -> Expr:
    """sin(quarter pi / 2 + t) for quarter from 0 to 4: t or 1, times 1 + t^2 p(t^2), with the sign of the half turn."""
    straight = tirx.Or(tirx.EQ(quarter, f32(1.0)), tirx.EQ(quarter, f32(3.0)))
    coefficients = [tirx.Select(straight, f32(c), f32(s)) for s, c in zip(SIN_TAIL, COS_TAIL, strict=True)]
    back = tirx.And(quarter > f32(1.5), quarter < f32(3.5))

    def value(z: Expr, first: Expr) -> Expr:
        total = coefficients[-1]
        for coefficient in reversed(coefficients[:-1]):
            total = total * z + coefficient
        size = first + first * (z * total)
        return bound(size, lambda v: tirx.Select(back, f32(0.0) - v, v))

    return bound(t * t, lambda z: bound(tirx.Select(straight, f32(1.0), t), lambda first: value(z, first)))


def sinh(x: Expr, half_exp: Callable[[Expr], Expr]) -> Expr:
    """With e^a / 2 from ``half_exp``, for e^a is infinite before sinh(a) is; up to 1, where that cancels, a series."""

    def of_size(a: Expr) -> Expr:
        near = a < f32(1.0)
        series = _odd(tirx.Select(near, a, f32(1.0)), SINH_TAIL)
        return bound(half_exp(a), lambda h: tirx.Select(near, series, h - f32(0.25) / h))

    return bound(x, lambda y: _with_sign(bound(_size(y), of_size), y))


def cosh(x: Expr, half_exp: Callable[[Expr], Expr]) -> Expr:
    return bound(half_exp(_size(x)), lambda h: h + f32(0.25) / h)


def _f64(value: float) -> Expr:
    return tirx.const(value, "float64")
