"""Two products in one kernel by CUTLASS's templates (its example 13; Bolt §3.1): which configurations a pair may have.

A threadblock computes its rows of the first product in all columns and, of these, its rows of the second. What lies
between stays in the *registers* of the warp that made it, which then has whole rows of both products, or in *shared
memory*, where warps share columns. The templates are of sm_75 (two stages) and sm_80 (asynchronous copies), and run on
newer devices as these. They take halves and, since nothing in them is particular to halves, bfloat16; their form for
int8 reads interleaved tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tvm_ext.cost.gpu_chain import ChainProduct, ChainTile, ProductChain, ProductTile, Residence
from tvm_ext.cost.gpu_chain_tiles import construct_chain
from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import blocks_per_unit, registers_left
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.records.partition import CutlassRegion
from tvm_ext.support.arithmetic import ceil_div

from .convolution import ConvolutionProblem
from .epilogue import Epilogue
from .gemm import ACCESS_BITS, GemmConfig, GemmProblem
from .legality import shared_bytes_2x, thread_registers, why_no_main_loop, why_no_store, why_too_large
from .ranking import operand_bytes

ARITHMETICS = {"float16": 75, "bfloat16": 80}
"""What the templates multiply, and the oldest that does."""


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
        place = "registers" if self.residence == "registers" else "shared"
        assert self.second.warp is not None
        block, warp = ("x".join(map(str, shape)) for shape in (self.second.threadblock, self.second.warp))
        second = f"{block}_w{warp}_a{self.second.alignment_b}_{self.second.alignment_d}"
        return f"pair_{kind}_{place}_{self.first.name.removeprefix('gemm_')}_then_{second}"

    @property
    def registers(self) -> int:
        """Of a thread: what lies between stays beside the second product's sums, in full width."""
        most = max(thread_registers(self.first), thread_registers(self.second))
        if self.residence == "shared memory":
            return most
        assert self.first.warp is not None
        return max(most, thread_registers(self.second) + self.first.warp[0] * self.first.warp[1] // 32)

    def shared_bytes(self, problem: PairProblem) -> int:
        """Either product's stages, for the second's take the first's place, and what lies between where it is there."""
        stages = max(shared_bytes_2x(self.first, problem.first), shared_bytes_2x(self.second, problem.second))
        if self.residence == "registers":
            return stages
        rows, columns, _ = self.first.threadblock
        return stages + rows * (columns + _PADDING) * problem.first.multiplier.bits // 8

    def tile(self, problem: PairProblem) -> ChainTile:
        """As the model of chains takes it."""
        products = tuple(_product_tile(config, depth) for config, depth in self._depths(problem))
        return ChainTile(
            units="matrix units", residence=self.residence, rows=self.first.threadblock[0],
            threads=self.first.warps * 32, products=products, registers=self.registers,
            shared_bytes=self.shared_bytes(problem),
        )  # fmt: skip

    def _depths(self, problem: PairProblem) -> tuple[tuple[GemmConfig, int], ...]:
        """What each product's loop runs over, zeros included: of a convolution whole steps of each position."""
        step = self.first.threadblock[2]
        depth = problem.first.k
        if problem.convolution is not None:
            depth = problem.convolution.positions * ceil_div(problem.convolution.channels, step) * step
        return (self.first, depth), (self.second, self.first.threadblock[1])


_PADDING = 8
"""Elements by which rows of what lies between are apart in shared memory, at most."""


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


# --- which pairs -----------------------------------------------------------------------------------------------------
WIDE = ACCESS_BITS // 16
"""Halves of the one width of copies that the convolutions' templates have."""


def pair_reasons(problem: PairProblem, device: DeviceSpec, first: Epilogue, second: Epilogue) -> Iterator[str | None]:
    """Rule by rule, why no template serves the products, whatever its tiles."""
    head, tail = problem.first, problem.second
    yield _why_wrong_types(problem, device)
    if (head.m, head.n) != (tail.m, tail.k):
        yield f"{head.m} x {head.n} is not the first factor of the second product, {tail.m} x {tail.k}"
    if max(head.batch, tail.batch) > 1 or (problem.convolution and problem.convolution.window.groups > 1):
        yield "the templates have neither batches nor groups"
    if "column" in (head.a.order, tail.a.order) or head.b.order != tail.b.order:
        yield "first factors must lie row by row, and the second ones both alike"
    if problem.convolution is None and tail.a.leading_dimension != head.n:
        yield "the second product reads what lies between in another shape"
    yield _why_wrong_first(first)
    yield _why_wrong_second(second)
    if problem.convolution and (head.k % WIDE or problem.convolution.channels % WIDE or head.n % WIDE):
        yield f"{problem.convolution.channels} and {head.n} channels are no multiples of {WIDE}: pad them"


def _why_wrong_types(problem: PairProblem, device: DeviceSpec) -> str | None:
    arithmetic = problem.arithmetic
    if arithmetic == "int8":
        return "the templates for pairs read interleaved int8 tensors alone, which no graph has"
    if arithmetic not in ARITHMETICS:
        return f"the templates for pairs take {' and '.join(ARITHMETICS)}, not {arithmetic}"
    if pair_architecture(device) < ARITHMETICS[arithmetic]:
        return f"the templates for pairs of {device.name} do not take {arithmetic}"
    if not arithmetic == problem.first.out_dtype == problem.second.arithmetic:
        return f"what lies between must be {arithmetic}, as the factors are"
    return None


def _why_wrong_first(epilogue: Epilogue) -> str | None:
    """The template hands the first epilogue at most two rows, a bias and a scale, of one type."""
    dtypes = {item.dtype for item in epilogue.operands}
    if len(epilogue.operands) > 2 or len(dtypes) > 1 or any(item.role != "row" for item in epilogue.operands):
        return "behind the first product of a pair come at most two rows of one type, and no other tensors"
    return None


def _why_wrong_second(epilogue: Epilogue) -> str | None:
    """As CUTLASS's own epilogues: one tensor of the result's type, which may repeat one row."""
    if epilogue.reduction is not None or len(epilogue.operands) > 1:
        return "behind the second product of a pair comes at most one tensor, and no rows or columns are added up"
    for item in epilogue.operands:
        if item.role not in ("row", "matrix") or item.dtype != epilogue.out_dtype:
            return f"behind the second product of a pair comes a row or matrix of {epilogue.out_dtype}"
    return None


# --- which tiles -----------------------------------------------------------------------------------------------------
def tile_reasons(config: PairConfig, problem: PairProblem, device: DeviceSpec) -> Iterator[str | None]:
    """Rule by rule, why ``config`` does not compile or run: each product's own template's rules, and of residence."""
    yield why_no_main_loop(config.first, problem.first, device)
    yield why_no_main_loop(config.second, problem.second, device)
    yield why_no_store(config.second, problem.second)
    if config.first.warps != config.second.warps:
        yield "both products have the same warps"
    if config.first.threadblock[1] % config.second.threadblock[2]:
        yield "the first product's columns are no whole steps of the second"  # b2b_*_smem_accumulator.h, b2b_*.h
    threads = config.first.warps * device.teu_lanes
    if config.registers > registers_left(threads, device):
        yield f"{config.registers} registers of a thread are more than a block of {threads} threads leaves to each"
    yield why_too_large(config.shared_bytes(problem), device)
    yield None if blocks_per_unit(config.tile(problem).use, device) else "not one block fits a unit"


def pair_architecture(device: DeviceSpec) -> int:
    """Of the templates that the device runs."""
    return 80 if has(device, ASYNC_COPIES_SINCE) else 75
