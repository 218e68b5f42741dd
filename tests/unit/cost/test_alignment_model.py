"""The model of alignment against Bolt's Table 3, and what it must never say."""

from __future__ import annotations

from math import gcd

import pytest

from tvm_ext.cost.alignment_model import AlignedProduct, copied_us, has_matrix_units, product_us
from tvm_ext.devices.device_db import lookup

# n, h, w, input channels, filters, r, s, padding; the paper's speed with padding over without, on a T4.
TABLE_3 = [
    ((32, 20, 26, 46, 32, 3, 3, (1, 1)), 1.62),
    ((32, 20, 26, 46, 32, 5, 5, (2, 2)), 1.95),
    ((128, 14, 19, 46, 32, 5, 7, (0, 0)), 1.77),
    ((288, 11, 15, 46, 32, 5, 7, (0, 0)), 1.71),
    ((32, 20, 26, 174, 64, 3, 3, (1, 1)), 1.60),
    ((32, 20, 26, 174, 64, 5, 5, (2, 2)), 1.99),
]


def convolution(row: tuple[int, int, int, int, int, int, int, tuple[int, int]], channels: int) -> AlignedProduct:
    n, h, w, _, filters, r, s, (top, left) = row
    return AlignedProduct(
        rows=n * (h + 2 * top - r + 1) * (w + 2 * left - s + 1),
        columns=filters,
        depth=r * s * channels,
        batch=1,
        input_elements=n * h * w * channels,
        alignments=(gcd(8, channels), gcd(8, channels)),
        itemsize_bytes=2,
        dtype="float16",
    )


@pytest.mark.parametrize(("row", "measured"), TABLE_3)
def test_the_papers_speed_ups(row: tuple[int, int, int, int, int, int, int, tuple[int, int]], measured: float) -> None:
    t4, channels = lookup("nvidia-t4"), row[3]
    wide = -(-channels // 8) * 8
    pixels = row[0] * row[1] * row[2]
    padding = copied_us(2 * pixels * channels, 2 * pixels * wide, t4)
    speed_up = product_us(convolution(row, channels), t4) / (product_us(convolution(row, wide), t4) + padding)
    assert speed_up == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("device", ["nvidia-v100", "nvidia-t4", "nvidia-a100", "nvidia-h200"])
def test_wider_copies_are_never_slower(device: str) -> None:
    times = []
    for alignment in (1, 2, 4, 8):
        product = AlignedProduct(
            rows=4096,
            columns=512,
            depth=512,
            batch=1,
            input_elements=4096 * 512,
            alignments=(alignment, alignment),
            itemsize_bytes=2,
            dtype="float16",
        )
        times.append(product_us(product, lookup(device)))
    assert times == sorted(times, reverse=True)


def test_a_large_product_is_bound_by_multiplying() -> None:
    """4096 cubed halves on an A100: between its peak and half of that."""
    product = AlignedProduct(
        rows=4096,
        columns=4096,
        depth=4096,
        batch=1,
        input_elements=4096**2,
        alignments=(8, 8),
        itemsize_bytes=2,
        dtype="float16",
    )
    peak_us = 2 * 4096**3 / 312e12 * 1e6
    assert peak_us < product_us(product, lookup("nvidia-a100")) < 2 * peak_us


def test_types_without_matrix_units() -> None:
    assert has_matrix_units(lookup("nvidia-a100"), "float16")
    assert not has_matrix_units(lookup("nvidia-a100"), "float32")
    assert not has_matrix_units(lookup("amd-mi50"), "float16")
