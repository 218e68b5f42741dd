"""A process that is forked after it has run kernels: TVM's worker threads stay behind, and waiting for them never ends.

TVM gives every thread that runs kernels a pool of workers of its own. A fork copies the thread that calls it and no
other: in the child its pool has queues that nobody reads. The first parallel kernel there waits for ever, and so does
the end of the process, which destroys the pool: the C library waits for the workers that sleep on a condition variable
before it gives that up.

What is done from the first instance of a library (or the first build) on, which calls `watch`:

* Before a fork the workers of the thread that forks are woken. They then look for more work 300,000 times before they
  sleep again, which takes them 80 ms of processor time on a Zen 5; meanwhile they hold no lock and wait for nothing, so
  that what the child gets is a pool that can be taken down.
* The child makes the pool anew, when it first needs it: who only reads files there gets no threads.
* Where a fork took so long that workers may have slept (`_workers_were_awake`), the child leaves the pool alone and
  runs kernels in a thread of their own, whose pool is new.

A lock that another thread holds stays locked in the child for good. `ForkAwareLock` is one that says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tvm.base import _LOADED_LIBS

from tvm_ext.errors import ForkError
from tvm_ext.options import pool_spin_count

left_behind = False
"""Whether this is a child whose surviving thread still has its parent's pool: kernels then go through `call`."""

_SHORTEST_YIELD_S = 1e-7
"""A `sched_yield` takes no less: 0.27 us on a Zen 5 at 4.5 GHz, most of it the way into the kernel and back."""

_POLL_S = 0.1
_USER_TIME, _SYSTEM_TIME = 11, 12  # of proc(5)'s fields, counted from the one behind the name
_BIG_CORES = 1  # ThreadGroup::AffinityMode::kBig, what a pool starts with

_watching = False
_surely_awake_s = 0.0  # for how long at least woken workers stay awake
_generation = 0  # forks between the process that was started and this one
_survivor = 0  # the thread that `left_behind` is about
_may_renew = False
_woken_at = 0.0
_parent = 0  # the process that forked last
_python_threads: set[str] = set()  # its threads that are no workers
_used_then_s: dict[str, float] = {}  # the processor time of its threads right before


class ForkAwareLock:
    """A re-entrant lock. Where another thread held it when the process was forked, taking it in the child is an error.

    Worked example: the parent builds in a thread while it forks. In the child that thread does not exist; an ordinary
    lock would be waited for for ever, and what it protects may be half changed.
    """

    def __init__(self, error: ForkError) -> None:
        self._lock = threading.RLock()
        self._taken_in = 0
        self._error = error
        self._take, self.give = self._lock.acquire, self._lock.release

    def take(self) -> None:
        """Wait for the lock; raises ForkError where nobody will ever give it back. `give` gives it back."""
        if not self._take(False):
            self._wait()
        self._taken_in = _generation

    def _wait(self) -> None:
        while not self._take(timeout=_POLL_S):
            if self._taken_in != _generation:
                raise ForkError(self._error.problem, self._error.remedy)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.give()


def watch() -> None:
    """Prepare every fork of this process from now on, at a cost of about 0.3 ms each."""
    global _watching, _surely_awake_s
    if not _watching and hasattr(os, "register_at_fork"):
        _watching, _surely_awake_s = True, _SHORTEST_YIELD_S * pool_spin_count()
        os.register_at_fork(before=_wake_workers, after_in_child=_note_child)


def call(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """``function(*arguments)``, which may run kernels, wherever in this process that works."""
    if _renewed():
        return function(*arguments)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as other:
        return other.submit(function, *arguments).result()


def require_pool() -> None:
    """Make sure that this thread can run parallel kernels; raises ForkError where it cannot."""
    if left_behind and not _renewed():
        raise ForkError(
            "this process was forked while TVM's threads slept, and kernels cannot run in its main thread.",
            "build in another thread, before the fork, or in a process that is spawned "
            '(multiprocessing.get_context("spawn"))',
        )


def _renewed() -> bool:
    """Whether this thread's pool has workers, if need be by making it anew."""
    global left_behind
    if not left_behind or threading.get_ident() != _survivor:
        return True
    if _may_renew:
        _reset_pool()
        left_behind = False
    return _may_renew


def _wake_workers() -> None:
    """Before a fork: have the workers of this thread's pool awake for a while."""
    global _parent, _python_threads, _used_then_s, _woken_at
    if left_behind and threading.get_ident() == _survivor:
        return  # no workers to wake; the child of this child is in the same state
    _parent, _used_then_s = os.getpid(), _thread_times_s(os.getpid())
    _python_threads = {str(thread.native_id) for thread in threading.enumerate()}
    _woken_at = time.monotonic()
    _run_nothing()


def _note_child() -> None:
    """In the child of a fork: remember whose pool has no workers, and whether it can be taken down."""
    global left_behind, _survivor, _may_renew, _generation
    _generation += 1
    thread = threading.get_ident()
    if left_behind and thread == _survivor:
        return
    left_behind, _survivor, _may_renew = True, thread, _workers_were_awake()


def _workers_were_awake() -> bool:
    """Whether no worker can have looked for work so often that it sleeps: that takes time, and processor time.

    On a busy machine much time passes in which none of them runs. Worked example: the fork took 50 ms, a worker's time
    went from 0.25 to 0.26 s in steps of 0.01; it has run for less than 0.02 s, and needs 0.03.
    """
    if time.monotonic() - _woken_at < _surely_awake_s:
        return True
    now_s = _thread_times_s(_parent)
    step_s = 1 / os.sysconf("SC_CLK_TCK")
    workers = now_s.keys() - _python_threads
    used_s = [now_s[name] - _used_then_s.get(name, 0) + step_s for name in workers]
    return bool(used_s) and max(used_s) <= _surely_awake_s


def _thread_times_s(process: int) -> dict[str, float]:
    """The processor time that each thread of a process has used, in the clock's steps; empty where that is unknown."""
    times = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for path in Path("/proc", str(process), "task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            fields = path.read_text().rpartition(")")[2].split()  # its name, in parentheses, may hold spaces
            times[path.parent.name] = tick_s * (int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME]))
    return times


# --- TVM's runtime ------------------------------------------------------------------------------------------------
def _runtime() -> Any:
    return _LOADED_LIBS["tvm_runtime"]


def _run_nothing() -> None:
    """Give every worker of this thread's pool something to do that does nothing; a task answers 0, as sched_yield."""
    used, workers = int(_runtime_function("NumThreads")()), int(_runtime_function("MaxConcurrency")())
    if used < workers:  # somebody set fewer (runtime.config_threadpool): the others cannot be reached
        _reset_pool()
        _configure_pool(used)
    else:
        _runtime().TVMBackendParallelLaunch(ctypes.CDLL(None).sched_yield, None, 0)


def _reset_pool() -> None:
    """Take down this thread's pool and make it anew. The threads of a parent count as ended: glibc has seen to that."""
    _runtime_function("ResetThreadPool")()


def _configure_pool(used: int) -> None:
    import tvm_ffi

    tvm_ffi.get_global_func("runtime.config_threadpool")(_BIG_CORES, used)


def _runtime_function(name: str) -> Any:
    """``tvm::runtime::threading::name()``, exported by TVM's runtime under its C++ name."""
    return getattr(_runtime(), f"_ZN3tvm7runtime9threading{len(name)}{name}Ev")
