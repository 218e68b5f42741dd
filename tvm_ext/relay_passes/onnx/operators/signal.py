"""Fourier transforms, as matrix products with constant matrices.

An audio model transforms a few hundred samples at a time, where a product on the kernels that products have is as fast
as a butterfly network of small steps would be, and one pass over the data.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tvm_ext.support.arrays import Array

from .context import Pen, rule

# What a transform's matrix may hold at most: 4096 complex points.
_MATRIX_BYTES = 256 << 20


def _phases(points: int, rows: int, columns: int) -> npt.NDArray[np.float64]:
    """2 pi n k / N for n < rows and k < columns, reduced below 2 pi before it is rounded."""
    turns = np.outer(np.arange(rows, dtype=np.int64), np.arange(columns, dtype=np.int64)) % points
    return 2 * np.pi * turns / points


def forward_matrix(points: int, rows: int, columns: int, parts: int) -> Array:
    """The transform x -> X of `points` points as a matrix [rows, parts, columns, 2].

    `rows` samples are given (the rest is zero, and samples from `points` on are dropped), each of `parts` = 1 (real)
    or 2 numbers; the first `columns` of X are wanted. X[k] = sum of x[n] (cos - i sin)(2 pi n k / N).
    """
    phases = _phases(points, rows, columns)
    phases[points:] = 0
    cosine, sine = np.cos(phases), np.sin(phases)
    cosine[points:] = 0
    of_real = np.stack([cosine, -sine], axis=-1)
    of_imaginary = np.stack([sine, cosine], axis=-1)
    return np.stack([of_real, of_imaginary][:parts], axis=1)


def inverse_matrix(points: int, rows: int, parts: int) -> Array:
    """The transform X -> x of `points` points as a matrix [rows, parts, points, 2]: the conjugate over N."""
    matrix = forward_matrix(points, rows, points, 2)
    conjugate = np.stack([matrix[:, 0] * (1, -1), matrix[:, 1] * (-1, 1)], axis=1)
    return np.asarray(conjugate[:, :parts] / points)


def real_inverse_matrix(points: int, rows: int, parts: int) -> Array:
    """The transform of half a spectrum to real samples as a matrix [rows, parts, points, 1].

    The other half is the conjugate, so that every X[k] counts twice but X[0] and, for even N, X[N / 2], whose
    imaginary parts are ignored.
    """
    matrix = inverse_matrix(points, rows, 2)[..., :1]
    weight = np.full(rows, 2.0)
    weight[points // 2 + 1 :] = 0
    single = [0, points // 2] if points % 2 == 0 else [0]
    single = [index for index in single if index < rows]
    weight[single] = 1
    matrix = matrix * weight[:, None, None, None]
    matrix[single, 1] = 0
    return np.asarray(matrix[:, :parts])


@rule("DFT", replaces=True)
def _dft(pen: Pen) -> None:
    """The axis goes last but one, its points and parts become the rows of a product, and everything goes back."""
    x = pen.x
    shape = pen.known_shape(x)
    axis = _dft_axis(pen, len(shape))
    matrix = _dft_matrix(pen, shape[axis], shape[-1])
    before = (*(position for position in range(len(shape) - 1) if position != axis), axis, len(shape) - 1)
    rest = [shape[position] for position in before[:-2]]
    moved = x if before == tuple(range(len(shape))) else pen.add("Transpose", x, perm=before)
    transformed = _transform(pen, moved, rest, matrix)
    after = [before.index(position) for position in range(len(shape))]
    pen.give(transformed if moved == x else pen.add("Transpose", transformed, perm=after))


def _dft_axis(pen: Pen, rank: int) -> int:
    axis = pen.known_number(2, -2) if pen.opset >= 20 else pen.integer("axis", 1)
    if not -rank <= axis <= rank - 2 or axis == -1:
        raise pen.refusal(f"has no axis {axis} before the last of {rank}", "export a valid axis")
    return axis % rank


def _dft_matrix(pen: Pen, extent: int, parts: int) -> Array:
    inverse, onesided = pen.flag("inverse"), pen.flag("onesided")
    if parts not in (1, 2):
        raise pen.refusal(f"has {parts} values in a number (last axis)", "a number has 1 or 2: real, imaginary")
    points = pen.known_number(1, 2 * (extent - 1) if inverse and onesided else extent)
    if points < 1:
        raise pen.refusal(f"transforms {points} points", "give at least one")
    _check_matrix(pen, extent * points * parts * 2)
    if inverse:
        return (real_inverse_matrix if onesided else inverse_matrix)(points, extent, parts)
    return forward_matrix(points, extent, points // 2 + 1 if onesided else points, parts)


def _check_matrix(pen: Pen, elements: int) -> None:
    if elements * 8 > _MATRIX_BYTES:
        raise pen.refusal(
            f"needs a matrix of {elements * 8 >> 20} MiB (limit {_MATRIX_BYTES >> 20} MiB): transforms are products",
            "transform fewer points at a time, or cut this node off",
        )


def _transform(pen: Pen, x: str, rest: list[int], matrix: Array) -> str:
    """x [*rest, rows, parts] times the matrix [rows, parts, columns, parts of the result]."""
    rows, parts, columns, results = matrix.shape
    flat = pen.add("Reshape", x, pen.integers(*rest, rows * parts))
    constant = pen.constant(matrix.reshape(rows * parts, columns * results), pen.dtype(pen.x))
    return pen.add("Reshape", pen.add("MatMul", flat, constant), pen.integers(*rest, columns, results))


@rule("STFT", replaces=True)
def _stft(pen: Pen) -> None:
    """Frames are gathered, and each is a row of a product. A window known at import goes into the matrix."""
    signal, window = pen.x, pen.operand(2)
    shape = pen.known_shape(signal)
    batch, samples, parts = shape if len(shape) == 3 else (*shape, 1)
    step, length = _frame_step_and_length(pen, samples)
    columns = length // 2 + 1 if pen.attribute("onesided", 1) else length
    _check_matrix(pen, length * parts * columns * 2)
    matrix = forward_matrix(length, length, columns, parts)
    starts = np.arange((samples - length) // step + 1)[:, None] * step
    frames = pen.add("Gather", signal, pen.constant(starts + np.arange(length), np.int64), axis=1)
    if window in pen.constants:
        matrix *= pen.constants[window].astype(np.float64).reshape(-1, 1, 1, 1)
    elif window:
        weights = pen.add("Reshape", window, pen.integers(length, *([1] if len(shape) == 3 else [])))
        frames = pen.add("Mul", frames, weights)
    pen.give(_transform(pen, frames, [batch, len(starts)], matrix))


def _frame_step_and_length(pen: Pen, samples: int) -> tuple[int, int]:
    window = pen.extent(pen.operand(2), 0) if pen.operand(2) else None
    hop, length = pen.known_number(1, 0), pen.known_number(3, window or samples)
    if pen.operand(2) and window != length:
        raise pen.refusal(f"has frames of {length} samples and a window of {window}", "both must be the same")
    if hop < 1 or not 1 <= length <= samples:
        raise pen.refusal(
            f"cuts {samples} samples into frames of {length}, {hop} apart", "frames must fit and step forward"
        )
    return hop, length


@rule("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", replaces=True)
def _known_operands(pen: Pen) -> None:
    """Folded where every operand is known; here one is not, and is named: the shape of the result depends on it."""
    for index in range(len(pen.input)):
        pen.known_value(index)
