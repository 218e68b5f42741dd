"""Whole numbers that hold for tiles, threads and bytes alike."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient rounded up: 7 rows in tiles of 3 are 3 tiles."""
    return -(-dividend // divisor)
