"""Convolutions without the taps that only ever meet padding: they multiply weights by zeros, for every output.

That happens where a kernel reaches further than its input: widely dilated convolutions over small images (the pyramids
of DeepLab), and kernels larger than the image. Worked example: 3 x 3 taps dilated by 24 with as much padding over
16 x 16 elements: the outer taps lie 24 places from the inner one, so that none of them meets an element. What is left
is a 1 x 1 convolution, with a ninth of the multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_ext._tvm import Call, Constant, Expr, relax
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape
from tvm_ext.analysis.window import WindowAxis

from .rewriting import CallRewriter, call_pass

CONVOLUTIONS = {
    "relax.nn.conv1d": (relax.op.nn.conv1d, "NCW", "OIW"),
    "relax.nn.conv2d": (relax.op.nn.conv2d, "NCHW", "OIHW"),
    "relax.nn.conv3d": (relax.op.nn.conv3d, "NCDHW", "OIDHW"),
}


def trimmed(axis: WindowAxis) -> tuple[int, WindowAxis]:
    """(first tap kept, ``axis`` without what is before it and behind the last one that meets an element).

    Nothing is trimmed where the input would have to be cropped instead of padded.
    """
    kept = [tap for tap in range(axis.taps) if axis.outputs_of(tap)] or [0, axis.taps - 1]
    first, taps = kept[0], kept[-1] - kept[0] + 1
    if taps == axis.taps:
        return 0, axis
    dilation = axis.dilation if taps > 1 else 1
    own = replace(axis, taps=taps, dilation=dilation, before=axis.before - axis.dilation * first)
    whole = outputs(own, padding_after(own)) == axis.extent
    return (first, own) if own.before >= 0 and whole else (0, axis)


def outputs(axis: WindowAxis, after: int) -> int:
    """The outputs of a convolution whose input is padded by ``after`` elements at its end."""
    return (axis.size + axis.before + after - axis.dilation * (axis.taps - 1) - 1) // axis.stride + 1


def padding_after(axis: WindowAxis) -> int:
    """The padding at the input's end that the last tap of the last output reads."""
    return max(0, axis.span - axis.size - axis.before)


@call_pass("tvm_ext.TrimTaps")
class TrimTaps(CallRewriter):
    """Rewrite ``nn.conv1d``, ``conv2d`` and ``conv3d`` whose outermost taps meet nothing but padding.

    A weight that is no number has no effect in a tap that is left out. Left alone: layouts other than NCHW/OIHW,
    dynamic shapes.
    """

    def rewritten(self, call: Call) -> Expr:
        make, *layouts = CONVOLUTIONS.get(operator_name(call) or "", (None,))
        data, weight = call.args if make is not None else (None, None)
        if make is None or [str(call.attrs.data_layout), str(call.attrs.kernel_layout)] != layouts:
            return call
        shape, kernel = static_shape(data), static_shape(weight)
        if shape is None or kernel is None:
            return call
        axes = _axes(call, shape[2:], kernel[2:])
        found = [trimmed(axis) for axis in axes]
        own = [axis for _, axis in found]
        if own == axes:
            return call
        return make(
            data,
            _without(weight, [first for first, _ in found], [axis.taps for axis in own]),
            strides=list(call.attrs.strides),
            padding=[*(axis.before for axis in own), *map(padding_after, own)],
            dilation=[axis.dilation for axis in own],
            groups=int(call.attrs.groups),
            out_dtype=dtype_of(call),
        )


def _axes(call: Call, sizes: Sequence[int], taps: Sequence[int]) -> list[WindowAxis]:
    attrs, padding = call.attrs, [int(size) for size in call.attrs.padding]
    extents = static_shape(call)
    assert extents is not None
    return [
        WindowAxis(
            variable=None,
            tap=None,
            extent=extents[2 + axis],
            taps=taps[axis],
            stride=int(attrs.strides[axis]),
            dilation=int(attrs.dilation[axis]),
            before=padding[axis],
            first=0,
            size=size,
        )
        for axis, size in enumerate(sizes)
    ]


def _without(weight: Expr, first: Sequence[int], taps: Sequence[int]) -> Expr:
    """The ``taps`` from ``first`` on, of a constant at once."""
    end = [start + count for start, count in zip(first, taps, strict=True)]
    if isinstance(weight, Constant):
        own = (slice(None), slice(None), *map(slice, first, end))
        kept = weight.value.numpy()[own]
        return relax.const(kept.copy(), str(kept.dtype))
    return relax.op.strided_slice(weight, axes=list(range(2, 2 + len(taps))), begin=list(first), end=end)
