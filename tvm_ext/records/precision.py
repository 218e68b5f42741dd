"""Which products of a model run in bfloat16, which do not, and the error that was measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, kw_only=True, slots=True)
class NarrowedProduct:
    """A float32 ``matmul`` or ``conv2d`` by constant weights, or both products of an ``attention``.

    ``reason`` says why it stayed float32, if it did.
    """

    kind: str
    data: tuple[int, ...]
    weights: tuple[int, ...]
    result: tuple[int, ...]
    reason: str = ""

    def refused(self, reason: str) -> NarrowedProduct:
        return replace(self, reason=reason)

    def __str__(self) -> str:
        return f"{self.kind} {_size(self.data)} by {_size(self.weights)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRecord:
    """What a build with ``precision`` did; ``error`` of the outputs against float32, by norm, None if not measured."""

    instruction: str
    products: tuple[NarrowedProduct, ...]
    error: float | None = None
    bound: float | None = None

    def lines(self) -> list[str]:
        """For the report: how many run in bfloat16, the error, and the others by reason."""
        narrowed = [product for product in self.products if not product.reason]
        error = "" if self.error is None else f"; error against float32 {self.error:.2g}"
        bound = "" if self.bound is None else f" (bound {self.bound:.2g})"
        head = f"bfloat16 by {self.instruction}: {len(narrowed)} of {len(self.products)} products{error}{bound}"
        done = Counter(f"bfloat16: {product}" for product in narrowed)
        kept = Counter(f"float32: {product}: {product.reason}" for product in self.products if product.reason)
        return [head, *(text if count == 1 else f"{text} ({count} times)" for text, count in (done + kept).items())]


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"
