"""Strided transposed convolutions as plain convolutions, so that no multiplication is spent on inserted zeros.

A transposed convolution of stride s is stock-legalised to a convolution over its input with s - 1 zeros inserted
between neighbours: of its multiply-adds one in s * s meets a value. The same sums by output phase: with
o + padding = s * q + r and the kernel's taps k = s * j + r,

    out[f, s * q + r - padding] = sum over c, j of in[c, q - j] * w[c, f, s * j + r]

is a stride-1 convolution for each of the s * s phases. All of them together are one convolution with s * s times the
filters, whose channels are then interleaved ("pixel shuffle"). Worked example: 4 x 4 taps of stride 2 on 28 x 28 x 64
are 16 taps at 56 x 56 places, where only 4 meet a value; by phase they are 4 taps at 29 x 29 places with 4 times as
many filters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tvm_ext._tvm import (
    Call,
    Constant,
    Expr,
    IRModule,
    PassContext,
    expr_mutator,
    module_pass,
    relax,
)
from tvm_ext.analysis.relax_values import operator_name, static_shape
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from .rewriting import CallRewriter

TRANSPOSED = "relax.nn.conv2d_transpose"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phases:
    """One dimension: input places q read from ``first`` to ``last``, and what is cropped from their interleaving."""

    taps: int  # per phase
    first: int
    last: int
    crop: int
    length: int

    def padding(self, size: int) -> tuple[int, int]:
        """Zeros before and after an input of ``size`` for exactly the places wanted; below 0 where it is cropped."""
        return self.taps - 1 - self.first, self.last - (size - 1)


def _phases(size: int, kernel: int, stride: int, padding: tuple[int, int], extra: int) -> _Phases:
    """Worked example: size 28, kernel 4, stride 2, padding 1, 1: 56 results, places 0 to 28; of 58 the first is cut."""
    length = (size - 1) * stride - sum(padding) + kernel + extra
    first = padding[0] // stride
    return _Phases(
        taps=ceil_div(kernel, stride),
        first=first,
        last=(padding[0] + length - 1) // stride,
        crop=padding[0] - first * stride,
        length=length,
    )


def phase_filters(weight: Array, strides: Sequence[int], groups: int) -> Array:
    """The filters [F * sy * sx, C / groups, jy, jx] of all phases, from a transposed kernel [C, F / groups, ky, kx]."""
    channels, filters, *kernel = weight.shape
    taps = [ceil_div(k, s) for k, s in zip(kernel, strides, strict=True)]
    whole = np.zeros((channels, filters, taps[0] * strides[0], taps[1] * strides[1]), weight.dtype)
    whole[:, :, : kernel[0], : kernel[1]] = weight
    # tap = stride * j + phase: split it, flip j, and bring the phases to the filters
    split = whole.reshape(groups, channels // groups, filters, taps[0], strides[0], taps[1], strides[1])
    flipped = split[:, :, :, ::-1, :, ::-1, :]
    ordered = flipped.transpose(0, 2, 4, 6, 1, 3, 5)
    return np.ascontiguousarray(ordered.reshape(-1, channels // groups, *taps))


@expr_mutator
class _Expand(CallRewriter):
    def rewritten(self, call: Call) -> Expr:
        if operator_name(call) != TRANSPOSED or not isinstance(call.args[1], Constant):
            return call
        expanded = self._expanded(call)
        return call if expanded is None else expanded

    def _expanded(self, call: Call) -> Expr:
        data, attrs = call.args[0], call.attrs
        shape = static_shape(data)
        strides = [int(s) for s in attrs.strides]
        layouts = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout))
        plain = layouts == ("NCHW", "IOHW", "NCHW") and all(int(d) == 1 for d in attrs.dilation)
        if shape is None or not plain or max(strides) == 1:
            return None
        weight = call.args[1].value.numpy()
        pads = [int(p) for p in attrs.padding]
        pads = pads * 2 if len(pads) == 2 else pads
        extra = [int(p) for p in attrs.output_padding]
        sizes = [
            _phases(shape[2 + i], weight.shape[2 + i], strides[i], (pads[i], pads[2 + i]), extra[i]) for i in range(2)
        ]
        around = [size.padding(shape[2 + i]) for i, size in enumerate(sizes)]
        if min(min(pair) for pair in around) < 0 or min(size.length for size in sizes) < 1:
            return None  # the output stops short of some input: rare, and stock's form is right
        groups = int(attrs.groups)
        convolved = relax.op.nn.conv2d(
            data,
            relax.const(phase_filters(weight, strides, groups), str(weight.dtype)),  # or float64 becomes float32
            padding=(around[0][0], around[1][0], around[0][1], around[1][1]),
            groups=groups,
        )
        return self._interleaved(convolved, shape[0], weight.shape[1] * groups, strides, sizes)

    def _interleaved(self, phases: Expr, batch: int, filters: int, strides: list[int], sizes: list[_Phases]) -> Expr:
        places = [size.last - size.first + 1 for size in sizes]
        split = relax.op.reshape(phases, (batch, filters, strides[0], strides[1], places[0], places[1]))
        ordered = relax.op.permute_dims(split, [0, 1, 4, 2, 5, 3])
        whole = relax.op.reshape(ordered, (batch, filters, places[0] * strides[0], places[1] * strides[1]))
        if all(p * s == size.length for p, s, size in zip(places, strides, sizes, strict=True)):
            return whole
        begin, end = [size.crop for size in sizes], [size.crop + size.length for size in sizes]
        return relax.op.strided_slice(whole, axes=[2, 3], begin=begin, end=end)


@module_pass(opt_level=0, name="tvm_ext.ExpandTransposedConvolutions")
class ExpandTransposedConvolutions:
    """Rewrite ``nn.conv2d_transpose`` with a stride and a constant kernel as a convolution of all output phases.

    Left alone: kernels that are not constant, dilation, layouts other than NCHW/IOHW, dynamic shapes.
    """

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return _Expand(mod).run()
