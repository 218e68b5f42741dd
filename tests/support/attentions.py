"""Attentions drawn at random, their operands, and what NumPy makes of them in float64: for tests of the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from tvm_ext._tvm import tirx
from tvm_ext.records.attention import ATTENTION, Attention, BatchDigits, MatrixOperand, ScoreTerm
from tvm_ext.records.serialise import to_json

LOWEST = float(np.finfo(np.float32).min)
SIZES = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 64, 100)


def places(operand: MatrixOperand, rows: int, columns: int) -> Any:
    """Where the elements of all matrices lie, (batch, rows, columns)."""
    starts = np.full(1, operand.offset)
    for extent, stride in operand.batch:
        starts = (starts[:, None] + np.arange(extent) * stride).ravel()
    lines = np.arange(rows)[:, None] * operand.row_stride + np.arange(columns) * operand.column_stride
    return starts[:, None, None] + lines


def expected(work: Attention, arrays: Sequence[Any]) -> Any:
    """The flat output for flat operands in their order, in float64; rows of -inf alone are NaN."""
    query, key, value, *masks = arrays
    cleared = masks.pop() if work.cleared is not None else None
    q, k = (
        array.astype("f8")[places(operand, rows, work.features)]
        for array, operand, rows in ((query, work.query, work.queries), (key, work.key, work.keys))
    )
    with np.errstate(all="ignore"):
        scores = work.scale * (q @ k.transpose(0, 2, 1))
        for term, mask in zip(work.terms, masks, strict=True):
            scores = _changed(scores, term, mask[places(term.operand, work.queries, work.keys)])
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities = powers / powers.sum(-1, keepdims=True)
        if work.cleared is not None and cleared is not None:
            probabilities[cleared[places(work.cleared, work.queries, 1)][..., 0]] = 0.0
        values = value.astype("f8")[places(work.value, work.keys, work.value_features)]
        result = probabilities @ values
    output = np.zeros(work.output.size)
    output[places(work.output, work.queries, work.value_features)] = result
    return output


def _changed(scores: Any, term: ScoreTerm, mask: Any) -> Any:
    if term.change == "add":
        return scores + term.scale * mask.astype("f8")
    if term.change == "choose":
        return scores + np.where(mask, term.yes, term.no)
    return np.where(mask == term.replaced, term.no, scores)


def packed(batch: Sequence[int], rows: int, columns: int, dtype: str = "float32", order: str = "brc") -> MatrixOperand:
    """Matrices in a tensor of just that size; ``order`` as they lie, with c the columns last: "rbc" is [S, B, D].

    A second batch axis, the heads, lies behind the rows where ``order`` is "brhc", as in [B, S, H, D].
    """
    extents = {"b": batch[0], "h": prod(batch[1:]), "r": rows, "c": columns}
    order = order if "h" in order else order.replace("b", "bh")
    strides = {axis: prod(extents[inner] for inner in order[place + 1 :]) for place, axis in enumerate(order)}
    digits: BatchDigits = ((extents["b"], strides["b"]), (extents["h"], strides["h"]))
    return MatrixOperand(
        dtype=dtype,
        size=prod(extents.values()),
        offset=0,
        batch=digits,
        row_stride=strides["r"],
        column_stride=strides["c"],
    )


def drawn(rng: np.random.Generator) -> Attention:
    """An attention of small random extents, layouts and terms; nothing about it is round."""
    batch, heads = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    queries, keys = (int(rng.choice(SIZES)) for _ in range(2))
    features, values = (int(rng.choice([1, 3, 8, 16, 20, 33, 40, 64])) for _ in range(2))
    dtype = str(rng.choice(["float32", "float32", "float16"]))
    layouts = [str(rng.choice(["bhrc", "brhc", "rbhc", "bhcr"])) for _ in range(4)]
    shared = MatrixOperand(
        dtype=dtype,
        size=batch * keys * features,
        offset=0,
        batch=((batch, keys * features), (heads, 0)),
        row_stride=features,
        column_stride=1,
    )
    return Attention(
        batch=batch * heads,
        queries=queries,
        keys=keys,
        features=features,
        value_features=values,
        scale=float(rng.choice([features**-0.5, 1.0, -0.3])),
        query=packed((batch, heads), queries, features, dtype, layouts[0]),
        key=shared if rng.random() < 0.25 else packed((batch, heads), keys, features, dtype, layouts[1]),
        value=packed((batch, heads), keys, values, dtype, layouts[2]),
        output=packed((batch, heads), queries, values, dtype, layouts[3]),
        terms=tuple(_term(rng, batch, heads, queries, keys, dtype) for _ in range(int(rng.integers(0, 3)))),
        cleared=packed((batch, heads), queries, 1, "bool") if rng.random() < 0.3 else None,
    )


def _term(rng: np.random.Generator, batch: int, heads: int, queries: int, keys: int, dtype: str) -> ScoreTerm:
    """A mask that is one for all of what it does not follow: batches, heads, queries."""
    of_batch, of_head, of_query = (bool(rng.random() < 0.5) for _ in range(3))
    rows = queries if of_query else 1
    matrix = rows * keys
    digits = ((batch, matrix * (heads if of_head else 1) if of_batch else 0), (heads, matrix if of_head else 0))
    size = matrix * (batch if of_batch else 1) * (heads if of_head else 1)
    change = str(rng.choice(["add", "choose", "replace"]))
    operand = MatrixOperand(
        dtype=dtype if change == "add" else "bool",
        size=size,
        offset=0,
        batch=digits,
        row_stride=keys if of_query and queries > 1 else 0,
        column_stride=1,
    )
    if change == "add":
        return ScoreTerm(change="add", operand=operand, scale=float(rng.choice([1.0, -0.5])))
    low = float(rng.choice([LOWEST, -1e4, -2.0]))
    if change == "choose":
        return ScoreTerm(change="choose", operand=operand, yes=0.0, no=low)
    return ScoreTerm(change="replace", operand=operand, no=low, replaced=bool(rng.random() < 0.5))


def arrays_of(work: Attention, rng: np.random.Generator) -> list[Any]:
    """Values for the operands, without the output."""
    return [
        rng.random(item.size) < 0.7 if item.dtype == "bool" else rng.standard_normal(item.size).astype(item.dtype)
        for item in work.operands[:-1]
    ]


def function_of(work: Attention) -> Any:
    """A function with the attribute that construction reads, and no body of its own."""
    masks = len(work.operands) - 4
    names = ["query", "key", "value", *(f"mask{number}" for number in range(masks)), "output"]
    params = [tirx.decl_buffer([item.size], item.dtype, name) for item, name in zip(work.operands, names, strict=True)]
    function = tirx.PrimFunc(params, tirx.Evaluate(0))
    return function.with_attrs({ATTENTION: to_json(work), "s_tir": True, "tirx.noalias": True})
