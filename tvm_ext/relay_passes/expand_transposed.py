"""Strided transposed convolutions as plain convolutions, so that no multiplication is spent on inserted zeros.

A transposed convolution of stride s is stock-legalised to a convolution over its input with s - 1 zeros inserted
between neighbours: of its multiply-adds one in s * s meets a value. The same sums by output phase: with
o + padding = s * q + r and the kernel's taps k = s * j + r,

    out[f, s * q + r - padding] = sum over c, j of in[c, q - j] * w[c, f, s * j + r]

is a stride-1 convolution for each of the s * s phases. All of them together are one convolution with s * s times the
filters, whose channels are then interleaved ("pixel shuffle"). Worked example: 4 x 4 taps of stride 2 on 28 x 28 x 64
are 16 taps at 56 x 56 places, where only 4 meet a value; by phase they are 4 taps at 29 x 29 places with 4 times as
many filters.

Where the stride does not divide the kernel, phases have taps of different numbers: those of 3 x 3 and stride 2 have 4,
2, 2 and 1. On CPUs phases of as many taps are a convolution of their own, if that saves enough: 9 taps, not 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tvm_ext._tvm import Call, Constant, Expr, relax
from tvm_ext.analysis.relax_values import operator_name, static_shape
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

from .layout.weave import PhaseRange, Weave, woven
from .rewriting import CallRewriter, call_pass, is_for_gpu

TRANSPOSED = "relax.nn.conv2d_transpose"

LEAST_SAVED = 8e6
"""A choice: multiply-adds of zeros, about 20 us, for which a convolution is worth cutting into up to four."""


def parts(kernel: int, stride: int) -> list[PhaseRange]:
    """Phases by their taps. Worked example, 3 taps and stride 2: taps 0 and 2 are phase 0, tap 1 is phase 1."""
    taps, more = divmod(kernel, stride)
    if more == 0 or taps == 0:
        return [PhaseRange(first=0, count=stride, taps=ceil_div(kernel, stride))]
    return [PhaseRange(first=0, count=more, taps=taps + 1), PhaseRange(first=more, count=stride - more, taps=taps)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phases:
    """One dimension: input places q read from ``first`` to ``last``, and what is cropped from their interleaving."""

    first: int
    last: int
    crop: int
    length: int

    def padding(self, size: int, taps: int) -> tuple[int, int]:
        """Zeros before and after an input of ``size`` for exactly the places wanted; below 0 where it is cropped."""
        return taps - 1 - self.first, self.last - (size - 1)


def _phases(size: int, kernel: int, stride: int, padding: tuple[int, int], extra: int) -> _Phases:
    """Worked example: size 28, kernel 4, stride 2, padding 1, 1: 56 results, places 0 to 28; of 58 the first is cut."""
    length = (size - 1) * stride - sum(padding) + kernel + extra
    first = padding[0] // stride
    return _Phases(
        first=first, last=(padding[0] + length - 1) // stride, crop=padding[0] - first * stride, length=length
    )


def phase_filters(weight: Array, strides: Sequence[int], groups: int, rows: PhaseRange, columns: PhaseRange) -> Array:
    """The filters of some phases, from a transposed kernel [C, F / groups, ky, kx].

    Those of a GPU are [F * y * x, C / groups, jy, jx], of a CPU [groups * y * x * (F / groups), ...]: neighbouring
    channels are of one phase.
    """
    channels, filters, *kernel = weight.shape
    taps = [ceil_div(k, s) for k, s in zip(kernel, strides, strict=True)]
    whole = np.zeros((channels, filters, taps[0] * strides[0], taps[1] * strides[1]), weight.dtype)
    whole[:, :, : kernel[0], : kernel[1]] = weight
    # tap = stride * j + phase: split it, flip j, and bring the phases to the filters
    split = whole.reshape(groups, channels // groups, filters, taps[0], strides[0], taps[1], strides[1])
    some = split[:, :, :, : rows.taps, rows.first : rows.first + rows.count]
    some = some[:, :, :, :, :, : columns.taps, columns.first : columns.first + columns.count]
    order = (0, 2, 4, 6, 1, 3, 5) if is_for_gpu() else (0, 4, 6, 2, 1, 3, 5)
    ordered = some[:, :, :, ::-1, :, ::-1, :].transpose(order)
    return np.ascontiguousarray(ordered.reshape(-1, channels // groups, rows.taps, columns.taps))


@call_pass("tvm_ext.ExpandTransposedConvolutions")
class ExpandTransposedConvolutions(CallRewriter):
    """Rewrite ``nn.conv2d_transpose`` with a stride and a constant kernel as a convolution of all output phases.

    Left alone: kernels that are not constant, dilation, layouts other than NCHW/IOHW, dynamic shapes.
    """

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
        cuts = self._cuts(weight.shape, shape, strides)
        around = [size.padding(shape[2 + i], part.taps) for i, size in enumerate(sizes) for part in cuts[i]]
        if min(min(pair) for pair in around) < 0 or min(size.length for size in sizes) < 1:
            return None  # the output stops short of some input: rare, and stock's form is right
        groups = int(attrs.groups)

        def convolved(rows: PhaseRange, columns: PhaseRange) -> Expr:
            (top, bottom), (left, right) = (
                size.padding(shape[2 + i], part.taps)
                for i, (size, part) in enumerate(zip(sizes, (rows, columns), strict=True))
            )
            filters = phase_filters(weight, strides, groups, rows, columns)
            constant = relax.const(filters, str(weight.dtype))  # or float64 becomes float32
            return relax.op.nn.conv2d(data, constant, padding=(top, left, bottom, right), groups=groups)

        made = [[self.builder_.emit(convolved(rows, columns)) for columns in cuts[1]] for rows in cuts[0]]
        filters = weight.shape[1] * groups
        if is_for_gpu():
            return self._interleaved(made[0][0], shape[0], filters, strides, sizes)
        weave = Weave(
            rows=tuple(cuts[0]),
            columns=tuple(cuts[1]),
            strides=(strides[0], strides[1]),
            crops=(sizes[0].crop, sizes[1].crop),
            lengths=(sizes[0].length, sizes[1].length),
            groups=groups,
        )
        return woven(self.builder_, [item for line in made for item in line], weave)

    def _cuts(self, weight: Sequence[int], shape: Sequence[int], strides: Sequence[int]) -> list[list[PhaseRange]]:
        """The phases of both dimensions by their taps, or all of them together."""
        channels, filters, *kernel = weight
        whole = [[PhaseRange(first=0, count=s, taps=ceil_div(k, s))] for k, s in zip(kernel, strides, strict=True)]
        zeros = prod(s * cut[0].taps for s, cut in zip(strides, whole, strict=True)) - prod(kernel)
        is_worth = zeros * channels * filters * prod((shape[0], *shape[2:])) > LEAST_SAVED
        if is_for_gpu() or not is_worth:
            return whole
        return [parts(k, s) for k, s in zip(kernel, strides, strict=True)]

    def _interleaved(self, phases: Expr, batch: int, filters: int, strides: list[int], sizes: list[_Phases]) -> Expr:
        places = [size.last - size.first + 1 for size in sizes]
        split = relax.op.reshape(phases, (batch, filters, strides[0], strides[1], places[0], places[1]))
        ordered = relax.op.permute_dims(split, [0, 1, 4, 2, 5, 3])
        whole = relax.op.reshape(ordered, (batch, filters, places[0] * strides[0], places[1] * strides[1]))
        if all(p * s == size.length for p, s, size in zip(places, strides, sizes, strict=True)):
            return whole
        begin, end = [size.crop for size in sizes], [size.crop + size.length for size in sizes]
        return relax.op.strided_slice(whole, axes=[2, 3], begin=begin, end=end)
