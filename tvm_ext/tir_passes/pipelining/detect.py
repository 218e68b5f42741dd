"""Which buffers can be pipelined (ALCOP §2.1): the three rules, and for each refusal the rule and the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tvm_ext._tvm import (
    AllocBuffer,
    Buffer,
    BufferStore,
    Call,
    Expr,
    Node,
    PrimFunc,
    SBlock,
    Stmt,
    TensorLoad,
    structural_walk,
)
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.records.pipelines import PipelineRefusal, PipelineRule

from .analyse import LoadUse, RefusedError, find_load_use, fuses_with, loads_from_shared
from .function import Function
from .loops import accesses_of, enclosing_loops, is_register, is_shared, scope_of
from .move_functions import why_it_stays
from .part_copies import Loader

STAGES_HINT = "tvm_ext.pipeline_stages"
"""Annotation of a block or an allocation: how many versions its buffer shall have; 1 for no pipelining."""

MakeLoader = Callable[[LoadUse], Loader]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoadGroup:
    """Shared buffers loaded by one loop, and the register buffers whose pipeline runs on across its iterations."""

    loop: Stmt
    shared: tuple[tuple[LoadUse, Loader], ...]
    registers: tuple[LoadUse, ...] = ()


@dataclass(kw_only=True, eq=False)
class Detection:
    """What was found in a function.

    ``alone`` are register buffers whose pipeline would begin anew in each iteration of the loop around, and why.
    """

    function: Function
    groups: list[LoadGroup] = field(default_factory=list)
    alone: list[tuple[LoadUse, str]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    refusals: list[PipelineRefusal] = field(default_factory=list)

    def refuse(self, name: str, buffer: Buffer, rule: PipelineRule, reason: str) -> None:
        self.refusals.append(PipelineRefusal(buffer=name, scope=scope_of(buffer), rule=rule, reason=reason))


def detect(function: Function, make_loader: MakeLoader) -> Detection:
    """Apply the three rules to every buffer of the canonical ``function`` that something is loaded into.

    ``make_loader`` says how a buffer can be loaded ahead; it raises IllegalRewrite where it cannot (rule 1).
    """
    found = Detection(function=function)
    shared, registers = [], []
    for name, allocation in function.buffers.items():
        buffer = allocation.buffer
        if is_shared(buffer) and _is_loaded(function, buffer):
            load_use = _asked(found, name, buffer)
            loader = None if load_use is None else _loader(found, load_use, make_loader)
            if load_use is not None and loader is not None:
                shared.append((load_use, loader))
        elif is_register(buffer) and loads_from_shared(function, buffer) and not _accumulates(function, buffer):
            load_use = _asked(found, name, buffer)
            if load_use is not None:
                registers.append(load_use)
    groups = _agreeing(found, _by_loop(shared))
    found.groups = [_with_registers(found, loop, members, registers) for loop, members in groups]
    _note_alone(found, registers)
    return found


def _asked(found: Detection, name: str, buffer: Buffer) -> LoadUse | None:
    try:
        return find_load_use(found.function, name)
    except RefusedError as refusal:
        found.refuse(name, buffer, refusal.rule, refusal.problem)
        return None


def _loader(found: Detection, load_use: LoadUse, make_loader: MakeLoader) -> Loader | None:
    try:
        return make_loader(load_use)
    except IllegalRewrite as refusal:
        reason = refusal.problem
    if any(not copy.is_pure for copy in load_use.copies):
        stays = why_it_stays(found.function, load_use)
        if stays is None:
            found.moved.append(load_use.name)
            return None
        reason += f"; {stays}"
    found.refuse(load_use.name, load_use.buffer, "asynchronous copy", reason)
    return None


def _is_loaded(function: Function, buffer: Buffer) -> bool:
    """Whether something from global memory is stored in ``buffer``, at once or by way of a thread's registers."""
    for around, statement in function.leaves:
        if isinstance(statement, BufferStore) and statement.buffer.same_as(buffer):
            for access in accesses_of(statement.value):
                if scope_of(access.buffer) == "global" or _holds_loads(function, access.buffer, around):
                    return True
    return False


def _holds_loads(function: Function, buffer: Buffer, around: tuple[Stmt, ...]) -> bool:
    if not is_register(buffer) or not around:
        return False
    return any(
        isinstance(statement, BufferStore)
        and statement.buffer.same_as(buffer)
        and isinstance(statement.value, TensorLoad | Call)
        and any(scope_of(access.buffer) == "global" for access in accesses_of(statement.value))
        for _, statement in function.leaves
    )


def _accumulates(function: Function, buffer: Buffer) -> bool:
    """Whether a value of ``buffer`` depends on the one before: it is no load."""
    return any(
        isinstance(statement, BufferStore)
        and statement.buffer.same_as(buffer)
        and any(access.buffer.same_as(buffer) for access in accesses_of(statement.value))
        for _, statement in function.leaves
    )


# --- rule 3 -------------------------------------------------------------------------------------------------------
LoadsOfLoop = list[tuple[LoadUse, Loader]]


def _by_loop(shared: LoadsOfLoop) -> list[tuple[Stmt, LoadsOfLoop]]:
    groups: list[tuple[Stmt, LoadsOfLoop]] = []
    for load_use, loader in shared:
        group = next((members for loop, members in groups if loop.same_as(load_use.loop)), None)
        if group is None:
            groups.append((load_use.loop, [(load_use, loader)]))
        else:
            group.append((load_use, loader))
    return groups


def _agreeing(found: Detection, groups: list[tuple[Stmt, LoadsOfLoop]]) -> list[tuple[Stmt, LoadsOfLoop]]:
    """Groups, none inside another: a wait is for all copies of a scope, whichever loop they belong to.

    Of two nested loops the inner one keeps its pipeline, for it loads more often.
    """
    kept = []
    for loop, members in groups:
        inner = next((other for other, _ in groups if not other.same_as(loop) and _is_inside(other, loop)), None)
        if inner is None:
            kept.append((loop, members))
            continue
        for load_use, _ in members:
            reason = (
                f"loads of loop {loop.loop_var.name} and of loop {inner.loop_var.name} inside it would have to be "
                "waited for at different places"
            )
            found.refuse(load_use.name, load_use.buffer, "synchronisation", reason)
    return kept


def _is_inside(inner: Stmt, outer: Stmt) -> bool:
    return any(loop.same_as(inner) for around, _ in enclosing_loops(outer.body) for loop in around)


# --- registers ----------------------------------------------------------------------------------------------------
def _with_registers(found: Detection, loop: Stmt, members: LoadsOfLoop, registers: Iterable[LoadUse]) -> LoadGroup:
    """The group with the register loads that can run on across its iterations (§3.1, step 5)."""
    inside = [register for register in registers if _is_inside(register.loop, loop)]
    loops = _distinct([use.loop for use in inside])
    outer = [load_use for load_use, _ in members]
    for inner_loop in loops:
        candidates = [use for use in inside if use.loop.same_as(inner_loop)]
        if fuses_with(candidates, outer, found.function) is None:
            return LoadGroup(loop=loop, shared=tuple(members), registers=tuple(candidates))
    return LoadGroup(loop=loop, shared=tuple(members))


def _distinct(loops: Iterable[Stmt]) -> list[Stmt]:
    kept: list[Stmt] = []
    for loop in loops:
        if not any(loop.same_as(other) for other in kept):
            kept.append(loop)
    return kept


def _note_alone(found: Detection, registers: list[LoadUse]) -> None:
    taken = [register for group in found.groups for register in group.registers]
    for register in registers:
        if any(register is other for other in taken):
            continue
        found.alone.append((register, _why_alone(found, register, registers)))


def _why_alone(found: Detection, use: LoadUse, registers: list[LoadUse]) -> str:
    for group in found.groups:
        if _is_inside(use.loop, group.loop):
            together = [other for other in registers if other.loop.same_as(use.loop)]
            why = fuses_with(together, [load_use for load_use, _ in group.shared], found.function)
            return why or "another loop's loads run on already"
    return "no pipelined loop of shared memory is around it"


# --- what the user asks ---------------------------------------------------------------------------------------------
def read_hints(func: PrimFunc) -> dict[str, int]:
    """What the user asked for, buffer name to versions, from annotations of blocks and allocations.

    Raises InputError for a number that is none, and where two annotations disagree about a buffer.
    """
    found: dict[str, int] = {}

    def note(buffer: Buffer, value: Expr) -> None:
        name, count = str(buffer.name), _count(value, str(buffer.name))
        if found.setdefault(name, count) != count:
            raise InputError(
                f"{STAGES_HINT} says both {found[name]} and {count} for buffer {name}", "annotate one block of a buffer"
            )

    def block(node: Node) -> None:
        if STAGES_HINT in node.annotations:
            for region in node.writes:
                note(region.source, node.annotations[STAGES_HINT])

    def allocation(node: Node) -> None:
        if STAGES_HINT in node.annotations:
            note(node.buffer, node.annotations[STAGES_HINT])

    structural_walk(func.body, [(SBlock, block), (AllocBuffer, allocation)], order="pre")
    return found


def _count(value: Expr, name: str) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{STAGES_HINT} of buffer {name} is {value}", "an integer from 1 to 8") from error
    if not 1 <= count <= 8:
        raise InputError(f"{STAGES_HINT} of buffer {name} is {count}", "an integer from 1 to 8")
    return count
