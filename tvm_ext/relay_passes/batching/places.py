"""Where a batch lies, as two shapes of one tensor say, for two sizes of the batch."""

from __future__ import annotations

from tvm_ext.records.batching import BatchAxis


class SameModel(Exception):  # noqa: N818 - why two modules are not one model at two sizes
    """What two sizes of the batch have not in common, apart from the extents of batch axes."""


def place_of(first: tuple[int, ...], second: tuple[int, ...], sizes: tuple[int, int]) -> BatchAxis | None:
    """The one axis on which two shapes differ, by the batch ``sizes``; None where they are equal.

    (8, 12, 4) and (8, 36, 4) for sizes 2 and 6: axis 1, 6 places an element. Raises SameModel for other differences.
    """
    if first == second:
        return None
    axes = [axis for axis, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]]
    if len(first) != len(second) or len(axes) != 1:
        raise SameModel("its shape depends on the batch size in more than one axis")
    ((axis,), inner) = axes, first[axes[0]] // sizes[0]
    if (inner * sizes[0], inner * sizes[1]) != (first[axis], second[axis]):
        raise SameModel("its extent is no multiple of the batch size")
    return BatchAxis(axis=axis, inner=inner)
