"""Two products in one kernel by CUTLASS's templates (its example 13; Bolt §3.1): which configurations a pair may have.

A threadblock computes its rows of the first product in all columns and, of these, its rows of the second. What lies
between stays in the *registers* of the warp that made it, which then has whole rows of both products, or in *shared
memory*, where warps share columns. The templates are of sm_75 (two stages) and sm_80 (asynchronous copies), and run on
newer devices as these. They take halves and, since nothing in them is particular to halves, bfloat16; their form for
int8 reads interleaved tensors alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tvm_ext.cost.gpu_chain import ChainProduct, ChainTile, ProductChain, ProductTile, Residence
from tvm_ext.cost.gpu_chain_tiles import construct_chain
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.records.partition import CutlassRegion
from tvm_ext.support.arithmetic import ceil_div

from .convolution import ConvolutionProblem
from .epilogue import Epilogue
from .gemm import GemmConfig, GemmProblem
from .legality import shared_bytes_2x, thread_registers
from .ranking import operand_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PairProblem:
    """Two matrix products, the second of what the first makes, and the ``convolution`` that the first one is."""

    first: GemmProblem
    second: GemmProblem
    convolution: ConvolutionProblem | None

    @classmethod
    def of(cls, region: CutlassRegion) -> PairProblem:
        """The two products of ``region``, which has a second one. Raises IllegalRewrite for what no template reads."""
        assert region.then is not None
        first, second = region.problem, region.then.problem
        if (first.window is None) != (second.window is None):
            raise IllegalRewrite("a convolution and a matrix product are no pair of one template", "")
        if first.window is None:
            return cls(
                first=GemmProblem.of(first, region.out_dtype),
                second=GemmProblem.of(second, region.then.out_dtype),
                convolution=None,
            )
        head = ConvolutionProblem.of(first, region.out_dtype)
        tail = ConvolutionProblem.of(second, region.then.out_dtype)
        if not tail.is_plain:
            raise IllegalRewrite(f"the second convolution, {tail.described}, is not 1 x 1, unpadded, of stride 1", "")
        return cls(first=head.product(), second=tail.product(), convolution=head)

    @property
    def arithmetic(self) -> str:
        """The first product's; both have one where a template serves them."""
        return self.first.arithmetic

    @property
    def input_bytes(self) -> float:
        """Of the first product's first factor."""
        bits = self.first.multiplier.bits
        if self.convolution is None:
            return self.first.m * self.first.k * bits / 8
        n, h, w, c = self.convolution.window.input_extents
        return n * h * w * c * bits / 8


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

    def tile(self, problem: PairProblem) -> ChainTile:
        """As the model of chains takes it."""
        step = self.first.threadblock[2]
        depth = problem.first.k
        if problem.convolution is not None:  # whole steps of each position, with zeros
            depth = problem.convolution.positions * ceil_div(problem.convolution.channels, step) * step
        products = (_product_tile(self.first, depth), _product_tile(self.second, self.first.threadblock[1]))
        return ChainTile(
            units="matrix units", residence=self.residence, rows=self.first.threadblock[0],
            threads=self.first.warps * 32, products=products, registers=self.registers,
            shared_bytes=self.shared_bytes,
        )  # fmt: skip


_PADDING = 8
"""Elements by which rows of what lies between are apart in shared memory, at most (b2b_mma_*_smem_accumulator.h)."""


def _product_tile(config: GemmConfig, depth: int) -> ProductTile:
    assert config.warp is not None
    _, columns, step = config.threadblock
    return ProductTile(columns=columns, depth=step, steps=ceil_div(depth, step), across=columns // config.warp[1])


def pair_chain(problem: PairProblem, first: Epilogue, second: Epilogue) -> ProductChain:
    """As the model of chains takes the products."""
    bits = problem.first.multiplier.bits
    products = tuple(
        ChainProduct(
            columns=part.n, depth=part.k, weight_bytes=part.k * part.n * bits / 8,
            epilogue_bytes=operand_bytes(epilogue, part.m, part.n),
        )
        for part, epilogue in ((problem.first, first), (problem.second, second))
    )  # fmt: skip
    return ProductChain(
        rows=problem.first.m, products=products, dtype=problem.arithmetic, itemsize=bits // 8,
        input_bytes=problem.input_bytes, output_itemsize=problem.second.out.bits / 8,
    )  # fmt: skip


def least_chain_us(region: CutlassRegion, device: DeviceSpec) -> float | None:
    """The least that one kernel of our own takes for a pair's two products, by the model of all its tiles.

    None where the products are no chain.
    """
    assert region.then is not None
    try:
        problem = PairProblem.of(region)
    except (IllegalRewrite, InputError):
        return None
    if (problem.first.m, problem.first.n) != (problem.second.m, problem.second.k):
        return None
    tiles = construct_chain(pair_chain(problem, Epilogue.of(region), Epilogue.of(region.then)), device, "matrix units")
    return tiles.ranked[0][1].time_s * 1e6 if tiles.ranked else None
