"""An attention as a tensor expression: what its function computes, whoever makes a kernel of it.

A CPU's construction reads the attribute beside it and emits one kernel; without that these are four computations, with
all scores in memory. Tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Expr, TeTensor, te, tirx
from tvm_ext.records.attention import Attention, BatchDigits, MatrixOperand, ScoreTerm

FLOAT = "float32"


def attention(*tensors: TeTensor, work: Attention) -> TeTensor:
    """The flat output of ``work`` from its flat operands, query, key, value, then one for each term."""
    query, key, value, *others = tensors
    terms = list(zip(work.terms, others, strict=work.cleared is None))
    feature, other_key, summed = (te.reduce_axis((0, n), "k") for n in (work.features, work.keys, work.keys))

    def product(b: Expr, i: Expr, j: Expr) -> Expr:
        left, right = _element(query, work.query, b, i, feature), _element(key, work.key, b, j, feature)
        return te.sum(left * tirx.const(work.scale, FLOAT) * right, axis=feature)

    grid = (work.batch, work.queries, work.keys)
    products = te.compute(grid, product, "products")

    def changed(b: Expr, i: Expr, j: Expr) -> Expr:
        score = products[b, i, j]
        for term, tensor in terms:
            score = _changed(score, term, tensor, b, i, j)
        return score

    scores = te.compute(grid, changed, "scores")
    high = te.compute(grid[:2], lambda b, i: te.max(scores[b, i, other_key], axis=other_key), "high")
    powers = te.compute(grid, lambda b, i, j: tirx.exp(scores[b, i, j] - high[b, i]), "powers")
    total = te.compute(grid[:2], lambda b, i: te.sum(powers[b, i, summed], axis=summed), "total")
    weighted = te.reduce_axis((0, work.keys), "k")
    results = te.compute(
        (work.batch, work.queries, work.value_features),
        lambda b, i, d: te.sum(powers[b, i, weighted] * _element(value, work.value, b, weighted, d), axis=weighted),
        "results",
    )

    def written(place: Expr) -> Expr:
        b, i, d = _coordinates(work, place)
        factor = tirx.const(1.0, FLOAT) / total[b, i]
        if work.cleared is not None:
            factor = tirx.Select(others[-1][_place(work.cleared, b, i, 0)], tirx.const(0.0, FLOAT), factor)
        return (results[b, i, d] * factor).astype(work.output.dtype)

    return te.compute((work.output.size,), written, "attention")


def _changed(score: Expr, term: ScoreTerm, tensor: TeTensor, b: Expr, i: Expr, j: Expr) -> Expr:
    if term.change == "add":
        return score + tirx.const(term.scale, FLOAT) * _element(tensor, term.operand, b, i, j)
    mask = tensor[_place(term.operand, b, i, j)]
    yes, no = (tirx.const(number, FLOAT) for number in (term.yes, term.no))
    if term.change == "choose":
        return score + tirx.Select(mask, yes, no)
    return tirx.Select(mask, no, score) if term.replaced else tirx.Select(mask, score, no)


def _element(tensor: TeTensor, operand: MatrixOperand, b: Expr, row: Expr, column: Expr) -> Expr:
    return tensor[_place(operand, b, row, column)].astype(FLOAT)


def _place(operand: MatrixOperand, b: Expr, row: Expr, column: Expr) -> Expr:
    place = tirx.IntImm("int64", operand.offset) + row * operand.row_stride + column * operand.column_stride
    left = 1
    for extent, stride in reversed(operand.batch):
        place = place + tirx.floormod(tirx.floordiv(b, left), extent) * stride
        left *= extent
    return place


def _coordinates(work: Attention, place: Expr) -> tuple[Expr, Expr, Expr]:
    """Batch, query and feature of an element of the output, which has every place once."""
    matrix: Sequence[BatchDigits] = (
        work.output.batch,
        ((work.queries, work.output.row_stride),),
        ((work.value_features, work.output.column_stride),),
    )
    found = []
    for digits in matrix:
        number: Expr = tirx.IntImm("int64", 0)
        for extent, stride in digits:
            digit = tirx.floormod(tirx.floordiv(place, stride), extent) if extent > 1 else tirx.IntImm("int64", 0)
            number = number * extent + digit
        found.append(number)
    return found[0], found[1], found[2]
