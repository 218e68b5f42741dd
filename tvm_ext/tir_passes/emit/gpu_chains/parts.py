"""What both emitters of chains need: the factors, where tiles cross the end of a tensor, copies of factors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computations import Computation, dtype_of
from tvm_ext.cost.gpu_chain import ChainTile
from tvm_ext.cost.gpu_chain_tiles import declared_shared
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import blocks_per_unit, max_thread_registers, static_shared_bytes
from tvm_ext.ir.build_ir import UNROLLED, VECTORIZED, if_all, index, loop
from tvm_ext.ir.matrix_units.operand import Factor, digits_of, read_operands, within
from tvm_ext.ir.matrix_units.shared import SharedTile, TileOrigin, copy_tile
from tvm_ext.ir.matrix_units.write import Destination, output_destination, store_vector, value_at
from tvm_ext.ir.simt_ir import with_blocks_per_unit
from tvm_ext.ir.stores import is_lane_by_lane, store_lanes

from ...plan.gpu_chain import ChainGroup, ChainLink, made_by

ROOM = 1.5
"""What ptxas is left of registers, of those planned. Told nothing, or one block, it keeps loads in flight in twice as
many; told to fit the plan's blocks, it spills a few behind wide epilogues."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChainParts:
    """A chain, its tile, and the factors of its products; of all but the first only the second factor is read."""

    group: ChainGroup
    tile: ChainTile
    device: DeviceSpec
    operands: tuple[tuple[Factor, Factor], ...]

    @property
    def row_bound(self) -> int | None:
        """The end of the rows where blocks cross it, else None."""
        rows = self.group.chain.rows
        return rows if rows % self.tile.rows else None

    def column_bound(self, position: int) -> int | None:
        columns = self.group.chain.products[position].columns
        return columns if columns != self.tile.products[position].columns else None

    def depth_bound(self, position: int) -> int | None:
        tile, depth = self.tile.products[position], self.group.chain.products[position].depth
        return depth if depth != tile.depth * tile.steps else None

    @property
    def scope(self) -> str:
        """The scope of all tiles in shared memory: what a kernel may declare, or what it asks for at its launch."""
        declared = declared_shared(self.tile, self.device)
        return "shared" if declared or self.tile.shared_bytes <= static_shared_bytes(self.device) else "shared.dyn"

    def copy_weights(self, tile: SharedTile, position: int, step: Expr, thread: Expr) -> Stmt:
        """All threads copy the second factor's part of one reduction step."""
        return self._copy(tile, position, index(0), self.column_bound(position), step, thread)

    def copy_rows(self, tile: SharedTile, first_row: Expr, step: Expr, thread: Expr) -> Stmt:
        """All threads copy the block's rows of the first factor for one reduction step."""
        return self._copy(tile, 0, first_row, self.row_bound, step, thread)

    def _copy(
        self, tile: SharedTile, position: int, line: Expr, line_bound: int | None, step: Expr, thread: Expr
    ) -> Stmt:
        origin = TileOrigin(
            batch=index(0),
            line=line,
            depth=step * index(self.tile.products[position].depth),
            line_bound=line_bound,
            depth_bound=self.depth_bound(position),
        )
        return copy_tile(tile, origin, thread, self.tile.threads)

    @property
    def last(self) -> Destination:
        """Where the chain's result goes."""
        link = self.group.links[-1]
        bounds = (self.row_bound, self.column_bound(len(self.group.links) - 1))
        return output_destination(link.computation, link.form, link.group.epilogue, bounds)


def read_chain(group: ChainGroup, tile: ChainTile, device: DeviceSpec, params: Sequence[Buffer]) -> ChainParts:
    """The parts of a chain, whose products are of two tensors each (`plan.gpu_chain` has made sure of that)."""
    operands = tuple(read_operands(link.computation, link.form, link.group.prologue, params) for link in group.links)
    return ChainParts(group=group, tile=tile, device=device, operands=operands)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptValues:
    """The values between a product and the next: ``keep(row, column, ...)`` stores some where the next one reads them.

    Rows and columns that the tensor does not have are 0: the next product adds them up with the others.
    """

    link: ChainLink
    row_bound: int | None
    column_bound: int | None

    @property
    def consumer(self) -> Computation | None:
        return made_by(self.link.group) if self.link.group.epilogue else None

    def keep(
        self, at: tuple[Expr, Expr], count: int, element: Callable[[Expr], Expr], put: Callable[[Expr, Expr], Stmt]
    ) -> Stmt:
        """``put(lane, value)`` for ``count`` columns from ``at``, (row, column), on.

        ``element(lane)`` is the product before its epilogue.
        """
        (row, column), link, consumer = at, self.link, self.consumer
        columns = digits_of(link.computation, link.form.columns)
        # as many columns are computed at a time as the epilogue's other tensors can be loaded at once
        vector = min(count, store_vector(link.computation, columns, link.group.epilogue))
        one_by_one = consumer is not None and is_lane_by_lane(consumer.value) and vector > 1
        # of rows only what an epilogue reads asks
        row_bound = self.row_bound if consumer is not None and len(consumer.sources()) > 1 else None
        made = made_by(link.group)
        assert made is not None
        zero = tirx.const(0, dtype_of(made.target))

        def piece(p: Expr) -> Stmt:
            first, place = column + p * index(vector), p * index(vector)

            def lane(v: Expr) -> Stmt:
                where = (row, first, v if vector > 1 else None)
                return put(place + v, value_at(link.computation, link.form, consumer, where, element(place + v)))

            inside = store_lanes(vector, lane) if one_by_one else loop(vector, VECTORIZED, "v", lane)
            empty = loop(vector, VECTORIZED, "v", lambda v: put(place + v, zero))
            return if_all([within(row, row_bound), within(first, self.column_bound)], inside, empty)

        return loop(count // vector, UNROLLED, "piece", piece)


def kept_values(parts: ChainParts, position: int) -> KeptValues:
    return KeptValues(
        link=parts.group.links[position], row_bound=parts.row_bound, column_bound=parts.column_bound(position)
    )


def with_planned_blocks(statement: Stmt, parts: ChainParts) -> Stmt:
    """A statement of the kernel, and with it how many blocks ptxas is to fit into a unit; see `ROOM`."""
    use = parts.tile.use
    roomy = dataclasses.replace(use, registers=min(int(use.registers * ROOM), max_thread_registers(parts.device)))
    return with_blocks_per_unit(statement, blocks_per_unit(roomy, parts.device))
