"""Winograd's minimal filtering: the matrices of F(m x m, 3x3) (Lavin & Gray, CVPR 2016).

m x m outputs are computed from (m+2) x (m+2) inputs by (m+2)^2 products instead of 9 m^2:

    Y = A^T [(G g G^T) * (B^T d B)] A

The matrices come from the points at which polynomials are evaluated (Toom-Cook), infinity among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

TAPS = 3
"""Taps along each axis: the filters that the matrices are made for."""

POINTS: dict[int, tuple[Fraction, ...]] = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (Fraction(0), Fraction(1), Fraction(-1), Fraction(1, 2), Fraction(-2)),
}
"""By outputs along an axis, the points beside infinity. Those of 4 err 0.69 times as much as the usual 0, 1, -1, 2, -2,
measured in float32 over 50 channels; of all pairs of small fractions beside 0, 1 and -1 only (-1/2, 2) erred less."""

Rationals = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transforms:
    """``outputs`` = A^T (m x a), ``filters`` = G (a x 3), ``inputs`` = B^T (a x a), for a = m + 2."""

    outputs: Rationals
    filters: Rationals
    inputs: Rationals


@cache
def transforms(m: int) -> Transforms:
    """The matrices of F(m, 3); the products of B^T's rows with common denominators are moved into G.

    Worked example, m = 2: B^T = [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]].
    """
    points = POINTS[m]
    size = m + TAPS - 1
    outputs = tuple((*(point**power for point in points), Fraction(int(power == m - 1))) for power in range(m))
    filters = [tuple(point**power for power in range(TAPS)) for point in points]
    inputs = []
    for i, point in enumerate(points):
        others = [other for j, other in enumerate(points) if j != i]
        scale = prod(point - other for other in others)
        row = _polynomial(others, size)
        factor = _scale_of(row)
        inputs.append(tuple(item * factor for item in row))
        filters[i] = tuple(item / scale / factor for item in filters[i])
    inputs.append(_polynomial(points, size))
    filters.append((Fraction(0), Fraction(0), Fraction(1)))
    return Transforms(outputs=outputs, filters=tuple(filters), inputs=tuple(inputs))


def _polynomial(roots: Sequence[Fraction], size: int) -> tuple[Fraction, ...]:
    """The ``size`` coefficients, that of 1 first, of the product of (x - root)."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return (*coefficients, *[Fraction(0)] * (size - len(coefficients)))


def _scale_of(row: Sequence[Fraction]) -> Fraction:
    """The power of two, with a sign, that makes the first coefficient of ``row`` that is not 0 about 1."""
    first = next(item for item in row if item)
    factor = Fraction(1) if first > 0 else Fraction(-1)
    while abs(first * factor) < 1:
        factor *= 2
    return factor
