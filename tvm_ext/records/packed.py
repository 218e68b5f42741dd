"""Products by weights of four bits: what the import says of one, and what a CPU's kernel computes in its place."""

from __future__ import annotations

ACCURACY = "tvm_ext.accuracy_level"
"""PrimFunc attribute: ONNX Runtime's ``accuracy_level`` of a product by packed weights, 0 where none is asked for.

The function's parameters are x (rows, K), codes (blocks, half a block, N) of two codes a byte, scales (blocks, N) in
float32, zero points (blocks, N) in uint8, which are left out where all are `MIDDLE`, a bias (N,) in float32 or none,
then the product (rows, N).
A byte has the codes of one column at two places of a block, half a block apart: the first in its lower bits.
"""

ROUNDED = "tvm_ext.rounded_product"
"""PrimFunc attribute: of such a function, that a kernel may round the blocks of x to signed bytes."""

MIDDLE = 8
"""The zero point of four bits where a model gives none."""

ROUNDED_LEVEL = 4
"""The accuracy level that asks for int8."""
