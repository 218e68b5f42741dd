"""Kernels with bulk copies, by hand and sound; tests take them apart by their named steps, and break one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.simt.good_kernels import argument, primitive_function
from tvm_ext._tvm import Expr, Stmt, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.ir.build_ir import SERIAL, allocate, index, load, loop, nest, sequence, split_index, store
from tvm_ext.ir.bulk_ir import (
    announce_bytes,
    arrive,
    copy_in_bulk,
    fence_initialised_mbarriers,
    initialise_mbarrier,
    mbarrier_buffer,
    shared_pointer,
    wait_for_phase,
)
from tvm_ext.ir.simt_ir import gpu_buffer, launch

HOPPER = "nvidia-h200"
ROW = 64
"""Elements of float32 of a `Row`, one a thread: 256 bytes."""


def meet(scope: str = "shared") -> Stmt:
    return tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", scope))


def first_thread(thread: Expr, *statements: Stmt) -> Stmt:
    return tirx.IfThenElse(thread == index(0), sequence(*statements), None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """What the steps of `copy_row` have at hand."""

    a: Any
    b: Any
    tile: Any
    barriers: Any
    thread: Expr

    def pointer(self, which: int = 0) -> Expr:
        return shared_pointer(self.barriers, index(which))

    def copy(self, size_bytes: int = 4 * ROW, offset: int = 0) -> Stmt:
        return copy_in_bulk(self.tile, index(offset), self.a, [index(0)], size_bytes, self.pointer())


Step = Callable[[Row], Stmt]

STEPS: dict[str, Step] = {
    "initialise": lambda r: first_thread(r.thread, initialise_mbarrier(r.barriers, index(0), 1)),
    "fence": lambda r: first_thread(r.thread, fence_initialised_mbarriers()),
    "meet": lambda r: meet(),
    "announce": lambda r: first_thread(r.thread, announce_bytes(r.barriers, index(0), 4 * ROW)),
    "copy": lambda r: first_thread(r.thread, r.copy()),
    "wait": lambda r: wait_for_phase(r.barriers, index(0), index(0)),
    "write": lambda r: store(r.b, load(r.tile, [r.thread]), [r.thread]),
}


def copy_row(changes: Mapping[str, Step | None] | None = None) -> Any:
    """B = A, 64 floats through shared memory by one bulk copy. ``changes`` replace steps by name; None drops one.

    A new name is a step of its own, before "write".
    """
    a, b = argument("A", ROW), argument("B", ROW)
    tile = gpu_buffer((2 * ROW,), "float32", "tile", "shared")
    barriers = mbarrier_buffer(2, "barriers", "shared")
    steps = {**STEPS, **(changes or {})}
    steps["write"] = steps.pop("write")

    def body(block: Expr, thread: Expr) -> Stmt:
        row = Row(a=a, b=b, tile=tile, barriers=barriers, thread=thread)
        done = [step(row) for step in steps.values() if step is not None]
        return sequence(allocate(barriers), allocate(tile), *done)

    return primitive_function([a, b], launch(1, ROW, body))


@dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """``C = A @ B`` in tiles of 32x32x32 through ``stages`` slots, loaded ahead row by row, by the lanes of one warp.

    A slot is handed back by a barrier of the block in every iteration, or (``release="mbarrier"``) by an mbarrier of
    its own, at which all threads arrive and for which only the loading warp waits. The other fields break it:
    ``parity_of`` says in which iteration's phase to wait, ``ahead`` into which later tile's slot to load, ``waits``
    which threads wait, and ``releases`` whether slots are handed back at all.
    """

    stages: int = 3
    dtype: str = "float16"
    scope: str = "shared"
    release: str = "barrier"
    threads: int = 64
    waits: bool = True
    releases: bool = True
    announced_tiles: int = 1
    shift: int = 0  # of the slot that is loaded, against the right one
    parity_shift: int = 0

    def function(self, m: int = 64, n: int = 32, k: int = 160) -> Any:
        a, b, c = argument("A", m, k, dtype=self.dtype), argument("B", k, n, dtype=self.dtype), argument("C", m, n)
        size = self.stages * TILE * TILE
        tiles = [gpu_buffer((size,), self.dtype, name, self.scope) for name in ("A_shared", "B_shared")]
        full, empty = (mbarrier_buffer(self.stages, name, self.scope) for name in ("full", "empty"))
        sums = gpu_buffer((TILE * TILE // self.threads,), "float32", "sums", "local")
        steps, grid = k // TILE, (m // TILE, n // TILE)

        def kernel(block: Expr, thread: Expr) -> Stmt:
            row, column = (part * index(TILE) for part in split_index(block, grid))
            place = lambda step: ([row, step * index(TILE)], [step * index(TILE), column])  # noqa: E731

            def produce(step: Expr) -> Stmt:
                slot = tirx.floormod(step + index(self.shift), index(self.stages))
                return self._load((a, b), tiles, full, place(step), slot, thread)

            def main(step: Expr) -> Stmt:
                before = self._iteration(step, steps, full, empty, thread, produce)
                after = [arrive(empty, self._slot(step))] if self.release == "mbarrier" else []
                return sequence(*before, self._add(step, tiles, sums, thread), *after)

            return sequence(
                allocate(full), *([allocate(empty)] if self.release == "mbarrier" else []),
                *(allocate(buffer) for buffer in (*tiles, sums)), self._start(full, empty, thread),
                loop(int(sums.ty.shape[0]), SERIAL, "e", lambda e: store(sums, tirx.const(0, "float32"), [e])),
                loop(min(self.stages - 1, steps), SERIAL, "p", produce), loop(steps, SERIAL, "ko", main),
                loop(int(sums.ty.shape[0]), SERIAL, "e", lambda e: self._write(c, sums, (row, column), e, thread)),
            )  # fmt: skip

        return primitive_function([a, b, c], launch(grid[0] * grid[1], self.threads, kernel))

    def _slot(self, step: Expr) -> Expr:
        return tirx.floormod(step, index(self.stages))

    def _parity(self, step: Expr) -> Expr:
        return tirx.floormod(tirx.floordiv(step, index(self.stages)) + index(self.parity_shift), index(2))

    def _start(self, full: Any, empty: Any, thread: Expr) -> Stmt:
        def one(slot: Expr) -> Stmt:
            both = [initialise_mbarrier(full, slot, 1)]
            if self.release == "mbarrier":
                both.append(initialise_mbarrier(empty, slot, self.threads))
            return sequence(*both)

        every = loop(self.stages, SERIAL, "slot", one)
        return sequence(first_thread(thread, every, fence_initialised_mbarriers()), meet(self.scope))

    def _load(self, sources: Any, tiles: Any, full: Any, places: Any, slot: Expr, thread: Expr) -> Stmt:
        row_bytes = TILE * (2 if self.dtype == "float16" else 4)
        pointer = shared_pointer(full, slot)
        row = (slot * index(TILE) + thread) * index(TILE)
        copies = [
            copy_in_bulk(tile, row, source, [place[0] + thread, place[1]], row_bytes, pointer)
            for tile, source, place in zip(tiles, sources, places, strict=True)
        ]
        announced = announce_bytes(full, slot, 2 * self.announced_tiles * TILE * row_bytes)
        return sequence(first_thread(thread, announced), tirx.IfThenElse(thread < index(TILE), sequence(*copies), None))

    def _iteration(
        self, step: Expr, steps: int, full: Any, empty: Any, thread: Expr, produce: Callable[[Expr], Stmt]
    ) -> list[Stmt]:
        """What precedes the sums of a tile: wait for it, hand back the slot of the one before, load a later one."""
        later = step + index(self.stages - 1)
        fill = produce(later)
        if self.release == "mbarrier" and self.releases:
            before = step - index(1)  # the tile that was in the slot; there is none in iteration 0
            free = wait_for_phase(
                empty, self._slot(before), tirx.floormod(tirx.floordiv(before, index(self.stages)), index(2))
            )
            only = tirx.all(step > index(0), thread < index(TILE))
            fill = sequence(tirx.IfThenElse(only, free, None), fill)
        parts = [wait_for_phase(full, self._slot(step), self._parity(step))] if self.waits else []
        parts += [meet(self.scope)] if self.release == "barrier" and self.releases else []
        return [*parts, tirx.IfThenElse(later < index(steps), fill, None)]

    def _add(self, step: Expr, tiles: Any, sums: Any, thread: Expr) -> Stmt:
        def add(parts: tuple[Expr, ...]) -> Stmt:
            kk, e = parts
            i, j = split_index(e * index(self.threads) + thread, (TILE, TILE))
            first = self._slot(step) * index(TILE * TILE)
            left, right = load(tiles[0], [first + i * index(TILE) + kk]), load(tiles[1], [first + kk * index(TILE) + j])
            return store(sums, load(sums, [e]) + _wide(left) * _wide(right), [e])

        return nest((TILE, int(sums.ty.shape[0])), SERIAL, ("kk", "e"), add)

    def _write(self, c: Any, sums: Any, at: tuple[Expr, Expr], e: Expr, thread: Expr) -> Stmt:
        i, j = split_index(e * index(self.threads) + thread, (TILE, TILE))
        return store(c, load(sums, [e]), [at[0] + i, at[1] + j])


TILE = 32


def _wide(value: Expr) -> Expr:
    return value if dtype_of(value) == "float32" else tirx.Cast("float32", value)
