"""Matrix products: a few hundred configurations for a device, the legal ones ranked by a model.

They come from the device's limits and the vendor's guidance (Bolt §3.2.2): warp tiles as large as the registers allow,
four or eight warps to a threadblock, small threadblocks where there are too few large ones to keep the units busy.
Nothing is a tuner's list. `legality` refuses what the headers would refuse, `ranking` predicts the time of the rest,
`emit` writes the source.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator

from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, BULK_COPIES_SINCE, LDMATRIX_SINCE, has
from tvm_ext.support.arithmetic import ceil_div

from . import emit
from .elements import FP8_SINCE, Shape3
from .family import Ranked
from .gemm import GemmConfig, Schedule
from .ranking import ProductClock

# What is looked at: powers of two between an instruction's extents and what registers and shared memory hold.
_TILES = (32, 64, 128, 256)
_COLLECTIVE_WIDTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)  # what wgmma's N allows, in growing steps
_WARP_TILES = (16, 32, 64)
_K_BYTES = (64, 128)  # of one tile's row along K: the widths of shared memory's swizzled rows
_STAGES = (3, 4, 5, 6)
_SIMT_K = 8  # default_gemm_configuration.h: tiles of the vector units along K
SPLITS = (1, 2, 4, 8)
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))  # up to half of `PORTABLE_CLUSTER`
DEEPEST_SWIZZLE = 8
"""2.x templates are compiled for this, and take less where there are fewer columns of tiles (threadblock_swizzle.h)."""


class ProductFamily(ProductClock):
    """One product of matrices, or a batch of them; of a convolution, the implicit one."""

    form = emit.GEMM_CALL
    does = "multiplies"

    def candidates(self) -> Iterator[GemmConfig]:
        if self.problem.arithmetic == "float32":
            yield from self._vector_candidates()
            return
        known = [shape for since, shape in self.multiplier.instructions if has(self.device, since)]
        if known:  # the newest instruction of the arithmetic that the device has
            stages = _STAGES if has(self.device, ASYNC_COPIES_SINCE) else (2,)
            yield from self._warp_tiles(self._architecture, known[-1], stages)
        if has(self.device, BULK_COPIES_SINCE):
            yield from self.collective_tiles(("cooperative", "pingpong"))

    def preference(self, config: GemmConfig) -> tuple[int, int]:
        return roomy(config)

    def splits(self, config: GemmConfig) -> Iterator[GemmConfig]:
        """With K split where its tiles leave units idle and every part keeps its stages filled."""
        yield config
        if has_no_splits(config) or self.problem.batch > 1 or self.epilogue.reduction is not None:
            return  # stream-K has parts of tiles, which reduce nothing
        tiles, steps = config.tiles(self.problem), ceil_div(self.problem.depth, config.threadblock[2])
        for split in SPLITS[1:]:
            if tiles * split <= self.device.unit_count * 2 and steps >= split * config.stages:
                yield config.with_split(split)

    def variants(self, config: GemmConfig) -> Iterator[GemmConfig]:
        """Splits of a stream-K form, 3.x's swizzle and raster."""
        steps = ceil_div(self.problem.depth, config.threadblock[2])
        splits = [split for split in SPLITS[1:] if steps >= split * config.stages] if config.split_k > 1 else [1]
        swizzles, rasters = [config.swizzle], [config.raster]
        if config.generation == "3.x":
            deepest = self._swizzle(config.threadblock[1])
            swizzles = [1 << power for power in range(deepest.bit_length())]
            rasters = ["along_m", "along_n"]
        for split, swizzle, raster in itertools.product(splits, swizzles, rasters):
            variant = dataclasses.replace(config, split_k=split, swizzle=swizzle, raster=raster)
            if variant != config:
                yield variant

    def spread(self, ranked: list[Ranked[GemmConfig]]) -> list[Ranked[GemmConfig]]:
        """In rounds: the first of every threadblock tile, the second of every tile, and so on.

        Stages, clusters and splits of one tile are nearly the same time to the model, and a profiler with eight
        attempts should not spend them on one tile.
        """
        seen: Counter[tuple[int, int]] = Counter()
        rounds = []
        for each in ranked:
            tile = each.config.threadblock[:2]
            rounds.append(seen[tile])
            seen[tile] += 1
        order = sorted(range(len(ranked)), key=lambda i: rounds[i])  # stable: within a round, the fastest first
        return [ranked[i] for i in order]

    def symbol(self, config: GemmConfig) -> str:
        return emit.symbol_of(config, self.epilogue, self.problem)

    def source(self, config: GemmConfig) -> str:
        return emit.emit_gemm(config, self.epilogue, self.problem)

    def numbers(self, config: GemmConfig) -> tuple[int, ...]:
        problem, (a, b) = self.problem, self.problem.operands
        return (
            problem.rows, problem.columns, problem.depth, problem.batch, a.leading_dimension, b.leading_dimension,
            a.batch_stride, b.batch_stride, problem.rows * problem.columns if problem.batch > 1 else 0,
            config.split_k, config.swizzle, int(config.raster == "along_m"), 0,
        )  # fmt: skip

    # ---- candidates --------------------------------------------------------------------------------------------------

    @property
    def _architecture(self) -> int:
        """What 2.x templates are tagged with: the newest that they have and the device knows."""
        instructions = self.multiplier.instructions
        if instructions and instructions[0][0] == FP8_SINCE:
            return 89
        return 80 if has(self.device, ASYNC_COPIES_SINCE) else 75

    def pipelined_tiles(self) -> Iterator[GemmConfig]:
        """With the newest instruction, but two stages, whose threads load what they like in place of copying it."""
        known = [shape for since, shape in self.multiplier.instructions if has(self.device, since)]
        if known:
            yield from self._warp_tiles(self._architecture, known[-1], (2,))

    def two_stage_tiles(self) -> Iterator[GemmConfig]:
        """sm_75's templates for a newer device, which copy elements that are too narrow for asynchronous copies."""
        known = self.multiplier.instructions
        if known and known[0][0] == LDMATRIX_SINCE and has(self.device, ASYNC_COPIES_SINCE):
            yield from self._warp_tiles(75, known[0][1], (2,))

    def _warp_tiles(self, architecture: int, instruction: Shape3, stages: tuple[int, ...]) -> Iterator[GemmConfig]:
        """2.x templates on matrix units."""
        for m, n, k_bytes in itertools.product(_TILES, _TILES, _K_BYTES):
            k = k_bytes * 8 // self.multiplier.bits
            warps = ((wm, wn) for wm in _WARP_TILES for wn in _WARP_TILES if m % wm == 0 and n % wn == 0)
            for (wm, wn), depth in itertools.product(warps, stages):
                yield GemmConfig(
                    arithmetic=self.problem.arithmetic, architecture=architecture, threadblock=(m, n, k),
                    warp=(wm, wn, k), instruction=instruction, stages=depth, swizzle=DEEPEST_SWIZZLE,
                    **self.alignments,
                )  # fmt: skip

    def _vector_candidates(self) -> Iterator[GemmConfig]:
        """2.x templates on the vector units, which store one element at a time."""
        stages = _STAGES[:2] if has(self.device, ASYNC_COPIES_SINCE) else (2,)
        for m, n, depth in itertools.product(_TILES[:3], _TILES[:3], stages):
            for wm, wn in ((32, 32), (32, 64), (64, 32)):
                yield GemmConfig(
                    arithmetic=self.problem.arithmetic, architecture=self._architecture, threadblock=(m, n, _SIMT_K),
                    warp=(wm, wn, _SIMT_K), instruction=(1, 1, 1), stages=depth, swizzle=DEEPEST_SWIZZLE,
                    alignment_a=1, alignment_b=1, alignment_d=1,
                )  # fmt: skip

    def collective_tiles(self, schedules: tuple[Schedule, ...]) -> Iterator[GemmConfig]:
        """3.x templates: a collective of warp groups, fed by the bulk copy engine; of convolutions a "single" group."""
        problem = self.problem
        k = _K_BYTES[-1] * 8 // self.multiplier.bits
        shapes = itertools.product(_TILES[1:], _COLLECTIVE_WIDTHS, (2, *_STAGES), schedules, _CLUSTERS)
        for m, n, depth, schedule, cluster in shapes:
            yield GemmConfig(
                arithmetic=problem.arithmetic, architecture=90, threadblock=(m, n, k), stages=depth,
                swizzle=self._swizzle(n), raster="along_n" if problem.columns <= problem.rows else "along_m",
                schedule=schedule, cluster=cluster, **self.alignments,
            )  # fmt: skip

    def _swizzle(self, tile_n: int) -> int:
        """Columns of tiles that neighbouring threadblocks share: so many that there are, up to `DEEPEST_SWIZZLE`."""
        columns = ceil_div(self.problem.columns, tile_n)
        return min(DEEPEST_SWIZZLE, 1 << (columns.bit_length() - 1))


def roomy(config: GemmConfig) -> tuple[int, int]:
    """Of equals, the one whose warps have the largest tiles, and then that with most stages to spare."""
    warp = config.warp or config.threadblock
    return -warp[0] * warp[1], -config.stages


def has_no_splits(config: GemmConfig) -> bool:
    """Whether the template's depth cannot be divided among threadblocks."""
    return config.is_simt or config.schedule in ("pingpong", "single")
