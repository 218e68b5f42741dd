"""Where Resize samples along one axis, and with which weights: tables computed at import, in float64.

Kernels that compute coordinates in float32 choose another element wherever a coordinate is close to a boundary:
output 3 of an axis resized by 0.6 is at 3 / 0.6 = 5, or at 4.9999998, for 0.6 is 0.60000002 as a float32. For the same
reason the operations below are those of ONNX's reference implementation, in its order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvm_ext.support.arrays import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How every axis of one Resize is sampled: the operator's attributes by their ONNX names."""

    mode: str
    coordinates: str
    nearest_mode: str
    cubic_coeff_a: float = -0.75
    antialias: bool = False
    exclude_outside: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizedAxis:
    """One axis that is resized.

    ``scale``: output by input extent, as the model gives it: `extent * scale` need not be integral. ``roi``: start and
    end, 1 being the last element; only "tf_crop_and_resize" asks for them.
    """

    index: int
    extent: int
    resized: int
    scale: float
    roi: tuple[float, float] = (0.0, 1.0)

    @property
    def is_kept(self) -> bool:
        return self.resized == self.extent and abs(self.scale - 1.0) <= 1e-9 and self.roi == (0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisTable:
    """Output element i is the sum over k of weights[i, k] * input[indices[i, k]], or the extrapolation value.

    ``indices``, ``weights``: of shape (resized extent, taps); indices lie inside the input. ``outside``: which outputs
    are extrapolated; None: none.
    """

    indices: Array
    weights: Array
    outside: Array | None

    def dense(self, extent: int) -> Array:
        """The same as a matrix of shape (resized extent, input extent)."""
        matrix = np.zeros((len(self.indices), extent))
        np.add.at(matrix, (np.arange(len(self.indices))[:, None], self.indices), self.weights)
        return matrix


def axis_table(axis: ResizedAxis, sampling: Sampling) -> AxisTable:
    """The table of one axis."""
    x = _coordinates(axis, sampling.coordinates)
    outside = (x < 0) | (x > axis.extent - 1) if sampling.coordinates == "tf_crop_and_resize" else None
    whole = x == np.floor(x)
    # ONNX counts a ratio in (0, 1]: an integral coordinate is all of its left neighbour's right neighbour.
    ratio = np.where(whole, 1.0, x - np.floor(x))
    weights = _weights(ratio, min(axis.scale, 1.0), sampling)
    indices = _neighbours(x, weights.shape[1])
    if sampling.exclude_outside:
        weights = np.where((indices < 0) | (indices >= axis.extent), 0.0, weights)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0.0, 1.0, total)
    indices = np.clip(indices, 0, axis.extent - 1)
    if sampling.mode == "nearest":
        indices, weights = np.take_along_axis(indices, weights.argmax(axis=1)[:, None], axis=1), np.ones((len(x), 1))
    return AxisTable(
        indices=indices, weights=weights, outside=outside if outside is not None and outside.any() else None
    )


def _coordinates(axis: ResizedAxis, mode: str) -> Array:
    """The place of each output element on the input axis."""
    y = np.arange(axis.resized, dtype=np.float64)
    length, last = axis.scale * axis.extent, axis.extent - 1
    half_pixel = (y + 0.5) / axis.scale
    if mode == "align_corners":
        return y * 0.0 if length == 1 else y * last / (length - 1)
    if mode == "asymmetric":
        return y / axis.scale
    if mode == "tf_crop_and_resize":
        start, end = np.float32(axis.roi[0]), np.float32(axis.roi[1])
        steps = y * 0.0 + (end - start) * last / 2 if length == 1 else y * (end - start) * last / (length - 1)
        places: Array = steps + start * last
        return places
    if mode == "pytorch_half_pixel":
        return y * 0.0 - 0.5 if length == 1 else half_pixel - 0.5
    if mode == "half_pixel_symmetric":
        return axis.extent / 2 * (1 - axis.resized / length) + half_pixel - 0.5
    return half_pixel - 0.5


def _neighbours(x: Array, taps: int) -> Array:
    """The `taps` elements that are nearest to each coordinate, the left one of two that are equally near."""
    # (As if the axis were padded at its left: coordinates round to what they are there.)
    padding = (taps + 1) // 2
    left, ratio = np.floor(x + padding).astype(np.int64) - padding, x + padding - np.floor(x + padding)
    if taps % 2 == 0:
        first = np.where(ratio == 0, -(taps // 2), 1 - taps // 2)
    else:
        first = np.where(ratio <= 0.5, -((taps - 1) // 2), 1 - (taps - 1) // 2)
    neighbours: Array = (left + first)[:, None] + np.arange(taps)
    return neighbours


def _weights(ratio: Array, scale: float, sampling: Sampling) -> Array:
    """One row of weights for each ratio; `scale` is at most 1, below which antialiasing widens the window."""
    distance = ratio[:, None]
    if sampling.mode == "nearest":
        right = _takes_right(ratio, sampling.nearest_mode)[:, None]
        return np.concatenate([~right, right], axis=1).astype(np.float64)
    if not sampling.antialias:
        scale = 1.0
    if sampling.mode == "linear":
        first = int(np.floor(-1 / scale)) + 1
        weights = np.clip(1 - np.abs((np.arange(first, 2 - first) - distance) * scale), 0.0, 1.0)
    else:
        first = int(np.floor(-2 / scale)) + 1
        weights = _cubic(np.abs((np.arange(first, 2 - first) - distance) * scale), sampling.cubic_coeff_a)
    normal: Array = weights / weights.sum(axis=1, keepdims=True) if sampling.antialias else weights
    return normal


def _takes_right(ratio: Array, nearest_mode: str) -> Array:
    if nearest_mode == "floor":
        return np.equal(ratio, 1.0)
    if nearest_mode == "ceil":
        return np.greater(ratio, 0.0)
    return np.greater_equal(ratio, 0.5) if nearest_mode == "round_prefer_ceil" else np.greater(ratio, 0.5)


def _cubic(distance: Array, a: float) -> Array:
    """Keys' cubic convolution at distances that are not negative."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * a * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
