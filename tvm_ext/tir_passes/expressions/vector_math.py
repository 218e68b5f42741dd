"""exp, log, erf, tanh, sigmoid, simple powers and `circular_math` as arithmetic, so that loops run in SIMD registers.

LLVM has no vector form of these functions: each would be one call to the C library per element (about 20 ns). The
polynomials below are our own fits, made in float64 by Chebyshev interpolation and by iteratively reweighted rational
least squares; tests/unit/tir_passes/expressions/test_vector_math.py holds erf and tanh within 6 units in the last
place of float32 and the others within 4.

Half precision is computed in float32 and rounded. Calls that stay, those in float64 among them, are the C library's:
`by_c_library` names it where stock TVM would write arithmetic that cancels, or has no code for vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from tvm_ext._tvm import Call, Expr, Node, structural_map, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import HALF_TYPES
from tvm_ext.ir.float_ir import bound, f32, polynomial

from . import circular_math
from .cut_expressions import binds, name_of

_CIRCULAR = ("sin", "cos", "tan", "asin", "acos", "atan")
FUNCTIONS = frozenset(
    f"tirx.{name}" for name in ("exp", "log", "erf", "tanh", "sigmoid", "pow", *_CIRCULAR, "sinh", "cosh")
)
LIBRARY_FUNCTIONS = frozenset(f"tirx.{name}" for name in ("tanh", "sinh", "cosh"))
AVX512_REGISTER_BYTES = 64  # 512 bits, by definition
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has 9 bits, so n * LN2_HIGH is exact
EXP_HIGHEST, EXP_LOWEST = 89.0, -104.0  # e^x rounds to inf above, to 0 below
HALF_EXP_HIGHEST = 89.5  # e^x / 2 rounds to inf above
EXP_SCALABLE = -150.0  # from here on both halves of the exponent are those of normal numbers
EXP_NORMAL = -87.336  # e^x is normal from here on

EXP_TAIL = (0.49999999552629826, 0.16666577292716622, 0.041666853420181296, 0.008363144923241602, 0.00139012854727106)
"""(e^r - 1 - r) / r^2 over |r| <= ln(2) / 2, relative error of e^r 7e-9."""
LOG_TAIL = (
    0.33333331173580805,
    -0.24999993994907893,
    0.20000714762973018,
    -0.16668057517902013,
    0.14249322685734164,
    -0.1242014395198354,
    0.11677003060541168,
    -0.11514591055789516,
    0.07037648186006609,
)
"""(log(1 + f) - f + f^2 / 2) / f^3 for 1 + f from sqrt(1/2) to sqrt(2), relative error 7e-8."""
SQRT_HALF_BITS, MANTISSA_BITS = 0x3F3504F3, 23  # sqrt(1/2) as a float32, and IEEE 754's fraction
SMALLEST_NORMAL, SUBNORMAL_SCALE, SUBNORMAL_EXPONENT = 1.17549435e-38, 8388608.0, -23.0  # 8388608 = 2^23
# erf(x) / x as a fraction in x^2 over |x| <= 3.9, relative error 2e-8.
ERF_NUMERATOR = (
    1.128379150109673,
    0.1892172856047747,
    0.052609477811148324,
    0.0037195256794456963,
    0.00028472087151227844,
    2.0708634045254583e-06,
)
ERF_DENOMINATOR = (
    1.0,
    0.5010222939066193,
    0.113633982834763,
    0.0148762256321531,
    0.0011529830969705984,
    3.8297954562849964e-05,
)
ERF_ONE = 3.9  # erf is 1 in float32 from here on
# tanh(x) / x as a fraction in x^2 over |x| <= 9.02, relative error 1.3e-9.
TANH_NUMERATOR = (
    0.9999999986913596,
    0.13679920888026526,
    0.003868335010750921,
    2.8007603302525275e-05,
    3.05853581710967e-08,
    -1.2203701677247659e-11,
)
TANH_DENOMINATOR = (1.0, 0.4701325294882119, 0.02724586546492992, 0.00039386438542484195, 1.287376547069099e-06)
TANH_ONE = 9.02  # tanh is 1 in float32 from here on


def has_scale(device: DeviceSpec) -> bool:
    """Whether vectors are multiplied by powers of two in one instruction: AVX-512's vscalef."""
    return device.kind == "cpu" and device.register_bytes == AVX512_REGISTER_BYTES


def expand_math(node: Node, *, scales_by_instruction: bool = False) -> Node:
    """``node`` (a statement or expression) with every float32 call of these functions replaced by arithmetic.

    Of nested calls the inner ones are replaced: `cut_expressions` has to come first.

    ``scales_by_instruction`` is what `has_scale` says of the machine: without such an instruction LLVM would call the
    C library.
    """
    return structural_map(node, (Call, lambda call: _expand(call, _Maker(scales_by_instruction))))


def by_c_library(node: Node) -> Node:
    """``node`` with calls of the C library for the functions that stock TVM does not lower exactly, or not at all.

    Its tanh is (1 - e^-2x) / (1 + e^-2x), which has no digit right near 0; sinh and cosh of vectors end the build.
    """
    return structural_map(node, (Call, _called))


def is_called(call: Call, functions: Set[str]) -> bool:
    """Whether ``call`` is `by_c_library`'s, of one of ``functions``."""
    if name_of(call) != "tirx.call_pure_extern":
        return False
    return f"tirx.{str(call.args[0].value).removesuffix('f')}" in functions


def _called(call: Call) -> Expr:
    if name_of(call) not in LIBRARY_FUNCTIONS:
        return call
    dtype, name = dtype_of(call), name_of(call).removeprefix("tirx.")
    if dtype in HALF_TYPES:
        wide = [tirx.Cast("float32", argument) for argument in call.args]
        return tirx.Cast(dtype, tirx.call_pure_extern("float32", f"{name}f", *wide))
    return tirx.call_pure_extern(dtype, name if dtype == "float64" else f"{name}f", *call.args)


def _expand(call: Call, make: _Maker) -> Expr:
    maker = make.functions().get(name_of(call))
    if maker is None or dtype_of(call) not in ("float32", "float16"):
        return call
    if any(map(binds, call.args)):  # a function that could not be cut off an argument: of the two, one stays a call
        return call
    if dtype_of(call) == "float16":
        wide = maker([tirx.Cast("float32", argument) for argument in call.args])
        return call if wide is None else tirx.Cast("float16", wide)
    expanded = maker(list(call.args))
    return call if expanded is None else expanded


def _power_of_two(exponent: Expr) -> Expr:
    """2**exponent for an int32 from -126 to 127, by writing the exponent's bits."""
    return tirx.reinterpret("float32", (exponent + tirx.const(127, "int32")) * tirx.const(1 << 23, "int32"))


def _within(x: Expr, low: float, high: float) -> Expr:
    """``x`` between two limits; NaN stays NaN, for it compares false with both.

    ``x`` is bound, as whatever stands twice must be: tanh(tanh(tanh(x))) would hold x eight times.
    """

    def limited(y: Expr) -> Expr:
        below = tirx.Select(y > f32(high), f32(high), y)
        return bound(below, lambda z: tirx.Select(z < f32(low), f32(low), z))

    return bound(x, limited)


def _scaled(value: Expr, exponent: Expr) -> Expr:
    """``value * 2**exponent`` for an integral float32 exponent from -217 to 128, in two factors of half as much.

    Worked example, 2^128 * 0.9: neither 2^128 nor its bits exist in float32, but 2^64 does. NaN's exponent is any.
    """

    def twice(n: Expr) -> Expr:
        half = tirx.shift_right(n, tirx.const(1, "int32"))
        return bound(half, lambda h: value * _power_of_two(h) * _power_of_two(n - h))

    return bound(tirx.Cast("int32", exponent), twice)


def _scaled_by_instruction(value: Expr, exponent: Expr) -> Expr:
    n = tirx.Cast("int32", exponent)
    return tirx.call_llvm_pure_intrin("float32", "llvm.ldexp.f32.i32", value, n)


def _with_exponent(value: Expr, exponent: Expr) -> Expr:
    """``value * 2**exponent`` where both are normal: the exponent's bits grow. NaN stays NaN, its exponent counts as 0
    modulo 2^8."""
    n = tirx.shift_left(tirx.Cast("int32", exponent), tirx.const(MANTISSA_BITS, "int32"))
    return tirx.reinterpret("float32", tirx.reinterpret("int32", value) + n)


def _exp_of_near(x: Expr, scale: Callable[[Expr, Expr], Expr]) -> Expr:
    """e^x where it is neither 0 nor far beyond the largest number: ``scale(e^r, n)``."""
    n = tirx.floor(x * f32(1.4426950408889634) + f32(0.5))
    return bound(
        n,
        lambda m: bound(
            x - m * f32(LN2_HIGH) - m * f32(LN2_LOW), lambda r: scale(polynomial(r, (1.0, 1.0, *EXP_TAIL)), m)
        ),
    )


def _log(arguments: Sequence[Expr]) -> Expr:
    """log x = e log 2 + log m with m from sqrt(1/2) to sqrt(2), by taking the exponent's bits off x.

    Worked example: x = 3 is 2^1 * 1.5, but 1.5 is above sqrt(2), so e is 2 and m is 0.75. Subtracting the bits of
    sqrt(1/2) first makes the exponent that of the interval.
    """

    def parts(x: Expr, scaled: Expr, offset: Expr) -> Expr:
        bits = tirx.reinterpret("int32", scaled)
        shift = tirx.const(MANTISSA_BITS, "int32")
        exponent = tirx.shift_right(bits - tirx.const(SQRT_HALF_BITS, "int32"), shift)
        return bound(
            exponent,
            lambda e: bound(
                tirx.reinterpret("float32", bits - tirx.shift_left(e, shift)) - f32(1.0),
                lambda f: special(x, tirx.Cast("float32", e) + offset, f),
            ),
        )

    def special(x: Expr, e: Expr, f: Expr) -> Expr:
        """The sum is a number, whatever x is: what is none is added. LLVM branches around a sum that may not matter,
        element by element, and computes one row's logarithm after another."""
        square = f * f
        tail = f * square * polynomial(f, LOG_TAIL) + e * f32(LN2_LOW) - f32(0.5) * square
        value = (f + tail) + e * f32(LN2_HIGH)
        none = tirx.Select(x < f32(float("inf")), f32(0.0), x)  # inf and NaN are their own logarithms
        none = tirx.Select(x < f32(0.0), f32(float("nan")), none)
        return value + tirx.Select(tirx.EQ(x, f32(0.0)), f32(float("-inf")), none)

    def normal(x: Expr) -> Expr:
        tiny = x < f32(SMALLEST_NORMAL)
        scaled = tirx.Select(tiny, x * f32(SUBNORMAL_SCALE), x)
        offset = tirx.Select(tiny, f32(SUBNORMAL_EXPONENT), f32(0.0))
        return bound(scaled, lambda y: parts(x, y, offset))

    return bound(arguments[0], normal)


def _fraction(arguments: Sequence[Expr], one: float, numerator: Sequence[float], denominator: Sequence[float]) -> Expr:
    """An odd function that is 1 in float32 beyond ``one``: x P(x^2) / Q(x^2)."""
    value = bound(
        _within(arguments[0], -one, one),
        lambda y: bound(y * y, lambda t: y * polynomial(t, numerator) / polynomial(t, denominator)),
    )
    return bound(value, lambda v: _within(v, -1.0, 1.0))  # rounding may not lift it past its limits


def _erf(arguments: Sequence[Expr]) -> Expr:
    return _fraction(arguments, ERF_ONE, ERF_NUMERATOR, ERF_DENOMINATOR)


def _tanh(arguments: Sequence[Expr]) -> Expr:
    return _fraction(arguments, TANH_ONE, TANH_NUMERATOR, TANH_DENOMINATOR)


def _power(arguments: Sequence[Expr]) -> Expr | None:
    """x**c for the exponents that roots and products give exactly enough; None for any other.

    The square root of -0 is -0 and of -inf NaN, where powers are 0 and inf.
    """
    x, exponent = arguments
    constant = getattr(exponent, "value", None)
    roots = {0.5: 1, 0.25: 2, 0.75: 2, 2.0: 0, 1.0: 0, 3.0: 0}
    if constant not in roots:
        return None
    root = x if roots[constant] == 0 else bound(x, _root)
    for _ in range(roots[constant] - 1):
        root = tirx.sqrt(root)
    repeat = {0.75: 3, 2.0: 2, 3.0: 3}.get(constant, 1)

    def product(y: Expr) -> Expr:
        result = y
        for _ in range(repeat - 1):
            result = result * y
        return result

    return bound(root, product)


def _root(x: Expr) -> Expr:
    infinite, nothing = tirx.EQ(x, f32(float("-inf"))), tirx.EQ(x, f32(0.0))
    return tirx.Select(infinite, f32(float("inf")), tirx.Select(nothing, f32(0.0), tirx.sqrt(x)))


def _not_beyond_infinity(x: Expr) -> Expr:
    """``x``, or where e^x is inf a number of which it is, too."""
    return tirx.Select(x > f32(EXP_HIGHEST), f32(EXP_HIGHEST), x)


def exp_below_one(x: Expr, device: DeviceSpec) -> Expr:
    """e^x in float32 for x up to 0, as arithmetic for ``device``; 0 where it is below the smallest normal number.

    Beside a sum of at least 1 that is nothing, but to multiply by a subnormal number takes 150 cycles. A window's mask
    of -100 made an attention 15 times slower for it.
    """
    return _Maker(has_scale(device)).exp_below_one(x)


@dataclass(frozen=True, slots=True)
class _Maker:
    """The functions, with the way in which this machine multiplies by a power of two."""

    scales_by_instruction: bool

    def functions(self) -> dict[str, Callable[[Sequence[Expr]], Expr | None]]:
        return {
            "tirx.exp": self.exp,
            "tirx.log": _log,
            "tirx.erf": _erf,
            "tirx.tanh": _tanh,
            "tirx.sigmoid": self.sigmoid,
            "tirx.pow": _power,
            "tirx.sinh": lambda arguments: circular_math.sinh(arguments[0], self._half_exp),
            "tirx.cosh": lambda arguments: circular_math.cosh(arguments[0], self._half_exp),
            **{f"tirx.{name}": getattr(circular_math, name) for name in _CIRCULAR},
        }

    def exp(self, arguments: Sequence[Expr]) -> Expr:
        """e^x = 2^n e^r with n the nearest integer to x / ln 2; inf comes from scaling by too large an n.

        So would 0, but at 150 cycles for each vector that holds one element as small: processors take what is below
        the smallest normal number step by step. A softmax whose mask adds -10000 was seven times slower for it. So
        where e^x is nothing, 0 is scaled in place of e^r, by an n whose halves are normal. A choice between 0 and the
        scaled number would not do: LLVM sees that x matters on one side alone, and scales whatever x was. (With the
        instruction it is right, for the processor passes over elements that are not chosen.)
        """
        form = self._exp_by_instruction if self.scales_by_instruction else self._exp_by_halves
        return bound(arguments[0], form)

    def exp_below_one(self, x: Expr) -> Expr:
        """e^x of x up to 0, with 0 for what is smaller than the smallest normal number.

        Powers that are normal, and no others, come of adding n to the exponent of e^r: the others are not chosen.
        """
        if self.scales_by_instruction:
            return bound(x, lambda y: self._exp_by_instruction(y, EXP_NORMAL, lambda z: z))
        return bound(x, lambda y: tirx.Select(y < f32(EXP_NORMAL), f32(0.0), _exp_of_near(y, _with_exponent)))

    def _exp_by_instruction(
        self, x: Expr, lowest: float = EXP_LOWEST, not_above: Callable[[Expr], Expr] = _not_beyond_infinity
    ) -> Expr:
        is_nothing = x < f32(lowest)
        near = tirx.Select(is_nothing, f32(0.0), not_above(x))
        scaled = bound(near, lambda y: _exp_of_near(y, _scaled_by_instruction))
        return tirx.Select(is_nothing, f32(0.0), scaled)

    def _exp_by_halves(self, x: Expr) -> Expr:
        def scaled(fraction: Expr, n: Expr) -> Expr:
            return _scaled(tirx.Select(x < f32(EXP_LOWEST), f32(0.0), fraction), n)

        near = tirx.Select(x < f32(EXP_SCALABLE), f32(EXP_SCALABLE), _not_beyond_infinity(x))
        return bound(near, lambda y: _exp_of_near(y, scaled))

    def _half_exp(self, a: Expr) -> Expr:
        """e^a / 2 for a from 0 up, which is infinite where sinh(a) is."""
        scale = _scaled_by_instruction if self.scales_by_instruction else _scaled
        near = bound(a, lambda y: tirx.Select(y > f32(HALF_EXP_HIGHEST), f32(HALF_EXP_HIGHEST), y))
        return bound(near, lambda y: _exp_of_near(y, lambda value, n: scale(value, n - f32(1.0))))

    def sigmoid(self, arguments: Sequence[Expr]) -> Expr:
        return f32(1.0) / (f32(1.0) + self.exp([f32(0.0) - arguments[0]]))
