"""Running products."""

from __future__ import annotations

import numpy as np

from tvm_ext.support.arrays import DType

from .context import Pen, rule


@rule("CumProd", replaces=True)
def _cum_prod(pen: Pen) -> None:
    """Products over distances 1, 2, 4, ...: after step s each element is the product of 2^s elements up to it.

    Worked example: [a, b, c, d] -> [a, ab, bc, cd] -> [a, ab, abc, abcd]. No loop, and any number type.
    """
    shape, dtype = pen.known_shape(pen.x), pen.dtype(pen.x)
    axis = _axis(pen, pen.known_number(1, 0), len(shape)) % max(1, len(shape))
    product, reverse = pen.x, pen.flag("reverse")
    if pen.flag("exclusive"):
        product = _shifted(pen, product, shape, axis, 1, reverse, dtype)
    distance = 1
    while distance < shape[axis]:
        product = pen.add("Mul", product, _shifted(pen, product, shape, axis, distance, reverse, dtype))
        distance *= 2
    pen.add("Identity", product, out=pen.out)


@rule("CumSum")
def _check_cum_sum(pen: Pen) -> None:
    rank, axis = pen.rank(pen.x), pen.constants.get(pen.operand(1))
    if rank is not None and axis is not None:
        _axis(pen, int(axis.reshape(-1)[0]), rank)


def _axis(pen: Pen, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise pen.refusal(f"has no axis {axis} among {rank}", "export a valid axis")
    return axis


def _shifted(pen: Pen, x: str, shape: tuple[int, ...], axis: int, distance: int, backwards: bool, dtype: DType) -> str:
    """x moved by `distance` along `axis`, ones in the gap."""
    gap = (*shape[:axis], min(distance, shape[axis]), *shape[axis + 1 :])
    ones = pen.constant(np.ones(gap, dtype))
    begin, end = (distance, shape[axis]) if backwards else (0, shape[axis] - distance)
    if begin >= end:
        return ones
    kept = pen.add("Slice", x, pen.integers(begin), pen.integers(end), pen.integers(axis))
    return pen.add("Concat", *((kept, ones) if backwards else (ones, kept)), axis=axis)
