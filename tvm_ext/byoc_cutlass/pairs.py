"""Two products in one kernel: tiles of both with the warps that they share (`back_to_back`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import gcd
from typing import Literal

from tvm_ext.cost.gpu_chain import ProductChain, Residence, predict_chain
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.records.partition import CutlassRegion

from . import emit_back_to_back
from .back_to_back import WIDE, PairConfig, PairProblem, pair_architecture, pair_chain, pair_reasons, tile_reasons
from .convolution_legality import MASK_POSITIONS
from .epilogue import Epilogue
from .family import PredictedTime, TemplateFamily
from .gemm import GemmConfig, GemmProblem, widest_access

_ROWS = (32, 64, 128, 256)
_WARP_ROWS = (16, 32, 64)
_WARP_COLUMNS = (16, 32, 64, 128)
_DEPTHS = (32, 64)
_STAGES = (3, 4)
_COLUMNS = (16, 32, 64, 96, 128, 160, 192, 256)
_RESIDENCES: tuple[Residence, ...] = ("registers", "shared memory")


class PairFamily(TemplateFamily[PairProblem, PairConfig]):
    """Two products in one kernel, each with an epilogue."""

    form = emit_back_to_back.PAIR_CALL

    def __init__(self, problem: PairProblem, device: DeviceSpec, *epilogues: Epilogue) -> None:
        super().__init__(problem, device, *epilogues)
        first, second = epilogues
        self.why_unserved = next(filter(None, pair_reasons(problem, device, first, second)), None)

    @cached_property
    def chain(self) -> ProductChain:
        """As the model of chains takes a problem that some template serves."""
        first, second = self.epilogues
        return pair_chain(self.problem, first, second)

    @staticmethod
    def serves(region: CutlassRegion) -> bool:
        return region.then is not None

    @staticmethod
    def problem_of(region: CutlassRegion) -> PairProblem:
        return PairProblem.of(region)

    def candidates(self) -> Iterator[PairConfig]:
        problem, device = self.problem, self.device
        if self.why_unserved is not None:
            return
        stages = _STAGES if pair_architecture(device) == 80 else (2,)
        for residence in _RESIDENCES:
            exact = problem.convolution is None or residence == "shared memory" or _divides(self.epilogue)
            for rows in _ROWS:
                for columns in _widths(problem.first.n, exact=exact):
                    for more in _widths(problem.second.n, exact=False):
                        for depth in _DEPTHS:
                            for count in stages:
                                yield from _warped(problem, device, residence, rows, (columns, more), depth, count)

    def reasons(self, config: PairConfig) -> Iterator[str | None]:
        return tile_reasons(config, self.problem, self.device)

    def summary(self, reasons: Sequence[str]) -> str:
        """Why no template serves the products; else the reason against the last candidate, and the columns."""
        if self.why_unserved is not None:
            return self.why_unserved
        last = reasons[-1] if reasons else "no tile has the columns of both"
        return f"{self.problem.first.n} and {self.problem.second.n} columns: {last}"

    def predict(self, config: PairConfig) -> PredictedTime:
        time = predict_chain(self.chain, config.tile(self.problem), self.device)
        busy_us = time.busy_s * 1e6 + Machine(self.device).launch_us
        return PredictedTime(time_us=time.time_s * 1e6, full_clock_us=busy_us)

    def preference(self, config: PairConfig) -> tuple[int, int]:
        """Of equals, the one that keeps values in registers, and then that with fewer stages."""
        return int(config.residence != "registers"), config.first.stages

    def symbol(self, config: PairConfig) -> str:
        first, second = self.epilogues
        return emit_back_to_back.symbol_of(config, first, second, self.problem.first.b.order)

    def source(self, config: PairConfig) -> str:
        first, second = self.epilogues
        return emit_back_to_back.emit_pair(config, first, second, layout_b=self.problem.first.b.order)

    def numbers(self, config: PairConfig) -> tuple[int, ...]:
        """Of matrix products the window is zeros."""
        del config
        head, tail, convolution = self.problem.first, self.problem.second, self.problem.convolution
        distances = (head.a.leading_dimension, head.b.leading_dimension, tail.b.leading_dimension)
        window: tuple[int, ...] = (0,) * 14
        if convolution is not None:
            own = convolution.window
            window = (*own.input_extents, *own.filter_extents, *own.output_extents)
            window += (*own.padding, *own.strides, *own.dilation)
        return head.m, head.n, head.k, tail.n, *distances, *window


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
