"""Products by weights of four bits: which are int8, which stay as they are imported, whose weights become floats.

A product of few rows takes as long as its weights take from memory, half a byte a weight. With more rows it takes as
long as its arithmetic: floats, unless the model or the build allows for a left operand of bytes.
"""

from __future__ import annotations

import numpy as np

from tvm_ext._tvm import CALL_TIR, OPAQUE, Call, Constant, Expr, GlobalVar, relax
from tvm_ext.analysis.relax_values import static_shape
from tvm_ext.cost.packed_products import rounds_blocks
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.options import BuildOptions
from tvm_ext.records.packed import ACCURACY, MIDDLE, ROUNDED, ROUNDED_LEVEL
from tvm_ext.support.arrays import Array

from .rewriting import CallRewriter, call_pass

MOST_PACKED_ROWS = 4
"""On a Zen 5 four rows take 0.47 to 0.77 of their time in float32, eight rows 1.1 to 1.2 times as long."""


@call_pass("tvm_ext.SettlePackedProducts")
class SettlePackedProducts(CallRewriter):
    """Mark functions with attribute `ACCURACY` as `ROUNDED`, or replace calls of more than `MOST_PACKED_ROWS`.

    Rounded are those whose accuracy level asks for it, and those that ask for nothing with ``precision="int8"``, where
    ``device`` has an instruction; without a device none is. What has weights that are no constants stays as it is.
    """

    def prepare(self, device: DeviceSpec | None, options: BuildOptions) -> None:
        has_kernels = device is not None and device.kind == "cpu" and options.enable_roller is not False
        levels = {ROUNDED_LEVEL, 0} if options.precision == "int8" else {ROUNDED_LEVEL}
        device = device if has_kernels else None
        self.device, self.levels = device, levels
        self.rounded: dict[GlobalVar, GlobalVar] = {}

    def rewritten(self, call: Call) -> Expr:
        func = self.mod[call.args[0]] if call.op == CALL_TIR else None
        if func is None or not func.attrs or ACCURACY not in func.attrs:
            return call
        x, *weights = call.args[1].fields
        if not all(isinstance(operand, Constant) for operand in weights):
            return call
        arrays = [operand.value.numpy() for operand in weights]
        if int(func.attrs[ACCURACY]) in self.levels and self.device and rounds_blocks(self.device, arrays[0].shape[1]):
            return relax.call_tir(self._rounded(call.args[0]), list(call.args[1].fields), call.ty_args[0])
        if (static_shape(x) or (0,))[0] <= MOST_PACKED_ROWS:
            return call
        bias = arrays.pop() if arrays[-1].ndim == 1 else None
        sums = relax.op.matmul(x, relax.const(floats(*arrays)))
        return sums if bias is None else relax.op.add(self.builder_.emit(sums), relax.const(bias))

    def _rounded(self, name: GlobalVar) -> GlobalVar:
        """The function with its mark; it joins no other operator."""
        if name not in self.rounded:
            func = self.mod[name].with_attr(ROUNDED, True).with_attr("op_pattern", OPAQUE)
            self.rounded[name] = self.builder_.add_func(func, f"{name.name_hint}_rounded")
        return self.rounded[name]


def floats(codes: Array, scales: Array, zeros: Array | None = None) -> Array:
    """(code - zero point) * scale as (K, N)."""
    blocks, half, columns = codes.shape
    values = np.stack([codes & 15, codes >> 4], axis=1).reshape(blocks, 2 * half, columns).astype(np.float32)
    shift = np.float32(MIDDLE) if zeros is None else zeros[:, None, :].astype(np.float32)
    return np.ascontiguousarray(((values - shift) * scales[:, None, :]).reshape(-1, columns))
