"""The largest error of each element-wise function, in units in the last place (ulp), and its special values.

    python -m tests.support.numerics            # prints the tables of docs/numerics.md, as measured here

Each function is one ONNX node that goes through `relay.frontend.from_onnx` and `relay.build` for this machine's CPU.
The reference is its formula in C's long double. An ulp is the distance from the exact result to the next number of its
type. Whole kernels (`numeric_kernels.py`) have errors in ulps of the largest result of a row.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import tvm
from onnx import helper, numpy_helper

from tvm_ext import relay
from tvm_ext.runtime.graph_module import flatten_outputs

Array = npt.NDArray[Any]

OPSET = 23
ALL = 20000
LONG = np.longdouble
HALVES = ("float16", "bfloat16")
TYPES = {name: np.dtype(name if name != "bfloat16" else ml_dtypes.bfloat16) for name in ("float64", *HALVES, "float32")}
DOUBLE_ULPS = 4.0  # at most; the C library's functions, and sums of a few of them
SPECIAL = (0.0, -0.0, math.inf, -math.inf, math.nan)
TINY = 1e-45  # in float32 the smallest subnormal number


def _erf(x: Array) -> Array:
    """2 / sqrt(pi) e^(-x^2) sum 2^n x^(2n + 1) / (1 3 5 ... (2n + 1)): terms of one sign, so that nothing cancels."""
    near = np.clip(x, -7, 7)
    term, total = near.copy(), near.copy()
    for n in range(1, 300):
        term = term * (2 * near * near) / (2 * n + 1)
        total = total + term
        if np.all(np.abs(term) <= np.abs(total) * 1e-22):
            break
    return np.where(np.abs(x) >= 7, np.sign(x), 2 / np.sqrt(PI) * np.exp(-near * near) * total)


PI = LONG("3.14159265358979323846264338327950288")


def _limits(dtype: np.dtype) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call] # of bfloat16 too, unlike NumPy's


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """An ONNX operator, the first word of its name in `FUNCTIONS`.

    ``reference`` is its formula. It may err by ``ulps`` in float32 between ``low`` and ``high``, by `double_ulps` in
    float64 there or within ``wide``: ``library_ulps`` where the C library, which computes it, errs by less.
    ``exponent`` is a second input, a constant.
    """

    reference: Callable[[Array], Array]
    low: float
    high: float
    ulps: float
    wide: tuple[float, float] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    exponent: float | None = None
    library_ulps: float = DOUBLE_ULPS

    def expected(self, values: Array) -> Array:
        """The exact results for ``values``, but for the last bits of a long double."""
        with np.errstate(all="ignore"):
            if self.exponent is None:
                return np.asarray(self.reference(values.astype(LONG)))
            # An array of exponents: for a single 0.5 NumPy takes roots, of -inf too.
            rounded = np.full(values.shape, self.exponent).astype(values.dtype)
            return np.asarray(np.power(values.astype(LONG), rounded.astype(LONG)))

    @property
    def double_ulps(self) -> float:
        return min(self.ulps, self.library_ulps)

    def span(self, dtype: np.dtype) -> tuple[float, float]:
        """Between which numbers of ``dtype`` the function is sampled."""
        low, high = self.wide if self.wide is not None and dtype == np.float64 else (self.low, self.high)
        limits = _limits(dtype)
        return max(low, float(limits.min)), min(high, float(limits.max))


def _single(value: float) -> Array:
    """An attribute's value: they are float32."""
    return np.asarray(np.float32(value), LONG)


def _softplus(x: Array) -> Array:
    return np.asarray(np.logaddexp(LONG(0), x))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / PI) * (x + LONG("0.044715") * x**3))))


def _selu(x: Array) -> Array:
    scale, alpha = _single(1.05070102), _single(1.67326319)  # ONNX's
    return np.asarray(scale * np.where(x > 0, x, alpha * (np.exp(x) - 1)))


def _power(exponent: float, low: float, high: float, ulps: float) -> Function:
    return Function(reference=lambda x: np.power(x, exponent), low=low, high=high, ulps=ulps, exponent=exponent)


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
    "Exp": Function(reference=np.exp, low=-87, high=88.7, ulps=2, wide=(-708, 709)),
    "Log": Function(reference=np.log, low=1e-37, high=3e38, ulps=2, wide=(1e-300, 1e300)),
    "Sigmoid": Function(reference=lambda x: 1 / (1 + np.exp(-x)), low=-87, high=88, ulps=4, wide=(-708, 709)),
    "Tanh": Function(reference=np.tanh, low=-20, high=20, ulps=6),
    "Erf": Function(reference=_erf, low=-6, high=6, ulps=6),
    "Softplus": Function(reference=_softplus, low=-87, high=1e4, ulps=5),
    "Mish": Function(reference=lambda x: x * np.tanh(_softplus(x)), low=-80, high=1e4, ulps=8),
    "Atanh": Function(reference=np.arctanh, low=-0.9999, high=0.9999, ulps=8),
    "Gelu": Function(reference=lambda x: x / 2 * (1 + _erf(x / np.sqrt(LONG(2)))), low=0, high=3e38, ulps=4),
    "Gelu tanh": Function(reference=_gelu_tanh, low=0, high=3e38, ulps=6, attributes={"approximate": "tanh"}),
    "Sqrt": Function(reference=np.sqrt, low=0, high=3e38, ulps=1),
    "Reciprocal": Function(reference=lambda x: 1 / x, low=1e-37, high=1e37, ulps=1),
    "Elu": Function(reference=lambda x: np.where(x > 0, x, np.exp(x) - 1), low=0, high=3e38, ulps=1),
    "HardSigmoid": Function(reference=lambda x: np.clip(_single(0.2) * x + 0.5, 0, 1), low=-2, high=1e4, ulps=2),
    "HardSwish": Function(reference=lambda x: x * np.clip(x / 6 + 0.5, 0, 1), low=-2, high=1e4, ulps=4),
    "Softsign": Function(reference=lambda x: x / (1 + np.abs(x)), low=-1e30, high=1e30, ulps=2),
    "Relu": Function(reference=lambda x: np.maximum(x, 0), low=-3e38, high=3e38, ulps=0),
    "LeakyRelu": Function(reference=lambda x: np.where(x < 0, _single(0.01) * x, x), low=-3e38, high=3e38, ulps=1),
    "Sign": Function(reference=np.sign, low=-3e38, high=3e38, ulps=0),
    "Selu": Function(reference=_selu, low=0, high=3e38, ulps=2),
    "Celu": Function(reference=lambda x: np.where(x > 0, x, np.exp(x) - 1), low=0, high=3e38, ulps=1),
    "Sin": Function(reference=np.sin, low=-100, high=100, ulps=2, library_ulps=1),
    "Cos": Function(reference=np.cos, low=-100, high=100, ulps=2, library_ulps=1),
    "Tan": Function(reference=np.tan, low=-100, high=100, ulps=4),
    "Asin": Function(reference=np.arcsin, low=-1, high=1, ulps=3, library_ulps=2),
    "Acos": Function(reference=np.arccos, low=-1, high=1, ulps=2),
    "Atan": Function(reference=np.arctan, low=-3e38, high=3e38, ulps=2),
    "Sinh": Function(reference=np.sinh, low=-89, high=89, ulps=4, wide=(-709, 709)),
    "Cosh": Function(reference=np.cosh, low=-89, high=89, ulps=4, wide=(-709, 709)),
    "Asinh": Function(reference=np.arcsinh, low=-3e38, high=3e38, ulps=4),
    "Acosh": Function(reference=np.arccosh, low=1, high=3e38, ulps=4),
    **POWERS,
}
"""Ranges of Gelu, Elu, Selu and Celu leave out where their own formulas, 1 + erf(x) and e^x - 1, cancel: there the
error is half an ulp of 1, as in ONNX's reference."""

HALF_ULPS = 1.0
"""What each function may err by in float16 and bfloat16: computed in float32 and rounded once, constants aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One node to run: its first operand is an input of the model, the others are constants."""

    operator: str
    values: Array
    constants: Sequence[Array] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


def run_nodes(nodes: Sequence[Node]) -> list[Array]:
    """The results of all ``nodes``, which do not read each other, as one model is built for this machine."""
    written, inputs, outputs, known = [], [], [], []
    for i, node in enumerate(nodes):
        code = helper.np_dtype_to_tensor_dtype(node.values.dtype)
        names = [f"c{i}_{k}" for k in range(len(node.constants))]
        written.append(helper.make_node(node.operator, [f"x{i}", *names], [f"y{i}"], **node.attributes))
        inputs.append(helper.make_tensor_value_info(f"x{i}", code, node.values.shape))
        outputs.append(helper.make_tensor_value_info(f"y{i}", code, None))
        known += [numpy_helper.from_array(value, name) for value, name in zip(node.constants, names, strict=True)]
    graph = helper.make_graph(written, "nodes", inputs, outputs, known)
    model = helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=11)
    module, params = relay.frontend.from_onnx(model)
    library = relay.build(module, "llvm", params=params)
    found = library.vm()["main"](*(tvm.runtime.tensor(node.values) for node in nodes))
    return [np.asarray(item.numpy()) for item in flatten_outputs(found)]


def _node(name: str, values: Array) -> Node:
    function = FUNCTIONS[name]
    constants = [] if function.exponent is None else [np.asarray(function.exponent).astype(values.dtype)]
    return Node(operator=name.split()[0], values=values, constants=constants, attributes=function.attributes)


def samples(function: Function, count: int, dtype: np.dtype, seed: int = 0) -> Array:
    """Values all over the range, on a linear and a logarithmic scale; of half precision normal numbers."""
    low, high = function.span(dtype)
    if dtype.name in HALVES:
        every = np.arange(1 << 16, dtype=np.uint16)[:: max(1, ALL // count)].view(dtype)
        with np.errstate(invalid="ignore"):  # of the NaNs among them
            wide = every.astype(np.float64)
        return np.asarray(every[(np.abs(wide) >= float(_limits(dtype).tiny)) & (wide >= low) & (wide <= high)])
    rng = np.random.default_rng(seed)
    even = rng.uniform(low / 2, high / 2, count) * 2  # (their distance may be beyond the largest number)
    steps = np.exp(rng.uniform(math.log(1e-37), math.log(max(abs(low), abs(high))), count))
    both = np.concatenate([even, steps, -steps]).astype(dtype)
    return np.asarray(both[(both >= dtype.type(low)) & (both <= dtype.type(high))])


def errors_ulp(actual: Array, expected: Array, scale: Array | None = None) -> Array:
    """Errors in ulps of ``actual``'s type, of the exact result or of ``scale``, where that is a normal number."""
    limits = _limits(actual.dtype)
    size = np.abs(expected if scale is None else np.broadcast_to(scale, expected.shape))
    normal = (size == 0) | ((size >= LONG(float(limits.tiny))) & (size <= LONG(float(limits.max))))
    _, exponent = np.frexp(np.where(size == 0, LONG(float(limits.tiny)), size)[normal])  # size is below 2^exponent
    spacing = np.ldexp(LONG(1), exponent - 1 - int(limits.nmant))
    errors = np.abs(actual[normal].astype(LONG) - expected[normal]) / spacing
    return np.asarray(np.where(np.isnan(errors), np.inf, errors).astype(np.float64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What was found of one function: its largest error in ulps, and its values at `SPECIAL`."""

    name: str
    largest_ulp: float
    special: tuple[float, ...]
    expected_special: tuple[float, ...]


def measure(names: Iterable[str] = FUNCTIONS, count: int = ALL, dtype: str = "float32") -> list[Measured]:
    """Run functions over their ranges and at the special values."""
    bodies = {name: samples(FUNCTIONS[name], count, TYPES[dtype]) for name in names}
    others = np.array([*SPECIAL, TINY]).astype(TYPES[dtype])
    nodes = {name: _node(name, np.concatenate([body, others])) for name, body in bodies.items()}
    results = run_nodes([*nodes.values()])
    return [_measured(name, nodes[name].values, actual) for name, actual in zip(nodes, results, strict=True)]


def _measured(name: str, values: Array, actual: Array) -> Measured:
    expected = FUNCTIONS[name].expected(values)
    body, special = slice(0, -len(SPECIAL) - 1), slice(-len(SPECIAL) - 1, -1)
    return Measured(
        name=name,
        largest_ulp=float(np.max(errors_ulp(actual[body], expected[body]))),
        special=tuple(map(float, actual[special])),
        expected_special=tuple(map(float, expected[special])),
    )


def table(found: Sequence[Measured]) -> str:
    """The Markdown table of float32 in docs/numerics.md."""
    header = "| operator | sampled | largest error, ulp | allowed | 0 | −0 | ∞ | −∞ | NaN |\n" + "|---" * 9 + "|"
    rows = []
    for item in found:
        function = FUNCTIONS[item.name]
        values = " | ".join(f"{value:g}" for value in item.special)
        span = f"{function.low:g} to {function.high:g}"
        rows.append(f"| {item.name} | {span} | {item.largest_ulp:.1f} | {function.ulps:g} | {values} |")
    return "\n".join([header, *rows])


def table_of_others() -> str:
    """The Markdown table of the other types."""
    header = "| operator | sampled in float64 | float64 | allowed | float16 | bfloat16 | allowed |\n" + "|---" * 7 + "|"
    rows = []
    for found in zip(*(measure(dtype=dtype) for dtype in ("float64", *HALVES)), strict=True):
        function = FUNCTIONS[found[0].name]
        low, high = function.span(TYPES["float64"])
        wide, *halves = (f"{item.largest_ulp:.2f}" for item in found)
        cells = [found[0].name, f"{low:g} to {high:g}", wide, f"{function.double_ulps:g}", *halves, f"{HALF_ULPS:g}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([header, *rows])


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    from .numeric_kernels import table_of_kernels

    tables = [table(measure()), table_of_others(), table_of_kernels()]
    sys.stdout.write("\n\n".join(tables) + "\n")


if __name__ == "__main__":
    main()
