"""The operations of TensorIR on numbers as functions of NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tvm_ext.errors import IllegalRewrite
from tvm_ext.support.arrays import Array
from tvm_ext.support.limits import check_count


def _truncated_quotient(a: Array, b: Array) -> Array:
    """Integers divided towards 0, as the processor does."""
    if a.dtype.kind not in "iu":
        return np.divide(a, b)
    return (a - np.fmod(a, b)) // b


def _floats_refused(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    def of_integers(a: Array, b: Array) -> Array:
        if a.dtype.kind not in "iu":
            raise IllegalRewrite("it takes the floor of a quotient of floats")
        return function(a, b)

    return of_integers


BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "Add": lambda a, b: np.logical_or(a, b) if a.dtype == bool else np.add(a, b),
    "Sub": np.subtract,
    "Mul": lambda a, b: np.logical_and(a, b) if a.dtype == bool else np.multiply(a, b),
    "Div": _truncated_quotient,
    "Mod": np.fmod,
    "FloorDiv": _floats_refused(np.floor_divide),
    "FloorMod": _floats_refused(np.mod),
    # NaN where an operand is NaN, as our kernels have it (`exact_floats.pass_nan_on`).
    "Max": np.maximum,
    "Min": np.minimum,
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}


def _round_half_away(x: Array) -> Array:
    """C's ``round``. Worked example: 2.5 is 3; 0.49999997 + 0.5 would be 1 in float32, hence the comparison."""
    whole = np.trunc(x)
    return np.where(np.abs(x - whole) >= 0.5, whole + np.copysign(np.ones_like(x), x), whole)


def _by_python(function: Callable[[float], float]) -> Callable[[Array], Array]:
    """A function that NumPy lacks, element by element in float64."""

    def of(x: Array) -> Array:
        check_count("folded_calls_of_python", x.size, "elements of a function that NumPy lacks")
        values = [function(value) for value in x.astype("f8").ravel()]
        return np.asarray(np.asarray(values, "f8").reshape(x.shape), x.dtype)

    return of


_erf = _by_python(math.erf)

_NAMED_ALIKE = (
    "exp exp2 log log10 log1p sqrt sin cos tan sinh cosh tanh floor ceil trunc isnan isinf isfinite fmod hypot copysign"
)
_INVERSES = "asin acos atan asinh acosh atanh"

FUNCTIONS: dict[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in _NAMED_ALIKE.split()},
    **{name: getattr(np, f"arc{name[1:]}") for name in _INVERSES.split()},
    "log2": np.log2,
    "atan2": np.arctan2,
    "fabs": np.abs,
    "abs": np.abs,
    "pow": np.power,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "sigmoid": lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype),
    "nearbyint": np.rint,
    "round": _round_half_away,
    "erf": _erf,
    "extern.erf": _erf,
    "likely": lambda x: x,
}
"""By name without "tirx." or "prim.": operators move from one to the other between releases."""

REDUCTIONS: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "sum": lambda x, axes: np.add.reduce(x, axis=axes, dtype=x.dtype, keepdims=True),
    "prod": lambda x, axes: np.multiply.reduce(x, axis=axes, dtype=x.dtype, keepdims=True),
    "max": lambda x, axes: np.maximum.reduce(x, axis=axes, keepdims=True),
    "min": lambda x, axes: np.minimum.reduce(x, axis=axes, keepdims=True),
}


def converted(values: Array, dtype: str, *, guarded: bool) -> Array:
    """``values`` in ``dtype``; IllegalRewrite where a float has no integer there, unless nobody may use it."""
    if values.dtype.kind == "f" and np.dtype(dtype).kind in "iu" and not guarded:
        limit = np.iinfo(dtype)
        with np.errstate(invalid="ignore"):
            inside = np.isfinite(values) & (values > float(limit.min) - 1) & (values < float(limit.max) + 1)
        if not inside.all():
            raise IllegalRewrite(f"a number is converted to {dtype}, which does not hold it")
    return values.astype(dtype)
