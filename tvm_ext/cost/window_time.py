"""The layouts that a window kernel may have, what each takes, and its rProgram, as reports show any other (paper §3.2).

The register tile's cycles and those of staging stand beside moving each tensor once, in the slowest layer it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from tvm_ext.analysis.computation_exprs import axis_names, tensor_expr_of
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.window import Window
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import WARM, Machine
from tvm_ext.ir.build_ir import lanes_of
from tvm_ext.records.rprogram import LayerCost, Prediction, RProgram, RTile
from tvm_ext.support.arithmetic import ceil_div

from .perf_model import MEMORY_OVERLAP
from .register_tiles import overlapped
from .window_layouts import WindowLayout, last_place, pitch_of, planes_of

ACCUMULATOR_SHARE = 5 / 8
"""Of the vector registers; the others hold a column of taps and the vectors being loaded."""

MAX_ROWS = 12
"""Output rows of a register tile: beyond, code grows and little more is shared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    cycles: float  # for a whole band
    rows: int
    vectors: int
    width: int
    is_flat: bool


class WindowClock:
    """What a window operator with its fused ``epilogue`` takes on ``device``; what pads its tensor is none of it.

    ``may_overrun``: whether the epilogue may be computed for the elements behind the end of a row.
    """

    def __init__(
        self, window: Window, epilogue: Sequence[Computation], device: DeviceSpec, *, may_overrun: bool = True
    ) -> None:
        self.window, self.device, self.machine = window, device, Machine(device)
        self.expr = tensor_expr_of(window.anchor, name=window.anchor.name, epilogue=epilogue)
        self.may_overrun = may_overrun
        self._lanes = lanes_of(window.dtype, device.register_bytes)
        self._pitch = pitch_of(window.x)
        self._stored = min(self._lanes, 1 << (window.x.extent.bit_length() - 1))
        line = device.layer("L1").transaction_bytes
        # Cache lines that a vector at any element touches on average: 60 of 64 places of a 64-byte vector straddle two.
        self._loads_per_vector = 1 + (device.register_bytes - 4) / line

    # ---- layouts -----------------------------------------------------------------------------------------------

    def usual_layout(self) -> WindowLayout:
        """The layout with the least expected time; its scratch memory takes at most three quarters of L1."""
        return min(
            (layout for band in self.usual_bands() for layout in self.layouts(band)), key=lambda layout: layout.cycles
        )

    def layouts(self, band: int) -> Iterator[WindowLayout]:
        """All layouts of tasks of ``band`` output rows, one for each legal register tile."""
        y, x, lanes = self.window.y, self.window.x, self._lanes
        pitch, phase_rows = self._pitch, band + last_place(y)
        reach = last_place(y) * pitch + last_place(x)
        needed = (phase_rows + 1) * pitch + x.before + 2 * lanes
        staging = self._staging_cycles(phase_rows)
        for tile in self._tiles(band):
            run = ceil_div((band - 1) * pitch + x.extent, tile.vectors * lanes) * tile.vectors * lanes
            yield WindowLayout(
                window=self.window,
                band=band,
                pitch=pitch,
                phase_rows=phase_rows,
                phase_size=ceil_div(max(needed, run + reach + 1) if tile.is_flat else needed, lanes) * lanes,
                result_size=run if tile.is_flat else 0,
                width=tile.width,
                stored=self._stored,
                rows=tile.rows,
                vectors=tile.vectors,
                is_flat=tile.is_flat,
                overruns=self.may_overrun,
                lanes=lanes,
                cycles=planes_of(self.window) * (tile.cycles + staging) * y.extent / band,
            )

    def usual_bands(self) -> list[int]:
        """Output rows of a task that `usual_layout` considers: as many bands as units and L1 ask for, or one fewer."""
        extent, planes = self.window.y.extent, planes_of(self.window)
        room = (self.device.layer("L1").capacity_bytes or 32768) * 3 // 4
        fitting = next((n for n in range(1, extent + 1) if self.scratch_bytes(ceil_div(extent, n)) <= room), extent)
        units = self.device.unit_count
        least = min(extent, max(1, ceil_div(2 * units, planes))) if planes < units else 1
        return [ceil_div(extent, count) for count in sorted({max(fitting, least), max(least, fitting - 1)})]

    def scratch_bytes(self, band: int) -> int:
        """What a task of ``band`` output rows keeps of its plane, about."""
        y, x = self.window.y, self.window.x
        rows = (band + last_place(y) + 1) * len(y.phases) * len(x.phases) + band
        return self.device.register_bytes // self._lanes * rows * self._pitch

    def _tiles(self, band: int) -> list[_Tile]:
        """Every register tile that fits, with its expected time for one band."""
        y, x, lanes, stored = self.window.y, self.window.x, self._lanes, self._stored
        budget = max(1, int(self.device.register_limit * ACCUMULATOR_SHARE))
        across = ceil_div(x.extent, stored)
        # A store and a load of each row's vectors, which mostly straddle cache lines.
        copying = across * (2 + self._loads_per_vector)
        tiles = []
        last = y.extent - (ceil_div(y.extent, band) - 1) * band
        for rows, vectors in product(range(1, min(MAX_ROWS, last, budget) + 1), range(1, across + 1)):
            if rows * vectors <= budget:
                count = ceil_div(band, rows) * ceil_div(across, vectors)
                cycles = count * self._tile_cycles(rows, vectors)
                tiles.append(_Tile(cycles=cycles, rows=rows, vectors=vectors, width=stored, is_flat=False))
        wider = min(lanes, 1 << (x.extent - 1).bit_length())
        for rows in range(1, min(MAX_ROWS, last, budget) + 1) if stored < wider else ():
            copied = 1 if self.may_overrun else rows
            cycles = ceil_div(band, rows) * (self._tile_cycles(rows, 1) + copied * copying)
            tiles.append(_Tile(cycles=cycles, rows=rows, vectors=1, width=wider, is_flat=False))
        places = (band - 1) * self._pitch + x.extent
        for vectors in range(1, min(8, budget, ceil_div(places, lanes)) + 1):
            count = ceil_div(places, vectors * lanes)
            cycles = count * self._tile_cycles(1, vectors) + band * copying
            tiles.append(_Tile(cycles=cycles, rows=1, vectors=vectors, width=lanes, is_flat=True))
        return tiles

    # ---- cycles ------------------------------------------------------------------------------------------------

    def _tile_cycles(self, rows: int, vectors: int) -> float:
        """Cycles of one register tile: multiply-adds, loads, and the latency of one accumulator's chain.

        Worked example, 5x5 with 4 rows and 2 vectors of 64 bytes: 200 multiply-adds on 2 pipes are 100 cycles; 8 source
        rows of 5 * 2 vectors, 1.94 cache lines each, and 25 taps on 2 ports are 90; 25 updates of 4 cycles are 100 of
        latency, about half of it hidden behind the neighbouring tiles.
        """
        y, x, device = self.window.y, self.window.x, self.device
        taps, row_taps = y.taps * x.taps, self.window.row_taps(rows)
        source_rows = len({y.stride * r + y.dilation * t for r, t in row_taps})
        loads = source_rows * x.taps * vectors * self._loads_per_vector
        broadcasts = taps if len(self.window.anchor.loads()) > 1 else 0
        arithmetic = len(row_taps) * x.taps * vectors / device.fma_rate
        issue = (loads + broadcasts) / device.load_rate
        latency = taps * (device.fma_latency_cycles or 0) / 2
        stores = rows * vectors / device.store_rate
        return max(arithmetic, issue, latency) + stores + 2

    def _staging_cycles(self, phase_rows: int) -> float:
        """Cycles of filling the scratch memory for one band: a load, a shuffle where there are phases, and a store."""
        y, x = self.window.y, self.window.x
        vectors = ceil_div(self._pitch, self._lanes) * len(x.phases)
        shuffled = 1 if x.stride > 1 else 0
        each = self._loads_per_vector * (x.stride / len(x.phases)) / self.device.load_rate + shuffled + 2
        return phase_rows * len(y.phases) * (vectors * each + 2)

    # ---- seconds -----------------------------------------------------------------------------------------------

    def predict(self, layout: WindowLayout) -> Prediction:
        """Cycles of the register tiles and of staging against moving each tensor once."""
        machine, balance = self.machine, 1 / self._waves(layout)
        compute_s = layout.cycles / machine.hz / self.device.unit_count / balance
        extra = sum(computation.extra_bytes_per_element for computation in self.expr.epilogue)
        moved = sum(access.itemsize_bytes * prod(access.shape) for access in self.expr.accesses)
        moved += extra * prod(self.expr.output.shape)
        layers = self.device.layers
        held = layers.index(machine.holder(moved, WARM))  # the operator stays here between its neighbours
        times = [(layer.name, moved / machine.rate(layer) / balance) for layer in layers[2 : held + 1]]
        costs = [LayerCost(layer=name, footprint_bytes=moved, traffic_bytes=moved, time_s=time) for name, time in times]
        return machine.bind(compute_s, costs)

    def seconds(self, layout: WindowLayout, *, forks: bool) -> float:
        """`predict`, where arithmetic and memory run nearly at once, and a band that L1 does not hold costs more."""
        said, waves = self.predict(layout), self._waves(layout)
        times = [said.compute_s, self._from_l2_s(layout) * waves, *(cost.time_s for cost in said.layers)]
        alone = 1.0 if forks else self.device.unit_count / waves
        return alone * overlapped(times, MEMORY_OVERLAP) + (self.machine.launch_s if forks else 0.0)

    def _waves(self, layout: WindowLayout) -> float:
        """How much longer the unit with most tasks takes than if all had the same."""
        units = self.device.unit_count
        return ceil_div(layout.task_count, units) * units / layout.task_count

    def _from_l2_s(self, layout: WindowLayout) -> float:
        """Seconds of all cores for writing and reading the scratch memory of bands that L1 does not hold.

        Worked example, 3 x 3 in register tiles of 4 rows: 6 rows are read for 4, so that each byte is read 1.5 times.
        """
        y, size = self.window.y, self.scratch_bytes(layout.band)
        if size <= (self.device.layer("L1").capacity_bytes or size):
            return 0.0
        step = layout.rows * y.stride
        read = (step + y.dilation * (y.taps - 1)) / step
        return layout.task_count * size * (1 + read) / self.machine.l2_rate

    # ---- the rProgram ------------------------------------------------------------------------------------------

    def program(self, layout: WindowLayout) -> RProgram:
        """The rProgram of ``layout``: its register tile in L0, one band of one plane in each cache."""
        caches = [layer.name for layer in self.device.layers[1:-1]]
        extent, partitions = self.window.x.extent, layout.task_count
        band = self._tile(rows=layout.band, columns=extent)
        columns = layout.vectors * (layout.lanes if layout.is_flat else layout.width)
        return RProgram(
            device=self.device.name,
            expr_digest=self.expr.digest,
            tiles=(
                ("L0", self._tile(rows=layout.rows, columns=min(columns, extent))),
                *((name, band) for name in caches),
            ),
            vector_axis=self._vector_axis(),
            unit_count=min(self.device.unit_count, partitions),
            partition_count=partitions,
            epsilon=0.0,
            shrunk=False,
            prediction=self.predict(layout),
        )

    def _vector_axis(self) -> str:
        """The anchor's name of the axis along x."""
        computation, along_x = self.window.anchor, self.window.x.variable
        assert along_x is not None, "a window kernel has outputs along x"
        names = dict(zip([v.name for v in computation.variables], axis_names(computation), strict=True))
        return str(names[along_x.name])

    def _tile(self, *, rows: int, columns: int) -> RTile:
        """One plane's tile: all taps, ``rows`` along y and ``columns`` along x."""
        window, computation = self.window, self.window.anchor
        shape = []
        for variable, extent, kind in zip(computation.variables, computation.extents, computation.kinds, strict=True):
            if variable.same_as(window.x.variable):
                shape.append(columns)
            elif window.y.variable is not None and variable.same_as(window.y.variable):
                shape.append(rows)
            else:
                shape.append(extent if kind == "reduce" else 1)
        return RTile(axes=axis_names(computation), shape=tuple(shape))
