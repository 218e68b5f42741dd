"""How the planes of a window operator lie in a task's scratch memory, and the register tile (paper §3.1).

The source is copied once per band of output rows into scratch memory that L1 holds, padding included. With a stride s,
position ``s * q + p`` of a row goes to place q of *phase* p, and likewise for rows, so that neighbouring outputs read
neighbouring elements whatever the stride. Rows lie ``pitch`` apart and share their padding: the right padding of a row
is the left padding of the next one.

Worked example, 3x3 with stride 1 over rows of 11 padded by 1: pitch 12, row 0 at places 1 ... 11, zeros at 0, 12, ...
As the window of output place q = 12 * y + x reads places q + 12 * ry + rx, a vector may run over the end of a row: its
lanes for x = 11 are thrown away, and 11 of 12 lanes are used, where vectors that stop at the row's end use 11 of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from tvm_ext.analysis.window import Window, WindowAxis
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import lanes_of
from tvm_ext.support.arithmetic import ceil_div

ACCUMULATOR_SHARE = 5 / 8
"""Of the vector registers; the others hold a column of taps and the vectors being loaded."""

MAX_ROWS = 12
"""Output rows of a register tile: beyond, code grows and little more is shared."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowLayout:
    """Scratch geometry in elements, and the register tile ``rows`` x ``vectors`` of ``width`` lanes.

    Rows are stored in vectors of ``stored`` lanes that end with the row. A tile covers ``rows`` neighbouring output
    rows by vectors as wide, or where the rows are narrow by one wider vector each; if it ``overruns``, each of its rows
    but the last is stored as that one vector, whose end the next row overwrites. ``is_flat``: vectors run along all
    places of the band (``rows`` is 1) into a second scratch memory, from which the rows are copied.
    """

    window: Window
    band: int  # output rows per task; the last band of a plane may have fewer
    pitch: int
    phase_rows: int  # rows of one phase for a whole band
    phase_size: int  # elements of one phase, with what vectors may run over
    result_size: int  # elements of the second scratch memory; 0 without one
    width: int
    stored: int
    rows: int
    vectors: int
    is_flat: bool
    overruns: bool
    lanes: int
    cycles: float  # expected for all planes on one core

    @property
    def bands(self) -> int:
        return ceil_div(self.window.y.extent, self.band)

    @property
    def last_band(self) -> int:
        return self.window.y.extent - (self.bands - 1) * self.band

    @property
    def task_count(self) -> int:
        return self.bands * _planes(self.window)

    def describe(self) -> str:
        """Worked example: "conv over pad in register tiles of 4 rows x 2 vectors of 16, bands of 42 rows"."""
        name = self.window.anchor.name + (f" over {self.window.pad.name}" if self.window.pad is not None else "")
        tile = f"{self.vectors} vectors of {self.width}"
        tile = f"{tile} along rows without gaps" if self.is_flat else f"{self.rows} rows x {tile}"
        return f"{name} in register tiles of {tile}, bands of {self.band} rows"

    def used_columns(self) -> int:
        """Source elements of a row that any window reads."""
        return min(self.window.x.size, self.window.x.span - self.window.x.before)

    def column(self, phase: int, first: int) -> tuple[int, int]:
        """(offset k, place): element ``first + k`` of a source row is the first of ``phase`` from ``first`` on.

        Worked example: stride 2, one column of padding: element 0 is position 1, so phase 0 starts at element 1, which
        is position 2, place 1.
        """
        x = self.window.x
        k = (phase - x.before - first) % x.stride
        return k, (x.before + first + k) // x.stride

    def tap(self, axis: WindowAxis, number: int) -> tuple[int, int]:
        """(slot of the phase, place) of a tap relative to the first place of the window."""
        position = axis.dilation * number
        return axis.phases.index(position % axis.stride), position // axis.stride


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    cycles: float  # for a whole band
    rows: int
    vectors: int
    width: int
    is_flat: bool


def lay_out_window(window: Window, device: DeviceSpec, *, may_overrun: bool = True) -> WindowLayout:
    """The layout with the least expected time; its scratch memory takes at most three quarters of L1.

    ``may_overrun``: whether the epilogue may be computed for the elements behind the end of a row.
    """
    bands = usual_bands(window, device)
    found = (layouts_of_band(window, band, device, may_overrun=may_overrun) for band in bands)
    return min((layout for layouts in found for layout in layouts), key=lambda layout: layout.cycles)


def layouts_of_band(
    window: Window, band: int, device: DeviceSpec, *, may_overrun: bool = True
) -> Iterator[WindowLayout]:
    """All layouts of tasks of ``band`` output rows, one for each legal register tile."""
    lanes = lanes_of(window.dtype, device.register_bytes)
    y, x = window.y, window.x
    pitch, phase_rows, planes = _pitch(x), _phase_rows(y, band), _planes(window)
    reach = _last_place(y) * pitch + _last_place(x)
    needed = (phase_rows + 1) * pitch + x.before + 2 * lanes
    staging = _staging_cycles(window, pitch, phase_rows, device, lanes)
    for tile in _tiles(window, pitch, band, device, may_overrun=may_overrun):
        run = ceil_div((band - 1) * pitch + x.extent, tile.vectors * lanes) * tile.vectors * lanes
        yield WindowLayout(
            window=window,
            band=band,
            pitch=pitch,
            phase_rows=phase_rows,
            phase_size=ceil_div(max(needed, run + reach + 1) if tile.is_flat else needed, lanes) * lanes,
            result_size=run if tile.is_flat else 0,
            width=tile.width,
            stored=_stored_lanes(x, lanes),
            rows=tile.rows,
            vectors=tile.vectors,
            is_flat=tile.is_flat,
            overruns=may_overrun,
            lanes=lanes,
            cycles=planes * (tile.cycles + staging) * y.extent / band,
        )


def _planes(window: Window) -> int:
    return prod(window.anchor.extent(variable) for variable in window.outer)


def _pitch(x: WindowAxis) -> int:
    """Places per row and phase: each row's own elements, and padding on one side only (see the module's example)."""
    used = min(x.size, x.span - x.before)
    return ceil_div(max(x.before + used, x.span - x.before), x.stride)


def _last_place(axis: WindowAxis) -> int:
    return max(axis.dilation * tap // axis.stride for tap in range(axis.taps))


def _stored_lanes(x: WindowAxis, lanes: int) -> int:
    return min(lanes, 1 << (x.extent.bit_length() - 1))


def _phase_rows(y: WindowAxis, band: int) -> int:
    return band + _last_place(y)


def usual_bands(window: Window, device: DeviceSpec) -> list[int]:
    """Output rows of a task that `lay_out_window` considers."""
    return [ceil_div(window.y.extent, count) for count in _band_counts(window, device)]


def _band_counts(window: Window, device: DeviceSpec) -> list[int]:
    """Numbers of bands per plane to consider: as many as units and L1 ask for, and a few more or fewer."""
    extent, planes = window.y.extent, _planes(window)
    room = (device.layer("L1").capacity_bytes or 32768) * 3 // 4
    fitting = next(
        (n for n in range(1, extent + 1) if scratch_bytes(window, ceil_div(extent, n), device) <= room), extent
    )
    least = min(extent, max(1, -(-2 * device.unit_count // planes))) if planes < device.unit_count else 1
    counts = {max(fitting, least), max(least, fitting - 1)}
    return sorted(counts)


def scratch_bytes(window: Window, band: int, device: DeviceSpec) -> int:
    """What a task of ``band`` output rows keeps of its plane, about."""
    y, x = window.y, window.x
    pitch, item = _pitch(x), device.register_bytes // lanes_of(window.dtype, device.register_bytes)
    return item * ((_phase_rows(y, band) + 1) * pitch * len(y.phases) * len(x.phases) + band * pitch)


def _tiles(window: Window, pitch: int, band: int, device: DeviceSpec, *, may_overrun: bool) -> list[_Tile]:
    """Every register tile that fits, with its expected time for one band."""
    y, x = window.y, window.x
    lanes = lanes_of(window.dtype, device.register_bytes)
    budget = max(1, int(device.register_limit * ACCUMULATOR_SHARE))
    stored = _stored_lanes(x, lanes)
    across = ceil_div(x.extent, stored)
    # A store and a load of each row's vectors, which mostly straddle cache lines.
    copying = across * (2 + _loads_per_vector(device))
    tiles = []
    last = y.extent - (ceil_div(y.extent, band) - 1) * band
    for rows, vectors in product(range(1, min(MAX_ROWS, last, budget) + 1), range(1, across + 1)):
        if rows * vectors <= budget:
            count = ceil_div(band, rows) * ceil_div(across, vectors)
            cycles = count * _tile_cycles(window, rows, vectors, device)
            tiles.append(_Tile(cycles=cycles, rows=rows, vectors=vectors, width=stored, is_flat=False))
    wider = min(lanes, 1 << (x.extent - 1).bit_length())
    for rows in range(1, min(MAX_ROWS, last, budget) + 1) if stored < wider else ():
        copied = 1 if may_overrun else rows
        cycles = ceil_div(band, rows) * (_tile_cycles(window, rows, 1, device) + copied * copying)
        tiles.append(_Tile(cycles=cycles, rows=rows, vectors=1, width=wider, is_flat=False))
    places = (band - 1) * pitch + x.extent
    for vectors in range(1, min(8, budget, ceil_div(places, lanes)) + 1):
        count = ceil_div(places, vectors * lanes)
        cycles = count * _tile_cycles(window, 1, vectors, device) + band * copying
        tiles.append(_Tile(cycles=cycles, rows=1, vectors=vectors, width=lanes, is_flat=True))
    return tiles


def _tile_cycles(window: Window, rows: int, vectors: int, device: DeviceSpec) -> float:
    """Cycles of one register tile: multiply-adds, loads, and the latency of one accumulator's chain.

    Worked example, 5x5 with 4 rows and 2 vectors of 64 bytes: 200 multiply-adds on 2 pipes are 100 cycles; 8 source
    rows of 5 * 2 vectors, 1.94 cache lines each, and 25 taps on 2 ports are 90; 25 updates of 4 cycles are 100 of
    latency, about half of it hidden behind the neighbouring tiles.
    """
    y, x = window.y, window.x
    taps = y.taps * x.taps
    source_rows = len({y.stride * r + y.dilation * t for r in range(rows) for t in range(y.taps)})
    loads = source_rows * x.taps * vectors * _loads_per_vector(device)
    broadcasts = taps if len(window.anchor.loads()) > 1 else 0
    arithmetic = rows * vectors * taps / device.fma_rate
    issue = (loads + broadcasts) / device.load_rate
    latency = taps * (device.fma_latency_cycles or 0) / 2
    stores = rows * vectors / device.store_rate
    return max(arithmetic, issue, latency) + stores + 2


def _loads_per_vector(device: DeviceSpec) -> float:
    """Cache lines that a vector at any element touches on average: 60 of 64 places of a 64-byte vector straddle two."""
    line = device.layer("L1").transaction_bytes
    return 1 + (device.register_bytes - 4) / line


def _staging_cycles(window: Window, pitch: int, phase_rows: int, device: DeviceSpec, lanes: int) -> float:
    """Cycles of filling the scratch memory for one band: a load, a shuffle where there are phases, and a store."""
    y, x = window.y, window.x
    vectors = ceil_div(pitch, lanes) * len(x.phases)
    shuffled = 1 if x.stride > 1 else 0
    each = _loads_per_vector(device) * (x.stride / len(x.phases)) / device.load_rate + shuffled + 2
    return phase_rows * len(y.phases) * (vectors * each + 2)
