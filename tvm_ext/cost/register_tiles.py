"""What one CPU core does with a register tile: registers that it fills, cycles that it takes (paper §3.3).

A register tile is computed as `tir_passes/emit/cpu_tiles/emit.py` emits it: accumulators at 0, one step after another
of the reduction, the store. docs/roller.md says how each constant was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import NamedTuple

import numpy as np

from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.support.arithmetic import ceil_div

from .access_table import AccessTable, Shape
from .dot_products import PIECE_CYCLES, dot_product

PORT_OVERLAP = 6
"""How nearly a core's ports work at once: busy times t1, t2 take (t1**6 + t2**6) ** (1/6) together.

Equal times take 12 % longer than one of them; a time of half the longest adds 0.3 %.
"""

PACKING_CYCLES = 3
"""Cycles that a CPU takes to copy one element of a strided input into its panel: address, load, scattered store."""


CUT_COST = 0.04
"""Share by which a kernel of several tile sizes is slower than its tiles: LLVM keeps fewer of them in registers.

Measured on a Zen 5, mean over 1,600 kernels: cut rows 1.04-1.05 times, a last vector of fewer lanes 1.04; one in ten
1.15 or more.
"""


REGISTERS_WITHOUT_BROADCASTS = 16
"""x86 before AVX-512 has so many vector registers, and no multiply-add with a broadcast operand; others have 32."""


class Step(NamedTuple):
    """One step of a register tile's reduction: its sizes in registers, its instructions, the registers that it fills.

    ``loads`` are instructions per input: registers, broadcasts, or one per lane for a gather.
    """

    units: Shape
    loads: tuple[int, ...]
    accumulators: int
    registers: int


class RegisterTiles:
    """The register tiles of one expression on one CPU core; axes are positions in ``expr.axes``.

    ``vector`` is the axis whose neighbours fill a register of ``lanes`` elements; None means scalar code.
    """

    def __init__(
        self,
        expr: TensorExpr,
        device: DeviceSpec,
        vector: int | None,
        lanes: int,
        inputs: tuple[AccessTable, ...],
        output: AccessTable,
    ) -> None:
        self.expr, self.device = expr, device
        self.vector, self.lanes = vector, lanes
        self.inputs, self.output = inputs, output
        self.extents: Shape = tuple(axis.extent for axis in expr.axes)
        self.spatial = tuple(i for i, axis in enumerate(expr.axes) if axis.kind == "spatial")
        self.reduction = tuple(i for i, axis in enumerate(expr.axes) if axis.kind == "reduce")
        self.slots = tuple(
            _slots_per_load(expr, access, device) if table.vector_use == "vector" and not table.packed else 1
            for access, table in zip(expr.inputs, inputs, strict=True)
        )
        self.rounds_lanes = all(table.padded for table in inputs if table.vector_use != "broadcast")
        self._total: dict[Shape, float] = {}
        self._steps: dict[Shape, Step] = {}
        self._step_cycles: dict[tuple[object, ...], float] = {}
        self._tile_cycles: dict[tuple[Shape, int], float] = {}
        self._row_cycles: dict[int, float] = {}
        self._epilogue = sum(item.flops_per_element for item in expr.epilogue) / 2 / device.fma_rate
        self.limit = device.register_limit
        self.latency = float(device.fma_latency_cycles or 0) if expr.combiner is not None else 0.0
        self.dot = dot_product(expr, device)
        # A step takes a whole group of the instruction.
        self.stepped = tuple(i for i in self.reduction if self.dot is None or i not in self.dot.axes)
        self._operations = max(1.0, expr.flops_per_point / 2) * self._instructions_per_multiply_add()
        self.contiguous = next((i for i in self.spatial if i != vector and output.moves_by_one(i)), None)

    # ---- registers ---------------------------------------------------------------------------------------------

    def pieces(self, size: int) -> int:
        """SIMD registers over ``size`` elements of the vector axis: whole ones, then powers of two.

        37 elements of 16 lanes are 16 + 16 + 4 + 1: four registers; three where panels are padded with zeros.
        """
        size = min(size, self.extents[self.vector]) if self.vector is not None else size
        return ceil_div(size, self.lanes) if self.rounds_lanes else size // self.lanes + (size % self.lanes).bit_count()

    def one_step(self, shape: Shape) -> Step:
        """One step of the reduction; it is remembered, since every question about a tile comes back to it."""
        known = self._steps.get(shape)
        if known is None:
            known = self._steps[shape] = self._one_step(shape)
        return known

    def _one_step(self, shape: Shape) -> Step:
        units = tuple(
            self.pieces(size) if i == self.vector else 1 if i in self.reduction else size
            for i, size in enumerate(shape)
        )
        operands = [table.elements(units) for table in self.inputs]
        accumulators = prod([units[i] for i in self.spatial])
        width = 1 if self.dot is None else self.dot.instruction.operand_registers
        used = accumulators + width * (min(operands, default=0) + max(0, len(operands) - 1)) + self._carried(units)
        loads = [
            count * self.lanes if table.vector_use == "gather" else count
            for count, table in zip(operands, self.inputs, strict=True)
        ]
        return Step(units=units, loads=tuple(loads), accumulators=accumulators, registers=used)

    def rows_at_once(self, axis: int) -> int:
        """Points along a spatial ``axis``, not the vector axis, that one register of sums has: 1, of tiles 16."""
        return 1

    def row_sizes(self, axis: int) -> list[int]:
        """The sizes along such an ``axis`` that register tiles may have."""
        return list(range(1, min(self.extents[axis], self.limit) + 1))

    def accumulators(self, shape: Shape) -> int:
        """Registers that hold the output tile; along a vectorised reduction axis each lane sums its share."""
        return self.one_step(shape).accumulators

    def operand_loads(self, shape: Shape) -> tuple[int, ...]:
        """Load instructions of one reduction step per input."""
        return self.one_step(shape).loads

    def registers(self, shape: Shape) -> int:
        """Accumulators, the smallest operand of a step kept whole, one register to stream each other, carried taps."""
        return self.one_step(shape).registers

    def _carried(self, units: Shape) -> int:
        """Broadcasts that stay in registers from tap to tap: LLVM unrolls a short window's innermost loop.

        Four columns of a 3x3 window on two channels' panels: 4 * 2 accumulators, 2 + 1 operands and 3 columns that the
        next tap uses again.
        """
        if not self.reduction:
            return 0
        taps = self.reduction[-1]
        carried = [t.carried(units, taps, self.extents[taps]) for t in self.inputs if t.vector_use == "broadcast"]
        return max(carried, default=0)

    # ---- cycles ------------------------------------------------------------------------------------------------

    def total_cycles(self, shape: Shape) -> float:
        """Cycles of all register tiles on one core; the last tile of an axis runs at its own smaller size.

        83 rows in tiles of 14 are five tiles of 14 and one of 13.
        """
        if shape not in self._total:
            self._total[shape] = self._total_cycles(shape)
        return self._total[shape]

    def _total_cycles(self, shape: Shape) -> float:
        steps = self.steps(shape)
        cycles = sum(count * self.cycles(tile, steps) for count, tile in self.kinds(shape))
        return cycles * (1 + CUT_COST * self.cuts(shape)) + self.packing_cycles()

    def steps(self, shape: Shape) -> int:
        """Steps of the whole reduction."""
        return prod(ceil_div(self.extents[i], shape[i]) for i in self.stepped)

    def kinds(self, shape: Shape) -> list[tuple[int, Shape]]:
        """How many register tiles there are of each size."""
        kinds: list[tuple[int, Shape]] = [(1, shape)]
        for i in self.spatial:
            full, rest = divmod(self.extents[i], shape[i])
            cut = [(n, (*s[:i], rest, *s[i + 1 :])) for n, s in kinds] if rest else []
            kinds = [(n * full, s) for n, s in kinds if full] + cut
        return kinds

    def cuts(self, shape: Shape) -> int:
        """Ways in which the kernel's tiles differ: cut rows (1), and a last vector of fewer lanes (1)."""
        rows = any(self.extents[i] % shape[i] for i in self.spatial if i != self.vector)
        lanes = self.vector in self.spatial and not self.rounds_lanes and self.extents[self.vector] % self.lanes
        return int(rows) + int(bool(lanes))

    def cycles(self, shape: Shape, steps: int) -> float:
        """Cycles of one register tile over the whole reduction; last tiles of many candidates are alike."""
        known = self._tile_cycles.get((shape, steps))
        if known is None:
            known = steps * self.step_cycles(shape) + self.store_cycles(shape) + self.latency
            self._tile_cycles[shape, steps] = known
        return known

    def step_cycles(self, shape: Shape) -> float:
        """Cycles of one step of the reduction; they follow from its instructions and registers.

        i=12, j=32: 24 FMAs on 2 pipes are 12 cycles, 2 + 12 loads on 2 ports are 7, and 4 of latency are hidden: 12.4
        cycles. i=1, j=16 (one accumulator): 0.5 and 1 cycles, but each FMA waits 4.
        """
        _, *instructions = self.one_step(shape)
        key = tuple(instructions)
        known = self._step_cycles.get(key)
        if known is None:
            known = self._step_cycles[key] = self._one_step_cycles(shape)
        return known

    def _one_step_cycles(self, shape: Shape) -> float:
        arithmetic = self.arithmetic_cycles(shape)
        issue = gathers = 0.0
        for count, table, slots in zip(self.operand_loads(shape), self.inputs, self.slots, strict=True):
            if table.vector_use == "gather":
                gathers += count
            if table.uses_reduction or not self.reduction:
                issue += count * slots
        issue /= self.device.load_rate
        return overlapped((arithmetic, issue, self.latency, gathers), PORT_OVERLAP) + self.spill_cycles(shape)

    def arithmetic_cycles(self, shape: Shape) -> float:
        """Cycles in which the pipes start the multiply-adds of a step."""
        return self.accumulators(shape) * self._operations / self.device.fma_rate

    def spill_cycles(self, shape: Shape) -> float:
        """Cycles of a step that a tile of too many registers stores accumulators: LLVM then keeps most in memory.

        A last tile can be that large though smaller: 57 of 64 columns are 16 + 16 + 16 + 8 + 1, five registers for
        four. Measured: 7 x 64 (33 registers) takes 38 cycles a step instead of 14; stored once each, 14 + 28.
        """
        if self.registers(shape) + self._overwritten(shape) <= self.limit:
            return 0.0
        return self.accumulators(shape) / self.device.store_rate

    def _overwritten(self, shape: Shape) -> int:
        """Registers of broadcasts that each meet one other operand, where a multiply-add cannot read them from memory.

        LLVM lets the sum take the register of its broadcast, and has those of two steps in flight: 11 rows of one
        register spill six sums a step, and take 14 cycles on a Zen 3 (AVX2) instead of 6.
        """
        if self.limit > REGISTERS_WITHOUT_BROADCASTS:
            return 0
        sums, counts = self.accumulators(shape), zip(self.operand_loads(shape), self.inputs, strict=True)
        return sum(count for count, table in counts if table.vector_use == "broadcast" and count == sums)

    def _instructions_per_multiply_add(self) -> float:
        """1 with fused multiply-add; 2 where the type's peak is half of float32's at as many lanes (int32).

        Of a dot-product instruction those that stand for it, by a group.
        """
        if self.dot is not None:
            return self.dot.instruction.operations
        peak32, peak = self.device.peak_gflops_of("float32"), self.device.peak_gflops_of(self.expr.output.dtype)
        if not peak32 or not peak:
            return 1.0
        return min(2.0, max(1.0, peak32 / peak * self.lanes / self.device.teu_lanes))

    def packing_cycles(self) -> float:
        """Cycles of copying on entry: strided inputs into vectors, element by element, and data into rows of tiles."""
        pieces = 0 if self.dot is None else self.dot.pieces * PIECE_CYCLES
        if self.device.stores_per_cycle is None:
            return float(pieces)
        return float(PACKING_CYCLES * sum(table.packed_elements for table in self.inputs) + pieces)

    def stored(self, shape: Shape) -> int:
        """SIMD registers of sums that the tile's end stores."""
        return self.accumulators(shape)

    def store_cycles(self, shape: Shape) -> float:
        """Cycles of the tile's end: its epilogue, and its stores along the output's contiguous axis."""
        per_cycle = self.device.stores_per_cycle
        if per_cycle is None:
            return 0.0
        registers = self.stored(shape)
        if self.vector in self.reduction:  # add the lanes together: log2(lanes) shuffles and additions
            return registers * (2 * log2(self.lanes) + 1) / per_cycle
        if self.vector is None or self.output.vector_use == "vector":
            return registers * (1 / per_cycle + self._epilogue)
        return self._transposed_store_cycles(shape) / per_cycle

    def _transposed_store_cycles(self, shape: Shape) -> float:
        """The tile is interleaved register by register, spilled, and written lane by lane.

        Six rows of one register: 8 registers (a power of two) take 3 rounds of 8 shuffles and 8 stores, then each of
        16 lanes is written as 4 + 2 elements: 24 + 8 + 32 cycles for 96 elements.
        """
        assert self.vector is not None
        rows = 1 if self.contiguous is None else shape[self.contiguous]
        if rows not in self._row_cycles:
            self._row_cycles[rows] = self._interleaved_cycles(rows)
        return self.stored(shape) / rows * self._row_cycles[rows]

    def _interleaved_cycles(self, rows: int) -> float:
        cycles = 0.0
        for first in range(0, rows, self.lanes):
            own = min(self.lanes, rows - first)
            rounds = (own - 1).bit_length()
            writes = (own // self.lanes + (own % self.lanes).bit_count()) * self.lanes
            cycles += (1 << rounds) * (rounds + 1) + writes * (1 + self._epilogue)
        return cycles


def _slots_per_load(expr: TensorExpr, access: Access, device: DeviceSpec) -> int:
    """Load slots that a whole register takes: 2 where it may start anywhere in a row and so ends in the next line.

    Rows of 30 floats start at 0, 120, 240 ... bytes: nearly all of their 64-byte loads touch two lines of 64. Loads
    that are narrower than a line cross one less often: 32 bytes half as often, which is not charged.
    """
    if device.register_bytes < device.layers[1].transaction_bytes:
        return 1
    strides = [stride for axis in expr.axes if (stride := access.stride(axis.name))]
    moves = [abs(stride) * access.itemsize_bytes for stride in strides if stride != 1]
    windowed = strides.count(1) > 1
    return 2 if windowed or any(move % device.register_bytes for move in moves) else 1


def overlapped(times: Sequence[float], norm: int) -> float:
    """Time of activities that run at once, a little above the longest: the ``norm``-th root of the sum of powers.

    Of numbers, or of arrays of positive ones.
    """
    columns = isinstance(times[0], np.ndarray)
    longest = np.max(times, axis=0) if columns else max(times)
    if not columns and longest <= 0:
        return 0.0
    together: float = longest * sum((time / longest) ** norm for time in times) ** (1 / norm)
    return together
