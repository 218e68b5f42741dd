"""The channel-blocked layout NCHW[b]c and the tensor expressions that are written for it.

An NCHW tensor of shape (n, c, h, w) is stored as (n, c // b, h, w, b): the innermost axis holds ``b`` neighbouring
channels, one SIMD register. Worked example, b = 16: element [0, 37, y, x] lies at [0, 2, y, x, 5].

A kernel's vector axis is then the innermost axis of what it reads and writes, whatever its window and stride: a
convolution stores its accumulators as they are, a strided pooling needs no gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_ext._tvm import Attrs, BlockBuilder, Buffer, Constant, Expr, TensorLoad, TeTensor, relax, te, tirx
from tvm_ext.analysis.computations import Computation, replace_loads
from tvm_ext.support.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvWindow:
    """How a convolution's window moves: ``pads`` are top, left, bottom, right."""

    strides: tuple[int, int]
    dilation: tuple[int, int]
    pads: tuple[int, int, int, int]

    @classmethod
    def of(cls, attrs: Attrs) -> ConvWindow:
        """From the attributes of ``relax.nn.conv2d``."""
        pads = [int(pad) for pad in attrs.padding]
        stride_y, stride_x = (int(stride) for stride in attrs.strides)
        dilation_y, dilation_x = (int(step) for step in attrs.dilation)
        return cls(
            strides=(stride_y, stride_x), dilation=(dilation_y, dilation_x), pads=(pads[0], pads[1], pads[2], pads[3])
        )

    @property
    def moves_by_one(self) -> bool:
        return self.strides == (1, 1)

    def outputs(self, extents: Sequence[int], taps: Sequence[int]) -> tuple[int, int]:
        """Output height and width: 56 rows, 1 + 1 of padding, 3 taps, stride 2 are (58 - 3) // 2 + 1 = 28."""
        sizes = [
            (extents[i] + self.pads[i] + self.pads[i + 2] - self.dilation[i] * (taps[i] - 1) - 1) // self.strides[i] + 1
            for i in range(2)
        ]
        return sizes[0], sizes[1]


def blocked_shape(shape: Sequence[int], block: int) -> tuple[int, int, int, int, int]:
    """(64, 7, 7) channels, rows, columns of one image in blocks of 16: (1, 64, 7, 7) becomes (1, 4, 7, 7, 16)."""
    n, c, h, w = shape
    return n, c // block, h, w, block


def shape_of(value: Expr) -> tuple[int, ...]:
    """The static shape of an expression or a TE tensor."""
    return tuple(int(size) for size in (value.shape if isinstance(value, TeTensor) else value.ty.shape))


# --- transforms ----------------------------------------------------------------------------------------------------
def to_blocked(builder: BlockBuilder, value: Expr, block: int) -> Expr:
    """NCHW to NCHW[b]c: a new constant for a constant, a view where a channel is one element, else one kernel."""
    shape = shape_of(value)
    target = blocked_shape(shape, block)
    if isinstance(value, Constant):
        n, outer, h, w, _ = target
        array = value.value.numpy().reshape(n, outer, block, h, w).transpose(0, 1, 3, 4, 2)
        return relax.const(np.ascontiguousarray(array), str(array.dtype))
    if shape[2] == shape[3] == 1:
        return relax.op.reshape(value, target)

    def block_channels(x: TeTensor) -> TeTensor:
        return te.compute(target, lambda n, co, y, w, ci: x[n, co * block + ci, y, w], name="block_channels")

    return builder.call_te(block_channels, value, primfunc_name_hint=f"to_NCHW{block}c")


def in_groups(builder: BlockBuilder, value: Expr, group: int) -> Expr:
    """NCHW to NCHW[g]c, the last group filled up with zeros; a constant filter bank (OIHW) only gets these."""
    n, channels, h, w = shape_of(value)
    outer = ceil_div(channels, group)
    if isinstance(value, Constant):
        array = value.value.numpy()
        return relax.const(np.pad(array, ((0, 0), (0, outer * group - channels), (0, 0), (0, 0))), str(array.dtype))

    def element(x: TeTensor) -> Callable[..., Expr]:
        def at(n: Expr, co: Expr, y: Expr, w: Expr, ci: Expr) -> Expr:
            read = x[n, co * group + ci, y, w]
            inside = co * group + ci < channels
            return read if channels % group == 0 else tirx.if_then_else(inside, read, tirx.const(0, str(x.dtype)))

        return at

    def group_channels(x: TeTensor) -> TeTensor:
        return te.compute((n, outer, h, w, group), element(x), name="group_channels")

    return builder.call_te(group_channels, value, primfunc_name_hint=f"to_NCHW{group}c")


def to_plain(builder: BlockBuilder, value: Expr) -> Expr:
    """NCHW[b]c to NCHW."""
    n, outer, h, w, block = shape_of(value)
    target = (n, outer * block, h, w)
    if h == w == 1:
        return relax.op.reshape(value, target)

    def unblock_channels(x: TeTensor) -> TeTensor:
        return te.compute(target, lambda n, c, y, w: x[n, c // block, y, w, c % block], name="unblock_channels")

    return builder.call_te(unblock_channels, value, primfunc_name_hint=f"from_NCHW{block}c")


def broadcast_operand(builder: BlockBuilder, value: Expr, channels: int, block: int) -> Expr:
    """An operand that NumPy's rules broadcast to (n, channels, h, w), so that they broadcast it to the blocked shape.

    Worked examples, channels = 64, b = 16: (1, 64, 1, 1) becomes (1, 4, 1, 1, 16); (7,) along the columns (7, 1).
    """
    shape = shape_of(value)
    if not shape:
        return value
    padded = (1,) * (4 - len(shape)) + shape
    if padded[1] == channels and channels > 1:
        whole = value if len(shape) == 4 else _reshaped(builder, value, padded)
        return to_blocked(builder, whole, block)
    return _reshaped(builder, value, (*shape, 1))


def _reshaped(builder: BlockBuilder, value: Expr, shape: tuple[int, ...]) -> Expr:
    if isinstance(value, Constant):
        array = value.value.numpy()
        return relax.const(array.reshape(shape), str(array.dtype))
    return builder.emit(relax.op.reshape(value, shape))


SUMS = {"uint8": "int32", "bfloat16": "float32"}
"""Of narrow data: what their products are added up in."""


# --- convolutions --------------------------------------------------------------------------------------------------
def convolution(
    window: ConvWindow, groups: int, block: int, *, blocked_output: bool
) -> Callable[[TeTensor, TeTensor], TeTensor]:
    """A convolution of data, NCHW or in blocks of any size, with weights OIHW, to NCHW[b]c or NCHW.

    The weights are read where they lie: their kernel's constants are packed later whatever their layout. With
    ``groups``, the input and output channels of a group must be whole blocks wherever the tensor is blocked. Bytes are
    added up in int32, bfloat16 in float32.
    """

    def compute(data: TeTensor, weight: TeTensor) -> TeTensor:
        features, depth, *taps = shape_of(weight)
        is_blocked = len(shape_of(data)) == 5
        shape = shape_of(data)
        height, width = window.outputs(shape[2:4], taps)
        padded = _pad(data, window.pads)
        ky, kx = te.reduce_axis((0, taps[0]), "ky"), te.reduce_axis((0, taps[1]), "kx")
        own = shape[4] if is_blocked else 1
        co, ci = te.reduce_axis((0, depth // own), "co"), te.reduce_axis((0, own), "ci")
        wide = SUMS.get(str(data.dtype))

        def term(value: Expr, factor: Expr) -> Expr:
            return value * factor if wide is None else value.astype(wide) * factor.astype(wide)

        def product(n: Expr, f: Expr, group: Expr, y: Expr, x: Expr) -> Expr:
            rows = y * window.strides[0] + ky * window.dilation[0]
            columns = x * window.strides[1] + kx * window.dilation[1]
            if is_blocked:
                value = padded[n, group * (depth // own) + co, rows, columns, ci]
                return te.sum(term(value, weight[f, co * own + ci, ky, kx]), axis=[co, ky, kx, ci])
            value = padded[n, group * depth + co, rows, columns]
            return te.sum(term(value, weight[f, co, ky, kx]), axis=[co, ky, kx])

        per_group = features // groups
        if not blocked_output:
            return te.compute(
                (shape[0], features, height, width),
                lambda n, f, y, x: product(n, f, f // per_group if groups > 1 else 0, y, x),
                name="conv2d_unblocked",
            )
        return te.compute(
            (shape[0], features // block, height, width, block),
            # A group is whole blocks, so the outer index alone says which: 3 * 16 channels a group, block 4 is group 1.
            lambda n, fo, y, x, fi: product(n, fo * block + fi, fo // (per_group // block) if groups > 1 else 0, y, x),
            name="conv2d_blocked",
        )

    return compute


def depthwise_convolution(window: ConvWindow, pad_value: float = 0) -> Callable[[TeTensor, TeTensor], TeTensor]:
    """One filter per channel, NCHW[b]c to NCHW[b]c, with weights (c, 1, kh, kw); bytes are read as float32."""

    def compute(data: TeTensor, weight: TeTensor) -> TeTensor:
        taps = shape_of(weight)[2:]
        n, outer, h, w, block = shape_of(data)
        height, width = window.outputs((h, w), taps)
        padded = _pad(data, window.pads, pad_value)
        ky, kx = te.reduce_axis((0, taps[0]), "ky"), te.reduce_axis((0, taps[1]), "kx")

        def product(n: Expr, co: Expr, y: Expr, x: Expr, ci: Expr) -> Expr:
            rows = y * window.strides[0] + ky * window.dilation[0]
            columns = x * window.strides[1] + kx * window.dilation[1]
            value = padded[n, co, rows, columns, ci]
            value = value.astype("float32") if str(data.dtype) == "uint8" else value
            return te.sum(value * weight[co * block + ci, 0, ky, kx], axis=[ky, kx])

        return te.compute((n, outer, height, width, block), product, name="depthwise_conv2d_blocked")

    return compute


def _pad(data: TeTensor, pads: tuple[int, int, int, int], value: float = 0) -> TeTensor:
    """``data`` with ``value`` around its rows and columns (dimensions 2 and 3 in either layout)."""
    if not any(pads):
        return data
    top, left, bottom, right = pads
    shape = list(shape_of(data))
    height, width = shape[2:4]
    shape[2], shape[3] = height + top + bottom, width + left + right

    def element(*indices: Expr) -> Expr:
        y, x = indices[2] - top, indices[3] - left
        inside = [
            condition
            for condition, needed in ((y >= 0, top), (y < height, bottom), (x >= 0, left), (x < width, right))
            if needed
        ]
        own = data(*indices[:2], y, x, *indices[4:])
        return tirx.if_then_else(tirx.all(*inside), own, tirx.const(value, str(data.dtype)))

    return te.compute(shape, element, name="pad_temp")


# --- any element-wise function -------------------------------------------------------------------------------------
def element_wise(computation: Computation, params: Sequence[Buffer], shape: Sequence[int]) -> Callable[..., TeTensor]:
    """``computation`` over ``shape``. Its loads are of ``params``, which the arguments replace, at its own axes or
    scalar.
    """

    def compute(*tensors: TeTensor) -> TeTensor:
        def element(*indices: Expr) -> Expr:
            def moved(load: TensorLoad) -> Expr:
                position = next(i for i, param in enumerate(params) if param.same_as(load.source))
                return tensors[position](*(indices if len(load.indices) else ()))

            return replace_loads(computation.value, moved)

        return te.compute(tuple(shape), element, name=computation.name)

    return compute
