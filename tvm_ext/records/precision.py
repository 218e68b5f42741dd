"""Which products of a model run on 16-bit numbers, which do not, and the error that was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvm_ext.records.serialise import record_of

if TYPE_CHECKING:  # where there is TVM's runtime alone, its compiler's names cannot be imported
    from tvm_ext._tvm import IRModule

PRECISION = "tvm_ext.precision"
"""Module attribute: the `PrecisionRecord` as JSON."""

KEPT = "tvm_ext.kept_in_float32"
"""Module attribute: the numbers, in program order, of products that stay float32 for their error; attentions last."""

BEYOND_BOUND = "the error would exceed the bound"


def kept_in_float32(mod: IRModule) -> set[int]:
    """What `KEPT` says of ``mod``."""
    return {int(number) for number in (mod.attrs or {}).get(KEPT, ())}


def precision_record(mod: IRModule) -> PrecisionRecord | None:
    """What `PRECISION` says of ``mod``; None where all of it is in the model's types."""
    return record_of(mod, PRECISION, PrecisionRecord)


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowedProduct:
    """A float32 ``matmul`` or ``conv2d`` by constant weights, or both products of an ``attention``.

    ``reason`` says why it stayed float32, if it did. ``exact``: the 16-bit type that holds all of its weights' values;
    nothing of it is rounded.
    """

    kind: str
    data: tuple[int, ...]
    weights: tuple[int, ...]
    result: tuple[int, ...]
    reason: str = ""
    exact: str = ""

    @property
    def is_rounded(self) -> bool:
        return not self.reason and not self.exact

    def refused(self, reason: str) -> NarrowedProduct:
        return replace(self, reason=reason)

    def __str__(self) -> str:
        return f"{self.kind} {_size(self.data)} by {_size(self.weights)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRecord:
    """What became of float32 products: ``instruction`` serves the rounded ones, None where no option asked for them.

    ``error`` of the outputs against float32, by norm, None if not measured.
    """

    products: tuple[NarrowedProduct, ...]
    instruction: str | None = None
    error: float | None = None
    bound: float | None = None

    def lines(self) -> list[str]:
        """For the report: how many run in bfloat16, the error, the others by reason, weights that stay 16 bits."""
        exact = _counted(f"{own}, weights stay {own.exact}" for own in self.products if own.exact)
        asked = [product for product in self.products if not product.exact]
        if self.instruction is None:
            return exact
        narrowed = [product for product in asked if product.is_rounded]
        error = "" if self.error is None else f"; error against float32 {self.error:.2g}"
        bound = "" if self.bound is None else f" (bound {self.bound:.2g})"
        head = f"bfloat16 by {self.instruction}: {len(narrowed)} of {len(asked)} products{error}{bound}"
        done = _counted(f"bfloat16: {product}" for product in narrowed)
        kept = _counted(f"float32: {product}: {product.reason}" for product in asked if product.reason)
        return [head, *done, *kept, *exact]


def _counted(texts: Iterable[str]) -> list[str]:
    return [text if count == 1 else f"{text} ({count} times)" for text, count in Counter(texts).items()]


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"
