"""Products by weights of four bits, which stay packed in memory where few rows are multiplied by them.

Such a product takes as long as its weights take from memory: half a byte a weight instead of four. The kernel widens
them in registers. With more rows it takes as long as its arithmetic, and weights become floats when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tvm_ext._tvm import BlockBuilder, Expr, TeTensor, relax, te
from tvm_ext.analysis.relax_values import static_shape

from .context import FLOAT, converter

PACKED_PRODUCT = "PackedProduct"
"""(x, codes, scales, zero points) with sizes K and N: what the import writes for a MatMulNBits of four bits.

Codes are (blocks, half a block, N) of two codes a byte; scales float32 and zero points uint8 of (blocks, N).
"""

MOST_PACKED_ROWS = 4
"""On a Zen 5 four rows take 0.47 to 0.77 of their time in float32, eight rows 1.1 to 1.2 times as long."""


def is_served(shape: tuple[int, ...] | None, code: int) -> bool:
    """Whether the left operand of a product by packed weights is float32 and has few rows, as far as is known."""
    return shape is not None and prod(shape[:-1]) <= MOST_PACKED_ROWS and code == FLOAT


@converter(PACKED_PRODUCT)
def packed_product(builder: BlockBuilder, operands: Sequence[Expr], _: Mapping[str, Any], __: int) -> Expr:
    """x (..., K) by K x N; sums in float32, two halves of a block side by side."""
    x, codes, scales, zeros = operands
    shape = static_shape(x)
    assert shape is not None
    rows = builder.emit(relax.op.reshape(x, (prod(shape[:-1]), shape[-1])))
    product = builder.emit(builder.call_te(_product, rows, codes, scales, zeros, primfunc_name_hint="packed_product"))
    return relax.op.reshape(product, (*shape[:-1], codes.ty.shape[2]))


def _product(x: TeTensor, codes: TeTensor, scales: TeTensor, zeros: TeTensor) -> TeTensor:
    blocks, half, columns = codes.shape
    block, place = te.reduce_axis((0, blocks), "block"), te.reduce_axis((0, half), "place")

    def element(row: Expr, column: Expr) -> Expr:
        byte, start = codes[block, place, column].astype("int32"), block * (half * 2) + place
        scale = scales[block, column]
        shift = zeros[block, column].astype("float32") * scale  # once a block, so that a weight is one multiply-add
        first, second = (code.astype("float32") * scale - shift for code in (byte & 15, byte >> 4))
        return te.sum(x[row, start] * first + x[row, start + half] * second, axis=[block, place])

    return te.compute((x.shape[0], columns), element, name="packed_product")
