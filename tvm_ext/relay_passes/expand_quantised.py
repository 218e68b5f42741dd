"""Quantisation of floats to bytes, and the way back, as arithmetic that joins what is before and behind it."""

from __future__ import annotations

import numpy as np

from tvm_ext._tvm import Call, Constant, Expr, relax
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape

from .rewriting import CallRewriter, call_pass

_BYTES = ("uint8", "int8")
_ROUNDS = 12582912.0
"""1.5 * 2**23: float32 near it are whole numbers, so that adding it rounds, halves to even. (Stock TVM calls a function
for each element otherwise.)
"""
_WIDE = 1048576.0
"""2**20: beyond what any zero point brings back to a byte, and far below `_ROUNDS`."""


@call_pass("tvm_ext.ExpandQuantised")
class ExpandQuantised(CallRewriter):
    """Rewrite ``quantize`` of float32 to bytes and ``dequantize`` of bytes to float32.

    Stock TVM's forms are one computation each, of which a kernel can neither fuse a part nor leave out a scale of 1.
    """

    def rewritten(self, call: Call) -> Expr:
        name = operator_name(call)
        types = (dtype_of(call.args[0]), dtype_of(call)) if name in ("relax.quantize", "relax.dequantize") else ()
        if not types or static_shape(call.args[0]) is None or dtype_of(call.args[1]) != "float32":
            return call
        if name == "relax.quantize" and types[0] == "float32" and types[1] in _BYTES:
            return self._quantised(call)
        if name == "relax.dequantize" and types[0] in _BYTES and types[1] == "float32":
            return self._real(call)
        return call

    def _quantised(self, call: Call) -> Expr:
        """saturate(round(x / scale) + zero point), clipped where rounding by an addition is exact."""
        x, (scale, zero), limits = call.args[0], self._by_axis(call), np.iinfo(dtype_of(call))
        if not _is_all(scale, 1):
            x = self.builder_.emit(relax.op.divide(x, scale))
        offset = float(zero.value.numpy()) if isinstance(zero, Constant) and zero.value.numpy().ndim == 0 else None
        low, high = (-_WIDE, _WIDE) if offset is None else (limits.min - offset, limits.max - offset)
        x = self.builder_.emit(relax.op.clip(x, low, high))
        x = self.builder_.emit(relax.op.add(x, relax.const(_ROUNDS, "float32")))
        x = self.builder_.emit(relax.op.subtract(x, relax.const(_ROUNDS - (offset or 0.0), "float32")))
        if offset is None:
            x = self.builder_.emit(relax.op.add(x, zero))
            x = self.builder_.emit(relax.op.clip(x, limits.min, limits.max))
        return relax.op.astype(x, dtype_of(call))

    def _real(self, call: Call) -> Expr:
        """(x - zero point) * scale: bytes and their differences are float32."""
        scale, zero = self._by_axis(call)
        x = self.builder_.emit(relax.op.astype(call.args[0], "float32"))
        if not _is_all(zero, 0):
            x = self.builder_.emit(relax.op.subtract(x, zero))
        return relax.op.multiply(x, scale)

    def _by_axis(self, call: Call) -> list[Expr]:
        """Scale and zero point in float32, in a shape that broadcasts along the call's axis."""
        rank = len(static_shape(call.args[0]) or ())
        shape = [-1 if axis == int(call.attrs.axis) % max(1, rank) else 1 for axis in range(rank)]
        return [self._in_shape(value, shape) for value in call.args[1:]]

    def _in_shape(self, value: Expr, shape: list[int]) -> Expr:
        single = static_shape(value) in ((), (1,))
        if isinstance(value, Constant):
            array = value.value.numpy().astype("float32")
            return relax.const(array.reshape(() if single else shape), "float32")
        if dtype_of(value) != "float32":
            value = self.builder_.emit(relax.op.astype(value, "float32"))
        extents = [] if single else [(static_shape(value) or ())[0] if size == -1 else size for size in shape]
        return self.builder_.emit(relax.op.reshape(value, extents))


def _is_all(value: Expr, number: int) -> bool:
    return isinstance(value, Constant) and bool((value.value.numpy() == number).all())
