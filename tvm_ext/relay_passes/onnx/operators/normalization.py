"""Normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from .context import DOUBLE, FLOAT, Pen, rule


@rule("LpNormalization", replaces=True)
def _lp_normalization(pen: Pen) -> None:
    """x / |x|_p along one axis, 0 where the norm is 0: the norm becomes 1 there, and 0 / 1 = 0."""
    x = pen.x
    power = "L1" if pen.attribute("p", 2) == 1 else "L2"
    norm = pen.reduce(f"Reduce{power}", x, pen.integer("axis", -1), keepdims=True)
    is_zero = pen.add("Equal", norm, pen.add("Sub", norm, norm))
    pen.add("Div", x, pen.add("Add", norm, pen.add("CastLike", is_zero, x)), out=pen.out)


@rule("LayerNormalization", "RMSNormalization")
def _normalize(pen: Pen) -> None:
    """LayerNormalization and RMSNormalization over several axes, of float64, or with a scale of another shape.

    (x - mean) / sqrt(variance + epsilon), in RMSNormalization without the mean; then the scale and the bias.
    """
    shape, code = pen.shape(pen.x), pen.element_type(pen.x)
    if shape is None or not code or not shape:
        return
    axis = pen.integer("axis", -1) % len(shape)
    is_layer = pen.op_type == "LayerNormalization"
    is_plain = pen.shape(pen.input[1]) == shape[axis:] and (is_layer or axis == len(shape) - 1)
    if code != DOUBLE and is_plain:
        return
    narrow = code not in (DOUBLE, FLOAT)
    x = pen.cast(pen.x, FLOAT) if narrow else pen.x
    axes = [*range(axis, len(shape))]
    normalized = _over_deviation(pen, _centred(pen, x, axes) if is_layer else x, axes, code)
    normalized = pen.cast(normalized, code) if narrow else normalized
    scaled = pen.add("Mul", normalized, pen.input[1])
    pen.give(pen.add("Add", scaled, pen.operand(2)) if pen.operand(2) else scaled)


def _centred(pen: Pen, x: str, axes: Sequence[int]) -> str:
    return pen.add("Sub", x, pen.mean(x, axes))


def _over_deviation(pen: Pen, x: str, axes: Sequence[int], code: int) -> str:
    """x / sqrt(mean of x^2 + epsilon) in float64 or float32; epsilon is float32's, as an attribute is."""
    dtype = np.float64 if code == DOUBLE else np.float32
    epsilon = pen.constant(np.float32(pen.attribute("epsilon", 1e-5)), dtype)
    return pen.add("Div", x, pen.add("Sqrt", pen.add("Add", pen.mean(pen.add("Mul", x, x), axes), epsilon)))


@rule("GroupNormalization", types=[DOUBLE])
def _normalize_groups(pen: Pen) -> None:
    """GroupNormalization of float64, which the stock importer computes in float32.

    Since operator set 21 there is a scale and a bias for each channel, before for each group.
    """
    shape, x = pen.shape(pen.x), pen.x
    if shape is None or len(shape) < 2:
        return
    groups = pen.integer("num_groups", 1)
    grouped = pen.add("Reshape", x, pen.integers(shape[0], groups, -1))
    normalized = _over_deviation(pen, _centred(pen, grouped, [2]), [2], DOUBLE)
    ones = [1] * (len(shape) - 2)
    by_channel = pen.opset >= 21
    whole = pen.integers(*shape)
    normalized = pen.add("Reshape", normalized, whole) if by_channel else normalized
    scale, bias = (pen.add("Reshape", name, pen.integers(-1, *(ones if by_channel else [1]))) for name in pen.input[1:])
    moved = pen.add("Add", pen.add("Mul", normalized, scale), bias)
    pen.give(moved if by_channel else pen.add("Reshape", moved, whole))


@rule("MeanVarianceNormalization", types=[DOUBLE])
def _mean_variance(pen: Pen) -> None:
    """(x - mean) / (deviation + 1e-9), as ONNX defines it."""
    axes = pen.numbers("axes", [0, 2, 3])
    centred = _centred(pen, pen.x, axes)
    variance = pen.mean(pen.add("Mul", centred, centred), axes)
    deviation = pen.add("Add", pen.add("Sqrt", variance), pen.constant(1e-9, np.float64))
    pen.add("Div", centred, deviation, out=pen.out)


@rule("LRN", types=[DOUBLE])
def _local_response(pen: Pen) -> None:
    """x / (bias + alpha m)^beta, m being the mean square over `size` channels; beyond the last channel stand zeros.

    The stock importer's constants are float32. An even window has one channel more behind than before.
    """
    batch, channels, *image = shape = pen.known_shape(pen.x)
    size = pen.integer("size", 1)
    squares = pen.add("Reshape", pen.add("Mul", pen.x, pen.x), pen.integers(batch, 1, channels, prod(image)))
    pads = [(size - 1) // 2, 0, size // 2, 0]
    means = pen.add("AveragePool", squares, kernel_shape=[size, 1], pads=pads, count_include_pad=1)
    defaults = {"alpha": 1e-4, "beta": 0.75, "bias": 1.0}
    alpha, beta, bias = (pen.constant(np.float32(pen.attribute(*pair)), np.float64) for pair in defaults.items())
    scale = pen.add("Pow", pen.add("Add", bias, pen.add("Mul", alpha, means)), beta)
    pen.add("Div", pen.x, pen.add("Reshape", scale, pen.integers(*shape)), out=pen.out)


# Gauss's elimination is unrolled, about twenty small nodes for each row.
# --- Determinants -----------------------------------------------------------------------------------------------------
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
