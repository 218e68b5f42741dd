"""Kernels that look at run-time values before others use them, and operators that are safe for all values.

A kernel that reads where an index says, or divides by what a tensor holds, can crash the process. Such values are
looked at once, beforehand, in one pass over the tensor that holds them; the kernel that uses them gets the copy that
this pass makes, so that it cannot run before or without it. Cores share the pass over a long tensor; what they found
is judged behind it, for an assertion in a parallel loop loses its kind.

Worked example: indices (3, -1, 7) into 5 rows. 7 is not below 5, and the run ends with an error. Of (3, -1) the
copy is (3, 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    OPAQUE,
    Buffer,
    Expr,
    PrimFunc,
    SBlock,
    SBlockRealize,
    Stmt,
    StringImm,
    TeTensor,
    Var,
    te,
    tirx,
    topi,
)
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.errors import DivisionByZeroError, IndexRangeError
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    PARALLEL,
    SERIAL,
    allocate,
    index,
    load,
    loop,
    nest,
    new_buffer,
    sequence,
    split_index,
    store,
    tile_size,
)
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import to_json
from tvm_ext.support.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A tensor that is looked at: its shape (None: an extent of run time) and type, and how an error names its user."""

    shape: tuple[int | None, ...]
    dtype: str
    user: str


CHECKED_AT_A_TIME = 32768
"""Indices that one task looks at, in 6 us: of fewer, another core would start too late."""


def check_indices(tensor: Checked, extents: Sequence[int | None], dtype: str) -> PrimFunc:
    """A kernel (indices, copy): every index is in [-extent, extent), and from 0 in the copy; else an IndexRangeError.

    The copy is of ``dtype``.

    Of several ``extents`` the i-th is that of the elements at i along the last axis, as GatherND has them. Those of
    run time, None here, are parameters behind the indices.
    """
    count = len(extents)
    sizes = [Var(f"extent{i}", INDEX_DTYPE) if extent is None else index(extent) for i, extent in enumerate(extents)]
    source, copy = _params(tensor, dtype)
    outside = new_buffer([count], INDEX_DTYPE, "outside")

    def look(place: Sequence[Expr], column: Expr, size: Expr, found: Buffer = outside) -> Stmt:
        value = tirx.Cast(INDEX_DTYPE, load(source, place))
        inside = tirx.Select(value < index(0), value + size, value)
        wrong = tirx.Cast(INDEX_DTYPE, tirx.Or(value < index(0) - size, value >= size))
        return sequence(_also(found, column, wrong), store(copy, tirx.Cast(dtype, inside), place))

    def judge(position: int, extent: int | None) -> Stmt:
        inside = load(outside, [index(position)]).equal(index(0))
        axis = f" at position {position} of an index tuple" if count > 1 else ""
        allowed = "its axis" if extent is None else f"[{-extent}, {extent - 1}]"
        text = f"{tensor.user}: an index{axis} is outside {allowed}."
        return _fail_unless(
            inside, IndexRangeError, text, "correct the indices; bounds='wrap' takes them modulo the extent"
        )

    def columns(outer: Sequence[Expr]) -> Stmt:
        if count == 1:
            return look(outer, index(0), sizes[0])
        return sequence(*(look([*outer, index(i)], index(i), size) for i, size in enumerate(sizes)))

    shape = [size for size in tensor.shape if size is not None]
    if count == 1 and len(shape) == len(tensor.shape):
        looks = _in_tasks(shape, outside, lambda place, found: look(place, index(0), sizes[0], found))
    else:
        looks = _loops(source.shape if count == 1 else source.shape[:-1], columns)
    body = sequence(
        allocate(outside),
        *(store(outside, index(0), [index(i)]) for i in range(count)),
        looks,
        *(judge(i, extent) for i, extent in enumerate(extents)),
    )
    params = [source, *(size for size in sizes if isinstance(size, Var)), copy]
    return _kernel(params, body, f"looks for indices outside {', '.join(str(size) for size in sizes)}")


def _also(found: Buffer, column: Expr, wrong: Expr) -> Stmt:
    return store(found, tirx.bitwise_or(load(found, [column]), wrong), [column])


def _in_tasks(shape: Sequence[int], outside: Buffer, look: Callable[[Sequence[Expr], Buffer], Stmt]) -> Stmt:
    """``look`` at each element of ``shape``, as one long row in parallel parts, and what they found in ``outside``."""
    count = prod(shape)
    tasks = ceil_div(count, CHECKED_AT_A_TIME)
    results = new_buffer([tasks], INDEX_DTYPE, "results")

    def task(number: Expr) -> Stmt:
        start, found = number * index(CHECKED_AT_A_TIME), new_buffer([1], INDEX_DTYPE, "found", "local")
        part = tile_size(count, min(CHECKED_AT_A_TIME, count), start)
        return sequence(
            allocate(found),
            store(found, index(0), [index(0)]),
            loop(part, SERIAL, "i", lambda i: look(split_index(start + i, shape), found)),
            store(results, load(found, [index(0)]), [number]),
        )

    return sequence(
        allocate(results),
        loop(tasks, PARALLEL, "task", task),
        loop(tasks, SERIAL, "task", lambda number: _also(outside, index(0), load(results, [number]))),
    )


def check_divisors(tensor: Checked) -> PrimFunc:
    """A kernel (divisors, copy): none is 0; else a DivisionByZeroError."""
    source, copy = _params(tensor, tensor.dtype)
    zeros = tirx.decl_buffer([index(1)], "int32", "zeros", data_alignment=64)
    first = [index(0)]

    def look(place: Sequence[Expr]) -> Stmt:
        value = load(source, place)
        zero = tirx.Cast("int32", tirx.EQ(value, tirx.const(0, tensor.dtype)))
        return sequence(store(zeros, tirx.max(load(zeros, first), zero), first), store(copy, value, place))

    text = f"{tensor.user}: a divisor is 0."
    none = tirx.EQ(load(zeros, first), tirx.const(0, "int32"))
    body = sequence(
        allocate(zeros),
        store(zeros, tirx.const(0, "int32"), first),
        _loops(source.shape, look),
        _fail_unless(
            none, DivisionByZeroError, text, "correct the divisors, or build with bounds='wrap', which never fails"
        ),
    )
    return _kernel([source, copy], body, "looks for divisors that are 0")


def copy_dtype(dtype: str, operator: str = "", extents: Sequence[int | None] = ()) -> str:
    """The type of checked indices: that of the indices if it holds every extent. Index -1 of 200 is no int8.

    Gathers, which ONNX gives indices of 32 bits too, read no longer ones where ``extents`` need none.
    """
    short = all(extent is not None and extent < 2**31 for extent in extents)
    if dtype == INDEX_DTYPE and operator in ("relax.take", "relax.gather_elements") and short:
        return "int32"
    return dtype if dtype in ("int32", INDEX_DTYPE) else INDEX_DTYPE


def _params(tensor: Checked, result: str) -> list[Buffer]:
    shape = [Var(f"size{i}", INDEX_DTYPE) if size is None else index(size) for i, size in enumerate(tensor.shape)]
    return [
        tirx.decl_buffer(shape, dtype, name, data_alignment=int(itemsize_bytes(dtype)))
        for name, dtype in (("values", tensor.dtype), ("checked", result))
    ]


def _loops(extents: Sequence[Expr], body: Callable[[Sequence[Expr]], Stmt]) -> Stmt:
    return nest(extents, SERIAL, [f"i{axis}" for axis in range(len(extents))], body)


def _fail_unless(condition: Expr, error: type[Exception], problem: str, remedy: str) -> Stmt:
    """An assertion; TVM raises the class by its name where this package is loaded, else a RuntimeError."""
    return tirx.AssertStmt(
        condition, StringImm(error.__name__), [StringImm(problem), StringImm(f"\n  remedy: {remedy}")]
    )


def _kernel(params: Sequence[Buffer | Var], body: Stmt, reason: str) -> PrimFunc:
    choice = KernelChoice(operator="check", path="check", notes=(reason,), device="cpu")
    attributes = {CHOICE: to_json(choice), ALREADY_SCHEDULED: True, "s_tir": True, "tirx.noalias": True}
    # Stock TVM's passes over graphs expect a block at the root.
    root = SBlockRealize([], tirx.const(True, "bool"), SBlock([], [], [], "root", body))
    return tirx.PrimFunc(list(params), root).with_attrs({**attributes, "op_pattern": OPAQUE})


DIVISIONS = {
    "relax.divide": "Div",
    "relax.floor_divide": "floor division",
    "relax.mod": "Mod",
    "relax.floor_mod": "Mod",
}
SHIFTS = ("relax.left_shift", "relax.right_shift")

_DIVIDE: dict[str, Callable[[TeTensor, TeTensor], TeTensor]] = {
    "relax.divide": topi.divide,
    "relax.floor_divide": topi.floor_divide,
    "relax.mod": topi.mod,
    "relax.floor_mod": topi.floor_mod,
}


def safe_division(name: str) -> Callable[[TeTensor, TeTensor], TeTensor]:
    """Relax operator ``name`` of `DIVISIONS` on integers, without what makes a processor trap: by 0, and min / -1."""
    quotient = name in ("relax.divide", "relax.floor_divide")

    def divide(dividend: TeTensor, divisor: TeTensor) -> TeTensor:
        one = tirx.const(1, divisor.dtype)
        safe = _each(divisor, lambda d: tirx.Select(_traps(d), one, d))
        result = _DIVIDE[name](dividend, safe)
        if not quotient:
            return result  # the remainder of a division by 1 is 0
        result = topi.where(topi.equal(divisor, tirx.const(0, divisor.dtype)), topi.full_like(result, 0), result)
        if not str(divisor.dtype).startswith("int"):
            return result
        return topi.where(topi.equal(divisor, tirx.const(-1, divisor.dtype)), _negative(dividend), result)

    return divide


def _traps(divisor: Expr) -> Expr:
    zero = tirx.EQ(divisor, tirx.const(0, divisor.ty.dtype))
    signed = str(divisor.ty.dtype).startswith("int")
    return tirx.Or(zero, tirx.EQ(divisor, tirx.const(-1, divisor.ty.dtype))) if signed else zero


def _negative(tensor: TeTensor) -> TeTensor:
    """Minus ``tensor``; of the smallest integer itself, for LLVM leaves open what an overflow gives, unsigned too."""
    smallest = tirx.min_value(str(tensor.dtype))
    zero = tirx.const(0, tensor.dtype)
    return _each(tensor, lambda value: tirx.Select(tirx.EQ(value, smallest), value, zero - value))


def _each(tensor: TeTensor, function: Callable[[Expr], Expr]) -> TeTensor:
    return te.compute(tensor.shape, lambda *place: function(tensor(*place)), tag=topi.tag.ELEMWISE)


def safe_shift(name: str) -> Callable[[TeTensor, TeTensor], TeTensor]:
    """Relax operator ``name`` of `SHIFTS`, which LLVM leaves open for shifts by the width or more."""

    def shift(value: TeTensor, amount: TeTensor) -> TeTensor:
        last = int(tirx.const(0, value.dtype).ty.dtype.bits) - 1

        def bounded(a: Expr) -> Expr:
            most = tirx.const(last, amount.dtype)
            return tirx.Select(_beyond(a, last), most, a)

        inside = _each(amount, bounded)
        if name == "relax.right_shift" and str(value.dtype).startswith("int"):
            return topi.right_shift(value, inside)
        result = (topi.left_shift if name == "relax.left_shift" else topi.right_shift)(value, inside)
        return topi.where(_each(amount, lambda a: _beyond(a, last)), topi.full_like(result, 0), result)

    return shift


def _beyond(amount: Expr, last: int) -> Expr:
    high = tirx.GT(amount, tirx.const(last, amount.ty.dtype))
    return tirx.Or(high, amount < 0) if str(amount.ty.dtype).startswith("int") else high
