"""What tiles of a product on tensor cores (mma.sync) take and load, of one tile or of arrays of them."""

from __future__ import annotations

from tvm_ext.devices.gpu import REGISTER_BYTES, WARP
from tvm_ext.support.quantities import Quantity, chosen, larger, smaller, whole_quotient

ADDRESS_REGISTERS = 40
"""Registers of a thread beside accumulators and fragments: addresses, copies under way. ptxas: 30 to 45."""

MAX_GROUP = 16  # a choice: bounds the groups of blocks that are looked at
MIN_UNEVEN_GAIN = 1.1  # a choice: groups that leave a rest need index arithmetic, and a gain that outweighs it


def fragment_bytes(warp_rows: Quantity, warp_columns: Quantity, step: int, itemsize: int) -> Quantity:
    """Of both factors that a warp reads for ``step`` products of each of its sums."""
    return (warp_rows + warp_columns) * step * itemsize


def accumulator_registers(warp_rows: Quantity, warp_columns: Quantity, lanes: int = WARP) -> Quantity:
    """32-bit registers of a thread for the sums of its warp, of ``lanes``."""
    return warp_rows * warp_columns // lanes


def factor_registers(fragments: Quantity, lanes: int = WARP) -> Quantity:
    """32-bit registers of a thread for so many bytes of its warp's fragments."""
    return fragments // (lanes * REGISTER_BYTES)


def panel_elements(
    group: int, rows: Quantity, columns: Quantity, resident: Quantity, tile: tuple[Quantity, Quantity]
) -> Quantity:
    """What concurrent tiles read, for one step of the reduction, if taken in groups of ``group`` rows.

    A group that does not divide the rows needs a division by a variable in every block, and must save a tenth.
    """
    wide = whole_quotient(smaller(resident, rows * columns), group)
    elements = group * tile[0] + smaller(wide, columns) * tile[1] + larger(0, wide - columns) * tile[0]
    return elements * chosen(rows % group != 0, MIN_UNEVEN_GAIN, 1.0)


def panel_lines(
    group: Quantity, rows: Quantity, columns: Quantity, resident: Quantity, tile: tuple[Quantity, Quantity]
) -> Quantity:
    """Rows of the first factor and columns of the second that ``resident`` tiles of ``tile`` elements span.

    Worked example, 216 concurrent tiles of 128 x 128: in groups of 16 rows they span 14 columns, 30 panels instead of
    432.
    """
    return smaller(group, rows) * tile[0] + smaller(columns, whole_quotient(resident, group)) * tile[1]


def grid_group(rows: int, columns: int, resident: int, tile: tuple[int, int]) -> int:
    """The group whose ``resident`` concurrent tiles of ``tile`` = (rows, columns) elements read the fewest panels."""
    groups = range(1, min(rows, MAX_GROUP) + 1)
    return min(groups, key=lambda group: float(panel_elements(group, rows, columns, resident, tile)))
