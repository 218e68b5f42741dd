"""Two products in one kernel by CUTLASS's templates (its example 13; Bolt §3.1): which configurations a pair may have.

A threadblock computes its rows of the first product in all columns and, of these, its rows of the second. What lies
between stays in the *registers* of the warp that made it, which then has whole rows of both products, or in *shared
memory*, where warps share columns. The templates are of sm_75 (two stages) and sm_80 (asynchronous copies), and run on
newer devices as these. They take halves and, since nothing in them is particular to halves, bfloat16; their form for
int8 reads interleaved tensors alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tvm_ext.cost.gpu_chain import ChainProduct, ChainTile, ProductChain, ProductTile, Residence
from tvm_ext.cost.gpu_chain_tiles import construct_chain
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import CutlassProblem, CutlassRegion
from tvm_ext.support.arithmetic import ceil_div

from .elements import ELEMENTS, Shape3
from .epilogue import Epilogue
from .gemm import GemmConfig
from .legality import shared_bytes_2x, thread_registers


@dataclass(frozen=True, kw_only=True, slots=True)
class PairConfig:
    """A template's parameters: both products' tiles, whose rows, stages and warps are the same in number."""

    first: GemmConfig
    second: GemmConfig
    residence: Residence
    iterator: Literal["", "optimized", "analytic"] = ""

    @property
    def exact(self) -> bool:
        """Whether the first product must have all of its tile's columns."""
        return not self.iterator or self.residence == "shared memory"

    @property
    def name(self) -> str:
        """A name of the template in C: whatever is compiled in, and nothing else."""
        kind = "conv2d_" + self.iterator if self.iterator else "gemm"
        residence = "registers" if self.residence == "registers" else "shared"
        assert self.second.warp is not None
        block, warp = ("x".join(map(str, shape)) for shape in (self.second.threadblock, self.second.warp))
        second = f"{block}_w{warp}_a{self.second.alignment_b}_{self.second.alignment_d}"
        return f"pair_{kind}_{residence}_{self.first.name.removeprefix('gemm_')}_then_{second}"

    @property
    def registers(self) -> int:
        """Of a thread: what lies between stays beside the second product's sums, in full width."""
        most = max(thread_registers(self.first), thread_registers(self.second))
        if self.residence == "shared memory":
            return most
        assert self.first.warp is not None
        return max(most, thread_registers(self.second) + self.first.warp[0] * self.first.warp[1] // 32)

    @property
    def shared_bytes(self) -> int:
        """Either product's stages, for the second's take the first's place, and what lies between where it is there."""
        stages = max(shared_bytes_2x(self.first), shared_bytes_2x(self.second))
        if self.residence == "registers":
            return stages
        rows, columns, _ = self.first.threadblock
        return stages + rows * (columns + _PADDING) * self.first.multiplier.bits // 8

    def tile(self, first: CutlassProblem) -> ChainTile:
        """As the model of chains takes it; ``first`` is the first product."""
        step, depth, window = self.first.threadblock[2], first.depth, first.window
        if window is not None:  # whole steps of each position, with zeros
            depth = window.positions * ceil_div(window.channels, step) * step
        products = (_product_tile(self.first, depth), _product_tile(self.second, self.first.threadblock[1]))
        return ChainTile(
            units="matrix units", residence=self.residence, rows=self.first.threadblock[0],
            threads=self.first.warps * 32, products=products, registers=self.registers,
            shared_bytes=self.shared_bytes,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedPairConfig:
    """A template of sm_90a (`emit_streamed_pair`): ``tile`` is its rows, the first product's columns of one step, and
    the most that the first factor and the result may have.
    """

    arithmetic: str
    tile: Shape3

    @property
    def name(self) -> str:
        """A name of the template in C: whatever is compiled in, and nothing else."""
        return f"pair_streamed_{self.arithmetic}_sm90_{'x'.join(map(str, self.tile))}"


_PADDING = 8
"""Elements by which rows of what lies between are apart in shared memory, at most (b2b_mma_*_smem_accumulator.h)."""


def _product_tile(config: GemmConfig, depth: int) -> ProductTile:
    assert config.warp is not None
    _, columns, step = config.threadblock
    return ProductTile(columns=columns, depth=step, steps=ceil_div(depth, step), across=columns // config.warp[1])


def product_chain(
    products: Sequence[CutlassProblem],
    epilogue_bytes: Sequence[float],
    output_itemsize: float,
    instructions: Sequence[float] = (),
) -> ProductChain:
    """Products one behind the other as the model of chains takes them; ``instructions`` are of each one's epilogue."""
    first = products[0]
    size = ELEMENTS[first.dtypes[0]].bits / 8
    chained = tuple(
        ChainProduct(
            columns=product.columns, depth=product.depth, weight_bytes=product.depth * product.columns * size,
            epilogue_bytes=read_bytes, instructions=own,
        )
        for product, read_bytes, own in zip(
            products, epilogue_bytes, instructions or [0.0] * len(products), strict=True
        )
    )  # fmt: skip
    return ProductChain(
        rows=first.rows, products=chained, dtype=first.arithmetic, itemsize=int(size),
        input_bytes=first.factor_elements[0] * size, output_itemsize=output_itemsize,
    )  # fmt: skip


def joined_chain(parts: Sequence[CutlassProblem], epilogues: Sequence[Epilogue], device: DeviceSpec) -> ProductChain:
    """`product_chain` of products with their epilogues."""
    read = [epilogue.read_bytes(part.rows, part.columns) for part, epilogue in zip(parts, epilogues, strict=True)]
    computed = [epilogue.instructions(device) for epilogue in epilogues]
    return product_chain(parts, read, ELEMENTS[epilogues[-1].out_dtype].bits / 8, computed)


def check_pair(first: CutlassProblem, then: CutlassProblem) -> None:
    """Raise IllegalRewrite for two products that no template reads, whatever their extents."""
    if (first.window is None) != (then.window is None):
        raise IllegalRewrite("a convolution and a matrix product are no pair of one template", "")
    if then.window is not None and not then.window.is_plain:
        (n, h, w, c), (r, s), groups = then.window.input_extents, then.window.filter_extents, then.window.groups
        size = f"{n}x{h}x{w}x{c} with {then.columns} filters of {r}x{s}{f' in {groups} groups' if groups > 1 else ''}"
        raise IllegalRewrite(f"the second convolution, of {size}, is not 1 x 1, unpadded, of stride 1", "")


def least_chain_us(regions: Sequence[CutlassRegion], device: DeviceSpec) -> float | None:
    """The least that one kernel of our own takes for products that follow each other, by the model of all its tiles.

    None where the products are no chain.
    """
    problems, epilogues = [region.problem for region in regions], [Epilogue.of(region) for region in regions]
    for first, then in pairwise(problems):
        try:
            check_pair(first, then)
        except IllegalRewrite:
            return None
        if (first.rows, first.columns) != (then.rows, then.depth):
            return None
    tiles = construct_chain(joined_chain(problems, epilogues, device), device, "matrix units")
    return tiles.ranked[0][1].time_s * 1e6 if tiles.ranked else None
