"""The matrices of Winograd's form, in exact arithmetic."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from tvm_ext.support.toom_cook import POINTS, TAPS, transforms


def product(matrix, vector):
    return [sum((a * b for a, b in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]


@pytest.mark.parametrize("outputs", sorted(POINTS))
def test_they_are_a_correlation(outputs):
    draw = random.Random(outputs)
    inputs, taps = ([Fraction(draw.randint(-9, 9)) for _ in range(n)] for n in (outputs + TAPS - 1, TAPS))
    made = transforms(outputs)
    products = [a * b for a, b in zip(product(made.filters, taps), product(made.inputs, inputs), strict=True)]
    wanted = [sum(inputs[i + k] * taps[k] for k in range(TAPS)) for i in range(outputs)]
    assert product(made.outputs, products) == wanted


def test_two_outputs_have_the_matrices_of_the_paper():
    """Lavin & Gray, equation 5, but for the signs of rows."""
    made = transforms(2)
    assert made.outputs == ((1, 1, 1, 0), (0, 1, -1, 1))
    assert [list(map(abs, row)) for row in made.inputs] == [[1, 0, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    assert [abs(row[0]) for row in made.filters] == [1, Fraction(1, 2), Fraction(1, 2), 0]
