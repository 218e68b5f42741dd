"""One random operator as data: enough to build it, to compute its reference and to repeat it from a line of JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def is_float(value: Array) -> bool:
    """Whether ``value`` has floats; bfloat16 is no ``np.floating``."""
    return "float" in str(value.dtype)


Values = Literal["signed", "positive", "index", "bool", "integer", "divisor"]
"""How an input is filled: uniformly over [-1, 1], [0.5, 1.5], [0, limit), a bool, [-limit, limit] or [1, limit]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseInput:
    """One parameter of ``main``. ``constant``: bound at build time, as a weight is.

    ``scale`` multiplies floating-point values: weights get 3/sqrt(K), with which a sum of K products of uniform
    values (variance 1/3 each) has variance K * 1/3 * 1/3 * 9/K = 1 whatever K is. ``limit`` is of the whole numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    constant: bool = False
    values: Values = "signed"
    scale: float = 1.0
    limit: int = 0

    def draw(self, generator: np.random.Generator) -> Array:
        """Random values of this shape, rounded to this dtype."""
        if self.values == "index":
            return generator.integers(0, self.limit, self.shape).astype(self.dtype)
        if self.values in ("integer", "divisor"):
            lowest = 1 if self.values == "divisor" else -self.limit
            return generator.integers(lowest, self.limit + 1, self.shape).astype(self.dtype)
        if self.values == "bool":
            return generator.integers(0, 2, self.shape).astype(np.bool_)
        low, high = (0.5, 1.5) if self.values == "positive" else (-1.0, 1.0)
        return np.asarray(generator.uniform(low, high, self.shape) * self.scale).astype(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCase:
    """``epilogue(operator(prologue(inputs[0]), inputs[1:arity], attributes), inputs[arity:])``.

    ``kind`` is the slot of the generator ("conv2d_depthwise"), ``operator`` the name under ``relax.op`` ("nn.conv2d").
    ``attributes`` maps names to integers: strides, axes, flags as 0 or 1, permutations. ``layouts`` are those of data
    and weight. ``arity`` counts the operator's own inputs; those of prologue and epilogue follow it.
    ``reduction_size`` K is the number of elements that go into one element of the result, for the tolerance.
    ``typical_magnitude`` is the size of a result that may vanish by cancellation, 0 where it cannot.
    ``num_threads`` and ``epsilon`` are build options. ``device``: a row of the tables ("cpu-avx2") to build for where
    this CPU can run its code; narrower registers give other tiles. ``precision``: what float32 products run in.
    """

    seed: int
    index: int
    kind: str
    operator: str
    inputs: tuple[CaseInput, ...]
    attributes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    layouts: tuple[str, ...] = ()
    arity: int = 1
    prologue: str = "none"
    epilogue: str = "none"
    out_dtype: str | None = None
    reduction_size: int = 1
    typical_magnitude: float = 0.0
    must_be_constructed: bool = True
    num_threads: int | None = None
    epsilon: float = 0.0
    device: str = ""
    precision: str = "float32"

    def __post_init__(self) -> None:
        assert 1 <= self.arity <= len(self.inputs), self

    def get(self, name: str) -> tuple[int, ...]:
        """The attribute ``name``."""
        return dict(self.attributes)[name]

    def flag(self, name: str) -> bool:
        return bool(self.get(name)[0])

    def core(self) -> OperatorCase:
        """The operator alone, without prologue and epilogue."""
        return replace(self, inputs=self.inputs[: self.arity], prologue="none", epilogue="none")

    def data(self, draw: int) -> list[Array]:
        """The values of all inputs; constants are the same for every ``draw``."""
        return [
            item.draw(np.random.default_rng([self.seed, self.index, position, 0 if item.constant else draw + 1]))
            for position, item in enumerate(self.inputs)
        ]

    def __str__(self) -> str:
        inputs = ", ".join(
            f"{item.dtype}{list(item.shape)}{' constant' if item.constant else ''}" for item in self.inputs
        )
        attributes = ", ".join(f"{name}={list(value)}" for name, value in self.attributes)
        around = f"prologue {self.prologue}, epilogue {self.epilogue}"
        built = f"threads {self.num_threads or 'all'}, epsilon {self.epsilon:g}"
        built += f", for {self.device}" if self.device else ""
        return f"#{self.index} {self.operator}({inputs}; {attributes}) {'/'.join(self.layouts)} {around}; {built}"
