"""Decides how threads share a row kernel: which axis the lanes run along, how many threads a row, what stays in
registers.

A warp's neighbouring lanes must be neighbours in memory. Where a row is a run of memory (softmax over the last axis)
they share rows and exchange results by shuffles; where neighbouring rows are (a mean over the batch, pooling in NHWC)
each lane has rows of its own and nothing to exchange, unless rows are divided among several warps, which then meet in
shared memory.

Worked example, 28 rows of 64 floats: 16 lanes of 4 floats are a row, 16 rows a block of 256 threads. On 108 units
that would be 2 blocks: rows that are so few get as many threads as they can use.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from tvm_ext.analysis.computation_exprs import itemsize_bytes, tensor_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, reads
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import max_block_threads, registers_left
from tvm_ext.support.arithmetic import ceil_div

from .form import RowForm, accesses, address_of
from .lanes import VectorLanes, find_lanes

BLOCK_THREADS = 256
"""Enough warps of a block to hide each other's latency, few enough that several blocks fit a unit."""

BLOCKS_PER_UNIT = 2
"""One computes or waits at a barrier while the other loads."""

ROW_ITEMS = 8
"""Vectors of a row that a thread takes before the row gets more threads: as many loads in flight at once."""

ROW_ELEMENTS = 32
"""Elements of a row that a thread takes at most so, and holds in as many registers: 4 vectors of 8 halves."""

HELD_REGISTERS = 64
"""32-bit registers of a thread for rows that are kept between passes; 64 threads of a row of 4096 floats hold 64."""

WINDOW_ITEMS = 32
"""The longest window whose taps are written out."""

SHORT_RUN_BYTES = 32
"""A run of memory shorter than one transaction is not worth lanes of its own."""

ASSUMED_LAUNCH_US = 5.0  # where the device table has none
OTHER_REGISTERS = 24  # addresses, loop counters, predicates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowPlan:
    """How one launch is divided.

    ``row_threads`` threads share a row and take ``items`` chunks of it each (``lanes.width`` elements where the lanes
    run ``along_row``, else 1), ``splits`` blocks each a part of it. ``grid_threads`` is the rows (or chunks of
    neighbouring rows) of a block. ``held``: what several passes read stays in registers.
    """

    lanes: VectorLanes
    along_row: bool
    row_threads: int
    grid_threads: int
    items: int
    splits: int
    held: bool
    grid_chunks: int
    row_chunks: int

    @property
    def grid_blocks(self) -> int:
        return ceil_div(self.grid_chunks, self.grid_threads)

    @property
    def blocks(self) -> int:
        return self.grid_blocks * self.splits

    @property
    def threads(self) -> int:
        return self.row_threads * self.grid_threads

    @property
    def row_lanes(self) -> int:
        """Elements of one row in a chunk."""
        return self.lanes.width if self.along_row else 1

    @property
    def grid_lanes(self) -> int:
        """Rows of a thread."""
        return 1 if self.along_row else self.lanes.width

    @property
    def covers_rows(self) -> bool:
        return self.items * self.row_threads * self.splits == self.row_chunks

    @property
    def covers_grid(self) -> bool:
        return self.grid_blocks * self.grid_threads == self.grid_chunks

    def describe(self) -> str:
        along = "along rows" if self.along_row else "across rows"
        kept = ", held in registers" if self.held else ""
        parts = f", each row in {self.splits} parts" if self.splits > 1 else ""
        return (
            f"{self.blocks} blocks of {self.grid_threads} x {self.row_threads} threads {along}, "
            f"{self.items} x {self.lanes.width} elements a thread{kept}{parts}"
        )


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


def plan_rows(form: RowForm, device: DeviceSpec, *, may_split: bool) -> RowPlan:
    """The plan of one launch; with ``may_split`` a row may be divided among blocks, which leave partial results."""
    if runs_along_row(form):
        return _plan_along(form, device, may_split=may_split)
    return _plan_across(form, device, may_split=may_split)


def runs_along_row(form: RowForm) -> bool:
    """Whether most of what is accessed lies in runs along the row rather than across rows."""
    if not form.row:
        return False
    along = across = 0.0
    for computation, buffer, indices in accesses(form):
        address = address_of(buffer, indices, computation, uniform_in=form.row[-1].variable)
        if address is None or len(computation.variables) != len(form.grid) + len(form.row):
            continue
        steps = address.coefficients
        if steps[-1] == 1 and not _overlaps(form, steps, itemsize_bytes(dtype_of(buffer))):
            along += tensor_bytes(buffer)
        elif form.grid and steps[len(form.grid) - 1] in (1, 2):  # a window of stride 2 steps by 2
            across += tensor_bytes(buffer)
    return along > across or not form.grid


def _overlaps(form: RowForm, steps: tuple[int, ...], itemsize: float) -> bool:
    """Whether the rows' runs are the short, possibly overlapping ones of windows: ``x[2*w + r]``."""
    run = form.row[-1].extent
    nearest = min((abs(step) for step in steps[: len(form.grid)] if step), default=run)
    return nearest < run or (len(form.row) > 1 and run * itemsize < SHORT_RUN_BYTES)


def _plan_along(form: RowForm, device: DeviceSpec, *, may_split: bool) -> RowPlan:
    lanes = find_lanes(form, form.row[-1].variable, form.row[-1].extent)
    chunks, warp = form.row_length // lanes.width, device.teu_lanes
    # such that `BLOCKS_PER_UNIT` blocks fit a unit
    limit = max_block_threads(device, blocks=BLOCKS_PER_UNIT) or BLOCK_THREADS
    most = min(ROW_ITEMS, ROW_ELEMENTS // lanes.width)
    threads = min(warp, power_of_two(chunks))
    if chunks > warp * most:
        threads = min(limit, power_of_two(ceil_div(chunks, most)))
    wanted = BLOCKS_PER_UNIT * device.unit_count
    while threads < min(limit, power_of_two(chunks)) and form.row_count * threads < wanted * BLOCK_THREADS:
        threads *= 2  # few rows: more threads for each
    rows = 1 if threads > warp else min(max(1, BLOCK_THREADS // threads), power_of_two(form.row_count))
    while rows > 1 and ceil_div(form.row_count, rows) < wanted and rows * threads > warp:
        rows //= 2
    splits = _splits(form, device, ceil_div(form.row_count, rows), chunks // (4 * threads)) if may_split else 1
    items = ceil_div(chunks, threads * splits)
    return RowPlan(
        lanes=lanes,
        along_row=True,
        row_threads=threads,
        grid_threads=rows,
        items=items,
        splits=ceil_div(chunks, threads * items),
        held=_is_held(form, lanes, items * lanes.width, rows * threads, device),
        grid_chunks=form.row_count,
        row_chunks=chunks,
    )


def _plan_across(form: RowForm, device: DeviceSpec, *, may_split: bool) -> RowPlan:
    last = form.grid[-1]
    widest = find_lanes(form, last.variable, last.extent)
    is_window = form.row_length <= WINDOW_ITEMS
    if is_window and form.row_count < BLOCKS_PER_UNIT * device.unit_count * BLOCK_THREADS:
        widest = dataclasses.replace(widest, width=1)  # rather more threads than wider ones
    plan = _plan_with(form, device, widest, may_split=may_split)
    narrower = plan
    while _sweep_count(form) > 1 and not narrower.held and narrower.lanes.width > 1:
        lanes = dataclasses.replace(narrower.lanes, width=narrower.lanes.width // 2)
        narrower = _plan_with(form, device, lanes, may_split=may_split)
    return narrower if narrower.held else plan


def _plan_with(form: RowForm, device: DeviceSpec, lanes: VectorLanes, *, may_split: bool) -> RowPlan:
    """The plan across rows for vectors of ``lanes``; narrower ones may be what lets a row stay in registers."""
    chunks, warp = form.row_count // lanes.width, device.teu_lanes
    wanted = BLOCKS_PER_UNIT * device.unit_count
    if form.row_length <= WINDOW_ITEMS:
        columns, parts = min(BLOCK_THREADS, max(warp, power_of_two(chunks))), 1
        while columns > 2 * warp and ceil_div(chunks, columns) < wanted:
            columns //= 2
    else:
        columns = min(warp, power_of_two(chunks))
        parts = min(BLOCK_THREADS // columns, power_of_two(form.row_length // 4))
        while columns * parts > 4 * warp and ceil_div(chunks, columns) >= 4 * wanted:
            parts //= 2
    splits = _splits(form, device, ceil_div(chunks, columns), form.row_length // (8 * parts)) if may_split else 1
    items = ceil_div(form.row_length, parts * splits)
    return RowPlan(
        lanes=lanes,
        along_row=False,
        row_threads=parts,
        grid_threads=columns,
        items=items,
        splits=ceil_div(form.row_length, parts * items),
        held=_is_held(form, lanes, items * lanes.width, columns * parts, device),
        grid_chunks=chunks,
        row_chunks=form.row_length,
    )


def _splits(form: RowForm, device: DeviceSpec, blocks: int, most: int) -> int:
    """Into how many blocks each row is divided: 1, unless the grid leaves units idle for longer than a launch takes.

    Worked example, the sum of 64 Mi floats on 108 units of 1555 GB/s: one block would read at 1/108 of that for 18
    ms; 216 parts and a second launch take 0.18 ms.
    """
    bandwidth = (device.lowest_layer.bandwidth_gb_per_s or 1.0) * 1e9
    busy_s = row_bytes(form) * form.row_count / bandwidth
    idle = max(1.0, device.unit_count / blocks)
    saved_s = busy_s * (idle - 1)
    launches = 2 * sum(computation.is_reduction for computation in form.computations) - 1 + (len(form.computations) > 1)
    if blocks >= device.unit_count or saved_s < launches * (Machine(device).launch_us or ASSUMED_LAUNCH_US) * 1e-6:
        return 1
    return max(1, min(most, -(-BLOCKS_PER_UNIT * device.unit_count // blocks)))


def row_bytes(form: RowForm) -> float:
    """Bytes that a row reads and writes, each access once."""
    total = 0.0
    for _, buffer, indices in accesses(form):
        points = form.row_length if mentions(list(indices), *(axis.variable for axis in form.row)) else 1
        total += points * itemsize_bytes(dtype_of(buffer))
    return total


def passes(form: RowForm) -> list[list[Computation]]:
    """The computations in order, in passes over the row; one with one value for the row is a pass of its own."""
    found: list[list[Computation]] = []
    for computation in form.computations:
        sweeps = computation.is_reduction or form.along_row(computation)
        last = found[-1] if found else []
        sweeping = bool(last) and (last[0].is_reduction or form.along_row(last[0]))
        waits = any(reads(computation.value, earlier.target) for earlier in last if earlier.is_reduction)
        if sweeps and sweeping and not waits:
            last.append(computation)
        else:
            found.append([computation])
    return found


def _sweep_count(form: RowForm) -> int:
    return sum(part[0].is_reduction or form.along_row(part[0]) for part in passes(form))


def _is_held(form: RowForm, lanes: VectorLanes, elements: int, threads: int, device: DeviceSpec) -> bool:
    """Whether several passes read a row, and it fits the registers of its threads."""
    if _sweep_count(form) < 2:
        return False
    # of each thread, such that `BLOCKS_PER_UNIT` blocks fit a unit
    budget = min(device.register_limit, registers_left(max(threads, 1), device, blocks=BLOCKS_PER_UNIT))
    return elements * held_count(form, lanes) <= min(HELD_REGISTERS, budget // 2)


def held_count(form: RowForm, lanes: VectorLanes) -> int:
    """Rows that are kept at once between two passes: what an earlier pass has and a later one reads.

    Worked example, softmax: x between the maximum and the exponentials, the exponentials (in x's place) before the last
    pass: never more than one.
    """
    sweeps = passes(form)
    uses: dict[str, list[int]] = {}
    for number, computations in enumerate(sweeps):
        for computation in computations:
            made = [str(computation.target.name)] if form.along_row(computation) else []
            read = [str(load.source.name) for load in computation.loads() if form.is_internal(load.source)]
            fetched = [str(unit) for unit in lanes.units(computation, form)]
            rows = {str(s.target.name) for s in form.computations if form.along_row(s)}
            for name in (*made, *(name for name in read if name in rows), *fetched):
                uses.setdefault(name, []).append(number)
    between = range(len(sweeps) - 1)
    return max([1, *(sum(used[0] <= p < used[-1] for used in uses.values()) for p in between)])


def register_estimate(form: RowForm, plan: RowPlan) -> int:
    """32-bit registers of a thread: held rows, a vector of each input, partial results, addresses."""
    units = sum(len(plan.lanes.units(computation, form)) for computation in form.computations)
    held = plan.items * plan.lanes.width * held_count(form, plan.lanes) if plan.held else 0
    in_flight = min(plan.items, ROW_ITEMS) if plan.along_row else 1  # nvcc moves the loads of later items up
    reductions = sum(computation.is_reduction for computation in form.computations)
    streamed = plan.lanes.width * (units + in_flight) if not plan.held else plan.lanes.width * (units + 1)
    return OTHER_REGISTERS + held + streamed + 2 * reductions * plan.grid_lanes
