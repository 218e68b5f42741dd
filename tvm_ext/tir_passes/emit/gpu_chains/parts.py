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
from tvm_ext.ir.build_ir import UNROLLED, VECTORIZED, index, loop
from tvm_ext.ir.matrix_units.operand import Factor, digits_of, read_operands, within
from tvm_ext.ir.matrix_units.shared import SharedTile, TileOrigin, copy_tile
from tvm_ext.ir.matrix_units.write import Destination, output_destination, store_vector, value_at
from tvm_ext.ir.simt_ir import MIN_BLOCKS_PER_UNIT
from tvm_ext.ir.vector_stores import is_lane_by_lane, store_lanes

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
        origin = TileOrigin(
            batch=index(0),
            line=index(0),
            depth=step * index(self.tile.products[position].depth),
            line_bound=self.column_bound(position),
            depth_bound=self.depth_bound(position),
        )
        return copy_tile(tile, origin, thread, self.tile.threads)

    def copy_rows(self, tile: SharedTile, first_row: Expr, step: Expr, thread: Expr) -> Stmt:
        """All threads copy the block's rows of the first factor for one reduction step."""
        origin = TileOrigin(
            batch=index(0),
            line=first_row,
            depth=step * index(self.tile.products[0].depth),
            line_bound=self.row_bound,
            depth_bound=self.depth_bound(0),
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
        self,
        at: tuple[Expr, Expr],
        count: int,
        element: Callable[[Expr], Expr],
        put: Callable[[Expr, Expr], Stmt],
    ) -> Stmt:
        """``put(lane, value)`` for ``count`` columns from ``at``, (row, column), on.

        ``element(lane)`` is the product before its epilogue.
        """
        row, column = at
        vector = self._vector(count)

        def piece(p: Expr) -> Stmt:
            first = column + p * index(vector)

            def lane(v: Expr) -> Stmt:
                value = self._value(row, first, v if vector > 1 else None, element(p * index(vector) + v))
                return put(p * index(vector) + v, value)

            def empty(v: Expr) -> Stmt:
                return put(p * index(vector) + v, tirx.const(0, self._dtype))

            return self._bounded(row, first, self._lanes(vector, lane), loop(vector, VECTORIZED, "v", empty))

        return loop(count // vector, UNROLLED, "piece", piece)

    def _vector(self, count: int) -> int:
        """Columns that are computed at a time: as many as the epilogue's other tensors can be loaded at once."""
        columns = digits_of(self.link.computation, self.link.form.columns)
        return min(count, store_vector(self.link.computation, columns, self.link.group.epilogue))

    def _lanes(self, vector: int, lane: Callable[[Expr], Stmt]) -> Stmt:
        if self.consumer is not None and is_lane_by_lane(self.consumer.value) and vector > 1:
            return store_lanes(vector, lane)
        return loop(vector, VECTORIZED, "v", lane)

    @property
    def _dtype(self) -> str:
        made = made_by(self.link.group)
        assert made is not None
        return dtype_of(made.target)

    def _value(self, row: Expr, column: Expr, lane: Expr | None, element: Expr) -> Expr:
        return value_at(self.link.computation, self.link.form, self.consumer, (row, column, lane), element)

    def _bounded(self, row: Expr, column: Expr, inside: Stmt, outside: Stmt) -> Stmt:
        """``inside`` where the tensor has the element, else ``outside``; of rows only what an epilogue reads asks."""
        reads = self.consumer is not None and len(self.consumer.sources()) > 1
        bounds = ((row, self.row_bound if reads else None), (column, self.column_bound))
        checks = [within(position, bound) for position, bound in bounds if bound is not None]
        if not checks:
            return inside
        return tirx.IfThenElse(checks[0] if len(checks) == 1 else tirx.And(*checks), inside, outside)


def kept_values(parts: ChainParts, position: int) -> KeptValues:
    return KeptValues(
        link=parts.group.links[position], row_bound=parts.row_bound, column_bound=parts.column_bound(position)
    )


def with_planned_blocks(statement: Stmt, parts: ChainParts) -> Stmt:
    """A statement of the kernel, and with it how many blocks ptxas is to fit into a unit; see `ROOM`."""
    use = parts.tile.use
    roomy = dataclasses.replace(use, registers=min(int(use.registers * ROOM), max_thread_registers(parts.device)))
    blocks = tirx.const(max(1, blocks_per_unit(roomy, parts.device)), "int32")
    return tirx.AttrStmt(tirx.const(0, "int32"), MIN_BLOCKS_PER_UNIT, blocks, statement)


def weight_factor(parts: ChainParts, position: int) -> Factor:
    """The second factor of a product, named after its position."""
    return dataclasses.replace(parts.operands[position][1], name=f"B{position}")
