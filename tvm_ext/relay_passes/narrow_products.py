"""Integer products and convolutions of bytes: unsigned by signed for a CPU's dot-product instructions, signed by signed
for a GPU's matrix units.

Importers write quantised operators with widened operands, ``(int32(x) - z) w``. The sums are the same, element for
element, of narrow operands and a correction that the weights' sums are known for:

    sum((x - z) w) = sum(x w) - z sum(w)

Signed data become unsigned by adding 128 to them and to z, and the other way. Where a window meets padding, which
stands for x = z, the weights' sum is that of the taps inside. All of it is arithmetic modulo 2**32, as int32's is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from tvm_ext._tvm import Call, Constant, Expr, IRModule, TeTensor, copy_module, relax, te, tirx
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape
from tvm_ext.devices.dot_instructions import TILE_INSTRUCTIONS, DotInstruction, dot_instruction, whole_depth
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from .rewriting import CallRewriter, call_pass

_MATMUL, _CONV = "relax.matmul", "relax.nn.conv2d"
FEW_CHANNELS = 16
"""Of an image itself: it is copied for the instruction anyway, and padded then."""

ROWS_TO_PAD = 16
"""Of a product, for its depth to be padded for tiles, which take so many at once; vectors serve fewer."""

_EXACT_FLOATS = 1 << 24
"""Whole numbers up to here are float32."""
_LARGEST_TERM = 255 * 128
"""Of a byte, or the difference of two, and a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shifted:
    """Bytes ``x`` less ``zero``: a number, or a tensor of one int32 element."""

    x: Expr
    zero: int | Expr


@call_pass("tvm_ext.NarrowProducts")
class NarrowProducts(CallRewriter):
    """Rewrite int32 products and convolutions of widened bytes by constants, where ``device`` has an instruction.

    On CPUs, depthwise convolutions, which have no reduction over channels, are computed in float32 where that is exact:
    what fills blocks of channels by its blocked form, from bytes, the others here.
    """

    def prepare(self, device: DeviceSpec) -> None:
        types = ("uint8", "int8", "int32")
        self.row, tiles = dot_instruction(device, *types), dot_instruction(device, *types, TILE_INSTRUCTIONS)
        self.tiles, self.lanes = tiles, device.teu_lanes
        self.is_served = self.row is not None or device.peak_gflops_of("int8_tensor") is not None

    def run(self) -> IRModule:
        if not self.is_served:
            return copy_module(self.mod)
        # Layouts are decided by who reads what: widened operands that nobody reads go.
        return relax.transform.DeadCodeElimination()(super().run())

    def rewritten(self, call: Call) -> Expr:
        name = operator_name(call)
        if name not in (_MATMUL, _CONV) or dtype_of(call) != "int32":
            return call
        data = self._shifted(call.args[0])
        if data is None or None in (static_shape(data.x), static_shape(call)):
            return call
        if not isinstance(call.args[1], Constant):
            return self._product_of_two(call, data, self._shifted(call.args[1])) if name == _MATMUL else call
        weights = call.args[1].value.numpy()
        limits = np.iinfo("int8")
        if weights.dtype != np.int32 or not (limits.min <= weights.min() and weights.max() <= limits.max):
            return call
        narrow = self._product if name == _MATMUL else self._convolution
        return narrow(call, data, weights.astype(np.int8))

    # --- operands ---------------------------------------------------------------------------------------------------
    def _shifted(self, value: Expr) -> _Shifted | None:
        made = self.bound(value)
        zero: int | Expr = 0
        if operator_name(made) == "relax.subtract":
            value, offset = made.args
            if dtype_of(offset) != "int32" or static_shape(offset) not in ((), (1,)):
                return None
            zero = int(offset.value.numpy().reshape(-1)[0]) if isinstance(offset, Constant) else offset
            made = self.bound(value)
        if operator_name(made) != "relax.astype" or dtype_of(made) != "int32":
            return None
        kind = dtype_of(made.args[0])
        return _Shifted(x=made.args[0], zero=zero) if kind in ("uint8", "int8") else None

    def _of_type(self, data: _Shifted, kind: str) -> _Shifted:
        """The same numbers from bytes of ``kind``."""
        if dtype_of(data.x) == kind:
            return data
        by = 128 if kind == "uint8" else -128
        wide = self.builder_.emit(relax.op.add(relax.op.astype(data.x, "int32"), relax.const(by, "int32")))
        zero = data.zero
        zero = zero + by if isinstance(zero, int) else self.builder_.emit(relax.op.add(zero, relax.const(by, "int32")))
        return _Shifted(x=self.builder_.emit(relax.op.astype(wide, kind)), zero=zero)

    def _data(self, data: _Shifted) -> _Shifted:
        """As the left operand of the device's instruction."""
        return self._of_type(data, "int8" if self.row is None else "uint8")

    def _corrected(self, sums: Expr, zero: int | Expr, weights: Array) -> Expr:
        """``sums`` less ``zero`` times the sums of the ``weights`` that each has met."""
        if isinstance(zero, int):
            correction = (weights.astype(np.int64) * -zero).astype(np.int32)
            return relax.op.add(self.builder_.emit(sums), relax.const(correction)) if correction.any() else sums
        moved = self.builder_.emit(relax.op.multiply(zero, relax.const(weights)))
        return relax.op.subtract(self.builder_.emit(sums), moved)

    # --- products ---------------------------------------------------------------------------------------------------
    def _product(self, call: Call, data: _Shifted, weights: Array) -> Expr:
        shape = static_shape(data.x)
        if weights.ndim != 2 or shape is None or len(shape) < 2:
            return call
        data, depth = self._data(data), weights.shape[0]
        rows, tiles = prod(shape[:-1]), self.tiles
        x, whole = data.x, depth
        if self.row is not None:
            whole = whole_depth(depth, self.row, tiles if rows >= ROWS_TO_PAD else None)
        if whole != depth:
            x = self.builder_.emit(self.builder_.call_te(lambda x: _behind(x, whole), x, primfunc_name_hint="pad"))
        padded = np.zeros((whole, weights.shape[1]), np.int8)
        padded[:depth] = weights
        sums = relax.op.matmul(x, relax.const(padded), out_dtype="int32")
        return self._corrected(sums, data.zero, weights.sum(axis=0, dtype=np.int32))

    def _product_of_two(self, call: Call, data: _Shifted, weights: _Shifted | None) -> Expr:
        """The product of what a run computes: the right operand is copied by groups, as a constant is packed.

        sum((x - z) (w - v)) = sum(x w) - z sum(w) - v sum(x) + depth z v
        """
        left, right = static_shape(data.x), None if weights is None else static_shape(weights.x)
        if weights is None or left is None or right is None or len(left) < 2 or left[:-2] != right[:-2]:
            return call
        if not isinstance(data.zero, int) or not isinstance(weights.zero, int):
            return call
        data, weights = self._data(data), self._of_type(weights, "int8")
        assert isinstance(data.zero, int) and isinstance(weights.zero, int)
        depth, emit = left[-1], self.builder_.emit
        if self.row is None:
            sums = relax.op.matmul(data.x, weights.x, out_dtype="int32")
        else:
            sums = self._grouped(data.x, weights.x, (depth, right[-1]), self.row)
        for zero, side, axis in ((data.zero, weights, -2), (weights.zero, data, -1)):
            if zero:
                own = emit(relax.op.sum(emit(relax.op.astype(side.x, "int32")), axis=axis, keepdims=True))
                sums = relax.op.subtract(emit(sums), emit(relax.op.multiply(own, relax.const(zero, "int32"))))
        both = data.zero * weights.zero * depth
        return relax.op.add(emit(sums), relax.const(both, "int32")) if both else sums

    def _grouped(self, x: Expr, weights: Expr, sides: tuple[int, int], row: DotInstruction) -> Expr:
        """``x`` by ``weights`` of (depth, columns), copied as ``row`` takes it."""
        (depth, columns), emit = sides, self.builder_.emit
        group, lanes = row.group, row.register_bytes // 4
        whole, width = ceil_div(depth, group) * group, ceil_div(columns, lanes) * lanes
        if whole != depth:
            x = emit(self.builder_.call_te(lambda x: _behind(x, whole), x, primfunc_name_hint="pad"))
        grouped = emit(self.builder_.call_te(_by_groups, weights, group, width, primfunc_name_hint="by_groups"))
        sums = self.builder_.call_te(grouped_product, x, grouped, primfunc_name_hint="matmul")
        return sums if width == columns else relax.op.strided_slice(emit(sums), [-1], [0], [columns])

    # --- convolutions -----------------------------------------------------------------------------------------------
    def _convolution(self, call: Call, data: _Shifted, weights: Array) -> Expr:
        attrs = call.attrs
        if (attrs.data_layout, attrs.kernel_layout, attrs.out_layout) != ("NCHW", "OIHW", "NCHW"):
            return call
        if weights.shape[1] == 1 and int(attrs.groups) > 1:
            if self.row is None or weights[0].size * _LARGEST_TERM > _EXACT_FLOATS:
                return call
            if weights.shape[0] != int(attrs.groups) or weights.shape[0] % self.lanes:
                return self._in_floats(call, weights)
        data, pads = self._data(data), [int(pad) for pad in attrs.padding]
        if any(pads) and not isinstance(data.zero, int):
            return call
        if self.row is not None and any(pads) and data.zero and weights.shape[1] < FEW_CHANNELS:
            width = [0, 0, 0, 0, pads[0], pads[2], pads[1], pads[3]]
            padded = self.builder_.emit(relax.op.nn.pad(data.x, width, pad_value=data.zero))
            sums = _again(call, padded, weights, "int32", [0] * 4)
            return self._corrected(sums, data.zero, weights.sum(axis=(1, 2, 3), dtype=np.int32).reshape(1, -1, 1, 1))
        sums = _again(call, data.x, weights, "int32", pads)
        return self._corrected(sums, data.zero, _met(call, weights, pads))

    def _in_floats(self, call: Call, weights: Array) -> Expr:
        real = self.builder_.emit(relax.op.astype(call.args[0], "float32"))
        pads = [int(pad) for pad in call.attrs.padding]
        sums = self.builder_.emit(_again(call, real, weights.astype(np.float32), "float32", pads))
        return relax.op.astype(sums, "int32")


def _by_groups(w: TeTensor, group: int, width: int) -> TeTensor:
    """(..., K, N) -> (..., K / group, width, group), with zeros behind what there is."""
    *outer, depth, columns = w.shape

    def element(*at: Expr) -> Expr:
        *outside, number, column, place = at
        row = number * group + place
        is_inside = [*([column < columns] if width != columns else []), *([row < depth] if depth % group else [])]
        value = w(*outside, row, column)
        return tirx.if_then_else(tirx.all(*is_inside), value, tirx.const(0, "int8")) if is_inside else value

    return te.compute((*outer, ceil_div(depth, group), width, group), element, name="by_groups")


def grouped_product(x: TeTensor, w: TeTensor) -> TeTensor:
    """(..., M, K) by (..., K / group, N, group), in whole numbers."""
    *outer, rows, _ = x.shape
    groups, columns, group = w.shape[-3:]
    number, place = te.reduce_axis((0, groups), "group"), te.reduce_axis((0, group), "place")

    def element(*at: Expr) -> Expr:
        *outside, row, column = at
        data, weight = x(*outside, row, number * group + place), w(*outside, number, column, place)
        return te.sum(data.astype("int32") * weight.astype("int32"), axis=[number, place])

    return te.compute((*outer, rows, columns), element, name="matmul")


def _behind(x: TeTensor, whole: int) -> TeTensor:
    """``x`` with zeros behind its last axis, up to ``whole``."""
    *outer, depth = x.shape

    def element(*at: Expr) -> Expr:
        return tirx.if_then_else(at[-1] < depth, x(*at), tirx.const(0, str(x.dtype)))

    return te.compute((*outer, whole), element, name="pad_temp")


def _again(call: Call, data: Expr, weights: Array, out_dtype: str, pads: list[int]) -> Expr:
    """The convolution of ``call`` with other operands."""
    strides, dilation = ([int(number) for number in own] for own in (call.attrs.strides, call.attrs.dilation))
    groups = int(call.attrs.groups)
    return relax.op.nn.conv2d(data, relax.const(weights), strides, pads, dilation, groups, out_dtype=out_dtype)


def _met(call: Call, weights: Array, pads: list[int]) -> Array:
    """The sums of the weights that each output meets inside the data, (1, filters, rows, columns) or broadcast."""
    shape, attrs = static_shape(call.args[0]), call.attrs
    assert shape is not None
    taps: Array = weights.sum(axis=1, dtype=np.int32)
    if not any(pads):
        whole: Array = taps.sum(axis=(1, 2)).reshape(1, -1, 1, 1)
        return whole
    inside = []
    for axis in range(2):
        count = (static_shape(call) or ())[2 + axis]
        first = np.arange(count) * int(attrs.strides[axis]) - pads[axis]
        place = first[:, None] + np.arange(taps.shape[1 + axis]) * int(attrs.dilation[axis])
        inside.append(((place >= 0) & (place < shape[2 + axis])).astype(np.int32))
    met: Array = np.einsum("fyx,oy,px->fop", taps, *inside)
    return met[None].astype(np.int32)
