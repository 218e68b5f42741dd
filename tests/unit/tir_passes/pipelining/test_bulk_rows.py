"""Rows of a tile, found again behind any division of it among threads, loops and vector lanes."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_ext._tvm import BufferStore, For, ForKind, Var, tirx
from tvm_ext.errors import IllegalRewrite
from tvm_ext.tir_passes.pipelining.bulk_rows import BulkRows, Level, bulk_rows
from tvm_ext.tir_passes.pipelining.copies import Copy

THREAD, LOOP, LANE, BLOCK = (Var(name, "int32") for name in ("thread", "loop", "lane", "block"))


def number(value: int) -> Any:
    return tirx.IntImm("int32", value)


def copy_of(
    to: Any, frm: Any, *, loops: dict[Any, int], dtype: str = "float16", condition: Any = None, **rest: Any
) -> Copy:
    """A copy ``tile[to] = source[frm]`` in ``loops``, maybe under a condition."""
    tile = tirx.decl_buffer([number(1 << 16)], dtype, "tile", scope="shared")
    source = tirx.decl_buffer([number(1 << 20)], dtype, "source")
    store = BufferStore(tile, tirx.BufferLoad(source, [frm]), [to])
    around = tuple(For(v, number(0), number(n), ForKind.SERIAL, store) for v, n in loops.items())
    if condition is not None:
        around = (tirx.IfThenElse(condition, store, None), *around)
    fields = {"predicate": None, "vector": None, "around": around, **rest}
    return Copy(store=store, buffer=tile, index=to, source=source, from_index=frm, **fields)


def rows_of(copy: Copy, threads: int = 64) -> BulkRows:
    return bulk_rows(copy, {THREAD: threads}, {THREAD: number(threads), BLOCK: number(8)})


def test_the_worked_example() -> None:
    """64 threads copy 8 halves each from rows of 1024 into a tile of 16 x 32."""
    row, column = THREAD // 4, THREAD % 4 * 8 + LANE
    copy = copy_of(row * 32 + column, BLOCK * 16384 + row * 1024 + column, loops={LANE: 8})
    rows = rows_of(copy)
    assert (rows.row_elements, rows.levels, rows.count) == (32, (Level(count=16, to_step=32, from_step=1024),), 16)
    assert (rows.to_first, rows.from_first) == (0, 0)
    assert str(rows.base) == str(BLOCK * 16384)


@given(
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 16, 32, 64]), st.integers(1, 3), st.integers(0, 3), st.booleans()
)
def test_rows_do_not_depend_on_who_copies_them(
    vector: int, width: int, turns: int, padding: int, by_columns: bool
) -> None:
    """Threads take neighbours of a row, or of a column of vectors: the rows are the same."""
    units = width // vector
    height = 64 * turns // units if 64 * turns % units == 0 else 64 * turns
    loops = {LOOP: turns if 64 * turns % units == 0 else units * turns, LANE: vector}
    flat = LOOP * 64 + THREAD
    row, unit = (flat % height, flat // height) if by_columns else (flat // units, flat % units)
    column = unit * vector + LANE
    pitch = width + 8 * padding
    rows = rows_of(copy_of(row * pitch + column, row * 4096 + column, loops=loops))
    assert rows.row_elements == width and rows.count == height
    assert rows.levels == ((Level(count=height, to_step=pitch, from_step=4096),) if height > 1 else ())


def test_neighbouring_rows_are_one_run() -> None:
    copy = copy_of(THREAD * 8 + LANE, THREAD * 8 + LANE, loops={LANE: 8})
    rows = rows_of(copy)
    assert (rows.row_elements, rows.levels) == (512, ())


def test_two_levels_of_distances() -> None:
    """8 planes of 8 rows of 8 elements: rows 64 apart, planes 1000 apart in global memory, side by side in the tile."""
    plane, row = THREAD // 8, THREAD % 8
    copy = copy_of(THREAD * 16 + LANE, plane * 1000 + row * 64 + LANE, loops={LANE: 8})
    levels = (Level(count=8, to_step=128, from_step=1000), Level(count=8, to_step=16, from_step=64))
    assert rows_of(copy).levels == levels
    assert prod(level.count for level in levels) == rows_of(copy).count


def test_threads_that_do_not_copy_are_left_out() -> None:
    copy = copy_of(THREAD * 8 + LANE, THREAD * 64 + LANE, loops={LANE: 8}, condition=THREAD < 10)
    assert rows_of(copy).count == 10


REFUSED: dict[str, tuple[Copy, str]] = {
    "transposed": (copy_of(LANE * 64 + THREAD, THREAD * 64 + LANE, loops={LANE: 8}), "in runs of 2 bytes"),
    "swizzled": (
        copy_of(
            THREAD // 8 * 64 + (THREAD % 8 + THREAD // 8) % 8 * 8 + LANE,
            THREAD // 8 * 128 + THREAD % 8 * 8 + LANE, loops={LANE: 8},
        ),
        "a swizzle, or an edge",
    ),
    "irregular": (
        copy_of(THREAD * 8 + LANE, THREAD * THREAD * 16 + LANE, loops={LANE: 8}), "irregular distances",
    ),
    "odd pitch": (copy_of(THREAD * 12 + LANE, THREAD * 64 + LANE, loops={LANE: 8}), "24 bytes apart in shared memory"),
    "odd place": (copy_of(THREAD * 8 + LANE, BLOCK * 4 + THREAD * 64 + LANE, loops={LANE: 8}), "multiple of 16 bytes"),
    "odd begin": (copy_of(THREAD * 8 + LANE + 4, THREAD * 64 + LANE, loops={LANE: 8}), "its first row begins 8 bytes"),
    "rows by block": (copy_of(THREAD * 8 + LANE, THREAD * BLOCK * 8 + LANE, loops={LANE: 8}), "depend on block"),
    "layout by block": (
        copy_of((THREAD + BLOCK) * 8 + LANE, THREAD * 8 + LANE, loops={LANE: 8}), "layout depend on block",
    ),
    "under the block": (
        copy_of(THREAD * 8 + LANE, THREAD * 8 + LANE, loops={LANE: 8}, condition=BLOCK < 2), "loaded depends on block",
    ),
    "twice": (copy_of(THREAD % 8 * 8 + LANE, THREAD * 8 + LANE, loops={LANE: 8}), "loaded twice"),
    "predicated": (
        copy_of(THREAD * 8 + LANE, THREAD * 8 + LANE, loops={LANE: 8}, predicate=BLOCK < 2), "under a predicate",
    ),
    "computed": (
        copy_of(THREAD * 8 + LANE, THREAD * 8 + LANE, loops={LANE: 8}, function=lambda x: x + x), "is computed",
    ),
    "huge": (copy_of(THREAD * 8 + LANE, THREAD * 8 + LANE, loops={LOOP: 4096, LANE: 8}), "more than 262144 copies"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    copy, words = REFUSED[name]
    with pytest.raises(IllegalRewrite, match=words):
        rows_of(copy)
