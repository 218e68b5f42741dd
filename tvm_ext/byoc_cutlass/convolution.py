"""A template's configuration for a convolution as data: plain records with JSON both ways.

A convolution is a matrix product whose left operand is never stored: its rows are the n * p * q pixels of the result,
its columns the filters, its depth the filter's r * s positions times the channels of a group. What tiles such a
product has, a `GemmConfig` says; what is particular to reading pixels in place of rows, a `ConvolutionConfig`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from .gemm import GemmConfig

Iterator = Literal["plain", "optimized", "analytic", "few_channels", "fixed_channels", "planes", "bulk"]
"""How a tile finds its pixels. "plain": as rows of a matrix, for filters of one position; "optimized": pointers that
are stepped, and masks of up to 32 positions each way; "analytic": coordinates computed for each access; "few_channels"
and "fixed_channels": positions and channels as one dimension, for the first layers; "planes": the same out of NCHW;
"bulk": sm_90's copy engine."""
Grouping = Literal["none", "single", "multiple"]
"""Of filters: a threadblock's tile is within one group, or is made of some."""
WINDOWED: tuple[Iterator, ...] = ("few_channels", "fixed_channels", "planes")
"""Iterators that step over positions and channels together, and so cannot have the channels split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanesRead:
    """What the iterator "planes" reads: activations of ``dtype``, ``run`` columns of a window at a time."""

    dtype: str
    run: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionConfig:
    """A template of a convolution: the product's ``tile``, and how it reads pixels.

    With ``stores_planes`` the result is NCHW. The tile's ``split_k`` is of the channels, and an argument at run time
    but for the iterator "plain".
    """

    tile: GemmConfig
    iterator: Iterator
    grouping: Grouping = "none"
    planes: PlanesRead | None = None
    stores_planes: bool = False

    def __post_init__(self) -> None:
        assert (self.planes is None) == (self.iterator != "planes")

    @property
    def name(self) -> str:
        """A name of the template in C: whatever is compiled in, and nothing else."""
        if self.iterator == "plain":
            return f"conv2d_{self.tile.name}"
        one = self.tile.with_split(1).name.removeprefix("gemm_")
        parts: list[str] = [self.grouping] if self.grouping != "none" else []
        parts += [f"{self.planes.dtype}_run{self.planes.run}"] if self.planes is not None else []
        parts += ["to_planes"] if self.stores_planes else []
        return "_".join(["conv2d", self.iterator, *parts, one])

    @property
    def arithmetic(self) -> str:
        return self.tile.arithmetic

    @property
    def split(self) -> int:
        return self.tile.split_k

    def with_split(self, split: int) -> ConvolutionConfig:
        return dataclasses.replace(self, tile=self.tile.with_split(split))


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


def _pair(letter: str, extents: tuple[int, int]) -> str:
    return f"{letter}{extents[0]}x{extents[1]}"
