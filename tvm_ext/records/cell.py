"""A step of a recurrent cell as plain numbers, and how a CPU kernel divides it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CellWork:
    """What one step computes: ``rows`` (the batch) of ``units``, each from several sums of every product.

    ``products`` has (gates, depth, bytes of a weight) of each: a unit has ``gates`` sums of ``depth`` terms.
    ``operations`` are those of the element-wise part, per row and unit. Worked example, an LSTM of 256 units at batch
    1: rows 1, units 256, products ((4, 256, 4.0),).
    """

    rows: int
    units: int
    products: tuple[tuple[int, int, float], ...]
    operations: float

    def __post_init__(self) -> None:
        assert self.products and min(self.rows, self.units) >= 1
        assert all(min(gates, depth) >= 1 for gates, depth, _ in self.products)

    @property
    def flops(self) -> float:
        """Of the products, a multiply-add counting as two."""
        return 2.0 * self.rows * self.units * sum(gates * depth for gates, depth, _ in self.products)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellTiles:
    """A task is ``vectors`` registers of ``lanes`` units; ``rows`` of the batch are computed at a time."""

    lanes: int
    vectors: int
    rows: int

    def __post_init__(self) -> None:
        assert min(self.lanes, self.vectors, self.rows) >= 1

    @property
    def units(self) -> int:
        """Units of a task; the last one may have fewer."""
        return self.lanes * self.vectors

    def __str__(self) -> str:
        return f"tasks of {self.units} units by {self.rows} rows"
