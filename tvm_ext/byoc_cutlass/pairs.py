"""Two products in one kernel: tiles of both with the warps that they share (`back_to_back`)."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from math import gcd
from typing import Literal

from tvm_ext.cost.epilogue_traffic import instructions_of
from tvm_ext.cost.gpu_chain import ProductChain, Residence, predict_chain
from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, BULK_COPIES_SINCE, has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import blocks_per_unit, registers_left
from tvm_ext.records.partition import CutlassProblem
from tvm_ext.support.arithmetic import ceil_div

from . import emit_back_to_back
from .back_to_back import PairConfig, StreamedPairConfig, check_pair, joined_chain
from .convolutions import MASK_POSITIONS
from .elements import Shape3
from .emit_attention import HOPPER_TILES
from .emit_streamed_pair import emit_streamed_pair
from .epilogue import Epilogue
from .family import PredictedTime, TemplateFamily
from .gemm import ACCESS_BITS, GemmConfig
from .legality import why_too_large
from .products import ProductFamily
from .ranking import global_gb_per_s, l2_gb_per_s, latency_us

ARITHMETICS = {"float16": 75, "bfloat16": 80}
"""What the templates multiply, and the oldest that does."""
WIDE = ACCESS_BITS // 16
"""Halves of the one width of copies that the convolutions' templates have."""

# The tiles that are looked at: powers of two, which whole instructions divide, and columns in multiples of 16.
_ROWS = (32, 64, 128, 256)
_WARP_ROWS = (16, 32, 64)
_WARP_COLUMNS = (16, 32, 64, 128)
_DEPTHS = (32, 64)
_STAGES = (3, 4)
_COLUMNS = (16, 32, 64, 96, 128, 160, 192, 256)
_RESIDENCES: tuple[Residence, ...] = ("registers", "shared memory")

AnyPair = PairConfig | StreamedPairConfig


class PairFamily(TemplateFamily[AnyPair]):
    """``problem`` and, of what that makes, the product ``then`` in one kernel, each with an epilogue.

    Raises IllegalRewrite for two products that no template reads.
    """

    form = emit_back_to_back.PAIR_CALL

    def __init__(
        self, problem: CutlassProblem, device: DeviceSpec, first: Epilogue, *, then: CutlassProblem, second: Epilogue
    ) -> None:
        super().__init__(problem, device, first)
        check_pair(problem, then)
        self.architecture = 80 if has(device, ASYNC_COPIES_SINCE) else 75  # of the templates that the device runs
        self.head, self.tail = ProductFamily(problem, device, first), ProductFamily(then, device, second)
        self.then, self.first, self.second = then, first, second
        self.why_unserved = next(filter(None, self._pair_reasons()), None)
        self.why_not_copied = next(filter(None, self._example_13_reasons()), None)

    @cached_property
    def chain(self) -> ProductChain:
        """As the model of chains takes a problem that some template serves."""
        return joined_chain((self.problem, self.then), (self.first, self.second))

    def candidates(self) -> Iterator[AnyPair]:
        if self.why_unserved is not None:
            return
        if has(self.device, BULK_COPIES_SINCE):
            for tile in HOPPER_TILES:
                yield StreamedPairConfig(arithmetic=self.problem.arithmetic, tile=tile)
        if self.why_not_copied is not None:
            return
        first, second, window = self.problem.columns, self.then.columns, self.problem.window
        stages = _STAGES if self.architecture == 80 else (2,)
        for residence in _RESIDENCES:
            exact = window is None or residence == "shared memory" or _divides(self.first)
            columns = itertools.product(_widths(first, exact=exact), _widths(second, exact=False))
            for rows, pair in itertools.product(_ROWS, columns):
                for depth, count in itertools.product(_DEPTHS, stages):
                    yield from self._warp_configs(residence, rows, pair, depth, count)

    def reasons(self, config: AnyPair) -> Iterator[str | None]:
        """Each product's own template's rules, and those of residence."""
        if isinstance(config, StreamedPairConfig):
            yield self._why_not_streamed(config)
            return
        yield self.head.why_no_main_loop(config.first)
        yield self.tail.why_no_main_loop(config.second)
        yield self.tail.why_no_store(config.second)
        if config.first.warps != config.second.warps:
            yield "both products have the same warps"
        if config.first.threadblock[1] % config.second.threadblock[2]:
            yield "the first product's columns are no whole steps of the second"  # b2b_*_smem_accumulator.h, b2b_*.h
        threads = config.first.warps * self.device.teu_lanes
        if config.registers > registers_left(threads, self.device):
            yield f"{config.registers} registers of a thread are more than a block of {threads} threads leaves to each"
        yield why_too_large(config.shared_bytes, self.device)
        yield None if blocks_per_unit(config.tile(self.problem).use, self.device) else "not one block fits a unit"

    def summary(self, reasons: Sequence[str]) -> str:
        """Why no template serves the products; else the reason against the last candidate, and the columns."""
        if self.why_unserved is not None:
            return self.why_unserved
        last = reasons[-1] if reasons else "no tile has the columns of both"
        if self.why_not_copied is not None:
            return self.why_not_copied + (f"; {last}" if reasons else "")
        return f"{self.problem.columns} and {self.then.columns} columns: {last}"

    def predict(self, config: AnyPair) -> PredictedTime:
        if isinstance(config, StreamedPairConfig):
            return self._streamed_time(config)
        time = predict_chain(self.chain, config.tile(self.problem), self.device)
        busy_us = time.busy_s * 1e6 + Machine(self.device).launch_us
        return PredictedTime(time_us=time.time_s * 1e6, full_clock_us=busy_us)

    def preference(self, config: AnyPair) -> tuple[int, int]:
        """Of equals, the one that keeps values in registers, and then that with fewer stages."""
        registers = isinstance(config, StreamedPairConfig) or config.residence == "registers"
        return int(not registers), 0 if isinstance(config, StreamedPairConfig) else config.first.stages

    def symbol(self, config: AnyPair) -> str:
        return emit_back_to_back.symbol_of(config.name, self.first, self.second, self.problem.orders[1])

    def source(self, config: AnyPair) -> str:
        if isinstance(config, StreamedPairConfig):
            return emit_streamed_pair(
                self.symbol(config), config.name, config.tile, self.first, self.second, config.arithmetic,
                self.problem.orders[1],
            )  # fmt: skip
        return emit_back_to_back.emit_pair(config, self.first, self.second, layout_b=self.problem.orders[1])

    def numbers(self, config: AnyPair) -> tuple[int, ...]:
        """Of matrix products the window is zeros."""
        del config
        head, tail, own = self.problem, self.then, self.problem.window
        distances = (matrix.leading_dimension for matrix in (*head.operands, tail.operands[1]))
        window: tuple[int, ...] = (0,) * 14
        if own is not None:
            window = (*own.input_extents, *own.filter_extents, *own.output_extents, *own.numbers)
        return head.rows, head.columns, head.depth, tail.columns, *distances, *window

    # ---- which pairs -------------------------------------------------------------------------------------------------

    def _pair_reasons(self) -> Iterator[str | None]:
        """Rule by rule, why no template serves the products, whatever its tiles."""
        head, tail, window = self.problem, self.then, self.problem.window
        yield self._why_wrong_types()
        if (head.rows, head.columns) != (tail.rows, tail.depth):
            made = f"{head.rows} x {head.columns}"
            yield f"{made} is not the first factor of the second product, {tail.rows} x {tail.depth}"
        if any(part.window is not None and part.window.changes_layout for part in (head, tail)):
            yield "the templates for pairs neither read nor store NCHW"
        if max(head.batch, tail.batch) > 1 or (window and window.groups > 1):
            yield "the templates have neither batches nor groups"
        if head.orders[0] == "column" or head.orders != tail.orders:
            yield "first factors must lie row by row, and the second ones both alike"
        if window is None and tail.operands[0].leading_dimension != head.columns:
            yield "the second product reads what lies between in another shape"
        if self.second.reduction is not None:
            yield "behind the second product of a pair, no rows or columns are added up"
        if window and (head.depth % WIDE or window.channels % WIDE or head.columns % WIDE):
            yield f"{window.channels} and {head.columns} channels are no multiples of {WIDE}: pad them"

    def _example_13_reasons(self) -> Iterator[str | None]:
        """Why example 13's templates do not, which hand over tensors as CUTLASS's own epilogues."""
        rows, operands, out = self.first.operands, self.second.operands, self.second.out_dtype
        if len(rows) > 2 or len({row.dtype for row in rows}) > 1 or any(row.role != "row" for row in rows):
            yield "behind the first product of a pair come at most two rows of one type, and no other tensors"
        if len(operands) > 1:
            yield "behind the second product of a pair comes at most one tensor"
        if any(operand.role not in ("row", "matrix") or operand.dtype != out for operand in operands):
            yield f"behind the second product of a pair comes a row or matrix of {out}"

    def _why_wrong_types(self) -> str | None:
        arithmetic = self.problem.arithmetic
        if arithmetic == "int8":
            return "the templates for pairs read interleaved int8 tensors alone, which no graph has"
        if arithmetic not in ARITHMETICS:
            return f"the templates for pairs take {' and '.join(ARITHMETICS)}, not {arithmetic}"
        if self.architecture < ARITHMETICS[arithmetic]:
            return f"the templates for pairs of {self.device.name} do not take {arithmetic}"
        if not arithmetic == self.first.out_dtype == self.then.arithmetic:
            return f"what lies between must be {arithmetic}, as the factors are"
        return None

    # ---- example 88 --------------------------------------------------------------------------------------------------

    def _why_not_streamed(self, config: StreamedPairConfig) -> str | None:
        """fmha_common.hpp, rs_op_selector: what lies between is a factor along K; the rest is what bulk copies read."""
        head, tail, most = self.problem, self.then, config.tile[2]
        if head.window is not None and not head.window.is_plain:
            return "example 88 multiplies matrices"
        if max(head.depth, tail.columns) > most:
            return f"{head.depth} and {tail.columns}, the depth and the columns of the result, are more than {most}"
        if min(self._alignments) < WIDE or head.columns % WIDE or tail.columns * self.tail.out.bits % ACCESS_BITS:
            return "bulk copies take rows of multiples of 16 bytes"
        return None

    def _streamed_time(self, config: StreamedPairConfig) -> PredictedTime:
        """A warp group multiplies, changes what it has made and multiplies that, one after another; the other fills
        the copies' latency. Behind it changes and stores its sums. All of both second factors pass through L2 for each
        threadblock, and so does what the second epilogue reads.
        """
        device, machine, (rows, columns, most) = self.device, Machine(self.device), config.tile
        blocks, steps = ceil_div(self.problem.rows, rows), ceil_div(self.problem.columns, columns)
        key = self.head.known_peak
        gflops, flops = device.peak_gflops_of(key), 4.0 * rows * columns * most
        assert gflops is not None
        units = device.unit_count
        changed_us = 1.0 / (machine.results_per_s("float32") / units / 1e6)
        multiply_us = flops / (gflops / units * 1e3)
        change_us = rows * columns * changed_us * (1.0 + _instructions(self.first, device))  # the conversion
        behind_us = rows * most * changed_us * _instructions(self.second, device)
        units_us = ceil_div(blocks, units) * (steps * (multiply_us + change_us) + behind_us + latency_us(device))
        traffic = steps * columns * 2.0 * most * 2.0 + self.second.read_bytes(rows, self.then.columns)
        l2_us = blocks * traffic / (l2_gb_per_s(device) * 1e3)
        busy_us = max(units_us, l2_us, self.chain.least_bytes / (global_gb_per_s(device) * 1e3))
        power_us = device.least_multiplying_s(blocks * steps * flops, key) * 1e6
        launch_us = machine.launch_us
        return PredictedTime(time_us=max(busy_us, power_us) + launch_us, full_clock_us=busy_us + launch_us)

    # ---- which tiles -------------------------------------------------------------------------------------------------

    def _warp_configs(
        self, residence: Residence, rows: int, columns: tuple[int, int], depth: int, stages: int
    ) -> Iterator[PairConfig]:
        """The tile in warps: in registers each has whole rows, in shared memory each product may have its own."""
        tiles = [
            [(wm, columns[part]) for wm in _WARP_ROWS]
            if residence == "registers"
            else [(wm, wn) for wm in _WARP_ROWS for wn in _WARP_COLUMNS]
            for part in (0, 1)
        ]
        for one, two in itertools.product(*tiles):
            if residence == "registers" and one[0] != two[0]:
                continue
            if any(rows % wm or width % wn for (wm, wn), width in zip((one, two), columns, strict=True)):
                continue
            if (rows // one[0]) * (columns[0] // one[1]) != (rows // two[0]) * (columns[1] // two[1]):
                continue
            yield PairConfig(
                first=self._tile(self.problem, (rows, columns[0], depth), one, stages),
                second=self._tile(self.then, (rows, columns[1], depth), two, stages),
                residence=residence,
                iterator=self._iterator,
            )

    @cached_property
    def _iterator(self) -> Literal["", "optimized", "analytic"]:
        window = self.problem.window
        if window is None:
            return ""
        return "optimized" if max(window.filter_extents) <= MASK_POSITIONS else "analytic"

    def _tile(self, part: CutlassProblem, threadblock: Shape3, warp: tuple[int, int], stages: int) -> GemmConfig:
        instruction = (16, 8, 16) if self.architecture == 80 else (16, 8, 8)
        alignment_a, alignment_b = self._alignments
        return GemmConfig(
            arithmetic=part.arithmetic, architecture=self.architecture, threadblock=threadblock,
            warp=(*warp, threadblock[2]), instruction=instruction, stages=stages, alignment_a=alignment_a,
            alignment_b=alignment_b, alignment_d=self.tail.alignments["alignment_d"],
        )  # fmt: skip

    @cached_property
    def _alignments(self) -> tuple[int, int]:
        """Elements of one access to the first factor, and to both second ones."""
        if self.problem.window is not None:
            return WIDE, WIDE
        a, b = self.problem.operands
        return a.alignment, gcd(b.alignment, self.then.operands[1].alignment)


def _instructions(epilogue: Epilogue, device: DeviceSpec) -> float:
    """Of one element; two neighbours of a row or matrix are read at once."""
    count = len(epilogue.operands) / 2.0
    for node in ast.walk(epilogue.tree()):
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        count += instructions_of(name, device) if name else isinstance(node, ast.BinOp)
    return count


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
