"""A chain while it is drawn: its tensors, with what is known of their values, and the nodes so far."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..random_operators.record import CaseInput
from ..random_operators.sizes import require
from .record import AttributeValue, ChainInput, ChainNode

EXACT_BELOW = {
    "bfloat16": 2.0**8,
    "float16": 2.0**11,
    "float32": 2.0**24,
    "float64": 2.0**53,
    "int8": 127.0,
    "uint8": 255.0,
    "int32": 2.0**31 - 1,
    "int64": 2.0**53,
    "bool": 1.0,
}
"""Up to which all whole numbers are values of a type; integers must stay below, floating point is exact there."""

LARGEST = {"bfloat16": 1e9, "float16": 3e4, "float32": 1e9, "float64": 1e9}
"""No chain goes beyond: what overflows has no reference."""

DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24}
"""Bits of the significands that round; other types round nothing away here, float64 least."""

MOST_ELEMENTS = 2**15
MOST_WORK = 2**20
WHOLE = 3
"""Inputs of exact chains are whole numbers from -3 to 3 (0 to 3 where unsigned)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A tensor of a chain. ``most`` bounds its magnitude, infinite where elements may be infinite or NaN.

    ``exact`` and ``coarsest`` are as in `ChainOutput`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    most: float
    exact: bool
    coarsest: str
    constant: bool = False

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        return len(self.shape)


Attributes = Mapping[str, AttributeValue]
NO_ATTRIBUTES: Attributes = {}


def _digits(dtype: str) -> int:
    return DIGITS.get(dtype, 53)


class Chain:
    """Collects the inputs and nodes of a chain. ``is_exact``: its inputs are whole numbers.

    ``products``: what float32 products run in; no float32 is then more exact than that.
    """

    def __init__(self, rng: random.Random, dtype: str, *, is_exact: bool, products: str = "float32") -> None:
        self.rng, self.dtype, self.is_exact, self.products = rng, dtype, is_exact, products
        self.inputs: list[ChainInput] = []
        self.nodes: list[ChainNode] = []
        self.values: list[Value] = []
        self._is_beyond = False

    # --- tensors that no node makes ---------------------------------------------------------------------------------
    def input(
        self, shape: Sequence[int], dtype: str | None = None, *, constant: bool = False, summed: int = 1
    ) -> Value:
        """A new input or weight; ``summed`` products of it go into a sum, for which continuous weights are scaled."""
        dtype = dtype or self.dtype
        name = f"{'w' if constant else 'x'}{len(self.inputs)}"
        content, most = self._content(tuple(shape), dtype, constant, summed)
        require(math.prod(shape) <= MOST_ELEMENTS)
        self.inputs.append(ChainInput(name=name, content=content))
        exact, coarsest = content.values != "signed", self._coarsest(dtype)
        return Value(
            name=name, shape=tuple(shape), dtype=dtype, most=most, exact=exact, coarsest=coarsest, constant=constant
        )

    def _coarsest(self, dtype: str, *others: str) -> str:
        rounded = (self.products,) if dtype == "float32" else ()
        coarsest: str = min((dtype, *others, *rounded), key=_digits)
        return coarsest

    def _content(self, shape: tuple[int, ...], dtype: str, constant: bool, summed: int) -> tuple[CaseInput, float]:
        if dtype == "bool":
            return CaseInput(shape=shape, dtype=dtype, constant=constant, values="bool"), 1.0
        if dtype == "uint8":
            return CaseInput(shape=shape, dtype=dtype, constant=constant, values="index", limit=WHOLE + 1), WHOLE
        if self.is_exact or "float" not in dtype:
            return CaseInput(shape=shape, dtype=dtype, constant=constant, values="integer", limit=WHOLE), WHOLE
        scale = 3 / math.sqrt(summed) if summed > 1 else 1.0
        return CaseInput(shape=shape, dtype=dtype, constant=constant, scale=scale), scale

    def numbers(self, values: Sequence[float], dtype: str = "int64", shape: Sequence[int] | None = None) -> str:
        """The name of a constant of these very values."""
        name = f"n{len(self.inputs)}"
        shape = (len(values),) if shape is None else tuple(shape)
        content = CaseInput(shape=tuple(shape), dtype=dtype, constant=True)
        self.inputs.append(ChainInput(name=name, content=content, given=tuple(values)))
        return name

    def scalar(self, value: float, dtype: str) -> str:
        return self.numbers([value], dtype, ())

    # --- nodes ------------------------------------------------------------------------------------------------------
    def emit(
        self,
        operator: str,
        inputs: Sequence[Value | str],
        shape: Sequence[int],
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        dtype: str | None = None,
        most: float | None = None,
        exact: bool | None = None,
        passed: Sequence[str] = (),
    ) -> Value:
        """The result of a node; by default of the first input's type, magnitude and exactness."""
        known = {"dtype": dtype, "most": most, "exact": exact}
        (result,) = self.emit_all(operator, inputs, [shape], attributes, known=known, passed=passed)
        return result

    def emit_all(
        self,
        operator: str,
        inputs: Sequence[Value | str],
        shapes: Sequence[Sequence[int]],
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        known: Mapping[str, Any] = NO_ATTRIBUTES,
        passed: Sequence[str] = (),
    ) -> list[Value]:
        """As `emit`, for a node of several results; their type, magnitude or exactness may be ``known``.

        ``passed`` are types that the node rounds to inside. Raises Unsuitable where the results would be too large.
        """
        tensors = [item for item in inputs if isinstance(item, Value)]
        dtype = str(known.get("dtype") or tensors[0].dtype)
        most = float(max(v.most for v in tensors) if known.get("most") is None else known["most"])
        exact = all(v.exact for v in tensors) if known.get("exact") is None else bool(known["exact"])
        self._check(dtype, most, shapes)
        limit = min(EXACT_BELOW[dtype], EXACT_BELOW[self._coarsest(dtype)])
        coarsest = self._coarsest(dtype, *passed, *(v.coarsest for v in tensors))
        made = [
            Value(
                name=f"t{len(self.values) + position}",
                shape=tuple(shape),
                dtype=dtype,
                most=most,
                exact=exact and most <= limit,
                coarsest=coarsest,
            )
            for position, shape in enumerate(shapes)
        ]
        node = ChainNode(
            operator=operator,
            inputs=tuple(item if isinstance(item, str) else item.name for item in inputs),
            outputs=tuple(value.name for value in made),
            attributes=tuple(attributes.items()),
        )
        self.nodes.append(node)
        self.values += made
        return made

    def mark(self) -> tuple[int, int, int]:
        """How far the chain is, for `take_back`."""
        return len(self.inputs), len(self.nodes), len(self.values)

    def take_back(self, mark: tuple[int, int, int]) -> None:
        """Forget what was added since `mark`."""
        inputs, nodes, values = mark
        del self.inputs[inputs:], self.nodes[nodes:], self.values[values:]

    @contextmanager
    def beyond_numbers(self) -> Iterator[None]:
        """Inside, tensors may have infinite bounds or no elements. Other steps refuse such tensors."""
        self._is_beyond = True
        try:
            yield
        finally:
            self._is_beyond = False

    def _check(self, dtype: str, most: float, shapes: Sequence[Sequence[int]]) -> None:
        for shape in shapes:
            require((0 if self._is_beyond else 1) <= math.prod(shape) <= MOST_ELEMENTS)
        require(
            (self._is_beyond and math.isinf(most))
            or most <= (LARGEST[dtype] if dtype in LARGEST else EXACT_BELOW[dtype])
        )
