"""A function that runs the function of one step as often as a tensor is long: see `records/step_loop.py`. ::

    last[...] = first[...]                              # of each carried state
    for step in range(steps):
      at = step                                         # steps - 1 - step of a reversed loop
      the step's body, its inputs and results read and written at [at, ...], its states in last
      last[...] = new[...]

With ``rows``, where there are that many places: ::

    for block in range(ceildiv(steps, rows)):
      first = min(block * rows, steps - rows)           # the last block does some rows again
      the step's body, row r read and written at [first + r, ...]

and else the body once, on copies that have the last place as often as is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from tvm_ext._tvm import (
    Buffer,
    BufferStore,
    Expr,
    IRModule,
    PassContext,
    PrimFunc,
    SBlock,
    Sequential,
    Stmt,
    TensorLoad,
    Var,
    nodes_in,
    s_tir,
    structural_map,
    tirx,
)
from tvm_ext.analysis.computations import dtype_of, mentions, substitute
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.step_loop import StepLoop

from .build_ir import (
    INDEX_DTYPE,
    SERIAL,
    allocate,
    flat,
    index,
    load,
    loop,
    nest,
    new_buffer,
    rename_apart,
    sequence,
    store,
)

_Place = Callable[[Sequence[Expr]], list[Expr]]


def step_loop(step: PrimFunc, plan: StepLoop) -> PrimFunc:
    """The loop of ``plan`` over ``step``, with its attributes; raises IllegalRewrite where ``step`` cannot be moved."""
    step = without_blocks(step)
    writer = _States(step, plan) if plan.rows is None else _Rows(step, plan, plan.rows)
    body = writer.body()
    made = PrimFunc(writer.params, body, step.ret_type).with_attrs({**(step.attrs or {}), "s_tir": True})
    with _own_context():
        return rename_apart(made)  # the body may be there twice


def without_blocks(func: PrimFunc) -> PrimFunc:
    """``func`` as loops over the buffers that it has; itself where it has no blocks."""
    if not nodes_in(func.body, SBlock):
        return func
    lowering = s_tir.transform
    passes = [
        lowering.LowerInitBlock(), lowering.PlanAndUpdateBufferAllocationLocation(), lowering.ConvertBlocksToOpaque(),
        lowering.LowerMatchBuffer(), lowering.LowerOpaqueBlock(),
    ]  # fmt: skip
    with _own_context():
        return Sequential(passes)(IRModule({"main": func.with_attr("s_tir", True)}))["main"]


def _own_context() -> PassContext:
    """Without the caller's instruments: what is run in it is part of one function's making."""
    return PassContext(config=dict(PassContext.current().config))


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """A parameter of the step, what holds all of it in the loop, and which axis of that is the loop's."""

    own: Buffer
    whole: Buffer
    axis: int


class _States:
    """Writes a loop over single steps, with what they carry; ``params`` are its parameters."""

    def __init__(self, step: PrimFunc, plan: StepLoop) -> None:
        self.step, self.plan = step, plan
        self.extent = Var("steps", INDEX_DTYPE) if plan.steps is None else index(plan.steps)
        inputs, results = step.params[: plan.input_count], step.params[plan.input_count :]
        self.moved = [self._whole(inputs[number]) for number in plan.sliced]
        self.moved += [self._whole(results[number]) for number in plan.collected]
        self.first = [inputs[own] for own, _ in plan.carried]
        self.given = [results[number] for _, number in plan.carried]
        self.last = [_declared(buffer.ty.shape, buffer) for buffer in self.given]
        self.params = [buffer if (whole := self._kept(buffer)) is None else whole for buffer in inputs]
        self.params += [*(item.whole for item in self.moved[len(plan.sliced) :]), *self.last]

    def _whole(self, own: Buffer) -> _Moved:
        return _Moved(own, _declared([self.extent, *own.ty.shape], own), 0)

    def _kept(self, own: Buffer) -> Buffer | None:
        """What holds ``own`` of all steps; None where nothing does."""
        return next((item.whole for item in self.moved if item.own.same_as(own)), None)

    def body(self) -> Stmt:
        passing = [buffer for buffer in self.given if self._kept(buffer) is None]
        new = [new_buffer(_extents(buffer), dtype_of(buffer), f"{buffer.name}_new") for buffer in passing]
        table = [*zip(self.first, self.last, strict=True), *zip(passing, new, strict=True)]

        def one(step: Expr) -> Stmt:
            at = self.extent - index(1) - step if self.plan.is_reverse else step
            inside = substitute(_moved(self.step.body, self.moved, lambda indices, _: [at, *indices]), table)
            return sequence(
                inside, *(self._carry(own, last, at, table) for own, last in zip(self.given, self.last, strict=True))
            )

        begin = [_copy(first, last) for first, last in zip(self.first, self.last, strict=True)]
        return sequence(*map(allocate, new), *begin, loop(self.extent, SERIAL, "step", one))

    def _carry(self, own: Buffer, last: Buffer, at: Expr, table: Sequence[tuple[Buffer, Buffer]]) -> Stmt:
        """What a step gives, as the next one's state."""
        whole = self._kept(own)
        if whole is None:
            return _copy(next(new for old, new in table if old.same_as(own)), last)
        return _copy(whole, last, lambda indices: [at, *indices])


class _Rows:
    """Writes a loop over blocks of rows; ``params`` are its parameters."""

    def __init__(self, step: PrimFunc, plan: StepLoop, rows: int) -> None:
        self.step, self.rows, self.extent = step, rows, Var("steps", INDEX_DTYPE)
        sliced = [step.params[number] for number in plan.sliced]
        collected = [step.params[plan.input_count + number] for number in plan.collected]
        self.moved = [self._whole(*pair) for pair in zip([*sliced, *collected], plan.axes, strict=True)]
        self.sliced, self.collected = self.moved[: len(sliced)], self.moved[len(sliced) :]
        self.params = [next((m.whole for m in self.moved if m.own.same_as(own)), own) for own in step.params]

    def _whole(self, own: Buffer, axis: int) -> _Moved:
        return _Moved(own, _declared(_replaced(list(own.ty.shape), axis, self.extent), own), axis)

    def body(self) -> Stmt:
        count, size = self.extent, index(self.rows)

        def block(number: Expr) -> Stmt:
            first = tirx.min(number * size, count - size)
            return _moved(self.step.body, self.moved, lambda at, item: _replaced(at, item.axis, first + at[item.axis]))

        blocks = loop(tirx.floordiv(count + index(self.rows - 1), size), SERIAL, "block", block)
        return tirx.IfThenElse(count >= size, blocks, self._short())

    def _short(self) -> Stmt:
        """The step once, on copies; nothing where there is no row at all.

        Copies are flat. Kernels address rows across their ends ([0, 47] is the last of 16 x 3), and stock TVM cuts off
        what it believes that nobody accesses.
        """
        copies = [replace(item, whole=_flat_like(item.own)) for item in self.moved]
        inside = _moved(self.step.body, copies, lambda at, item: [flat(at, _extents(item.own))])
        pairs = list(zip(self.moved, copies, strict=True))
        before = [self._filled(*pair) for pair in pairs[: len(self.sliced)]]
        behind = [self._emptied(*pair) for pair in pairs[len(self.sliced) :]]
        once = sequence(*(allocate(copy_.whole) for copy_ in copies), *before, inside, *behind)
        return tirx.IfThenElse(self.extent > index(0), once, None)

    def _filled(self, moved: _Moved, copy: _Moved) -> Stmt:
        """A copy of what is given, its last place as often as is missing."""
        last = self.extent - index(1)

        def element(at: list[Expr]) -> Stmt:
            value = load(moved.whole, _replaced(at, moved.axis, tirx.min(at[moved.axis], last)))
            return store(copy.whole, value, [flat(at, _extents(moved.own))])

        return _each(moved.own.ty.shape, element)

    def _emptied(self, moved: _Moved, copy: _Moved) -> Stmt:
        """What was computed, without the places that are not there."""

        def element(at: list[Expr]) -> Stmt:
            return store(moved.whole, load(copy.whole, [flat(at, _extents(moved.own))]), at)

        return _each(moved.whole.ty.shape, element)


def _replaced(at: Sequence[Expr], axis: int, value: Expr) -> list[Expr]:
    return [*at[:axis], value, *at[axis + 1 :]]


def _moved(body: Stmt, table: Sequence[_Moved], place: Callable[[list[Expr], _Moved], list[Expr]]) -> Stmt:
    """``body`` with each parameter of ``table`` accessed in what holds all of it, at ``place`` of its indices."""

    def found(buffer: Buffer) -> _Moved | None:
        return next((item for item in table if item.own.same_as(buffer)), None)

    def moved_load(item: TensorLoad) -> Expr:
        to = found(item.source)
        return item if to is None else load(to.whole, place(list(item.indices), to))

    def moved_store(item: BufferStore) -> Stmt:
        to = found(item.buffer)
        return item if to is None else store(to.whole, item.value, place(list(item.indices), to))

    body = structural_map(body, [(TensorLoad, moved_load), (BufferStore, moved_store)])
    for item in table:
        if mentions(body, item.own):
            raise IllegalRewrite(f"{item.own.name} is accessed by more than loads and stores")
    return body


def _declared(shape: Sequence[Expr], like: Buffer) -> Buffer:
    """A parameter of ``shape`` with the name, type and alignment of ``like``."""
    return tirx.decl_buffer(list(shape), dtype_of(like), like.name, data_alignment=int(like.ty.data_alignment))


def _extents(buffer: Buffer) -> list[int]:
    return [int(extent) for extent in buffer.ty.shape]


def _flat_like(buffer: Buffer) -> Buffer:
    """A buffer of its own as large as ``buffer``, in one dimension."""
    return new_buffer([prod(_extents(buffer))], dtype_of(buffer), f"{buffer.name}_rows")


def _copy(source: Buffer, target: Buffer, place: _Place | None = None) -> Stmt:
    """``target`` element by element, each read at ``place`` of its own indices."""
    return _each(target.ty.shape, lambda at: store(target, load(source, at if place is None else place(at)), at))


def _each(shape: Sequence[Expr], element: Callable[[list[Expr]], Stmt]) -> Stmt:
    """``element`` of all indices of ``shape``."""
    extents = [int(extent) if isinstance(extent, tirx.IntImm) else extent for extent in shape]
    return nest(extents, SERIAL, [f"i{axis}" for axis in range(len(extents))], lambda at: element(list(at)))
