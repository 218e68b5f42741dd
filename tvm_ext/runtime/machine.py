"""TVM's VirtualMachine for programs with several threads: one call at a time, and no mixing of their sequences.

A VirtualMachine of TVM has one stack and one return value. Two calls at once write into each other's registers, which
ends in wrong results, type errors or the death of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tvm
from tvm.runtime.vm import VirtualMachine

from tvm_ext import forks
from tvm_ext.errors import ConcurrentUseError, ForkError
from tvm_ext.forks import RunLock

if TYPE_CHECKING:
    from tvm_ext._tvm import Executable

_OWN = 'give each thread its own: lib["default"](device) or lib.vm(device), which share the code and the constants'

_ReentrantLock: Any = type(threading.RLock())  # in C: its own `__exit__` is the quickest

_STATEFUL = ("_invoke_closure", "_save_function", "_set_input", "_invoke_stateful", "_set_instrument")
"""What TVM's VirtualMachine calls inside; the functions of ``get_outputs`` are called under one lock there."""


class ThreadSafeMachine(VirtualMachine):  # type: ignore[misc]
    """A VirtualMachine that any number of threads may call: ``machine["main"](*inputs)``; a second call waits.

    ``set_input``, ``invoke_stateful`` and ``get_outputs`` are three calls, between which another thread may come. Where
    that changed what a thread set or computed, its next call raises ConcurrentUseError instead of using the other's.

    Instances share code, and constants on CPUs; whoever wants calls to run side by side makes one for each thread.
    """

    def __init__(self, executable: Executable, device: tvm.runtime.Device) -> None:
        forks.watch()
        self._lock = RunLock(
            ForkError(
                "this instance was running in another thread when the process was forked.",
                'make one in this process: lib.vm(device) or lib["default"](device)',
            )
        )
        self._turns = Turns()
        super().__init__(executable, device)
        for name in _STATEFUL:
            setattr(self, name, self._one_at_a_time(getattr(self, name)))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._one_at_a_time(super().__getitem__(name))

    def _one_at_a_time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        take, give = self._lock.take, self._lock.give  # not `with`: this is the way of every run

        def call(*arguments: Any) -> Any:
            take()
            try:
                if forks.left_behind:
                    return forks.call(function, arguments)
                return function(*arguments)
            finally:
                give()

        return call

    def set_input(self, func_name: str, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            super().set_input(func_name, *args, **kwargs)
            self._turns.has_set(func_name)

    def invoke_stateful(self, func_name: str) -> None:
        with self._lock:
            self._turns.check_inputs()
            super().invoke_stateful(func_name)
            self._turns.has_run()

    def get_outputs(self, func_name: str) -> Any:
        with self._lock:
            self._turns.check_outputs()
            return super().get_outputs(func_name)

    def time_evaluator(self, *arguments: Any, **settings: Any) -> Callable[..., Any]:
        return self._one_at_a_time(super().time_evaluator(*arguments, **settings))


class Turns:
    """Who set the inputs of the next run, and who ran: tells a thread that another one came between.

    Worked example: A sets x, B sets x, B runs, A runs. B is right; A would compute with B's x, which `check_inputs`
    refuses. A setting that was used by a run belongs to nobody any more: A sets x, B runs, B sets x, A runs is a way
    to work together. Likewise A runs, B runs, A reads is refused, and A runs, A sets, B runs, A reads is not.
    """

    __slots__ = ("_lost", "_ran", "_runs", "_set")

    def __init__(self) -> None:
        self._runs = 0
        self._set: dict[str, tuple[int, int]] = {}  # input -> the thread that set it last, runs before that
        self._lost: dict[int, set[str]] = {}  # thread -> inputs that another one replaced before a run
        self._ran: dict[int, int] = {}  # thread -> the number of its last run, until it sets an input

    def has_set(self, name: str) -> None:
        thread = threading.get_ident()
        before = self._set.get(name)
        if before is not None and before[0] != thread and before[1] == self._runs:
            self._lost.setdefault(before[0], set()).add(name)
        if self._lost:
            self._lost.get(thread, set()).discard(name)
        self._set[name] = thread, self._runs
        self._ran.pop(thread, None)

    def check_inputs(self) -> None:
        """Raise ConcurrentUseError where an input of this thread was replaced by another thread before it ran."""
        lost = self._lost and self._lost.get(threading.get_ident())
        if lost:
            raise ConcurrentUseError(
                f"another thread has set {sorted(lost)[0]!r} after this one and before it ran.", _OWN
            )

    def has_run(self, ident: Callable[[], int] = threading.get_ident) -> None:
        self._runs += 1
        self._ran[ident()] = self._runs

    def check_outputs(self) -> None:
        """Raise ConcurrentUseError where another thread has run since this thread did."""
        if self._ran.get(threading.get_ident(), self._runs) != self._runs:
            raise ConcurrentUseError("another thread has run since this one did: the outputs are its.", _OWN)


class OneThread(_ReentrantLock):  # type: ignore[misc]
    """A context that one thread at a time is in, as often as it likes; another one gets ConcurrentUseError at once."""

    def __enter__(self) -> None:
        if not self.acquire(False):
            raise ConcurrentUseError("this GraphModule is being used by another thread.", _OWN)
