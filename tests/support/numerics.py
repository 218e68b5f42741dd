"""The largest error of each element-wise function, in units in the last place (ulp), and its special values.

    python -m tests.support.numerics            # prints the table of docs/numerics.md, as measured here

Each function is one ONNX node that goes through `relay.frontend.from_onnx` and `relay.build` for this machine's CPU.
The reference is its formula in float64. An ulp is the distance from the exact result to the next number of its type.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import tvm
from onnx import helper

from tvm_ext import relay

Array = npt.NDArray[Any]

SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)
TINY = 1e-45  # in float32 the smallest subnormal number


def _elementwise(function: Callable[[float], float]) -> Callable[[Array], Array]:
    vectorized: Callable[[Array], Array] = np.vectorize(function, otypes=[np.float64])
    return vectorized


_erf, _erfc = _elementwise(math.erf), _elementwise(math.erfc)


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """An ONNX operator, the first word of its name in `FUNCTIONS`.

    ``reference`` is its formula in float64; it may err by ``ulps`` between ``low`` and ``high``. ``exponent`` is a
    second input, a constant.
    """

    reference: Callable[[Array], Array]
    low: float
    high: float
    ulps: float
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 20
    exponent: float | None = None


def _softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(0, x))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _selu(x: Array) -> Array:
    scale, alpha = 1.0507009873554805, 1.6732632423543772  # ONNX's, as float32
    return np.asarray(scale * np.where(x > 0, x, alpha * (np.exp(x) - 1)))


def _power(exponent: float, low: float, high: float, ulps: float) -> Function:
    """The reference takes an array of exponents: for a single 0.5 NumPy takes roots, of -inf too."""
    rounded = float(np.float32(exponent))
    return Function(
        reference=lambda x: np.power(x, np.full_like(x, rounded)), low=low, high=high, ulps=ulps, exponent=exponent
    )


POWERS = {
    "Pow 0.5": _power(0.5, 0, 3e38, 1),
    "Pow 0.25": _power(0.25, 0, 3e38, 2),
    "Pow 0.75": _power(0.75, 0, 3e38, 4),
    "Pow 1": _power(1, -3e38, 3e38, 0),
    "Pow 2": _power(2, -1e19, 1e19, 1),
    "Pow 3": _power(3, -6e12, 6e12, 2),
    "Pow 1.7": _power(1.7, 0, 4e22, 2),
    "Pow -1": _power(-1, 1e-37, 1e37, 2),
    "Pow -0.5": _power(-0.5, 1e-37, 3e38, 2),
    "Pow 0": _power(0, -3e38, 3e38, 0),
}
FUNCTIONS: dict[str, Function] = {
    "Exp": Function(reference=np.exp, low=-87, high=88.7, ulps=2),
    "Log": Function(reference=np.log, low=1e-37, high=3e38, ulps=2),
    "Sigmoid": Function(reference=lambda x: 1 / (1 + np.exp(-x)), low=-87, high=88, ulps=4),
    "Tanh": Function(reference=np.tanh, low=-20, high=20, ulps=6),
    "Erf": Function(reference=_erf, low=-6, high=6, ulps=6),
    "Softplus": Function(reference=_softplus, low=-87, high=1e4, ulps=5),
    "Mish": Function(reference=lambda x: x * np.tanh(_softplus(x)), low=-80, high=1e4, ulps=8, opset=18),
    "Atanh": Function(reference=np.arctanh, low=-0.9999, high=0.9999, ulps=8),
    "Gelu": Function(reference=lambda x: x * 0.5 * _erfc(-x / math.sqrt(2)), low=0, high=3e38, ulps=4),
    "Gelu tanh": Function(reference=_gelu_tanh, low=0, high=3e38, ulps=6, attributes={"approximate": "tanh"}),
    "Sqrt": Function(reference=np.sqrt, low=0, high=3e38, ulps=1),
    "Reciprocal": Function(reference=lambda x: 1 / x, low=1e-37, high=1e37, ulps=1),
    "Elu": Function(reference=lambda x: np.where(x > 0, x, np.exp(x) - 1), low=0, high=3e38, ulps=1),
    "HardSigmoid": Function(reference=lambda x: np.clip(0.2 * x + 0.5, 0, 1), low=-2, high=1e4, ulps=2),
    "HardSwish": Function(reference=lambda x: x * np.clip(x / 6 + 0.5, 0, 1), low=-2, high=1e4, ulps=4),
    "Softsign": Function(reference=lambda x: x / (1 + np.abs(x)), low=-1e30, high=1e30, ulps=2),
    "Relu": Function(reference=lambda x: np.maximum(x, 0), low=-3e38, high=3e38, ulps=0),
    "LeakyRelu": Function(reference=lambda x: np.where(x < 0, 0.01 * x, x), low=-3e38, high=3e38, ulps=1),
    "Sign": Function(reference=np.sign, low=-3e38, high=3e38, ulps=0),
    "Selu": Function(reference=_selu, low=0, high=3e38, ulps=2),
    "Celu": Function(reference=lambda x: np.where(x > 0, x, np.exp(x) - 1), low=0, high=3e38, ulps=1),
    "Sin": Function(reference=np.sin, low=-100, high=100, ulps=1),
    "Cos": Function(reference=np.cos, low=-100, high=100, ulps=1),
    "Tan": Function(reference=np.tan, low=-100, high=100, ulps=4),
    "Asin": Function(reference=np.arcsin, low=-1, high=1, ulps=2),
    "Acos": Function(reference=np.arccos, low=-1, high=1, ulps=2),
    "Atan": Function(reference=np.arctan, low=-3e38, high=3e38, ulps=2),
    "Sinh": Function(reference=np.sinh, low=-89, high=89, ulps=4),
    "Cosh": Function(reference=np.cosh, low=-89, high=89, ulps=4),
    "Asinh": Function(reference=np.arcsinh, low=-3e38, high=3e38, ulps=4),
    "Acosh": Function(reference=np.arccosh, low=1, high=3e38, ulps=4),
    **POWERS,
}
"""Ranges of Gelu, Elu, Selu and Celu leave out where their own formulas, 1 + erf(x) and e^x - 1, cancel: there the
error is half an ulp of 1, as in ONNX's reference."""

HALF_ULPS = 4
"""What each function may err by in half precision."""


def run(name: str, values: Array) -> Array:
    """The operator of ``values`` as it is built for this machine."""
    function = FUNCTIONS[name]
    code = helper.np_dtype_to_tensor_dtype(values.dtype)
    exponents = [] if function.exponent is None else [helper.make_tensor("p", code, [], [function.exponent])]
    node = helper.make_node(name.split()[0], ["x", *(item.name for item in exponents)], ["y"], **function.attributes)
    ends = [helper.make_tensor_value_info(end, code, values.shape) for end in "xy"]
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], exponents)
    model = helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", function.opset)], ir_version=9)
    module, params = relay.frontend.from_onnx(model)
    library = relay.build(module, "llvm", params=params)
    outcome = library.vm()["main"](tvm.runtime.tensor(values))
    return np.asarray((outcome if hasattr(outcome, "numpy") else outcome[0]).numpy())


def samples(function: Function, count: int, seed: int = 0) -> Array:
    """Values all over the range, on a linear and a logarithmic scale, as float32."""
    rng = np.random.default_rng(seed)
    even = rng.uniform(function.low, function.high, count)
    steps = np.exp(rng.uniform(math.log(1e-37), math.log(max(abs(function.low), abs(function.high))), count))
    both = np.concatenate([even, steps, -steps]).astype(np.float32)
    return np.asarray(both[(both >= np.float32(function.low)) & (both <= np.float32(function.high))])


def half_error_ulp(name: str) -> float:
    """The largest error of a function over every float16 of its range, subnormal ones left out."""
    function = FUNCTIONS[name]
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every) & (np.abs(every) >= np.finfo(np.float16).tiny)]
    every = every[(every.astype(np.float64) >= function.low) & (every.astype(np.float64) <= function.high)]
    with np.errstate(all="ignore"):
        expected = np.asarray(function.reference(every.astype(np.float64)))
        return float(np.max(errors_ulp(run(name, every), expected)))


def errors_ulp(actual: Array, expected: Array) -> Array:
    """Errors in ulps of ``actual``'s type, where the exact result is one of its normal numbers."""
    rounded = expected.astype(actual.dtype)
    normal = np.isfinite(rounded) & ((np.abs(rounded) >= np.finfo(actual.dtype).tiny) | (rounded == 0))
    below_largest = np.nextafter(np.finfo(actual.dtype).max, actual.dtype.type(0))  # which itself has no next number
    spacing = np.spacing(np.minimum(np.abs(rounded[normal]), below_largest)).astype(np.float64)
    return np.asarray(np.abs(actual[normal].astype(np.float64) - expected[normal]) / spacing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was found of one function: its largest error in ulps, and its values at `SPECIAL`."""

    name: str
    largest_ulp: float
    special: tuple[float, ...]
    expected_special: tuple[float, ...]


def measure(name: str, count: int = 20000) -> Measured:
    """Run one function over its range and at the special values."""
    function = FUNCTIONS[name]
    values = np.concatenate([samples(function, count), np.array([*SPECIAL, TINY], np.float32)])
    actual = run(name, values)
    with np.errstate(all="ignore"):
        expected = np.asarray(function.reference(values.astype(np.float64)))
    body = slice(0, len(values) - len(SPECIAL) - 1)
    special = slice(len(values) - len(SPECIAL) - 1, len(values) - 1)
    return Measured(
        name=name,
        largest_ulp=float(np.max(errors_ulp(actual[body], expected[body]))),
        special=tuple(map(float, actual[special])),
        expected_special=tuple(map(float, expected[special])),
    )


def table(found: Sequence[Measured]) -> str:
    """The Markdown table of docs/numerics.md."""
    header = "| operator | sampled | largest error, ulp | allowed | 0 | −0 | ∞ | −∞ | NaN |\n" + "|---" * 9 + "|"
    rows = []
    for item in found:
        function = FUNCTIONS[item.name]
        values = " | ".join(f"{value:g}" for value in item.special)
        span = f"{function.low:g} to {function.high:g}"
        rows.append(f"| {item.name} | {span} | {item.largest_ulp:.1f} | {function.ulps:g} | {values} |")
    return "\n".join([header, *rows])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.stdout.write(table([measure(name) for name in FUNCTIONS]) + "\n")


if __name__ == "__main__":
    main()
