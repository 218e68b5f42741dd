"""What loads cost beside a CPU core's arithmetic: terms by which measured tiles differ, for searches among them.

Construction's model (`perf_model.py`) lets a register tile's loads, the loads of L1 and the arithmetic run at once.
Measured, every candidate of four operators on a Cascade Lake, the time beyond the arithmetic's grows with the bytes
that L1 takes in *and* with the loads that are issued (docs/tuning.md). `PortTimes` therefore tells apart

* the arithmetic of all register tiles, with what follows each of them;
* the loads that are issued, for which L1 is busy as it is while it takes in a line: the two add up. What the taps of a
  window's innermost loop share is loaded once, since LLVM unrolls that loop;
* lines that a step reads and that L1 cannot hold until the next step, though it is large enough: rows a power of two
  apart lie in few of its sets. For the same reason part of each row takes the room of more (`set_share`).
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import numpy as np

from tvm_ext.devices.hal import DeviceSpec

from .access_table import AccessTable, Shape, is_columns
from .matrix_tiles import MatrixTiles
from .perf_model import PerfModel
from .register_tiles import CUT_COST

PORTS_OVERLAP = 2
"""How nearly arithmetic and all that loads do run at once: t1, t2 take (t1**2 + t2**2) ** (1/2).

Loads that take half as long as the arithmetic add 12 %. On a Cascade Lake, among candidates within 1.5 of their
operator's best, the rank correlation is the same to 0.01 with 1.5, 2 and 3.
"""


class PortTimes:
    """Times of register tiles on one operator, of all units together, by its ``model``."""

    def __init__(self, model: PerfModel) -> None:
        self.model, self.core, self.device = model, model.core, model.device
        self.hz = model.machine.vector_hz * model.device.unit_count

    def arithmetic_s(self, shape: Shape) -> float:
        """Seconds of the multiply-adds, of a tile's start and stores, of spills and of packing."""
        core = self.core
        if not self.hz:
            return self.model.compute_s(shape)
        steps = core.steps(shape)
        cycles = sum(count * self._arithmetic_cycles(tile, steps) for count, tile in core.kinds(shape))
        return (cycles * (1 + CUT_COST * core.cuts(shape)) + core.packing_cycles()) / self.hz

    def _arithmetic_cycles(self, tile: Shape, steps: int) -> float:
        core = self.core
        step = max(core.arithmetic_cycles(tile), core.latency) + core.spill_cycles(tile)
        return steps * step + core.store_cycles(tile) + core.latency

    def issue_s(self, shape: Shape) -> float:
        """Seconds in which the load ports start all loads."""
        if not self.hz:
            return 0.0
        steps = self.core.steps(shape)
        loads = sum(count * steps * self.loads_per_step(tile) for count, tile in self.core.kinds(shape))
        return loads / self.device.load_rate / self.hz

    def loads_per_step(self, tile: Shape) -> float:
        """Loads of one step of the reduction; a broadcast that several taps use counts once for all of them.

        Two rows of seven columns under a 3x3 window read 2 x 9 values for the three taps of a row: 6 a step and not 14.
        """
        core = self.core
        if isinstance(core, MatrixTiles):
            return float(sum(core.operand_loads(tile)))
        counts = zip(core.operand_loads(tile), core.slots, core.inputs, strict=True)
        return sum(
            self._broadcasts(table, tile) if table.vector_use == "broadcast" else count * slots
            for count, slots, table in counts
            if table.uses_reduction or not core.reduction
        )

    def _broadcasts(self, table: AccessTable, tile: Shape) -> float:
        units = self.core.one_step(tile).units
        taps = self.core.reduction[-1] if self.core.reduction else None
        if taps not in self.model.windows:
            return float(table.elements(units))
        assert taps is not None
        every = self.core.extents[taps]
        return table.elements((*units[:taps], every, *units[taps + 1 :])) / every

    def evicted_bytes(self, shape: Shape) -> float:
        """Bytes that L1 takes in again at each step, because the lines of a step are too many for their sets."""
        steps = self.core.steps(shape)
        lines = sum(count * steps * self._crowded_lines(tile) for count, tile in self.core.kinds(shape))
        return float(lines * self.device.layers[1].transaction_bytes)

    def _crowded_lines(self, tile: Shape) -> int:
        units = self.core.one_step(tile).units
        return sum(self._beyond_sets(table, units) for table in self.core.inputs if table.vector_use == "broadcast")

    def _beyond_sets(self, table: AccessTable, units: Shape) -> int:
        """Of the lines that a step reads of ``table``, one in each row, those that the rows' sets cannot hold.

        L1 is indexed within a page. Worked example, 32 KiB and pages of 4 KiB: 8 ways of 64 lines. Rows of 4096 bytes
        all lie in one set, so that of 12 rows 4 are too many; rows of 3072 bytes lie in 4 sets, which hold 32.
        """
        way, l1 = self.device.page_bytes, self.device.layers[1]
        if way is None or l1.capacity_bytes is None or not table.dims:
            return 0
        rows = prod(table.spans(units)[:-1])
        pitch = int(table.dims[-1][0] * table.itemsize_bytes)
        places = way // max(l1.transaction_bytes, gcd(pitch, way))
        return max(0, rows - places * (l1.capacity_bytes // way))


def set_share(table: AccessTable, shape: Shape, device: DeviceSpec) -> Any:
    """Share of a cache's sets in which the rows of a data tile lie; sizes of ``shape`` may be arrays.

    A page's offset says to which sets its lines may go. Worked example: 32 of 64 floats of each row, 128 bytes of
    every 256, lie in half of the sets, and take the room of twice as many bytes. Whole rows go on in the next one.
    """
    page, line = device.page_bytes, device.layers[1].transaction_bytes
    if table.packed or page is None or len(table.dims) < 2:
        return 1.0
    size, span = table.dims[-1][0], table.spans(shape)[-1]
    places = page // max(line, gcd(int(size * table.itemsize_bytes), page))
    lines = -(-span * table.itemsize_bytes // line)
    if not is_columns(shape):
        return 1.0 if span >= size else min(1.0, places * lines * line / page)
    return np.where(np.asarray(span) >= size, 1.0, np.minimum(1.0, places * lines * line / page))
