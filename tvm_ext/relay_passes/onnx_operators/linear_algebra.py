"""Determinants."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx

from tvm_ext.relay_passes.onnx_operators.context import Context, Pen, Rule, refusal

# Gauss's elimination is unrolled, about fifteen small nodes for each row.
_MOST_ROWS = 32
_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def _det(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Elimination with partial pivoting: the determinant is the product of the pivots, negated for each swap."""
    pen, shape = Pen(node=node, context=context), context.known_shape(node, node.input[0])
    if len(shape) < 2 or shape[-1] != shape[-2] or not 1 <= shape[-1] <= _MOST_ROWS:
        raise refusal(node, f"has matrices {list(shape)}", f"they must be square, with at most {_MOST_ROWS} rows")
    code = context.known_type(node, node.input[0])
    matrix, size = node.input[0], shape[-1]
    if code in _NARROW:
        matrix, code = pen.cast(matrix, onnx.TensorProto.FLOAT), onnx.TensorProto.FLOAT
    matrix = pen.add("Reshape", matrix, pen.integers(-1, size, size))
    dtype = np.float64 if code == onnx.TensorProto.DOUBLE else np.float32
    product = ""
    while size > 1:
        matrix, pivot = _eliminate(pen, matrix, size, dtype)
        product = pen.add("Mul", product, pivot) if product else pivot
        size -= 1
    last = pen.add("Reshape", matrix, pen.integers(-1))
    product = pen.add("Mul", product, last) if product else last
    result = pen.add("Reshape", product, pen.integers(*shape[:-2]) if shape[:-2] else pen.constant([], np.int64))
    pen.cast(result, context.known_type(node, node.input[0]), out=node.output[0])
    return pen.nodes


def _eliminate(pen: Pen, matrix: str, size: int, dtype: npt.DTypeLike) -> tuple[str, str]:
    """[batch, size, size] -> what is left below and right of the pivot, and the pivot with the swap's sign [batch].

    Swapping rows 0 and p: row p becomes the old row 0, and the old row p is the pivot row.
    """
    column = pen.add("Gather", matrix, pen.constant(0, np.int64), axis=2)
    chosen = pen.add("ArgMax", pen.add("Abs", column), axis=1, keepdims=1)
    is_pivot = pen.add("Equal", chosen, pen.constant(np.arange(size)[None, :], np.int64))
    mask = pen.add("Reshape", is_pivot, pen.integers(-1, size, 1))
    nought, one = pen.constant(0, dtype), pen.constant(1, dtype)
    pivot_row = pen.reduce("ReduceSum", pen.add("Where", mask, matrix, nought), 1, keepdims=True)
    first_row = pen.add("Gather", matrix, pen.integers(0), axis=1)
    swapped = pen.add("Where", mask, first_row, matrix)
    below = pen.add("Gather", swapped, pen.integers(*range(1, size)), axis=1)
    pivot = pen.add("Gather", pivot_row, pen.integers(0), axis=2)
    # A column of zeros: the determinant is 0 whatever is divided by.
    divisor = pen.add("Where", pen.add("Equal", pivot, nought), one, pivot)
    factor = pen.add("Div", pen.add("Gather", below, pen.integers(0), axis=2), divisor)
    rest = pen.integers(*range(1, size))
    taken = pen.add("Mul", factor, pen.add("Gather", pivot_row, rest, axis=2))
    left = pen.add("Sub", pen.add("Gather", below, rest, axis=2), taken)
    stays = pen.add("Equal", chosen, pen.constant([[0]], np.int64))
    sign = pen.add("Where", stays, one, pen.constant(-1, dtype))
    return left, pen.add(
        "Reshape", pen.add("Mul", sign, pen.add("Reshape", pivot, pen.integers(-1, 1))), pen.integers(-1)
    )


RULES: Mapping[str, Rule] = {"Det": _det}
REPLACED = frozenset(RULES)
