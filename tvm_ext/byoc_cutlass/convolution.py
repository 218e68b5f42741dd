"""A convolution and a template's configuration for it as data: plain records with JSON both ways.

A convolution is a matrix product whose left operand is never stored: its rows are the n * p * q pixels of the result,
its columns the filters, its depth the filter's r * s positions times the channels of a group. What tiles such a
product has, a `GemmConfig` says; what is particular to reading pixels in place of rows, a `ConvolutionConfig`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import prod
from typing import Literal

from tvm_ext.errors import InputError
from tvm_ext.records.partition import CutlassProblem, ImplicitWindow, MatrixLayout
from tvm_ext.support.arithmetic import ceil_div

from .elements import Element, Multiplier, element, multiplier
from .gemm import GemmConfig, GemmProblem, widest_access

Iterator = Literal["plain", "optimized", "analytic", "few_channels", "fixed_channels", "bulk"]
"""How a tile finds its pixels. "plain": as rows of a matrix, for filters of one position; "optimized": pointers that
are stepped, and masks of up to 32 positions each way; "analytic": coordinates computed for each access; "few_channels"
and "fixed_channels": positions and channels as one dimension, for the first layers; "bulk": sm_90's copy engine."""
Grouping = Literal["none", "single", "multiple"]
"""Of filters: a threadblock's tile is within one group, or is made of some."""
WINDOWED: tuple[Iterator, ...] = ("few_channels", "fixed_channels")
"""Iterators that step over positions and channels together, and so cannot have the channels split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionProblem:
    """A two-dimensional convolution of NHWC activations with OHWI ("KRSC") filters into NHWC.

    ``arithmetic`` is a key of `MULTIPLIERS`, ``out_dtype`` what is stored behind the epilogue. Raises InputError for
    extents that are not positive, groups that do not divide the channels and types that templates do not have.
    """

    window: ImplicitWindow
    filters: int
    arithmetic: str
    out_dtype: str

    @classmethod
    def of(cls, problem: CutlassProblem, out_dtype: str) -> ConvolutionProblem:
        """The convolution that ``problem`` is, stored as ``out_dtype``."""
        assert problem.window is not None
        return cls(window=problem.window, filters=problem.columns, arithmetic=problem.dtypes[0], out_dtype=out_dtype)

    def __post_init__(self) -> None:
        multiplier(self.arithmetic)
        element(self.out_dtype)
        window, size = self.window, f"a convolution {self.described}"
        extents = (*window.input_extents, *window.filter_extents, *window.output_extents, self.filters)
        if min(*extents, *window.strides, *window.dilation, window.groups) < 1 or min(window.padding) < 0:
            raise InputError(f"{size} has nothing to compute.", "every extent, stride and dilation must be at least 1")
        if window.input_extents[3] % window.groups or self.filters % window.groups:
            raise InputError(f"{size} has channels that are no whole groups.", "choose multiples of the groups")

    @property
    def described(self) -> str:
        n, h, w, c = self.window.input_extents
        r, s = self.window.filter_extents
        groups = f" in {self.window.groups} groups" if self.window.groups > 1 else ""
        return f"of {n}x{h}x{w}x{c} with {self.filters} filters of {r}x{s}{groups}"

    @property
    def multiplier(self) -> Multiplier:
        return multiplier(self.arithmetic)

    @property
    def out(self) -> Element:
        return element(self.out_dtype)

    @property
    def channels(self) -> int:
        """Of one group."""
        return self.window.input_extents[3] // self.window.groups

    @property
    def group_filters(self) -> int:
        return self.filters // self.window.groups

    @property
    def positions(self) -> int:
        return self.window.filter_extents[0] * self.window.filter_extents[1]

    @property
    def pixels(self) -> int:
        """Of the result."""
        return self.window.input_extents[0] * self.window.output_extents[0] * self.window.output_extents[1]

    @property
    def is_depthwise(self) -> bool:
        return self.window.groups == self.window.input_extents[3] == self.filters and self.window.groups > 1

    @property
    def is_plain(self) -> bool:
        """Whether the rows of a matrix product are its pixels as they lie: one position, every pixel, one group."""
        window = self.window
        return window.is_pointwise and window.groups == 1 and window.output_extents == window.input_extents[1:3]

    @property
    def numbers(self) -> tuple[int, ...]:
        """As a launch is told them (`emit_convolution`)."""
        w = self.window
        extents = (*w.input_extents, self.filters, *w.filter_extents, *w.output_extents)
        return *extents, *w.numbers, w.groups

    def product(self, depth: int | None = None) -> GemmProblem:
        """The implicit matrix product, of ``depth`` where a template counts more steps than there are channels."""
        alignment = widest_access(self.channels, self.multiplier.bits)
        layout = MatrixLayout(order="row", leading_dimension=self.channels, batch_stride=0, alignment=alignment)
        return GemmProblem(
            m=self.pixels,
            n=self.filters,
            k=depth or self.positions * self.channels,
            arithmetic=self.arithmetic,
            a=layout,
            b=dataclasses.replace(layout, order="column"),
            out_dtype=self.out_dtype,
        )

    @property
    def read_bits(self) -> int:
        """Of activations and filters, each once."""
        filters = self.filters * self.positions * self.channels
        return (prod(self.window.input_extents) + filters) * self.multiplier.bits

    def upper_padding(self) -> tuple[int, int]:
        """What is padded below and on the right: as much as the result's extents ask for, and never cropped."""
        w = self.window
        spans = [
            (w.output_extents[i] - 1) * w.strides[i] + (w.filter_extents[i] - 1) * w.dilation[i] + 1 for i in (0, 1)
        ]
        below, right = (max(0, spans[i] - w.input_extents[1 + i] - w.padding[i]) for i in (0, 1))
        return below, right


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionConfig:
    """A template of a convolution: the product's ``tile``, and how it reads pixels.

    The tile's ``split_k`` is of the channels, and an argument at run time but for the iterator "plain".
    """

    tile: GemmConfig
    iterator: Iterator
    grouping: Grouping = "none"

    @property
    def name(self) -> str:
        """A name of the template in C: whatever is compiled in, and nothing else."""
        if self.iterator == "plain":
            return f"conv2d_{self.tile.name}"
        one = self.tile.with_split(1).name.removeprefix("gemm_")
        return "_".join(["conv2d", self.iterator, *([self.grouping] if self.grouping != "none" else []), one])

    @property
    def arithmetic(self) -> str:
        return self.tile.arithmetic

    @property
    def split(self) -> int:
        return self.tile.split_k

    def with_split(self, split: int) -> ConvolutionConfig:
        return dataclasses.replace(self, tile=self.tile.with_split(split))

    def steps(self, problem: ConvolutionProblem) -> int:
        """Steps along the depth that a threadblock takes (conv2d_problem_size.h, implicit_gemm_k_iterations)."""
        k = self.tile.threadblock[2]
        if self.iterator == "plain":
            return ceil_div(ceil_div(problem.channels, k), self.tile.split_k)
        if self.iterator == "fixed_channels":
            return ceil_div(problem.positions, max(1, k // problem.channels))
        if self.iterator == "few_channels":
            return ceil_div(problem.positions * problem.channels, k)
        groups = self.tile.threadblock[1] // problem.group_filters if self.grouping == "multiple" else 1
        return problem.positions * ceil_div(ceil_div(problem.channels, self.tile.split_k), k) * max(1, groups)

    def product(self, problem: ConvolutionProblem) -> GemmProblem:
        """The matrix product that the template computes, with what it multiplies by zeros."""
        return problem.product(self.steps(problem) * self.tile.threadblock[2] * self.tile.split_k)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthwiseConfig:
    """The direct template for depthwise convolutions, on the vector units.

    A threadblock has ``pixels`` of the result (p, q) at a time and ``channels`` of them; one warp has ``warp_pixels``.
    The filter's extents are compiled in, and so are ``strides`` and ``dilation`` where they are not None. ``split`` is
    how many threadblocks share the pixels: an argument at run time.
    """

    arithmetic: str
    pixels: tuple[int, int]
    channels: int
    warp_pixels: int
    filter_extents: tuple[int, int]
    strides: tuple[int, int] | None
    dilation: tuple[int, int] | None
    stages: int
    split: int = 1

    def __post_init__(self) -> None:
        assert (self.strides is None) == (self.dilation is None)

    @property
    def warps(self) -> int:
        return self.pixels[0] * self.pixels[1] // self.warp_pixels

    @property
    def name(self) -> str:
        fixed = [] if self.strides is None or self.dilation is None else [_pair("t", self.strides)]
        fixed += [] if self.dilation is None else [_pair("d", self.dilation)]
        tile = [_pair("o", self.pixels), f"c{self.channels}", f"w{self.warp_pixels}", _pair("f", self.filter_extents)]
        return "_".join(["depthwise", self.arithmetic, *tile, *fixed, f"s{self.stages}"])

    def tiles(self, problem: ConvolutionProblem) -> int:
        """Of the result's pixels: what the threadblocks of one range of channels share."""
        p, q = problem.window.output_extents
        return problem.window.input_extents[0] * ceil_div(p, self.pixels[0]) * ceil_div(q, self.pixels[1])

    def blocks(self, problem: ConvolutionProblem) -> int:
        return ceil_div(problem.filters, self.channels) * self.split


def _pair(letter: str, extents: tuple[int, int]) -> str:
    return f"{letter}{extents[0]}x{extents[1]}"
