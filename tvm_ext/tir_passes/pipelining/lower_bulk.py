"""Pipelines by Hopper's bulk copies: rows by the TMA engine, tiles announced and waited for at mbarriers (sm_90).

====================  ===============================================================================================
primitive             becomes
====================  ===============================================================================================
producer_acquire      before the loop: mbarriers initialised, fenced and met over; in the loop nothing: the barrier of
                      the wait says that all threads have done with the version that is loaded next
producer_commit       nothing: with the copies of a tile, thread 0 announces their bytes
consumer_wait         a wait for the phase of the tile's version; in the loop a barrier behind it
consumer_release      nothing
====================  ===============================================================================================

Each version has an mbarrier. Tile t goes to version t % n, as its use number t // n: the wait is for parity
(t // n) % 2. The phase ends when thread 0 has announced the bytes of each buffer and all of them have come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext._tvm import AllocBuffer, Buffer, Expr, For, ForKind, Stmt, Var, nodes_in, structural_map, tirx
from tvm_ext.devices.capabilities import BULK_COPIES_SINCE, has
from tvm_ext.devices.gpu import ALL_BANKS_BYTES
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import shared_limit_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import as_index, cast_to
from tvm_ext.ir.bulk_ir import (
    MBARRIER_BYTES,
    announce_bytes,
    copy_in_bulk,
    fence_generic_stores,
    fence_initialised_mbarriers,
    initialise_mbarrier,
    invalidate_mbarrier,
    mbarrier_buffer,
    shared_pointer,
    wait_for_phase,
)
from tvm_ext.support.arithmetic import ceil_div

from .analyse import LoadUse
from .bulk_rows import BulkRows, bulk_rows
from .function import Function
from .loops import buffer_bytes, bytes_per_element, constant, enclosing_loops, integer, is_shared, zero
from .part_copies import NOTHING, Loader
from .plan import shared_bytes_around
from .primitives import read_primitive
from .transform import Pipeline


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Threads:
    """The threads of a block: their indices with extents, x first."""

    extents: Mapping[Var, int]

    @property
    def count(self) -> int:
        return prod(self.extents.values())

    def number(self, dtype: str) -> Expr:
        """x + extent of x * (y + extent of y * z)."""
        result: Expr = tirx.IntImm(dtype, 0)
        for position, (variable, extent) in enumerate(reversed(list(self.extents.items()))):
            same = cast_to(variable, dtype)
            result = result * tirx.IntImm(dtype, extent) + same if position else same
        return result


def threads_around(function: Function, loop: Stmt) -> Threads:
    """The threads of the kernel that ``loop`` is in; raises IllegalRewrite where they are virtual or not constant."""
    found: dict[str, tuple[Var, int]] = {}

    for node in nodes_in(function.launch_of(loop), tirx.AttrStmt, "pre"):
        if node.attr_key == "virtual_thread" and integer(node.value) != 1:
            raise IllegalRewrite("virtual threads would announce each tile several times")
        if node.attr_key == "thread_extent" and str(node.node.thread_tag).startswith("threadIdx"):
            extent = integer(node.value)
            if extent is None:
                raise IllegalRewrite("the number of threads is not constant")
            found[str(node.node.thread_tag)] = node.node.var, extent
    return Threads(extents=dict(found[tag] for tag in sorted(found)))


@dataclass(kw_only=True, eq=False)
class BulkLoader(Loader):
    """Rows of one buffer's tile by bulk copies, divided among the threads. ``barriers`` has one mbarrier a version."""

    load_use: LoadUse
    rows: Sequence[BulkRows]
    barriers: Buffer
    versions: int
    threads: Threads

    @property
    def tile_bytes(self) -> int:
        each = bytes_per_element(str(self.load_use.buffer.ty.dtype))
        return sum(rows.count * rows.row_elements for rows in self.rows) * each

    def whole(self, part: Stmt) -> Stmt:
        variable = self.load_use.loop.loop_var
        version = tirx.floormod(variable, constant(self.versions, variable))
        number = self.threads.number(str(variable.ty.dtype))
        announced = announce_bytes(self.barriers, version, self.tile_bytes)
        copies = [
            self._copies(rows, copy.source, version, number)
            for rows, copy in zip(self.rows, self.load_use.copies, strict=True)
        ]
        return tirx.stmt_seq(tirx.IfThenElse(tirx.EQ(number, zero(number)), announced, None), *copies)

    issue = whole

    def deposit(self, part: Stmt) -> Stmt:
        return NOTHING

    def _copies(self, rows: BulkRows, source: Buffer, version: Expr, number: Expr) -> Stmt:
        """Thread t copies rows t, t + threads, ..."""
        threads, size = self.threads.count, rows.row_elements * bytes_per_element(str(source.ty.dtype))

        def one(row: Expr) -> Stmt:
            to, frm = _starts(rows, row)
            place = rows.base + as_index(frm, rows.base)
            return copy_in_bulk(self.load_use.buffer, to, source, [place], size, shared_pointer(self.barriers, version))

        if rows.count <= threads:
            copied = one(number)
            return (
                copied
                if rows.count == threads
                else tirx.IfThenElse(number < constant(rows.count, number), copied, None)
            )
        turn = Var("turn", str(number.ty.dtype))
        row = turn * constant(threads, turn) + number
        copied = (
            one(row) if rows.count % threads == 0 else tirx.IfThenElse(row < constant(rows.count, row), one(row), None)
        )
        return For(turn, zero(turn), constant(ceil_div(rows.count, threads), turn), ForKind.SERIAL, copied)


def _starts(rows: BulkRows, row: Expr) -> tuple[Expr, Expr]:
    """Where row number ``row`` begins, in elements: in the tile, and beyond ``rows.base``."""
    to, frm, rest = constant(rows.to_first, row), constant(rows.from_first, row), row
    for position, level in reversed(list(enumerate(rows.levels))):
        count = constant(level.count, row)
        digit, rest = (tirx.floormod(rest, count), tirx.floordiv(rest, count)) if position else (rest, rest)
        to, frm = to + digit * constant(level.to_step, row), frm + digit * constant(level.from_step, row)
    return to, frm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BulkPipeline:
    """A pipeline whose tiles come by bulk copies.

    ``barriers`` are the mbarriers, by number of versions, and how many announcements end a phase of each. ``runs_on``:
    waits in the loop are for the next iteration's tile, because the register pipeline inside is ahead. ``has_others``:
    the kernel has other shared memory, which may lie where this one's is. ``begun_anew``: the loop is in another one.
    """

    number: int
    loop: Stmt
    scope: str
    barriers: Mapping[int, tuple[Buffer, int]]
    threads: Threads
    runs_on: bool
    has_others: bool
    begun_anew: bool


def with_bulk_copies(
    pipelines: Sequence[Pipeline], function: Function, device: DeviceSpec
) -> tuple[list[Pipeline], dict[int, BulkPipeline], list[str]]:
    """``pipelines`` with bulk loaders where that is legal; those by number; and why not, of the others.

    ``function`` is what the pipelines were found in. A pipeline is lowered by bulk copies as a whole or not at all.
    """
    result, bulk, reasons = [], {}, []
    for pipeline in pipelines:
        if all(is_shared(loaded.load_use.buffer) for loaded in pipeline.buffers):
            try:
                pipeline, bulk[pipeline.number] = _as_bulk(pipeline, function, device)
            except IllegalRewrite as refusal:
                reasons.append(f"no bulk copies in loop {pipeline.loop.loop_var.name}: {refusal.problem}")
        result.append(pipeline)
    return result, bulk, reasons


def _as_bulk(pipeline: Pipeline, function: Function, device: DeviceSpec) -> tuple[Pipeline, BulkPipeline]:
    if not has(device, BULK_COPIES_SINCE):
        raise IllegalRewrite(f"{device.name} has none (they came with sm_90)")
    begun_anew = _is_begun_anew(pipeline.loop, function)
    threads = threads_around(function, pipeline.loop)
    scope = str(pipeline.buffers[0].versions.new.ty.storage_scope)
    counts = [loaded.versions.count for loaded in pipeline.buffers]
    barriers = {
        count: (mbarrier_buffer(count, f"landed_{pipeline.number}_{count}", scope), counts.count(count))
        for count in sorted(set(counts))
    }
    buffers = []
    for loaded in pipeline.buffers:
        use = loaded.load_use
        if len(use.parts) != 1:
            raise IllegalRewrite(f"{use.name} is loaded by several statements")
        rows = [bulk_rows(copy, threads.extents, function.ranges) for copy in use.copies]
        count = loaded.versions.count
        loader = BulkLoader(load_use=use, rows=rows, barriers=barriers[count][0], versions=count, threads=threads)
        buffers.append(replace(loaded, loader=loader))
    _check_room(pipeline, function, device, sum(barriers))
    own = [loaded.load_use.buffer for loaded in pipeline.buffers]
    beside = [s.buffer for s in function.allocations_beside(pipeline.loop) if is_shared(s.buffer)]
    return replace(pipeline, buffers=tuple(buffers)), BulkPipeline(
        number=pipeline.number, loop=pipeline.loop, scope=scope, barriers=barriers, threads=threads,
        runs_on=pipeline.inner is not None,
        has_others=any(not any(buffer.same_as(mine) for mine in own) for buffer in beside), begun_anew=begun_anew,
    )  # fmt: skip


def _check_room(pipeline: Pipeline, function: Function, device: DeviceSpec, mbarriers: int) -> None:
    """The versions were chosen to fit; the mbarriers, and the gap before what is aligned behind them, must as well."""
    more = sum(buffer_bytes(loaded.versions.new) - buffer_bytes(loaded.load_use.buffer) for loaded in pipeline.buffers)
    taken = shared_bytes_around(function, pipeline.loop) + more + mbarriers * MBARRIER_BYTES + ALL_BANKS_BYTES
    if taken > shared_limit_bytes(device):
        raise IllegalRewrite(f"{mbarriers} mbarriers do not fit beside the tiles into shared memory")


def _is_begun_anew(loop: Stmt, function: Function) -> bool:
    """Whether ``loop`` is in another loop; raises IllegalRewrite where it is under a condition."""
    for around, _ in enclosing_loops(function.launch_of(loop)):
        if any(outer.same_as(loop) for outer in around):
            outside = around[: next(position for position, outer in enumerate(around) if outer.same_as(loop))]
            if not all(isinstance(outer, For) for outer in outside):
                raise IllegalRewrite(f"loop {loop.loop_var.name} is under a condition, which barriers may not be")
            return any(integer(outer.extent) != 1 for outer in outside)
    return False


# --- the primitives -----------------------------------------------------------------------------------------------
def lower_bulk_primitives(body: Stmt, pipelines: Mapping[int, BulkPipeline]) -> Stmt:
    """``body`` with the primitives of these pipelines as mbarrier instructions; others stay."""
    for pipeline in pipelines.values():
        body = structural_map(body, (For, lambda loop, p=pipeline: _in_loop(loop, p)))
        body = structural_map(body, (tirx.Evaluate, lambda statement, p=pipeline: _before_loop(statement, p)))
    return body


def _in_loop(loop: For, pipeline: BulkPipeline) -> Stmt:
    variable = pipeline.loop.loop_var
    if not loop.loop_var.same_as(variable):
        return loop
    ahead = variable + constant(1, variable) if pipeline.runs_on else variable
    guard = ahead < loop.extent if pipeline.runs_on else None

    def visit(statement: Stmt) -> Stmt:
        found = read_primitive(statement)
        if found is None or found[1] != pipeline.number:
            return statement
        if found[0] != "consumer_wait":
            return NOTHING
        return tirx.stmt_seq(_wait(pipeline, ahead, guard), _meet(pipeline.scope))

    body = structural_map(loop.body, (tirx.Evaluate, visit))
    new = For(variable, loop.min, loop.extent, loop.kind, body, None, dict(loop.annotations))
    return tirx.stmt_seq(new, *_end(pipeline)) if pipeline.has_others or pipeline.begun_anew else new


def _before_loop(statement: Stmt, pipeline: BulkPipeline) -> Stmt:
    found = read_primitive(statement)
    if found is None or found[1] != pipeline.number:
        return statement
    if found[0] == "producer_acquire":
        return tirx.stmt_seq(*_begin(pipeline, may_follow=bool(found[2])))
    if found[0] != "consumer_wait":
        return NOTHING
    first = zero(pipeline.loop.loop_var)
    return _wait(pipeline, first, None if integer(pipeline.loop.extent) else first < pipeline.loop.extent)


def _wait(pipeline: BulkPipeline, tile: Expr, guard: Expr | None) -> Stmt:
    """Every thread waits until the tile is there."""
    waits = []
    for count, (barriers, _) in pipeline.barriers.items():
        versions = constant(count, tile)
        parity = tirx.floormod(tirx.floordiv(tile, versions), constant(2, tile))
        waits.append(wait_for_phase(barriers, tirx.floormod(tile, versions), parity))
    together = waits[0] if len(waits) == 1 else tirx.stmt_seq(*waits)
    return together if guard is None else tirx.IfThenElse(guard, together, None)


def _begin(pipeline: BulkPipeline, *, may_follow: bool) -> list[Stmt]:
    """Allocates and initialises mbarriers. Where other code used the memory before, its stores are fenced and over.

    Of this pipeline itself, when it is begun anew, nothing is left but reads of tiles, which the barrier orders.
    """
    allocations = [AllocBuffer(barriers, {}) for barriers, _ in pipeline.barriers.values()]
    before = [fence_generic_stores(), _meet(pipeline.scope)] if may_follow and pipeline.has_others else []
    made = [
        initialise_mbarrier(barriers, tirx.IntImm("int32", version), arrivals)
        for count, (barriers, arrivals) in pipeline.barriers.items()
        for version in range(count)
    ]
    by_one = _by_first_thread(pipeline, [*made, fence_initialised_mbarriers()])
    return [*allocations, *before, by_one, _meet(pipeline.scope)]


def _end(pipeline: BulkPipeline) -> list[Stmt]:
    """The barrier of the last wait has been passed: nobody asks the mbarriers any more."""
    gone = [
        invalidate_mbarrier(barriers, tirx.IntImm("int32", version))
        for count, (barriers, _) in pipeline.barriers.items()
        for version in range(count)
    ]
    return [_by_first_thread(pipeline, gone), *([_meet(pipeline.scope)] if pipeline.has_others else [])]


def _by_first_thread(pipeline: BulkPipeline, statements: Sequence[Stmt]) -> Stmt:
    number = pipeline.threads.number("int32")
    return tirx.IfThenElse(tirx.EQ(number, zero(number)), tirx.stmt_seq(*statements), None)


def _meet(scope: str) -> Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", scope))


__all__ = ["BulkLoader", "BulkPipeline", "lower_bulk_primitives", "with_bulk_copies"]
