"""An attention that one kernel computes: where its operands lie, and what is done to the scores before the softmax."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from .tuning import SearchedTiles

ATTENTION = "tvm_ext.attention"
"""PrimFunc attribute: the `Attention` that the function computes, as JSON."""

BatchDigits = tuple[tuple[int, int], ...]
"""(extent, stride in elements) of each digit of a number, the most significant first.

Twelve heads of which three share one head of keys are ((4, stride), (3, 0)).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixOperand:
    """A tensor of the graph, flat, read or written as matrices: element (batch, row, column) lies at
    ``offset + batch's digits + row * row_stride + column * column_stride``, in elements.

    Strides of 0 repeat what is there. ``size`` is the length of the whole tensor.
    """

    dtype: str
    size: int
    offset: int
    batch: BatchDigits
    row_stride: int
    column_stride: int

    def fills_lanes(self, rows: int, columns: int, lanes: int) -> bool:
        """Whether a column's rows lie together, and whole registers of them can be read: what is behind the last of
        ``rows`` belongs to the tensor, too.
        """
        last = self.offset + sum((extent - 1) * stride for extent, stride in self.batch)
        read = -(-rows // lanes) * lanes
        return self.row_stride == 1 and last + (columns - 1) * self.column_stride + read <= self.size


ScoreChange = Literal["add", "choose", "replace"]
"""What happens to a score s, with m its element of the operand: s + ``scale`` * m; s + (``yes`` if m else ``no``); or,
where m is ``replaced``, ``no`` for s.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTerm:
    """One step between the product of queries and keys and the softmax; rows are queries, columns keys."""

    change: ScoreChange
    operand: MatrixOperand
    scale: float = 1.0
    yes: float = 0.0
    no: float = 0.0
    replaced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """softmax(terms(scale * Q K^T)) V over ``batch`` independent matrices: batches times heads.

    Rows of Q and of the output are queries; rows of K and V are keys; columns are ``features`` and, of V and the
    output, ``value_features``. Where ``cleared`` is true of a query, its probabilities are 0 throughout. The function's
    parameters are query, key, value, an operand for each term, ``cleared`` if there is one, the output.

    ``products`` is what the operands of both products are rounded to: queries once scaled, and probabilities before
    they are divided by their sum. Sums and the softmax are float32.
    """

    batch: int
    queries: int
    keys: int
    features: int
    value_features: int
    scale: float
    query: MatrixOperand
    key: MatrixOperand
    value: MatrixOperand
    output: MatrixOperand
    terms: tuple[ScoreTerm, ...] = ()
    cleared: MatrixOperand | None = None
    products: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        assert min(self.batch, self.queries, self.keys, self.features, self.value_features) >= 1
        assert all(prod(extent for extent, _ in operand.batch) == self.batch for operand in self.operands)

    @property
    def operands(self) -> tuple[MatrixOperand, ...]:
        """In the order of the function's parameters."""
        cleared = () if self.cleared is None else (self.cleared,)
        return (self.query, self.key, self.value, *(term.operand for term in self.terms), *cleared, self.output)

    def staged(self, lanes: int) -> tuple[bool, ...]:
        """Of each term whether its blocks are transposed before registers of ``lanes`` queries read them."""
        return tuple(
            term.operand.row_stride != 0 and not term.operand.fills_lanes(self.queries, self.keys, lanes)
            for term in self.terms
        )

    @property
    def flops(self) -> float:
        """Of both products, a multiply-add counting as two."""
        return 2.0 * self.batch * self.queries * self.keys * (self.features + self.value_features)

    def __str__(self) -> str:
        """``24 x (128 queries, 128 keys, 64 features)``; values' features where they differ."""
        values = f", {self.value_features} of values" if self.value_features != self.features else ""
        narrow = f" in {self.products}" if self.products != "float32" else ""
        return f"{self.batch} x ({self.queries} queries, {self.keys} keys, {self.features} features{values}){narrow}"


Copies = Literal["none", "values", "block", "shared"]
"""What is copied to float32 rows that lie together: each block of values, or of keys and values, by every task for
itself, or all keys and values once, before the tasks.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTiles(SearchedTiles):
    """How a CPU kernel divides an attention; queries lie in the lanes of SIMD registers.

    A task has ``query_vectors`` registers of ``lanes`` queries and goes over the keys in blocks of ``key_block``. The
    register tiles are ``key_rows`` keys, then ``feature_rows`` features of the output, by those queries. While a matrix
    is worked on, queries, keys and values of the next one are asked for in lines of ``ahead_bytes``; 0: they are not.
    """

    lanes: int
    query_vectors: int
    key_rows: int
    feature_rows: int
    key_block: int
    copies: Copies = "none"
    ahead_bytes: int = 0

    @property
    def query_block(self) -> int:
        return self.lanes * self.query_vectors

    def __str__(self) -> str:
        return (
            f"tasks of {self.query_block} queries over blocks of {self.key_block} keys, "
            f"register tiles of {self.key_rows} keys and {self.feature_rows} features by {self.query_vectors} vectors"
            + _COPIED[self.copies]
            + (", the next matrices asked for ahead" if self.ahead_bytes else "")
        )


_COPIED: dict[Copies, str] = {
    "none": "",
    "values": ", values copied by block",
    "block": ", keys and values copied by block",
    "shared": ", keys and values copied once",
}
