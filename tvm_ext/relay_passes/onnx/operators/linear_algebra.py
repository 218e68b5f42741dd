"""Determinants."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .context import Pen, rule

# Gauss's elimination is unrolled, about twenty small nodes for each row.
_MOST_ROWS = 32


@rule("Det", replaces=True)
def _det(pen: Pen) -> None:
    """Elimination with partial pivoting: the determinant is the product of the pivots, negated for each swap."""
    shape = pen.known_shape(pen.x)
    if len(shape) < 2 or shape[-1] != shape[-2] or not 1 <= shape[-1] <= _MOST_ROWS:
        raise pen.refusal(f"has matrices {list(shape)}", f"they must be square, with at most {_MOST_ROWS} rows")
    size, dtype, pivots = shape[-1], pen.dtype(pen.x), []
    matrix = pen.add("Reshape", pen.x, pen.integers(-1, size, size))
    for step in range(size):
        matrix, pivot = _eliminate(pen, matrix, step, size, dtype)
        pivots.append(pivot)
    pen.add("Reshape", pen.chain("Mul", pivots), pen.integers(*shape[:-2]), out=pen.out)


def _eliminate(pen: Pen, matrix: str, step: int, size: int, dtype: npt.DTypeLike) -> tuple[str, str]:
    """[batch, size, size] -> the matrix after step ``step``, and the pivot with the swap's sign, [batch, 1, 1].

    Every step is over the whole matrix, and which it is stands in constants alone: so all of them are the same few
    kernels, where smaller and smaller matrices would be a dozen more for each row. What lies above or left of the step
    is never looked at again.

    Swapping rows k and p: row p becomes the old row k, and the old row p is the pivot row.
    """
    at = np.arange(size)
    nought, one = pen.constant(0, dtype), pen.constant(1, dtype)
    is_step = {axis: pen.constant((at == step).reshape(shape)) for axis, shape in ((1, (1, -1, 1)), (2, (1, 1, -1)))}

    def picked(x: str, axis: int) -> str:
        """Row (axis 1) or column (axis 2) number ``step`` of ``x``."""
        return pen.reduce("ReduceSum", pen.add("Where", is_step[axis], x, nought), axis, keepdims=True)

    column = picked(matrix, 2)
    left = pen.add("Where", pen.constant((at >= step)[None, :, None]), pen.add("Abs", column), pen.constant(-1, dtype))
    chosen = pen.add("ArgMax", left, axis=1, keepdims=1)
    is_pivot = pen.add("Equal", chosen, pen.constant(at[None, :, None], np.int64))
    pivot_row = pen.reduce("ReduceSum", pen.add("Where", is_pivot, matrix, nought), 1, keepdims=True)
    swapped = pen.add("Where", is_pivot, picked(matrix, 1), matrix)
    pivot = picked(pivot_row, 2)
    # A column of zeros: the determinant is 0 whatever is divided by.
    divisor = pen.add("Where", pen.add("Equal", pivot, nought), one, pivot)
    factor = pen.add("Div", picked(swapped, 2), divisor)
    below = pen.add("Where", pen.constant((at > step)[None, :, None]), factor, nought)
    stays = pen.add("Equal", chosen, pen.constant([[[step]]], np.int64))
    sign = pen.add("Where", stays, one, pen.constant(-1, dtype))
    return pen.add("Sub", swapped, pen.add("Mul", below, pivot_row)), pen.add("Mul", sign, pivot)
