"""Emits a computation that reads across what it writes: through tiles in shared memory, whose rows are padded by one
bank.

Written along one axis and read along the other, both sides of global memory are coalesced. Worked example, 32 x 32
floats in rows of 33: lane i reads element (i, c) in bank (33*i + c) % 32, all different; in rows of 32 all lanes
would read bank c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, Var
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, substitute
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads
from tvm_ext.ir.build_ir import UNROLLED, below, bind, cast_to, if_all, index, load, loop, sequence, split_index, store
from tvm_ext.ir.simt_ir import SimtKernel, allocate_shared, gpu_buffer, launch_2d
from tvm_ext.support.arithmetic import ceil_div

from .form import RowForm, address_of
from .lanes import distinct, evaluate, outer_loads
from .plan import BLOCK_THREADS, OTHER_REGISTERS

TILE_BYTES = 128
"""A row of a tile: what a warp moves at once."""

SMALLEST_SIDE, LARGEST_SIDE = 16, 64
"""A choice: half a warp of lanes; a tile of 64 x 64 floats is 16 KiB of shared memory."""

TILE_ROWS = 8
"""Rows of threads that copy a tile, where a block may have so many threads."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tiles:
    """Square tiles of ``side`` elements along the written (last) grid axis and the axis at position ``read``.

    ``units`` are the loads that run along ``read``, each with its tile. ``rows`` rows of ``side`` threads copy them.
    """

    form: RowForm
    read: int
    units: tuple[tuple[Expr, Buffer], ...]
    side: int
    rows: int

    @property
    def computation(self) -> Computation:
        return self.form.computations[0]

    @property
    def written(self) -> int:
        return len(self.form.grid) - 1

    @property
    def counts(self) -> list[int]:
        """Tiles along the two axes, points along the others."""
        turned = (self.read, self.written)
        return [ceil_div(a.extent, self.side) if p in turned else a.extent for p, a in enumerate(self.form.grid)]

    def element(
        self, at: Sequence[Expr], read: Expr, written: Expr
    ) -> tuple[list[tuple[Var, Expr]], Callable[[Stmt], Stmt]]:
        """What the variables are so far along both axes of the tile at ``at``; what guards a statement there."""
        own, grid = list(at), self.form.grid
        own[self.read] = at[self.read] * index(self.side) + read
        own[self.written] = at[self.written] * index(self.side) + written
        inside = [below(own[p], grid[p].extent, self.side) for p in (self.read, self.written)]

        def guarded(body: Stmt) -> Stmt:
            for condition in inside:
                body = if_all([condition], body)
            return body

        return bind([axis.variable for axis in grid], own), guarded


def emit_turned(form: RowForm, device: DeviceSpec) -> SimtKernel | None:
    """The launch of a form of one computation that reads across what it writes; None where it does not.

    Nor where an axis is so short that tiles would be less than half full.
    """
    tiles = _find_tiles(form, device)
    if tiles is None:
        return None
    blocks = prod(tiles.counts)
    statement = launch_2d(
        blocks, tiles.side, tiles.rows, lambda block, x, y: _turn(tiles, split_index(block, tiles.counts), x, y)
    )
    threads = tiles.side * tiles.rows
    return SimtKernel(
        statements=(statement,),
        threads=threads,
        blocks=blocks,
        shared_bytes=sum(
            int(tiles.side * (tiles.side + _padding(tile)) * itemsize_bytes(dtype_of(tile))) for _, tile in tiles.units
        ),
        register_count=OTHER_REGISTERS + tiles.side // tiles.rows * (len(tiles.units) + 1),
        notes=(
            f"{form.computations[0].name}: {blocks} tiles of {tiles.side} x {tiles.side} turned in shared memory by "
            f"{threads} threads",
        ),
    )


def _find_tiles(form: RowForm, device: DeviceSpec) -> _Tiles | None:
    computation, last = form.computations[0], len(form.grid) - 1
    if last < 1 or not _runs(computation, computation.target, computation.indices, last):
        return None
    found = [
        (axis, unit)
        for unit in distinct(outer_loads(computation.value, lambda _: True))
        if isinstance(unit, TensorLoad) and (axis := _run_across(form, computation, unit)) is not None
    ]
    if not found:
        return None
    read = found[0][0]
    units = [unit for axis, unit in found if axis == read]
    side = int(TILE_BYTES / max(itemsize_bytes(dtype_of(unit)) for unit in units))
    side = max(SMALLEST_SIDE, min(LARGEST_SIDE, side))
    if min(form.grid[read].extent, form.grid[last].extent) * 2 < side:
        return None
    return _Tiles(
        form=form,
        read=read,
        units=tuple((unit, gpu_buffer((side, side), dtype_of(unit), "tile", "shared")) for unit in units),
        side=side,
        rows=min(TILE_ROWS, (max_block_threads(device) or BLOCK_THREADS) // side),
    )


def _run_across(form: RowForm, computation: Computation, unit: Expr) -> int | None:
    """The position of the axis along which ``unit`` runs, where it moves along the written axis in steps."""
    last = len(form.grid) - 1
    if not mentions(unit, form.grid[last].variable) or _runs(computation, unit.source, unit.indices, last):
        return None
    return next((p for p in range(last) if _runs(computation, unit.source, unit.indices, p)), None)


def _runs(computation: Computation, buffer: Buffer, indices: Sequence[Expr], position: int) -> bool:
    """Whether neighbours along the axis at ``position`` are neighbours in memory."""
    address = address_of(buffer, indices, computation)
    return address is not None and address.coefficients[position] == 1


def _turn(tiles: _Tiles, at: Sequence[Expr], x: Expr, y: Expr) -> Stmt:
    """One block: along the read axis to the tile, a barrier (stock ThreadSync's), along the written axis from it."""
    steps, computation = tiles.side // tiles.rows, tiles.computation

    def copy(step: Expr) -> Stmt:
        row = step * index(tiles.rows) + y
        table, guarded = tiles.element(at, x, row)
        return guarded(sequence(*(store(tile, substitute(unit, table), [row, x]) for unit, tile in tiles.units)))

    def write(step: Expr) -> Stmt:
        row = step * index(tiles.rows) + y
        table, guarded = tiles.element(at, row, x)
        registers = [(unit, load(tile, [x, row])) for unit, tile in tiles.units]
        value = cast_to(evaluate(computation.value, registers, lambda _: None, table), dtype_of(computation.target))
        return guarded(store(computation.target, value, [substitute(item, table) for item in computation.indices]))

    return sequence(
        *(allocate_shared(tile, padding=_padding(tile)) for _, tile in tiles.units),
        loop(steps, UNROLLED, "step", copy),
        loop(steps, UNROLLED, "step", write),
    )


def _padding(tile: Buffer) -> int:
    """Elements that make neighbouring rows start one 4-byte bank apart; 1 where elements are wider."""
    return max(1, int(4 / itemsize_bytes(dtype_of(tile))))
