"""The five analysis steps of ALCOP §3.1: for each buffer its producer, its consumers, its load-and-use loop.

Step 1, the hints, is the `PipelinePlan` (or, while detecting, every buffer is asked about). Step 2 finds the producer
and the consumers, step 3 the load-and-use loop, step 4 which statements of it load and which use, and step 5, whether
the prologue of an inner pipeline belongs before the outer one's loop, is `fuses_with`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext._tvm import Buffer, BufferStore, Expr, For, ForKind, Stmt, tirx
from tvm_ext.analysis.computations import mentions
from tvm_ext.analysis.predicates import is_in
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.pipelines import PipelineRule

from .copies import Copy, is_register_load, read_copies
from .function import Function, PlacedAccess
from .loops import (
    POINTERS,
    BufferAccess,
    accesses_of,
    allocations_of,
    buffer_behind,
    children_of,
    enclosing_loops,
    integer,
    is_register,
    is_sequential,
    is_shared,
    op_name,
    open_wrappers,
    scope_of,
    size_of,
)
from .side_effects import side_effect_in, text_of

SHARED_LEVEL, REGISTER_LEVEL = 0, 1  # ALCOP's levels of the memory hierarchy, from the outer to the inner pipeline


class RefusedError(IllegalRewrite):
    """A buffer that may not be pipelined: ``rule`` says by which rule, ``problem`` why."""

    def __init__(self, rule: PipelineRule, problem: str) -> None:
        super().__init__(problem)
        self.rule: PipelineRule = rule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadUse:
    """A buffer, the loop that loads it anew in every iteration, and which children of that loop's body do so.

    ``copies`` are those of shared memory; registers are loaded by instructions. ``sources`` are the buffers that are
    copied from.
    """

    name: str
    buffer: Buffer
    level: int
    loop: Stmt
    parts: tuple[Stmt, ...]
    copies: tuple[Copy, ...]
    sources: tuple[Buffer, ...]

    @property
    def loop_name(self) -> str:
        return str(self.loop.loop_var.name)


def find_load_use(function: Function, name: str) -> LoadUse:
    """Steps 2 to 4 for the buffer called ``name``; raises `RefusedError` with the rule that keeps it unpipelined."""
    buffer = function.buffers[name].buffer
    touched = [access for access in function.accesses if access[2].buffer.same_as(buffer)]
    writes = [access for access in touched if access[2].writes]
    _check_known(buffer, touched, function)
    loop = _one_loop(buffer, writes, touched)
    _check_loop(loop, buffer)
    children = children_of(open_wrappers(loop.body)[1])
    parts = _parts(buffer, children, writes, loop)
    _check_conditions(buffer, writes, loop)
    _check_uses(buffer, touched, loop, children, parts)
    level = SHARED_LEVEL if is_shared(buffer) else REGISTER_LEVEL
    if level == SHARED_LEVEL:
        _check_that_all_threads_come(function, loop, buffer)
    copies = _copies(buffer, parts) if level == SHARED_LEVEL else ()
    if level == REGISTER_LEVEL:
        _check_register_loads(buffer, parts)
    sources = _sources(function, buffer, parts, level)
    _check_names(buffer, children, parts)
    return LoadUse(
        name=name, buffer=buffer, level=level, loop=loop, parts=tuple(parts), copies=tuple(copies), sources=sources
    )


def _check_that_all_threads_come(function: Function, loop: Stmt, buffer: Buffer) -> None:
    """A pipeline of shared memory has barriers: every thread must run every iteration."""
    for outer in [*function.around(loop), loop]:
        decides = outer.extent if isinstance(outer, For) else outer.condition
        if not function.is_same_for_all_threads(decides):
            what = f"loop {loop.loop_var.name} of {buffer.name} has barriers once it is pipelined, and not all threads"
            raise RefusedError("synchronisation", f"{what} may come to each of them: {text_of(decides)}")


def loads_from_shared(function: Function, buffer: Buffer) -> bool:
    """Whether ``buffer``, in registers, is written by something that reads shared memory."""
    writers = [s for _, s, access in function.accesses if access.buffer.same_as(buffer) and access.writes]
    return any(is_shared(other.buffer) and other.reads for s in writers for other in accesses_of(s))


def _check_known(buffer: Buffer, touched: list[PlacedAccess], function: Function) -> None:
    if size_of(buffer) is None:
        raise RefusedError("resources", f"the size of {buffer.name} is not known when the kernel is compiled")
    if function.is_viewed(buffer):
        raise RefusedError("sequential loop", f"{buffer.name} is seen through another buffer as well (aliased)")
    if not any(access.writes for _, _, access in touched):
        raise RefusedError("sequential loop", f"{buffer.name} is never loaded")
    for _, statement, access in touched:
        if not access.is_known:
            raise RefusedError("asynchronous copy", f"what {text_of(statement)} does with {buffer.name} is not known")


# --- step 3 -------------------------------------------------------------------------------------------------------
def _load_use_loop(buffer: Buffer, around: tuple[Stmt, ...], access: BufferAccess, touched: list[PlacedAccess]) -> Stmt:
    """From the load outwards, the first sequential loop whose variable does not index inside the buffer (§3.1)."""
    inside = _index_of(access)
    for loop in reversed(around):
        if isinstance(loop, tirx.While):
            raise RefusedError("sequential loop", f"{buffer.name} is loaded in a while loop, whose end is not known")
        if not isinstance(loop, For) or any(mentions(index, loop.loop_var) for index in inside):
            continue
        if is_sequential(loop, registers=is_register(buffer)):
            return loop
        if integer(loop.extent) == 1:
            continue
        kind = ForKind(loop.kind).name.lower()
        raise RefusedError("sequential loop", f"the loop {loop.loop_var.name} that reuses {buffer.name} is {kind}")
    sequential = [
        loop for loop in around if isinstance(loop, For) and is_sequential(loop, registers=is_register(buffer))
    ]
    own = [loop for loop in sequential if _uses_what_it_loads(loop, touched)]
    if any(mentions(index, loop.loop_var) for loop in own for index in inside):
        name = next(loop.loop_var.name for loop in own if any(mentions(index, loop.loop_var) for index in inside))
        reason = f"each iteration of {name} fills a place of its own in {buffer.name}: no loop reuses it"
        raise RefusedError("sequential loop", reason)
    raise RefusedError(
        "sequential loop", f"{buffer.name} is loaded once: its tiles belong to parallel threadblocks, no loop reuses it"
    )


def _index_of(access: BufferAccess) -> list[Expr]:
    node = access.node
    if isinstance(node, BufferStore):
        return list(node.indices)
    if op_name(node) == "tirx.tvm_access_ptr":
        return [node.args[2]]
    return [
        node.args[pointer.offset]
        for pointer in POINTERS.get(op_name(node), ())
        if pointer.offset is not None
        and pointer.writes
        and access.buffer.same_as(buffer_behind(node.args[pointer.position]))
    ]


def _uses_what_it_loads(loop: Stmt, touched: list[PlacedAccess]) -> bool:
    """Whether the buffer is read in ``loop``; the rounds of a copy do not."""
    return any(access.reads and any(outer.same_as(loop) for outer in around) for around, _, access in touched)


def _loop_or_refusal(
    buffer: Buffer, around: tuple[Stmt, ...], access: BufferAccess, touched: list[PlacedAccess]
) -> Stmt | RefusedError:
    try:
        return _load_use_loop(buffer, around, access, touched)
    except RefusedError as refusal:
        return refusal


def _one_loop(buffer: Buffer, writes: list[PlacedAccess], touched: list[PlacedAccess]) -> Stmt:
    """The loop that all loads of ``buffer`` belong to; ``touched`` are its loads and its uses."""
    answers = [_loop_or_refusal(buffer, around, access, touched) for around, _, access in writes]
    refusals = [answer for answer in answers if isinstance(answer, RefusedError)]
    loops = [answer for answer in answers if not isinstance(answer, RefusedError)]
    if not loops:
        raise refusals[0]
    first = loops[0]
    if refusals:
        reason = f"{buffer.name} is loaded in loop {first.loop_var.name}, and outside of it as well"
        raise RefusedError("sequential loop", reason)
    if not all(loop.same_as(first) for loop in loops):
        names = " and ".join(dict.fromkeys(str(loop.loop_var.name) for loop in loops))
        raise RefusedError("sequential loop", f"{buffer.name} is loaded in different loops: {names}")
    return first


def _check_loop(loop: Stmt, buffer: Buffer) -> None:
    name = loop.loop_var.name
    if integer(loop.min) != 0 or (loop.step is not None and integer(loop.step) != 1):
        raise RefusedError("sequential loop", f"loop {name} of {buffer.name} does not count 0, 1, 2 ...")
    if integer(loop.extent) == 1:
        raise RefusedError("sequential loop", f"loop {name} of {buffer.name} has one iteration: there is no next one")
    if "software_pipeline_stage" in loop.annotations:
        raise RefusedError("already pipelined", f"loop {name} is pipelined by its annotations")
    problem = side_effect_in(loop.body)
    if problem is not None:
        raise RefusedError("synchronisation", f"loop {name} of {buffer.name} {problem}")


# --- step 4 -------------------------------------------------------------------------------------------------------
def _parts(buffer: Buffer, children: list[Stmt], writes: list[PlacedAccess], loop: Stmt) -> list[Stmt]:
    parts = [child for child in children if any(a.buffer.same_as(buffer) and a.writes for a in accesses_of(child))]
    assert parts, (buffer, loop)
    return parts


def _check_conditions(buffer: Buffer, writes: list[PlacedAccess], loop: Stmt) -> None:
    """An iteration that loads nothing uses what an earlier one loaded, and that is in another version."""
    for around, _, _ in writes:
        for outer in around:
            if isinstance(outer, tirx.IfThenElse) and mentions(outer.condition, loop.loop_var):
                condition = text_of(outer.condition)
                raise RefusedError(
                    "sequential loop", f"{buffer.name} is not loaded in every iteration, only if {condition}"
                )


def _check_uses(
    buffer: Buffer, touched: list[PlacedAccess], loop: Stmt, children: list[Stmt], parts: list[Stmt]
) -> None:
    """Every read is in the loop, behind the loads: a value from an iteration before would be another version's."""
    for around, statement, access in touched:
        if access.reads and not any(outer.same_as(loop) for outer in around):
            raise RefusedError(
                "sequential loop", f"{buffer.name} is used outside its loop {loop.loop_var.name}: {text_of(statement)}"
            )
    last = max(position for position, child in enumerate(children) if any(child.same_as(part) for part in parts))
    for child in children[: last + 1]:
        if any(a.buffer.same_as(buffer) and a.reads for a in accesses_of(child)):
            raise RefusedError("sequential loop", f"{buffer.name} is read before it is loaded, or while it is")
    if not any(a.buffer.same_as(buffer) and a.reads for child in children[last + 1 :] for a in accesses_of(child)):
        raise RefusedError("sequential loop", f"{buffer.name} is not used in its loop {loop.loop_var.name}")
    for part in parts:
        private = [statement.buffer for statement in allocations_of(part)]
        if any(private_buffer.same_as(buffer) for private_buffer in private):
            raise RefusedError("sequential loop", f"{buffer.name} is allocated where it is loaded")
        for access in accesses_of(part):
            if access.writes and not access.buffer.same_as(buffer) and not is_in(access.buffer, private):
                raise RefusedError("asynchronous copy", f"what loads {buffer.name} writes {access.buffer.name} as well")


def _copies(buffer: Buffer, parts: list[Stmt]) -> list[Copy]:
    try:
        return [copy for part in parts for copy in read_copies(part, buffer)]
    except RefusedError:
        raise
    except IllegalRewrite as refusal:
        raise RefusedError("asynchronous copy", refusal.problem) from refusal


def _check_register_loads(buffer: Buffer, parts: list[Stmt]) -> None:
    for part in parts:
        why = is_register_load(part, buffer)
        if why is not None:
            raise RefusedError("asynchronous copy", why)


def _sources(function: Function, buffer: Buffer, parts: list[Stmt], level: int) -> tuple[Buffer, ...]:
    """What is read to load ``buffer``. For shared memory it must not change while the kernel runs."""
    found: list[Buffer] = []
    for part in parts:
        private = [statement.buffer for statement in allocations_of(part)]
        for access in accesses_of(part):
            if access.reads and not is_in(access.buffer, [*private, *found]):
                found.append(access.buffer)
    for source in found:
        if level == SHARED_LEVEL and function.is_written(source):
            raise RefusedError(
                "asynchronous copy", f"{buffer.name} is loaded from {source.name}, which the kernel writes as well"
            )
        if level == REGISTER_LEVEL and scope_of(source) == "global" and function.is_written(source):
            raise RefusedError("asynchronous copy", f"{buffer.name} is loaded from {source.name}, which is written")
    return tuple(found)


def _check_names(buffer: Buffer, children: list[Stmt], parts: list[Stmt]) -> None:
    for child in children:
        if isinstance(child, tirx.Bind) and any(mentions(part, child.var) for part in parts):
            raise RefusedError(
                "sequential loop", f"what loads {buffer.name} needs {child.var.name}, computed in the loop"
            )


# --- step 5 -------------------------------------------------------------------------------------------------------
def fuses_with(inner: list[LoadUse], outer: list[LoadUse], function: Function) -> str | None:
    """Why ``inner``'s pipeline cannot run on over the iterations of ``outer``'s loop; None where it can (§3.1, step 5).

    The inner loop must be reached once in each iteration, and everything that reads the outer buffers must be an inner
    load: then a version is free as soon as the inner pipeline has begun to load from the next one, and one barrier
    serves both purposes.
    """
    loop, around = inner[0].loop, outer[0].loop
    if not any(inner.same_as(loop) for child in children_of(around.body) for inner in [open_wrappers(child)[1]]):
        return f"loop {loop.loop_var.name} is not run once in each iteration of {around.loop_var.name}"
    if integer(loop.extent) is None:
        return f"the extent of loop {loop.loop_var.name} is not constant"
    parts = [part for use in inner for part in use.parts]
    for use in outer:
        for _, statement, access in function.accesses:
            if access.buffer.same_as(use.buffer) and access.reads and not any(_contains(p, statement) for p in parts):
                return f"{use.name} is also read by {text_of(statement)}"
    loaded = [use.buffer for use in outer]
    for use in inner:
        for source in use.sources:
            if not is_in(source, loaded) and _is_written_in(around, source):
                return f"{use.name} is loaded from {source.name}, which is not loaded ahead"
    return None


def _is_written_in(loop: Stmt, buffer: Buffer) -> bool:
    return any(access.buffer.same_as(buffer) and access.writes for access in accesses_of(loop.body))


def _contains(part: Stmt, statement: Stmt) -> bool:
    return any(leaf.same_as(statement) for _, leaf in enclosing_loops(part))
