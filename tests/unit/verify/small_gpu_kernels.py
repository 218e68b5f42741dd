"""Small thread-bound functions for the tests of what runs them."""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import ForKind, tirx
from tvm_ext.ir.build_ir import allocate, index, load, loop, sequence, store
from tvm_ext.ir.simt_ir import allocate_shared, gpu_buffer, launch

SERIAL = ForKind.SERIAL


def _param(shape: tuple[int, ...], name: str) -> Any:
    return tirx.decl_buffer([index(size) for size in shape], "float32", name)


def _function(params: list[Any], body: Any) -> Any:
    return tirx.PrimFunc(params, body).with_attrs({"s_tir": True, "tirx.noalias": True})


def _when(condition: Any, statement: Any) -> Any:
    return tirx.IfThenElse(condition, statement, None)


def reversed_rows(rows: int, columns: int, *, copied: int | None = None, stored: int | None = None) -> Any:
    """Each block reverses a row through shared memory; only the first ``copied`` or ``stored`` threads do so."""
    x, y = _param((rows, columns), "x"), _param((rows, columns), "y")
    row = gpu_buffer((columns,), "float32", "row", "shared")

    def body(block: Any, thread: Any) -> Any:
        copy = store(row, load(x, [block, thread]), [thread])
        write = store(y, load(row, [index(columns - 1) - thread]), [block, thread])
        if copied is not None:
            copy = _when(thread < index(copied), copy)
        if stored is not None:
            write = _when(thread < index(stored), write)
        return sequence(allocate_shared(row), copy, write)

    return _function([x, y], launch(rows, columns, body))


def shared_matmul(m: int, n: int, k: int, step: int = 8, width: int = 16) -> Any:
    """Tiles of width x width with one thread for each element, both operands through shared memory."""
    a, b, c = _param((m, k), "A"), _param((k, n), "B"), _param((m, n), "C")
    tile_a = gpu_buffer((width, step), "float32", "tile_a", "shared")
    tile_b = gpu_buffer((step, width), "float32", "tile_b", "shared")
    sums = gpu_buffer((1,), "float32", "sums", "local")
    zero = index(0)

    def body(block: Any, thread: Any) -> Any:
        row, column = tirx.floordiv(block, index(n // width)), tirx.floormod(block, index(n // width))
        i, j = tirx.floordiv(thread, index(width)), tirx.floormod(thread, index(width))

        def one_step(number: Any) -> Any:
            half = index(width * step)
            r, s = tirx.floordiv(thread, index(step)), tirx.floormod(thread, index(step))
            copy_a = store(tile_a, load(a, [row * index(width) + r, number * index(step) + s]), [r, s])
            copy_b = store(tile_b, load(b, [number * index(step) + i, column * index(width) + j]), [i, j])
            update = loop(
                step,
                SERIAL,
                "s",
                lambda s: store(sums, load(sums, [zero]) + load(tile_a, [i, s]) * load(tile_b, [s, j]), [zero]),
            )
            return sequence(
                allocate_shared(tile_a),
                allocate_shared(tile_b),
                _when(thread < half, copy_a),
                _when(thread < half, copy_b),
                update,
            )

        return sequence(
            allocate(sums),
            store(sums, tirx.const(0.0, "float32"), [zero]),
            loop(k // step, SERIAL, "number", one_step),
            store(c, load(sums, [zero]), [row * index(width) + i, column * index(width) + j]),
        )

    return _function([a, b, c], launch((m // width) * (n // width), width * width, body))


def two_launches(rows: int, columns: int) -> Any:
    """``y = 2 * x + 1`` with the product in a workspace between two launches."""
    x, y, space = _param((rows, columns), "x"), _param((rows, columns), "y"), _param((rows, columns), "space")
    two, one = tirx.const(2.0, "float32"), tirx.const(1.0, "float32")
    first = launch(rows, columns, lambda b, t: store(space, load(x, [b, t]) * two, [b, t]))
    second = launch(rows, columns, lambda b, t: store(y, load(space, [b, t]) + one, [b, t]))
    return _function([x, y], sequence(allocate(space), first, second))


def row_sums(rows: int, columns: int) -> Any:
    """Each block sums a row in a tree of shared memory."""
    x, y = _param((rows, columns), "x"), _param((rows,), "y")
    sums = gpu_buffer((columns,), "float32", "sums", "shared")

    def body(block: Any, thread: Any) -> Any:
        statements = [allocate_shared(sums), store(sums, load(x, [block, thread]), [thread])]
        half = columns // 2
        while half:
            added = load(sums, [thread]) + load(sums, [thread + index(half)])
            statements.append(_when(thread < index(half), store(sums, added, [thread])))
            half //= 2
        write = _when(tirx.EQ(thread, index(0)), store(y, load(sums, [index(0)]), [block]))
        return sequence(*statements, write)

    return _function([x, y], launch(rows, columns, body))
