"""Which templates fit a matrix product on a device: a few hundred configurations, the legal ones ranked by a model.

They come from the device's limits and the vendor's guidance (Bolt §3.2.2): warp tiles as large as the registers allow,
four or eight warps to a threadblock, small threadblocks where there are too few large ones to keep the units busy.
Nothing is a tuner's list. `legality` refuses what the headers would refuse, `ranking` predicts the time of the rest.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, BULK_COPIES_SINCE, LDMATRIX_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import TargetError
from tvm_ext.support.arithmetic import ceil_div

from .elements import FP8_SINCE, MULTIPLIERS, Shape3
from .epilogue import Epilogue
from .gemm import GemmConfig, GemmProblem, Schedule
from .legality import why_illegal
from .ranking import Ranked, predict_product

MOST_CONFIGS = 48
"""Configurations that `propose` answers at most: tens, as a profiler can run."""

_TILES = (32, 64, 128, 256)
_COLLECTIVE_WIDTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)  # what wgmma's N allows, in growing steps
_WARP_TILES = (16, 32, 64)
_K_BYTES = (64, 128)  # of one tile's row along K: the widths of shared memory's swizzled rows
_STAGES = (3, 4, 5, 6)
_SIMT_K = 8
_SPLITS = (1, 2, 4, 8)
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2))
_SCHEDULES: tuple[Schedule, ...] = ("cooperative", "pingpong")
DEEPEST_SWIZZLE = 8
"""2.x templates are compiled for this, and take less where there are fewer columns of tiles (threadblock_swizzle.h)."""


def propose(
    problem: GemmProblem, device: DeviceSpec, epilogue: Epilogue, *, count: int = MOST_CONFIGS
) -> tuple[Ranked[GemmConfig], ...]:
    """The ``count`` legal configurations that are best worth measuring; empty where there is none.

    The first is the fastest by the model. Behind it come the best of every other threadblock tile, and only then the
    second best of each: stages, clusters and splits of one tile are nearly the same time to the model, and a profiler
    with eight attempts should not spend them on one tile.

    Raises TargetError where CUTLASS has no template for the device: not CUDA, or older than sm_75, which no compiler
    that it works with still compiles for; or where its row lacks what the model asks for.
    """
    check_device(device)
    legal = [item for item in candidates(problem, device) if why_illegal(item, problem, device, epilogue) is None]
    splits = (1,) if epilogue.reduction is not None else _SPLITS  # stream-K has parts of tiles
    split = [item for config in legal for item in _splits(config, problem, device, splits)]
    ranked = [Ranked.of(c, predict_product(c, problem, device, epilogue)) for c in split]
    return tuple(_tile_by_tile(sorted(ranked, key=_place))[:count])


def _tile_by_tile(ranked: list[Ranked[GemmConfig]]) -> list[Ranked[GemmConfig]]:
    """``ranked`` in rounds: the first of every tile, the second of every tile, and so on."""
    seen: Counter[tuple[int, int]] = Counter()
    rounds = []
    for item in ranked:
        tile = item.config.threadblock[:2]
        rounds.append(seen[tile])
        seen[tile] += 1
    order = sorted(range(len(ranked)), key=lambda i: rounds[i])  # stable: within a round, the fastest first
    return [ranked[i] for i in order]


def _place(item: Ranked[GemmConfig]) -> tuple[tuple[float, float], int, int, str]:
    """Of equals, the one whose warps have the largest tiles, and then that with most stages to spare."""
    warp = item.config.warp or item.config.threadblock
    return item.order, -warp[0] * warp[1], -item.config.stages, item.config.name


def why_none(problem: GemmProblem, device: DeviceSpec, epilogue: Epilogue) -> str | None:
    """Why no configuration is legal, as the most candidates were refused; None where one is. Raises as `propose`."""
    check_device(device)
    reasons = (why_illegal(config, problem, device, epilogue) for config in candidates(problem, device))
    return most_frequent(reasons, f"{device.name} has no template that multiplies {problem.arithmetic}")


def most_frequent(reasons: Iterable[str | None], without_any: str) -> str | None:
    """Why most of what was looked at is refused, ``without_any`` where that is nothing; None where one is not."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        if reason is None:
            return None
        counts[reason] += 1
    return counts.most_common(1)[0][0] if counts else without_any


def check_device(device: DeviceSpec) -> None:
    """Raise TargetError unless CUTLASS has templates for ``device``."""
    if not has(device, LDMATRIX_SINCE):
        raise TargetError(
            f"CUTLASS has no templates for {device.name}: they begin with CUDA's compute capability 7.5.",
            "such devices are served by the kernels that are constructed here",
        )


def candidates(problem: GemmProblem, device: DeviceSpec) -> Iterator[GemmConfig]:
    """Configurations worth a look, legal or not."""
    if problem.arithmetic == "float32":
        yield from _vector_candidates(problem, device)
        return
    yield from _warp_candidates(problem, device)
    if has(device, BULK_COPIES_SINCE):
        yield from _collective_candidates(problem)


def template_architecture(problem: GemmProblem, device: DeviceSpec) -> int:
    """The architecture that 2.x templates are tagged with: the newest that they have and the device knows."""
    if problem.multiplier.instructions and problem.multiplier.instructions[0][0] == FP8_SINCE:
        return 89
    return 80 if has(device, ASYNC_COPIES_SINCE) else 75


def _warp_candidates(problem: GemmProblem, device: DeviceSpec) -> Iterator[GemmConfig]:
    """2.x templates on matrix units."""
    instruction = _instruction(problem, device)
    if instruction is not None:
        stages = _STAGES if has(device, ASYNC_COPIES_SINCE) else (2,)
        yield from _warp_tiles(problem, template_architecture(problem, device), instruction, stages)


def two_stage_candidates(problem: GemmProblem, device: DeviceSpec) -> Iterator[GemmConfig]:
    """sm_75's templates for a newer device, which copy elements that are too narrow for asynchronous copies."""
    known = MULTIPLIERS[problem.arithmetic].instructions
    if known and known[0][0] == LDMATRIX_SINCE and has(device, ASYNC_COPIES_SINCE):
        yield from _warp_tiles(problem, 75, known[0][1], (2,))


def _warp_tiles(
    problem: GemmProblem, architecture: int, instruction: Shape3, stages: tuple[int, ...]
) -> Iterator[GemmConfig]:
    for m, n, k_bytes in itertools.product(_TILES, _TILES, _K_BYTES):
        k = k_bytes * 8 // problem.multiplier.bits
        warps = ((wm, wn) for wm in _WARP_TILES for wn in _WARP_TILES if m % wm == 0 and n % wn == 0)
        for (wm, wn), depth in itertools.product(warps, stages):
            yield GemmConfig(
                arithmetic=problem.arithmetic,
                architecture=architecture,
                threadblock=(m, n, k),
                warp=(wm, wn, k),
                instruction=instruction,
                stages=depth,
                swizzle=DEEPEST_SWIZZLE,
                **problem.alignments(),
            )


def _instruction(problem: GemmProblem, device: DeviceSpec) -> Shape3 | None:
    """The newest instruction of the arithmetic that the device has; None where it has none."""
    known = [shape for since, shape in MULTIPLIERS[problem.arithmetic].instructions if has(device, since)]
    return known[-1] if known else None


def _vector_candidates(problem: GemmProblem, device: DeviceSpec) -> Iterator[GemmConfig]:
    """2.x templates on the vector units, which store one element at a time."""
    architecture = template_architecture(problem, device)
    stages = _STAGES[:2] if has(device, ASYNC_COPIES_SINCE) else (2,)
    for m, n, depth in itertools.product(_TILES[:3], _TILES[:3], stages):
        for wm, wn in ((32, 32), (32, 64), (64, 32)):
            yield GemmConfig(
                arithmetic=problem.arithmetic,
                architecture=architecture,
                threadblock=(m, n, _SIMT_K),
                warp=(wm, wn, _SIMT_K),
                instruction=(1, 1, 1),
                stages=depth,
                swizzle=DEEPEST_SWIZZLE,
                alignment_a=1,
                alignment_b=1,
                alignment_d=1,
            )


def _collective_candidates(problem: GemmProblem) -> Iterator[GemmConfig]:
    """3.x templates: a collective of warp groups, fed by the bulk copy engine."""
    return _collective_tiles(problem, _SCHEDULES)


def single_group_candidates(problem: GemmProblem) -> Iterator[GemmConfig]:
    """3.x templates of convolutions, in which one warp group multiplies."""
    return _collective_tiles(problem, ("single",))


def _collective_tiles(problem: GemmProblem, schedules: tuple[Schedule, ...]) -> Iterator[GemmConfig]:
    k = _K_BYTES[-1] * 8 // problem.multiplier.bits
    stages = (2, *_STAGES)
    shapes = itertools.product(_TILES[1:], _COLLECTIVE_WIDTHS, stages, schedules, _CLUSTERS)
    for m, n, depth, schedule, cluster in shapes:
        yield GemmConfig(
            arithmetic=problem.arithmetic,
            architecture=90,
            threadblock=(m, n, k),
            stages=depth,
            swizzle=_swizzle(problem, n),
            raster="along_n" if problem.n <= problem.m else "along_m",
            schedule=schedule,
            cluster=cluster,
            **problem.alignments(),
        )


def _splits(
    config: GemmConfig, problem: GemmProblem, device: DeviceSpec, splits: Sequence[int]
) -> Iterator[GemmConfig]:
    """``config``, and with K split where its tiles leave units idle and every part keeps its stages filled."""
    if config.is_simt or config.schedule in ("pingpong", "single") or problem.batch > 1:
        yield config
        return
    tiles = config.tiles(problem)
    steps = ceil_div(problem.k, config.threadblock[2])
    for split in splits:
        if split == 1 or (tiles * split <= device.unit_count * 2 and steps >= split * config.stages):
            yield config.with_split(split)


def runtime_variants(config: GemmConfig, problem: GemmProblem) -> Iterator[GemmConfig]:
    """Other values of what the same program takes at run time: splits of a stream-K form, 3.x's swizzle and raster.

    Nothing of them is compiled in, so that a profiler tries them for the price of a run.
    """
    steps = ceil_div(problem.k, config.threadblock[2])
    splits = [split for split in _SPLITS if split > 1 and steps >= split * config.stages] if config.split_k > 1 else [1]
    swizzles, rasters = [config.swizzle], [config.raster]
    if config.generation == "3.x":
        deepest = _swizzle(problem, config.threadblock[1])
        swizzles = [1 << power for power in range(deepest.bit_length())]
        rasters = ["along_m", "along_n"]
    for split, swizzle, raster in itertools.product(splits, swizzles, rasters):
        variant = dataclasses.replace(config, split_k=split, swizzle=swizzle, raster=raster)
        if variant != config:
            yield variant


def _swizzle(problem: GemmProblem, tile_n: int) -> int:
    """Columns of tiles that neighbouring threadblocks share: so many that there are, up to `DEEPEST_SWIZZLE`."""
    columns = ceil_div(problem.n, tile_n)
    return min(DEEPEST_SWIZZLE, 1 << (columns.bit_length() - 1))
