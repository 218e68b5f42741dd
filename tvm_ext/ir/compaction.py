"""The positions of elements that are not zero, one behind the other, as loops."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computations import dtype_of, static_shape

from .build_ir import INDEX_DTYPE, SERIAL, allocate, cast_to, flat, index, load, nest, new_buffer, sequence, store


def compact(data: Buffer, positions: Buffer, count: Buffer) -> Stmt:
    """Row-major positions in ``data`` go into ``positions`` (n,) int64, how many there are into ``count`` (1,) int64.

    Each position is written, and counted where its element is not zero: no branch, which could not be foreseen. NaN is
    not zero.
    """
    shape = static_shape(data)
    taken = new_buffer((1,), INDEX_DTYPE, "taken", "local")
    held, zero = load(taken, (index(0),)), (index(0),)

    def element(point: Sequence[Expr]) -> Stmt:
        added = store(taken, held + cast_to(_is_set(load(data, point)), INDEX_DTYPE), zero)
        return sequence(store(positions, flat(point, shape), (held,)), added)

    loops = nest(shape, SERIAL, [f"i{k}" for k in range(len(shape))], element)
    return sequence(allocate(taken), store(taken, index(0), zero), loops, store(count, held, zero))


def _is_set(value: Expr) -> Expr:
    """Whether it is not zero, by two orderings: the LLVM code generator's inequality is false of NaN."""
    if dtype_of(value) == "bool":
        return value
    nothing = tirx.const(0, dtype_of(value))
    return tirx.Or(tirx.Not(value <= nothing), tirx.Not(value >= nothing))
