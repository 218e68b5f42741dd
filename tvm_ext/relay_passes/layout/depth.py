"""Windows over depth of images stored one after the other, (depth * batch, channels, height, width), blocked or not.

A 3-D convolution over kd slices is then a 2-D one whose channels are those of kd slices (`fold_depth`), and a pooling
takes the largest, or the mean, of kd slices. Slice d of image n is at index d * batch + n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from tvm_ext._tvm import BlockBuilder, Expr, TeTensor, te, tirx
from tvm_ext.records.serialise import to_json

from .blocked import shape_of

DEPTH = "tvm_ext.depth_window"
"""Attribute of a PrimFunc that does nothing else: its `DepthWindow` as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthWindow:
    """Output slice o is made of the input slices o * stride + k * dilation - before, k from 0 to taps - 1.

    "join" puts their channels one after the other, those of slices beyond the input being zeros. "max" and "mean"
    need all slices to be inside.
    """

    batch: int
    taps: int
    stride: int
    dilation: int
    before: int
    outputs: int
    combine: Literal["join", "max", "mean"]

    def fits(self, depth: int) -> bool:
        """Whether no slice lies beyond an input of ``depth`` slices."""
        last = (self.outputs - 1) * self.stride + (self.taps - 1) * self.dilation - self.before
        return self.before <= 0 and last < depth


def depth_window(window: DepthWindow) -> Callable[[TeTensor], TeTensor]:
    """The window over a tensor (depth * batch, channels, ...)."""

    def compute(data: TeTensor) -> TeTensor:
        images, channels, *inner = shape_of(data)
        batch, zero = window.batch, tirx.const(0, str(data.dtype))

        def element(image: Expr, k: Expr | int, *place: Expr) -> tuple[Expr, Expr]:
            """(the number of the slice, its element)"""
            number = image // batch * window.stride + k * window.dilation - window.before
            return number, data(number * batch + image % batch, *place)

        def joined(image: Expr, channel: Expr, *place: Expr) -> Expr:
            number, value = element(image, channel // channels, channel % channels, *place)
            return tirx.if_then_else(tirx.all(number >= 0, number < images // batch), value, zero)

        def combined(image: Expr, *place: Expr) -> Expr:
            values = [element(image, k, *place)[1] for k in range(window.taps)]
            if window.combine == "max":
                return reduce(te.max, values)
            return reduce(lambda a, b: a + b, values) * tirx.const(1 / window.taps, str(data.dtype))

        images_out = window.outputs * batch
        if window.combine == "join":
            return te.compute((images_out, window.taps * channels, *inner), joined, name="join_slices")
        return te.compute((images_out, channels, *inner), combined, name=f"{window.combine}_slices")

    return compute


def over_depth(builder: BlockBuilder, value: Expr, window: DepthWindow) -> Expr:
    """A call of the window's own kernel on ``value``, plain or in blocks of channels."""
    hint = f"{window.combine}_slices"
    call = builder.call_te(depth_window(window), value, primfunc_name_hint=hint)
    func = builder.get()[call.args[0]].with_attr(DEPTH, to_json(window))
    builder.update_func(call.args[0], func)
    return call
