"""Memories that threads share: shared memory of each block, global memory of all.

`read` and `write` take a `Engine` (for mask, barriers and findings), an index in elements of the accessed dtype
(uniform, ``(lanes,)``, or ``(lanes or 1, n)`` for a vector) and a `View`, which says how the buffer sees the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array, DType

from .between_blocks import BlocksShadow
from .block_clocks import NOBODY
from .local_memory import View, tell_bounds
from .machine import Engine
from .shadow import Shadow, same_bits
from .values import NEVER_WRITTEN, Tainted, Value, strip

if TYPE_CHECKING:
    from tvm_ext._tvm import ForKind


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """An access of addressable memory, spread out: ``lane`` (k,), ``element`` (k, n) in the block's own memory."""

    lane: Array
    element: Array
    vector: bool  # whether the program's value has two dimensions


class Landed:
    """Per cell: the event at which a bulk copy landed (0: none since), and its mbarrier's column in `Acquired`."""

    def __init__(self, cells: int) -> None:
        self.event = np.zeros(cells, np.int64)
        self.column = np.zeros(cells, np.int32)


class AddressableMemory:
    """Memory that threads share: bytes in ``rows`` of equal size (one a block, or one in all), cells of ``granule``.

    ``watched`` is false for memory which no thread of the kernel writes: then only bounds are checked.
    """

    scope = "global"

    def __init__(
        self, rows: Array, *, granule: int, origin: Array | None, shadow: Shadow | BlocksShadow | None
    ) -> None:
        self.bytes = rows
        self.row_bytes = rows.shape[1]  # in bounds
        self.granule = granule
        self.origin = origin  # per cell; None: all sound
        self.shadow = shadow
        self.pending: Array | None = None  # per cell: the event of a copy on its way
        self.landed: Landed | None = None  # what bulk copies brought
        self._typed: dict[DType, Array] = {}

    def typed(self, dtype: DType) -> Array:
        """All of it, flat, as ``dtype``."""
        if dtype not in self._typed:
            self._typed[dtype] = self.bytes.reshape(-1).view(dtype)
        return self._typed[dtype]

    def row_of(self, m: Engine, lane: Array) -> Array | int:
        raise NotImplementedError

    def read(self, m: Engine, view: View, index: Value) -> Value:
        request = self.request(m, view, index)
        self.count(m, view, request, store=False)
        return self.fetch(m, view, request)

    def fetch(self, m: Engine, view: View, request: Request) -> Value:
        """What `read` gives, not counted."""
        flat, cells = self._locate(m, view, request)
        data = self.typed(view.dtype)[flat]
        event = m.event(view.site)
        if self.shadow is not None:
            report = self._reporter(m, view)
            self.shadow.read(cells, request.lane, event, m.clock, report)
        self._check_landed(m, view, request, cells)
        shape = data if request.vector else data[:, 0]
        if self.origin is not None:
            origin = self.origin[cells]
            if origin.any():
                return self._tainted(m, view, request, shape, origin)
        return m.as_lanes(shape)

    def write(self, m: Engine, view: View, index: Value, value: Value) -> None:
        request = self.request(m, view, index)
        _, cells = self._locate(m, view, request)
        self.check_aligned(m, view, request)
        self.count(m, view, request, store=True)
        self._check_not_pending(m, view, request, cells)
        values = self._chosen(m, strip(value), request, view.dtype)
        origin = self._origin_to_store(m, view, value, request)
        self.put(m, view, request, values, origin)

    def put(self, m: Engine, view: View, request: Request, values: Array, origin: Array | int) -> None:
        """Store ``values`` (k, n), with the checks for races."""
        flat, cells = self._locate(m, view, request)
        typed, report, event = self.typed(view.dtype), self._reporter(m, view), m.event(view.site)
        if self.shadow is not None:
            equal = self._per_cell(same_bits(typed[flat], values), view)
            self.shadow.write(cells, request.lane, event, m.clock, report, equal)
        typed[flat] = values
        if self.origin is not None:
            spread = np.asarray(origin)
            self.origin[cells] = self._per_cell(spread, view) if spread.ndim == 2 else spread
        if self.shadow is not None:
            equal = self._per_cell(same_bits(typed[flat], values), view)
            self.shadow.settle(cells, request.lane, event, m.clock, report, equal)

    # --- asynchronous copies --------------------------------------------------------------------------------------
    def begin_copy(self, m: Engine, view: View, request: Request) -> None:
        """A copy to here starts: nobody may touch the cells until it has landed and a barrier has been passed."""
        self.check_aligned(m, view, request)
        self.begin_bulk(m, view, request)

    def begin_bulk(self, m: Engine, view: View, request: Request) -> None:
        """`begin_copy` of a bulk copy, whose alignment is not that of its size."""
        _, cells = self._locate(m, view, request)
        self._check_not_pending(m, view, request, cells)
        event = m.event(view.site)
        if self.shadow is not None:
            never_equal = np.zeros(cells.shape, bool)
            report = self._reporter(m, view)
            self.shadow.write(cells, request.lane, event, m.clock, report, never_equal)
            self.shadow.settle(cells, request.lane, event, m.clock, report, never_equal)
        if self.pending is None:
            self.pending = np.zeros(self.bytes.size // self.granule, np.int64)
        self.pending[cells] = event

    def land_copy(self, m: Engine, view: View, request: Request, values: Array, origin: Array | int) -> None:
        """Its data arrives: written now, by the thread that waited."""
        _, cells = self._locate(m, view, request)
        assert self.pending is not None, "a copy lands where one has begun"
        self.pending[cells] = 0
        self.put(m, view, request, values, origin)

    def land_bulk(
        self, m: Engine, copy: View, request: Request, values: Array, origin: Array, column: int, event: int
    ) -> None:
        """A bulk copy's data arrives: ordered before those who wait at the mbarrier of ``column``, and nobody else."""
        flat, cells = self._locate(m, copy, request)
        assert self.pending is not None, "a copy lands where one has begun"
        self.pending[cells] = 0
        self.typed(copy.dtype)[flat] = values
        if self.origin is not None:
            self.origin[cells] = self._per_cell(origin, copy)
        if self.shadow is not None:
            self.shadow.forget_writer(cells)
        if self.landed is None:
            self.landed = Landed(self.bytes.size // self.granule)
        self.landed.event[cells], self.landed.column[cells] = event, column

    def peek(self, m: Engine, view: View, request: Request) -> None:
        """The threads use what is here, but no value of it: only races are checked."""
        _, cells = self._locate(m, view, request)
        if self.shadow is not None:
            self.shadow.read(cells, request.lane, m.event(view.site), m.clock, self._reporter(m, view))

    def last_writes(self, m: Engine, view: View, request: Request) -> tuple[Array, Array]:
        """(identity of the thread, event) of the last store to each cell of a request, both (k, cells); 0: none."""
        _, cells = self._locate(m, view, request)
        if self.shadow is None:
            return np.full(cells.shape, NOBODY), np.zeros(cells.shape, np.int64)
        return self.shadow.writer[cells], self.shadow.write_event[cells]

    def _check_landed(self, m: Engine, view: View, request: Request, cells: Array) -> None:
        if self.pending is not None:
            self._tell_pending(m, view, request, cells, "unlanded copy", "read before its cp.async has been waited for")
        self._check_waited(m, view, request, cells, "unlanded copy", "read")

    def _check_waited(self, m: Engine, view: View, request: Request, cells: Array, kind: ForKind, verb: str) -> None:
        """Bulk copies that have landed here must lie before the access, by a wait of the thread or by a barrier."""
        if self.landed is None:
            return
        event = self.landed.event[cells]
        late = event > m.clock.marks(request.lane)[:, None]
        if not late.any():
            return
        assert m.clock.acquired is not None, "bulk copies land at mbarriers"
        late &= ~m.clock.acquired.knows(request.lane[:, None], self.landed.column[cells], event)
        detail = f"{verb} by a thread that has not waited for the copy"
        self._tell_late(m, view, request, cells, np.where(late, event, 0), kind, detail)

    def _check_not_pending(self, m: Engine, view: View, request: Request, cells: Array) -> None:
        if self.pending is not None:
            self._tell_pending(m, view, request, cells, "copy overlap", "written while a cp.async to it is on its way")
        self._check_waited(m, view, request, cells, "copy overlap", "written")
        if self.landed is not None:
            self.landed.event[cells] = 0

    def _tell_pending(self, m: Engine, view: View, request: Request, cells: Array, kind: ForKind, detail: str) -> None:
        assert self.pending is not None
        self._tell_late(m, view, request, cells, self.pending[cells], kind, detail)

    def _tell_late(
        self, m: Engine, view: View, request: Request, cells: Array, late: Array, kind: ForKind, detail: str
    ) -> None:
        """``late`` has the events of the copies in question, 0 where there is none."""
        if not late.any():
            return
        first = np.argwhere(late)[0]
        cell, event = int(cells[tuple(first)]), int(late[tuple(first)])
        site, then = m.record.events[event - 1]
        threads = (m.lanes.name(int(m.lanes.identity[request.lane[first[0]]])),)
        other = (site, tuple((name, value) for _, name, value in then))
        element = self._element(m, cell, view)
        m.tell(
            kind, view.site, element=element, threads=threads, detail=detail, other=other, count=int((late > 0).sum())
        )

    # --- addresses ------------------------------------------------------------------------------------------------
    def request(self, m: Engine, view: View, index: Value) -> Request:
        """The active lanes' elements, inside the bounds; those outside are reported and moved inside."""
        where = np.asarray(m.decided(index, view.site, "an address"))
        lane = m.active_lanes()
        vector = where.ndim == 2
        if where.ndim == 0:
            element = np.full((len(lane), 1), int(where))
        elif where.ndim == 1:
            element = where[:, None] if m.mask.index is None else where[lane][:, None]
        else:
            spread = np.broadcast_to(where, (m.lanes.count, where.shape[1]))
            element = spread if m.mask.index is None else spread[lane]
        size = self.row_bytes // view.dtype.itemsize
        if len(lane) and (int(element.min()) < 0 or int(element.max()) >= size):
            wrong = (element < 0) | (element >= size)
            first = np.argwhere(wrong)[0]
            tell_bounds(m, view, int(element[tuple(first)]), int(lane[first[0]]), size, int(wrong.sum()))
            element = np.clip(element, 0, max(0, size - 1))
        return Request(lane=lane, element=element, vector=vector)

    def _locate(self, m: Engine, view: View, request: Request) -> tuple[Array, Array]:
        """(flat elements, cells) of a request, both (k, n) or more cells."""
        per_row = self.bytes.shape[1] // view.dtype.itemsize
        flat = request.element + self.row_of(m, request.lane) * per_row
        ratio = view.dtype.itemsize // self.granule
        if ratio == 1:
            return flat, flat
        cells = flat[:, :, None] * ratio + np.arange(ratio)
        return flat, cells.reshape(len(flat), -1)

    def _per_cell(self, per_element: Array, view: View) -> Array:
        ratio = view.dtype.itemsize // self.granule
        return per_element if ratio == 1 else np.repeat(per_element, ratio, axis=1)

    def _element(self, m: Engine, cell: int, view: View) -> int:
        return int(cell * self.granule % self.bytes.shape[1]) // view.dtype.itemsize

    def check_aligned(self, m: Engine, view: View, request: Request) -> None:
        n = request.element.shape[1]
        if n == 1 or not view.vector or not m.record.strict_alignment:
            return
        wrong = request.element[:, 0] % n != 0
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            threads = (m.lanes.name(int(m.lanes.identity[request.lane[first]])),)
            detail = f"{n * view.dtype.itemsize} bytes at byte {int(request.element[first, 0]) * view.dtype.itemsize}"
            element = int(request.element[first, 0])
            m.tell(
                "misaligned access", view.site, element=element, threads=threads, detail=detail, count=int(wrong.sum())
            )

    def count(self, m: Engine, view: View, request: Request, *, store: bool) -> None:
        if not len(request.lane):
            return
        size, n = view.dtype.itemsize, request.element.shape[1]
        if view.vector:
            m.count(view.site, self.scope, request.element[:, 0] * size, size * n, store=store)
            return
        for position in range(n):
            m.count(view.site, self.scope, request.element[:, position] * size, size, store=store)

    # --- values ---------------------------------------------------------------------------------------------------
    def _chosen(self, m: Engine, value: Value, request: Request, dtype: DType | None) -> Array:
        """A plain value of all lanes as (k, n) for the request's lanes."""
        array = np.asarray(value) if dtype is None else np.asarray(value).astype(dtype, copy=False)
        shape = (len(request.lane), request.element.shape[1])
        if array.ndim == 0 or array.shape[0] == 1:
            return np.broadcast_to(array, shape)
        array = array if m.mask.index is None else array[request.lane]
        return np.broadcast_to(array[:, None] if array.ndim == 1 else array, shape)

    def _origin_to_store(self, m: Engine, view: View, value: Value, request: Request) -> Array | int:
        if type(value) is not Tainted:
            return 0
        return self._chosen(m, value.origin, request, None)

    def _tainted(self, m: Engine, view: View, request: Request, data: Array, origin: Array) -> Value:
        ratio = view.dtype.itemsize // self.granule
        per_element = origin if ratio == 1 else origin.reshape(len(origin), -1, ratio).max(axis=2)
        fresh = per_element == NEVER_WRITTEN
        if fresh.any():
            first = np.argwhere(fresh)[0]
            number = m.new_origin(view.site, int(request.element[tuple(first)]), int(request.lane[first[0]]))
            per_element = np.where(fresh, np.int32(number), per_element)
        shaped = per_element if request.vector else per_element[:, 0]
        return Tainted(m.as_lanes(data), m.as_lanes(shaped))

    def _reporter(self, m: Engine, view: View) -> Any:
        def report(conflict: Any, cell: int, who: int, other: int, event: int, count: int) -> None:
            m.tell_race(conflict, view.site, self._element(m, cell, view), who, other, event, count)

        return report


class SharedMemory(AddressableMemory):
    """``size_bytes`` of shared memory in each of ``blocks`` blocks, unwritten."""

    scope = "shared"

    def __init__(self, size_bytes: int, granule: int, blocks: int) -> None:
        padded = ceil_div(size_bytes, 16) * 16
        cells = blocks * padded // granule
        super().__init__(
            np.zeros((blocks, padded), np.uint8),
            granule=granule,
            origin=np.full(cells, NEVER_WRITTEN, np.int32),
            shadow=Shadow(cells, shared_by_blocks=False),
        )
        self.size_bytes = size_bytes

    def row_of(self, m: Engine, lane: Array) -> Array | int:
        return m.lanes.row[lane][:, None] if len(m.lanes.blocks) > 1 else 0


class GlobalMemory(AddressableMemory):
    """A tensor of ``count`` elements in global memory: ``array`` itself, flat, is read and written.

    ``origin`` says for each element whether its contents were there before (None: all). ``granule`` is the size of the
    smallest elements that kernels see here. An ``array`` of an empty tensor has one, out of bounds.
    """

    scope = "global"

    def __init__(self, array: Array, origin: Array | None, granule: int, count: int) -> None:
        rows = array.reshape(-1).view(np.uint8).reshape(1, -1)
        spread = None if origin is None else np.repeat(origin, array.dtype.itemsize // granule)
        super().__init__(rows, granule=granule, origin=spread, shadow=None)
        self.row_bytes = count * array.dtype.itemsize
        self._cells_per_element = array.dtype.itemsize // granule

    def watch(self, *, written: bool, synchronised: bool) -> None:
        """Forget who read and wrote: a new launch begins, in which threads write here or not, blocks wait or not."""
        cells = self.bytes.size // self.granule
        self.shadow = None
        if written:
            self.shadow = BlocksShadow(cells) if synchronised else Shadow(cells, shared_by_blocks=True)

    def written(self) -> Array:
        """By element, whether it holds something."""
        cells = self.row_bytes // self.granule
        if self.origin is None:
            return np.ones(cells // self._cells_per_element, bool)
        return np.asarray((self.origin[:cells] != NEVER_WRITTEN).reshape(-1, self._cells_per_element).all(axis=1))

    def change(self, m: Engine, view: View, request: Request, value: int, event: int) -> None:
        """An atomic access by one thread has left ``value`` here."""
        flat, cells = self._locate(m, view, request)
        self.typed(view.dtype)[flat] = value
        if isinstance(self.shadow, BlocksShadow):
            self.shadow.change(cells, request.lane, event, m.clock, self._reporter(m, view))

    def row_of(self, m: Engine, lane: Array) -> Array | int:
        return 0

    def _origin_to_store(self, m: Engine, view: View, value: Value, request: Request) -> Array | int:
        """A tainted value in global memory is an error: it is a result."""
        if type(value) is not Tainted:
            return 0
        m.decided(value, view.site, f"what is stored to {view.site.buffer}")
        return 0
