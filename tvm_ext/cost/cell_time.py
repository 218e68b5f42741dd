"""A step of a recurrent cell on a CPU: its tiles, and the time that they take.

Two floors: the multiply-adds over the pipes, and the weights over the bandwidth of the cache that holds a core's share
of them since the step before. Worked example, an LSTM of 256 units at batch 1 on two cores: each core reads 0.5 MiB, at
30 bytes a cycle 17,500 cycles, where its 131,072 multiply-adds take 4,100.
"""

from __future__ import annotations

from math import inf

from tvm_ext.devices.hal import DeviceSpec, MemoryLayer
from tvm_ext.devices.machine import OF_ONE_UNIT, Machine
from tvm_ext.records.cell import CellTiles, CellWork
from tvm_ext.records.rprogram import LayerCost, Prediction
from tvm_ext.support.arithmetic import ceil_div

from .perf_model import MEMORY_OVERLAP
from .register_tiles import CUT_COST, PORT_OVERLAP, overlapped

MOST_VECTORS = 4
"""Registers of units in a task: more do not help an accumulator wait, and leave fewer tasks to divide."""

MOST_ACCUMULATORS = 15
"""Accumulators of one gate in a tile: together they stay below what stock TVM keeps on the stack."""

ALIKE = 1.1
"""Times that differ by less are alike. Measured on Cascade Lake, half of an LSTM of 256 units at batch 1: 5.9, 6.0, 6.1
and 6.7 us with 1 to 4 registers of units; at batch 4 with 4, 3, 2 and 1 rows beside them 10.3, 14.3, 13.0 and 23.8 us.
"""

TASK_CYCLES = 40
"""Cycles between two tiles: addresses, accumulators at 0, the first elements of a panel."""


class CellClock:
    """What a step of ``work`` takes on ``device``, by its tiles."""

    def __init__(self, work: CellWork, device: DeviceSpec) -> None:
        self.work, self.device, self.machine = work, device, Machine(device)

    def usual_tiles(self) -> CellTiles | None:
        """The tiles that make most tasks, of those that the model expects to be about the fastest; None without SIMD
        registers for units.
        """
        lanes = self.device.register_bytes // 4
        if self.device.kind != "cpu" or lanes < 2:
            return None
        most = min(MOST_VECTORS, ceil_div(self.work.units, lanes))
        groups = [self._tiles(lanes, vectors) for vectors in range(1, most + 1)]
        times = {tiles: self.predict(tiles).busy_s for group in groups for tiles in group}
        fastest = [min(group, key=times.__getitem__) for group in groups if group]
        least = min(times.values(), default=0.0)
        return next((tiles for tiles in fastest if times[tiles] <= ALIKE * least), None)

    def _tiles(self, lanes: int, vectors: int) -> list[CellTiles]:
        """Tiles of ``vectors`` registers of units by as many rows as registers hold, in few tiles of rows or more.

        Worked example, 16 rows of an LSTM with 32 registers: 4 sums of 6 rows, 4 weights and one element to multiply
        them with are 29; 16 rows are 6 + 6 + 4, or 4 times 4, 8 times 2, 16 times 1.
        """
        work, most = self.work, 0
        gates = max(gates for gates, _, _ in work.products)
        for rows in range(1, min(work.rows, MOST_ACCUMULATORS // vectors) + 1):
            if gates * vectors * rows + min(gates * vectors, rows) + 1 <= self.device.register_limit:
                most = rows
        sizes = {ceil_div(work.rows, ceil_div(work.rows, rows)) for rows in range(1, most + 1)}
        return [CellTiles(lanes=lanes, vectors=vectors, rows=rows) for rows in sorted(sizes, reverse=True)]

    def task_count(self, tiles: CellTiles) -> int:
        """The tasks of a step; all but the last have ``tiles.units`` units."""
        return ceil_div(self.work.units, tiles.units)

    def predict(self, tiles: CellTiles, units: int | None = None) -> Prediction:
        """The time of a step on ``units``, or on all, with a start of each, and what binds it.

        Worked example, an LSTM of 256 units at batch 1: half of its weights stay in a second cache of 1 MiB, all of
        them do not. Measured on Zen 5, two streams of weights: 7.7 us on one core, 5.1 on two.
        """
        machine, tasks, traffic = self.machine, self.task_count(tiles), self._weight_bytes(tiles)
        share = ceil_div(tasks, units or self.device.unit_count)  # tasks of the busiest unit
        source = machine.holder(traffic / tasks * share, OF_ONE_UNIT)
        compute_s = share * self._task_cycles(tiles, None) / machine.hz
        busy_s = share * self._task_cycles(tiles, source) / machine.hz
        return Prediction(
            time_s=busy_s + (machine.launch_s if units != 1 else 0.0),
            compute_s=compute_s,
            layers=(LayerCost(layer=source.name, footprint_bytes=traffic, traffic_bytes=traffic, time_s=busy_s),),
            bound=source.name if traffic / machine.rate(source) > compute_s else "compute",
        )

    def _task_cycles(self, tiles: CellTiles, source: MemoryLayer | None) -> float:
        """Cycles of one whole task, whose weights come from ``source``; None: from nowhere, for its arithmetic alone.

        The rows after the first tile read the same weights from the first cache that holds those of a task. Cut rows
        cost what they cost any register tiles; measured here, 16 rows of 100 units as 6 + 6 + 4 take 23.1 us, as 4
        times 4 16.9.
        """
        own = self._weight_bytes(tiles) / self.task_count(tiles)
        again = None if source is None else self.machine.holder(own, OF_ONE_UNIT)
        full, rest = divmod(self.work.rows, tiles.rows)
        sizes = [tiles.rows] * full + ([rest] if rest else [])
        cycles = sum(self._tile_cycles(tiles, rows, again if i else source) for i, rows in enumerate(sizes))
        return cycles * (1 + CUT_COST * bool(full and rest))

    def _tile_cycles(self, tiles: CellTiles, rows: int, source: MemoryLayer | None) -> float:
        """Cycles of ``rows`` of the batch with one task's units: each step of every sum, then the element-wise part."""
        pipes, machine = self.device.fma_rate, self.machine
        loaded = inf if source is None else machine.bytes_per_cycle(machine.rate(source))
        cycles = TASK_CYCLES + rows * tiles.vectors * self.work.operations / pipes
        for gates, depth, itemsize in self.work.products:
            vectors = gates * tiles.vectors
            streamed = vectors * tiles.lanes * itemsize / loaded
            issue = (vectors + rows) / self.device.load_rate
            latency = float(self.device.fma_latency_cycles or 0)
            ports = overlapped((vectors * rows / pipes, issue, latency), PORT_OVERLAP)
            cycles += depth * overlapped((ports, streamed), MEMORY_OVERLAP)
        return cycles

    def _weight_bytes(self, tiles: CellTiles) -> float:
        """Of all weights as they are packed: units rounded up to whole tasks."""
        units = self.task_count(tiles) * tiles.units
        return units * sum(gates * depth * itemsize for gates, depth, itemsize in self.work.products)
