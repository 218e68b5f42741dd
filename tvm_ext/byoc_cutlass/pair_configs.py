"""Which templates fit two products in one kernel on a device: tiles of both with the warps that they share."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from math import gcd
from typing import Literal

from tvm_ext.cost.gpu_chain import Residence
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite

from .back_to_back import (
    WIDE,
    PairConfig,
    PairProblem,
    pair_architecture,
    pair_chain,
    predict_chained_pair,
    why_illegal_pair,
    why_no_pair,
)
from .configs import check_device
from .convolution_legality import MASK_POSITIONS
from .epilogue import Epilogue
from .gemm import GemmConfig, GemmProblem, widest_access
from .ranking import Ranked

_ROWS = (32, 64, 128, 256)
_WARP_ROWS = (16, 32, 64)
_WARP_COLUMNS = (16, 32, 64, 128)
_DEPTHS = (32, 64)
_STAGES = (3, 4)
_COLUMNS = (16, 32, 64, 96, 128, 160, 192, 256)
_RESIDENCES: tuple[Residence, ...] = ("registers", "shared memory")


def propose_pair(
    problem: PairProblem, device: DeviceSpec, first: Epilogue, second: Epilogue, count: int
) -> tuple[Ranked[PairConfig], ...]:
    """The ``count`` fastest legal configurations; raises IllegalRewrite, with the reason, where there is none.

    Raises TargetError as `configs.propose`.
    """
    check_device(device)
    why = why_no_pair(problem, device, first, second)
    if why is not None:
        raise IllegalRewrite(why, "")
    chain, lacking, found = pair_chain(problem, first, second), "no tile has the columns of both", []
    for config in _candidates(problem, device, first):
        reason = why_illegal_pair(config, problem, device)
        if reason is None:
            found.append(Ranked.of(config, predict_chained_pair(config, problem, chain, device)))
        else:
            lacking = reason
    if not found:
        raise IllegalRewrite(f"{problem.first.n} and {problem.second.n} columns: {lacking}", "")
    return tuple(sorted(found, key=_place)[:count])


def _place(item: Ranked[PairConfig]) -> tuple[tuple[float, float], bool, int, str]:
    """Of equals, the one that keeps values in registers, and then that with fewer stages."""
    config = item.config
    return item.order, config.residence != "registers", config.first.stages, config.name


def _candidates(problem: PairProblem, device: DeviceSpec, first: Epilogue) -> Iterator[PairConfig]:
    stages = _STAGES if pair_architecture(device) == 80 else (2,)
    for residence in _RESIDENCES:
        exact = problem.convolution is None or residence == "shared memory" or _divides(first)
        for rows in _ROWS:
            for columns in _widths(problem.first.n, exact=exact):
                for more in _widths(problem.second.n, exact=False):
                    for depth in _DEPTHS:
                        for count in stages:
                            yield from _warped(problem, device, residence, rows, (columns, more), depth, count)


def _iterator(problem: PairProblem) -> Literal["", "optimized", "analytic"]:
    if problem.convolution is None:
        return ""
    return "optimized" if max(problem.convolution.window.filter_extents) <= MASK_POSITIONS else "analytic"


def _divides(epilogue: Epilogue) -> bool:
    """Whether the epilogue may make an infinite number of zeros, which beyond the columns are multiplied by zeros."""
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not isinstance(node.right, ast.Constant)
        for node in ast.walk(epilogue.tree())
    )


def _widths(columns: int, *, exact: bool) -> list[int]:
    """The narrowest tiles that have ``columns``: exactly these, or at least these.

    The second product's loop runs over the tile's columns, and its matrix is read in whole steps: beyond the first
    product's columns there would be nothing (mma), or zeros (convolutions, in registers).
    """
    if exact:
        return [columns] if columns in _COLUMNS else []
    return [width for width in _COLUMNS if width >= columns][:3]


def _warped(
    problem: PairProblem,
    device: DeviceSpec,
    residence: Residence,
    rows: int,
    columns: tuple[int, int],
    depth: int,
    stages: int,
) -> Iterator[PairConfig]:
    """The tile in warps: in registers each has whole rows, in shared memory each product may have its own."""
    tiles = [
        [(wm, columns[part]) for wm in _WARP_ROWS]
        if residence == "registers"
        else [(wm, wn) for wm in _WARP_ROWS for wn in _WARP_COLUMNS]
        for part in (0, 1)
    ]
    for one in tiles[0]:
        for two in tiles[1]:
            if residence == "registers" and one[0] != two[0]:
                continue
            if any(rows % wm or width % wn for (wm, wn), width in zip((one, two), columns, strict=True)):
                continue
            if (rows // one[0]) * (columns[0] // one[1]) != (rows // two[0]) * (columns[1] // two[1]):
                continue
            yield PairConfig(
                first=_tile(problem, problem.first, device, (rows, columns[0], depth), one, stages),
                second=_tile(problem, problem.second, device, (rows, columns[1], depth), two, stages),
                residence=residence,
                iterator=_iterator(problem),
            )


def _tile(
    pair: PairProblem,
    problem: GemmProblem,
    device: DeviceSpec,
    threadblock: tuple[int, int, int],
    warp: tuple[int, int],
    stages: int,
) -> GemmConfig:
    architecture = pair_architecture(device)
    instruction = (16, 8, 16) if architecture == 80 else (16, 8, 8)
    alignment_a, alignment_b, alignment_d = _alignments(pair)
    return GemmConfig(
        arithmetic=problem.arithmetic, architecture=architecture, threadblock=threadblock,
        warp=(*warp, threadblock[2]), instruction=instruction, stages=stages, alignment_a=alignment_a,
        alignment_b=alignment_b, alignment_d=alignment_d,
    )  # fmt: skip


def _alignments(pair: PairProblem) -> tuple[int, int, int]:
    """Elements of one access to the first factor, to both second ones, and to the result."""
    if pair.convolution is not None:
        return WIDE, WIDE, widest_access(pair.second.n, pair.second.out.bits)
    factors = gcd(pair.first.b.alignment, pair.second.b.alignment)
    return pair.first.a.alignment, factors, widest_access(pair.second.n, pair.second.out.bits)
