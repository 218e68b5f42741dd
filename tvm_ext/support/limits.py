"""How much work a step of a build may take before it gives up on an operator, and why each limit is where it is.

A build that never ends is worse than a slow kernel. So every step counts what it is about to do (loads, computations,
tiles, elements: the same number on every machine), and where that passes its limit the operator goes the next simpler
way, which its entry in the report names. Only the last resort is a clock.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tvm_ext.errors import LimitPassed

if TYPE_CHECKING:
    from tvm_ext._tvm import IRModule

LIMIT_NOTES = "tvm_ext.limit_notes"
"""Module attribute: what limits have changed about the graph, a JSON list of sentences for the report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one build; the defaults are meant for everyone, other values for tests.

    Graph:

    joined_tensors
        Operands of one concatenation; more are joined in steps. Its kernel asks of each element in which operand it
        lies, one condition inside the other: over 2,000 of them stock TVM's recursion overflows the stack.
    chained_products
        Products of a chain that become one kernel at most. Every part of a chain up to this length is looked at, which
        takes some tens of milliseconds each.
    fused_operators
        Operators that are fused into one (stock TVM: 256). Planning compares all of them with each other; no network
        that we know fuses more than 30.

    Folding constants (`relay_passes/fold_calls.py`); what is not folded is computed by each run:

    folded_elements
        A result may have as many elements as this or as its operands together. Weights that are transposed or cast
        pass; a scalar that is expanded to a mask of 100 MB stays what it is until it is used.
    folded_filling
        The same for a result whose operands all have one element: storing it whole is a waste from the start.
    folded_points
        Points of a computation that NumPy evaluates one by one, about 10 ns each for each operation: a second or two.
    folded_products
        Multiplications of a product of constants that BLAS computes, about 0.1 ns each: two matrices of 4000^2.
    folded_calls_of_python
        Elements of functions that NumPy lacks (erf), about 0.2 us each.

    Kernels; what passes one of these is scheduled as stock TVM does it, unless it says otherwise:

    computations
        Computations of an operator. Planning looks at every pair of them.
    value_operations
        Loads, arithmetic and calls of one computation's value as it comes; each is looked at some ten times.
    inlined_operations
        The same after something was inlined into it; what is larger keeps a buffer between its computations.
        ``y = x + x; z = y + y; ...`` doubles at each step: 50 of them would be 2^50 loads.
    inlined_choices
        Choices (Select) of a computation after another that chooses was inlined into it. Stock TVM's simplifier looks
        at each under its condition and without it: four LeakyRelu in one expression, 40 choices, take 8 s.
    nested_extremes
        Maxima beside constants inside each other; what is deeper is stored first. Each binds what it is applied to, and
        takes stock TVM's lowering five times as long: 20 s for nine.
    search_steps
        Tiles that the construction of one operator looks at; beyond, it ranks what it has found by then. The
        convolutions and products of usual networks take up to 1,000.
    kernel_operations
        Operations of a kernel as it is emitted. LLVM takes about 0.1 ms for each; ours have some hundreds.
    expanded_functions
        Functions (exp, tanh, ...) of a kernel that are written as arithmetic, 20 to 60 operations each; where there
        are more, all are calls of the C library.
    pipelined_operations
        Operations of a GPU kernel that is looked at for pipelines; a larger one is not pipelined.
    construction_s
        Seconds of planning, construction and emission of one operator, a hundred times what the slowest takes: for
        what nobody has thought of. Slow machines and fast ones differ here, and only here.
    """

    joined_tensors: int = 16
    chained_products: int = 6
    fused_operators: int = 64
    folded_elements: int = 1 << 18
    folded_filling: int = 1024
    folded_points: int = 1 << 25
    folded_products: int = 1 << 36
    folded_calls_of_python: int = 1 << 20
    computations: int = 256
    value_operations: int = 8192
    inlined_operations: int = 512
    inlined_choices: int = 6
    nested_extremes: int = 4
    search_steps: int = 20_000
    kernel_operations: int = 50_000
    expanded_functions: int = 512
    pipelined_operations: int = 50_000
    construction_s: float = 120.0


_current: contextvars.ContextVar[Limits] = contextvars.ContextVar("tvm_ext.support.limits", default=Limits())  # noqa: B039 - frozen
_deadline: contextvars.ContextVar[float | None] = contextvars.ContextVar("tvm_ext.deadline", default=None)


def limits() -> Limits:
    """The limits that hold now."""
    return _current.get()


@contextlib.contextmanager
def limited(**values: float) -> Iterator[Limits]:
    """Other limits inside the ``with``, in this thread: for tests of what happens at a limit."""
    token = _current.set(replace(_current.get(), **values))  # type: ignore[arg-type]
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def check_count(name: str, count: int, what: str) -> None:
    """Raise LimitPassed where ``count``, of ``what``, is more than limit ``name`` allows."""
    limit = getattr(limits(), name)
    if count > limit:
        raise LimitPassed(f"it has {count} {what} (limit {limit})")


@contextlib.contextmanager
def timed_construction() -> Iterator[None]:
    """Starts the clock of limit ``construction_s`` for what runs inside, which asks `check_time` now and then."""
    token = _deadline.set(time.monotonic() + limits().construction_s)
    try:
        yield
    finally:
        _deadline.reset(token)


def check_time() -> None:
    """Raise LimitPassed where the construction that is under way has taken too long."""
    deadline = _deadline.get()
    if deadline is not None and time.monotonic() > deadline:
        raise LimitPassed(f"its construction took more than {limits().construction_s:g} s")


def with_notes(mod: IRModule, notes: Sequence[str]) -> IRModule:
    """``mod`` with ``notes`` among those that the report shows, each once."""
    known = notes_of(mod)
    new = list(dict.fromkeys([*known, *notes]))
    return mod if len(new) == len(known) else mod.with_attr(LIMIT_NOTES, json.dumps(new))


def notes_of(mod: IRModule) -> list[str]:
    """The notes that passes have left with `with_notes`."""
    attributes = dict(mod.attrs) if mod.attrs else {}
    return list(json.loads(str(attributes.get(LIMIT_NOTES, "[]"))))
