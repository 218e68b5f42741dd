"""Products by weights of four bits, which stay packed at import: `settle_packed` decides what becomes of them.

A kernel of few rows widens them in registers: half a byte a weight comes from memory instead of four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tvm_ext._tvm import BlockBuilder, Expr, TeTensor, relax, te
from tvm_ext.analysis.relax_values import static_shape
from tvm_ext.records.packed import ACCURACY, MIDDLE

from .context import converter

PACKED_PRODUCT = "PackedProduct"
"""(x, codes, scales, zero points if any, bias if any) with sizes K and N, and `level`: what becomes of a MatMulNBits.

The operands are those of functions with attribute `ACCURACY`, x of any rank.
"""


@converter(PACKED_PRODUCT)
def packed_product(builder: BlockBuilder, operands: Sequence[Expr], attributes: Mapping[str, Any], __: int) -> Expr:
    """x (..., K) by K x N; sums in float32, two halves of a block side by side."""
    x, *weights = operands
    shape = static_shape(x)
    assert shape is not None
    rows = builder.emit(relax.op.reshape(x, (prod(shape[:-1]), shape[-1])))
    level = {ACCURACY: int(attributes.get("level", 0))}
    call = builder.call_te(product, rows, *weights, primfunc_name_hint="packed_product", primfunc_attrs=level)
    return relax.op.reshape(builder.emit(call), (*shape[:-1], weights[0].ty.shape[2]))


def product(x: TeTensor, codes: TeTensor, scales: TeTensor, *more: TeTensor) -> TeTensor:
    zeros, bias = (next((tensor for tensor in more if len(tensor.shape) == rank), None) for rank in (2, 1))
    blocks, half, columns = codes.shape
    block, place = te.reduce_axis((0, blocks), "block"), te.reduce_axis((0, half), "place")

    def element(row: Expr, column: Expr) -> Expr:
        byte, start = codes[block, place, column].astype("int32"), block * (half * 2) + place
        scale = scales[block, column]
        zero = MIDDLE if zeros is None else zeros[block, column].astype("float32")
        shift = zero * scale  # once a block, so that a weight is one multiply-add
        first, second = (code.astype("float32") * scale - shift for code in (byte & 15, byte >> 4))
        return te.sum(x[row, start] * first + x[row, start + half] * second, axis=[block, place])

    sums = te.compute((x.shape[0], columns), element, name="packed_product")
    return sums if bias is None else te.compute(sums.shape, lambda row, n: sums[row, n] + bias[n], name="with_bias")
