"""Fourier transforms, as matrix products with constant matrices.

An audio model transforms a few hundred samples at a time, where a product on the kernels that products have is as fast
as a butterfly network of small steps would be, and one pass over the data.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from tvm_ext.support.arrays import Array

from ..graph import attribute
from .context import Context, Pen, Rule, operand, refusal

# What a transform's matrix may hold at most: 4096 complex points.
_MATRIX_BYTES = 256 << 20
_NARROW = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


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


def _dft(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """The axis goes last but one, its points and parts become the rows of a product, and everything goes back."""
    pen, x = Pen(node=node, context=context), node.input[0]
    shape = context.known_shape(node, x)
    axis = _dft_axis(node, context, len(shape))
    matrix = _dft_matrix(node, context, shape[axis], shape[-1])
    before = (*(position for position in range(len(shape) - 1) if position != axis), axis, len(shape) - 1)
    rest = [shape[position] for position in before[:-2]]
    moved = x if before == tuple(range(len(shape))) else pen.add("Transpose", x, perm=before)
    transformed = _transform(pen, moved, rest, matrix)
    if moved == x:
        pen.add("Identity", transformed, out=node.output[0])
    else:
        after = [before.index(position) for position in range(len(shape))]
        pen.add("Transpose", transformed, out=node.output[0], perm=after)
    return pen.nodes


def _dft_axis(node: onnx.NodeProto, context: Context, rank: int) -> int:
    if context.opset >= 20:
        given = context.known_value(node, 2)
        axis = -2 if given is None else int(given.reshape(-1)[0])
    else:
        axis = int(attribute(node, "axis", 1))
    if not -rank <= axis <= rank - 2 or axis == -1:
        raise refusal(node, f"has no axis {axis} before the last of {rank}", "export a valid axis")
    return axis % rank


def _dft_matrix(node: onnx.NodeProto, context: Context, extent: int, parts: int) -> Array:
    inverse, onesided = bool(attribute(node, "inverse", 0)), bool(attribute(node, "onesided", 0))
    given = context.known_value(node, 1)
    if parts not in (1, 2):
        raise refusal(node, f"has {parts} values in a number (last axis)", "a number has 1 or 2: real, imaginary")
    default = 2 * (extent - 1) if inverse and onesided else extent
    points = default if given is None else int(given.reshape(-1)[0])
    if points < 1:
        raise refusal(node, f"transforms {points} points", "give at least one")
    _check_matrix(node, extent * points * parts * 2)
    if inverse:
        return (real_inverse_matrix if onesided else inverse_matrix)(points, extent, parts)
    return forward_matrix(points, extent, points // 2 + 1 if onesided else points, parts)


def _check_matrix(node: onnx.NodeProto, elements: int) -> None:
    if elements * 8 > _MATRIX_BYTES:
        raise refusal(
            node,
            f"needs a matrix of {elements * 8 >> 20} MiB (limit {_MATRIX_BYTES >> 20} MiB): transforms are products",
            "transform fewer points at a time, or cut this node off",
        )


def _transform(pen: Pen, x: str, rest: list[int], matrix: Array) -> str:
    """x [*rest, rows, parts] times the matrix [rows, parts, columns, parts of the result]."""
    code = pen.context.known_type(pen.node, pen.node.input[0])
    narrow = code in _NARROW
    rows, parts, columns, results = matrix.shape
    flat = pen.add("Reshape", x, pen.integers(*rest, rows * parts))
    wide = pen.cast(flat, onnx.TensorProto.FLOAT) if narrow else flat
    dtype = np.float32 if narrow else helper.tensor_dtype_to_np_dtype(code)
    constant = pen.constant(matrix.reshape(rows * parts, columns * results), dtype)
    product = pen.add("MatMul", wide, constant)
    back = pen.cast(product, code) if narrow else product
    return pen.add("Reshape", back, pen.integers(*rest, columns, results))


def _stft(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Frames are gathered, and each is a row of a product. A window known at import goes into the matrix."""
    pen, signal, window = Pen(node=node, context=context), node.input[0], operand(node, 2)
    shape = context.known_shape(node, signal)
    batch, samples, parts = shape if len(shape) == 3 else (*shape, 1)
    step, length = _frame_step_and_length(node, context, samples)
    columns = length // 2 + 1 if attribute(node, "onesided", 1) else length
    _check_matrix(node, length * parts * columns * 2)
    matrix = forward_matrix(length, length, columns, parts)
    starts = np.arange((samples - length) // step + 1)[:, None] * step
    frames = pen.add("Gather", signal, pen.constant(starts + np.arange(length), np.int64), axis=1)
    if window in context.constants:
        matrix *= context.constants[window].astype(np.float64).reshape(-1, 1, 1, 1)
    elif window:
        weights = pen.add("Reshape", window, pen.integers(length, *([1] if len(shape) == 3 else [])))
        frames = pen.add("Mul", frames, weights)
    transformed = _transform(pen, frames, [batch, len(starts)], matrix)
    pen.add("Identity", transformed, out=node.output[0])
    return pen.nodes


def _frame_step_and_length(node: onnx.NodeProto, context: Context, samples: int) -> tuple[int, int]:
    step, given = context.known_value(node, 1), context.known_value(node, 3)
    hop = 0 if step is None else int(step.reshape(-1)[0])
    window = context.extent(operand(node, 2), 0) if operand(node, 2) else None
    length = int(given.reshape(-1)[0]) if given is not None else window or samples
    if operand(node, 2) and window != length:
        raise refusal(node, f"has frames of {length} samples and a window of {window}", "both must be the same")
    if hop < 1 or not 1 <= length <= samples:
        raise refusal(
            node, f"cuts {samples} samples into frames of {length}, {hop} apart", "frames must fit and step forward"
        )
    return hop, length


def _known_operands(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """Folded where every operand is known; here one is not, and is named: the shape of the result depends on it."""
    for index in range(len(node.input)):
        context.known_value(node, index)
    return None


RULES: Mapping[str, Rule] = {
    "BlackmanWindow": _known_operands,
    "DFT": _dft,
    "HammingWindow": _known_operands,
    "HannWindow": _known_operands,
    "MelWeightMatrix": _known_operands,
    "STFT": _stft,
}
REPLACED = frozenset(RULES)
