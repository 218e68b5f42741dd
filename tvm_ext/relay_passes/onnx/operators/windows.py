"""Where sliding windows lie: plain arithmetic for operators that are written as gathers by constant indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .context import Pen

# What a table of indices may hold at most.
_TABLE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Windows over an image, one value for each spatial axis; `pads` has all begins, then all ends."""

    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]

    @classmethod
    def of(cls, pen: Pen, extents: Sequence[int], kernel: Sequence[int]) -> Windows:
        """What a node's attributes say, `kernel` being the default of its `kernel_shape`."""
        rank = len(extents)
        return cls(
            extents=tuple(extents),
            kernel=pen.numbers("kernel_shape", kernel),
            strides=pen.numbers("strides", [1] * rank),
            dilations=pen.numbers("dilations", [1] * rank),
            pads=pen.numbers("pads", [0] * 2 * rank),
        )

    @property
    def rank(self) -> int:
        return len(self.extents)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many windows there are along each axis, the last partial one not counted."""
        return tuple(self._steps(axis) // stride + 1 for axis, stride in enumerate(self.strides))

    def rest(self, axis: int) -> int:
        """How many elements are left behind the last whole window."""
        return self._steps(axis) % self.strides[axis]

    def _steps(self, axis: int) -> int:
        """How far a window can move."""
        padded = self.extents[axis] + self.pads[axis] + self.pads[axis + self.rank]
        return padded - (self.kernel[axis] - 1) * self.dilations[axis] - 1


def check_windows(pen: Pen, windows: Windows) -> None:
    """Raises a ModelError where extents contradict each other."""
    lengths = {len(windows.kernel), len(windows.strides), len(windows.dilations), len(windows.pads) / 2}
    if lengths != {windows.rank} or min(*windows.kernel, *windows.strides, *windows.dilations, *windows.extents) < 1:
        raise pen.refusal(f"has contradictory windows: {windows}", "export the model again")
    if min(windows.counts) < 1 or min(windows.pads) < 0:
        raise pen.refusal(f"has windows that do not fit: {windows}", "export the model again")


def check_table(pen: Pen, windows: Windows) -> None:
    """Raises a ModelError where the table of indices would be too big."""
    size = 8 * int(np.prod(windows.counts)) * int(np.prod(windows.kernel))
    if size > _TABLE_BYTES:
        raise pen.refusal(
            f"needs a table of {size >> 20} MiB (limit {_TABLE_BYTES >> 20} MiB)", "cut the image into parts"
        )


def positions(windows: Windows, counts: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The pixel (row-major) under each tap of each window: [windows, taps]; -1 where it lies outside.

    Worked example: a kernel of 2 with stride 2 and one padded element before 3 pixels: [[-1, 0], [1, 2]].
    """
    flat = np.zeros((1, 1), np.int64)
    inside = np.ones((1, 1), bool)
    for axis, extent in enumerate(windows.extents):
        starts = np.arange(counts[axis]) * windows.strides[axis] - windows.pads[axis]
        along = starts[:, None] + np.arange(windows.kernel[axis]) * windows.dilations[axis]
        flat = _outer(flat * extent, along, np.add)
        inside = _outer(inside, (along >= 0) & (along < extent), np.logical_and)
    return np.where(inside, flat, -1)


def _outer(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic], combine: np.ufunc) -> npt.NDArray[np.int64]:
    """[a, b] and [c, d] combined to [a c, b d]."""
    joined = combine(left[:, None, :, None], right[None, :, None, :])
    return np.asarray(joined.reshape(left.shape[0] * right.shape[0], left.shape[1] * right.shape[1]))


def contributions(windows: Windows) -> npt.NDArray[np.int64]:
    """For each pixel, the (tap, window) pairs that lie over it, as tap * number of windows + window.

    [pixels, most pairs]; pixels with fewer have the number of all pairs as filling.
    """
    under = positions(windows, windows.counts)
    count, taps = under.shape
    window, tap = np.nonzero(under >= 0)
    pixel = under[window, tap]
    order = np.argsort(pixel, kind="stable")
    pixel, pair = pixel[order], (tap * count + window)[order]
    amounts = np.bincount(pixel, minlength=int(np.prod(windows.extents)))
    table = np.full((amounts.size, max(1, int(amounts.max()))), taps * count, np.int64)
    table[pixel, np.arange(pixel.size) - np.repeat(np.cumsum(amounts) - amounts, amounts)] = pair
    return table
