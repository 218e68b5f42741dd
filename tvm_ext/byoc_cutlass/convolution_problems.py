"""`relax.nn.conv2d` as an implicit product of templates: NHWC activations, OHWI filters."""

from __future__ import annotations

from math import gcd

from tvm_ext._tvm import Call
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.relax_values import dtype_of, shapes_of, static_shape
from tvm_ext.devices.gpu import VECTOR_BYTES
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import AnchorKind, CutlassProblem, ImplicitWindow, MatrixLayout

LAYOUTS = ("NHWC", "OHWI", "NHWC")

NARROWEST_TILE = 32
"""Filters of a threadblock at least: of grouped ones a tile is some whole groups, or a group some whole tiles
(`implicit_gemm_convolution.h`)."""

DEPTHWISE_ACCESS = 8
"""Halves of one access of the depthwise template, 16 bytes (`default_depthwise_fprop.h`)."""


def convolution_problem(call: Call) -> CutlassProblem:
    """The implicit product; raises IllegalRewrite for a layout or grouping that templates do not have."""
    attrs = call.attrs
    layouts = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout))
    if layouts != LAYOUTS:
        taken = f"templates take {', '.join(LAYOUTS)}"
        raise _refusal(call, f" in layouts {', '.join(layouts)}: {taken}", 'convert it (option layout="NHWC")')
    if dtype_of(call.args[0]).startswith("float8"):
        why = ": templates for 8-bit floats are matrix products alone"
        raise _refusal(call, why, "convert the convolution to float16")
    window = _window(call)
    filters, _, _, depth = static_shape(call.args[1]) or ()
    (batch, *_), (height, width) = window.input_extents, window.output_extents
    channels = _layout(depth, call)  # of one group: where another begins in the input, too
    return CutlassProblem(
        anchor=_anchor(call, window, filters),
        batch=1,
        rows=batch * height * width,
        columns=filters,
        depth=depth * window.filter_extents[0] * window.filter_extents[1],
        dtypes=(dtype_of(call.args[0]), dtype_of(call.args[1]), dtype_of(call)),
        operands=(channels, channels),
        simt=dtype_of(call.args[0]) == "float32" or depth == 1 < window.groups,
        window=window,
    )


def _window(call: Call) -> ImplicitWindow:
    attrs = call.attrs
    n, h, w, c = static_shape(call.args[0]) or ()
    _, r, s, _ = static_shape(call.args[1]) or ()
    _, p, q, _ = static_shape(call) or ()
    top, left, bottom, right = (int(pad) for pad in attrs.padding)
    if min(top, left, bottom, right) < 0:
        why = f" is padded by {[top, left, bottom, right]}: templates do not crop"
        raise _refusal(call, why, "slice the input before the convolution")
    strides, dilation = ((int(pad[0]), int(pad[1])) for pad in (attrs.strides, attrs.dilation))
    return ImplicitWindow(
        input_extents=(n, h, w, c),
        filter_extents=(r, s),
        output_extents=(p, q),
        padding=(top, left),
        strides=strides,
        dilation=dilation,
        groups=int(attrs.groups),
    )


def _anchor(call: Call, window: ImplicitWindow, filters: int) -> AnchorKind:
    if window.groups == 1:
        return "conv2d"
    dtype, of_group = dtype_of(call.args[0]), filters // window.groups
    if window.groups == window.input_extents[3] == filters:
        if dtype != "float16":
            why = f" is depthwise in {dtype}: the template for it takes float16"
            raise _refusal(call, why, "convert the model to float16")
        if filters % DEPTHWISE_ACCESS:
            copies = f"the template for depthwise convolutions copies {DEPTHWISE_ACCESS} at a time"
            remedy = f"pad the channels to a multiple of {DEPTHWISE_ACCESS}"
            raise _refusal(call, f" has {filters} channels: {copies}", remedy)
        return "conv2d_depthwise"
    if dtype != "float16":
        why = f" has {window.groups} groups of {dtype}: the template for groups takes float16"
        raise _refusal(call, why, "convert the model to float16")
    if of_group % NARROWEST_TILE and NARROWEST_TILE % of_group:
        why = f" has {of_group} filters in each of {window.groups} groups: templates want a multiple or a divisor of "
        raise _refusal(call, f"{why}{NARROWEST_TILE}", f"choose {NARROWEST_TILE} filters a group")
    return "conv2d_grouped"


def _layout(channels: int, call: Call) -> MatrixLayout:
    """Channels are contiguous in both operands, and everything else is a multiple of them."""
    widest = int(VECTOR_BYTES // itemsize_bytes(dtype_of(call.args[0])))
    return MatrixLayout(order="row", leading_dimension=channels, batch_stride=0, alignment=gcd(widest, channels))


def _refusal(call: Call, why: str, remedy: str) -> IllegalRewrite:
    return IllegalRewrite(f"relax.nn.conv2d of {shapes_of(call)}{why}", remedy)
