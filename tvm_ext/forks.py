"""A process that is forked after it has run kernels: TVM's worker threads stay behind, and waiting for them never ends.

TVM gives every thread that runs kernels a pool of workers of its own. A fork copies the thread that calls it and no
other: in the child its pool has queues that nobody reads. The first parallel kernel there waits for ever, and so does
the end of the process, which destroys the pool: the C library waits for the workers that sleep on a condition variable
before it gives that up.

What is done from the first instance of a library (or the first build) on, which calls `watch`:

* Before a fork the workers of the thread that forks are woken, unless it surely has none. They then look for more
  work 300,000 times before they sleep again, which takes them 80 ms of processor time on a Zen 5; meanwhile they hold
  no lock and wait for nothing, so that what the child gets is a pool that can be taken down.
* The child makes the pool anew at once: the first thread that it starts could get the place of a worker in memory, and
  the pool would then wait for that one's end.
* Where a worker may have slept again before the child looked (`_stayed_awake`), the child leaves the pool alone and
  runs kernels in a thread of their own, whose pool is new. Its end would wait for ever: SIGALRM ends it instead,
  `_END_WITHIN_S` seconds after Python begins to end.

A lock that another thread holds stays locked in the child for good. `ForkAwareLock` is one that says so. TVM has such a
lock, too: one allocator, whose lock is held for less than a microsecond, serves all VirtualMachines of a process. A
child of a fork in such a moment waited in its first run for ever. So a fork waits until no instance runs, for
`_SETTLE_S` at most.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tvm.base import _LOADED_LIBS

from tvm_ext.errors import ForkError
from tvm_ext.options import pool_spin_count

left_behind = False
"""Whether this is a child whose surviving thread still has its parent's pool: kernels then go through `call`."""

_SHORTEST_YIELD_S = 1e-7
"""A `sched_yield` takes no less: 0.27 us on a Zen 5 at 4.5 GHz, most of it the way into the kernel and back."""

_END_WITHIN_S = 5.0  # a choice: a child that Python's end does not end within it is ended by a signal
_SETTLE_S = 1.0  # a choice: what a fork may wait for runs of other threads
_SETTLE_POLL_S = 1e-3  # a choice: how late a run begins after a fork
_POLL_S = 0.1  # a choice: how late a thread notices that its process was forked meanwhile
_BUSY_STATES = "RD"  # of proc(5): running, and waiting for a page
_BIG_CORES = 1  # ThreadGroup::AffinityMode::kBig, what a pool starts with

_watching = False
_generation = 0  # forks between the process that was started and this one
_survivor = 0  # the thread that `left_behind` is about
_parent = 0  # the process that forked last
_older_threads: frozenset[int] | None = None  # that `import tvm` found, which are no workers of its pools
_had_pool = True  # whether the thread that forks may have one
_activity_then: dict[int, Activity | None] = {}  # of each worker of its thread, right before


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


class RunLock(ForkAwareLock):
    """The lock of an instance's runs. Forks wait for the run that is under way, and new ones for the fork."""

    def __init__(self, error: ForkError) -> None:
        super().__init__(error)
        _run_locks.add(self)

    def take(self) -> None:
        while _settling and threading.get_ident() != _survivor_to_be:
            time.sleep(_SETTLE_POLL_S)
        super().take()


_run_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()
_settling = False  # whether a thread is about to fork
_survivor_to_be = 0  # that thread
_settled: list[RunLock] = []  # what it holds meanwhile


def _settle() -> None:
    """Before a fork: take the locks of all runs but those that take too long, whose instances refuse in the child."""
    global _settling, _survivor_to_be
    _settling, _survivor_to_be = True, threading.get_ident()
    end = time.monotonic() + _SETTLE_S
    _settled.extend(lock for lock in list(_run_locks) if lock._take(timeout=max(0.0, end - time.monotonic())))


def _resume() -> None:
    """After a fork, in the parent and in the child."""
    global _settling
    while _settled:
        _settled.pop().give()
    _settling = False


def note_threads() -> None:
    """Remember who is there at the end of `import tvm`, before which no thread has a pool."""
    global _older_threads
    _older_threads = _threads()


def _threads() -> frozenset[int] | None:
    try:
        return frozenset(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return None


def _may_have_pool() -> bool:
    """Whether there is a thread that is neither older than TVM nor Python's: of a pool, of this thread or another."""
    now = _threads()
    if now is None or _older_threads is None:
        return True
    pythons = {item.native_id for item in threading.enumerate() if not isinstance(item, threading._DummyThread)}
    return bool(now - _older_threads - pythons)


def watch() -> None:
    """Prepare every fork of this process from now on, at a cost of about 0.3 ms each."""
    global _watching
    if not _watching and hasattr(os, "register_at_fork"):
        _watching = True
        os.register_at_fork(before=_before, after_in_parent=_resume, after_in_child=_note_child)


def call(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """``function(*arguments)``, which may run kernels, wherever in this process that works."""
    if not _has_lost_workers():
        return function(*arguments)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as other:
        return other.submit(function, *arguments).result()


def require_pool() -> None:
    """Make sure that this thread can run parallel kernels; raises ForkError where it cannot."""
    if _has_lost_workers():
        raise ForkError(
            "TVM's threads slept when this process was forked, and kernels cannot run in its main thread.",
            "build in another thread, before the fork, or in a process that is spawned "
            '(multiprocessing.get_context("spawn"))',
        )


def _has_lost_workers() -> bool:
    return left_behind and threading.get_ident() == _survivor


def _before() -> None:
    _settle()
    _wake_workers()


def _wake_workers() -> None:
    """Before a fork: have the workers of this thread's pool awake for a while."""
    global _parent, _activity_then, _had_pool
    if _has_lost_workers():
        return  # no workers to wake; the child of this child is in the same state
    _had_pool = _may_have_pool()  # else none is started: the end of the process would wait for its workers
    _parent, _activity_then = os.getpid(), _activity(os.getpid(), _woken_workers()) if _had_pool else {}


def _note_child() -> None:
    """In the child of a fork: make the pool anew, or remember that its workers are lost."""
    global left_behind, _survivor, _generation, _older_threads
    _generation += 1
    _resume()
    if _has_lost_workers():
        return
    left_behind, _survivor = not _workers_were_awake(), threading.get_ident()
    if left_behind:
        atexit.register(_end_soon)
    elif _had_pool:
        _reset_pool()
    else:
        _older_threads = _threads()


def _workers_were_awake() -> bool:
    """Whether surely no worker slept while the process was forked."""
    now = _activity(_parent, _activity_then)
    return all(_stayed_awake(then, now[worker]) for worker, then in _activity_then.items())


def _stayed_awake(then: Activity | None, now: Activity | None) -> bool:
    """Whether a worker cannot have slept since: it did not wait, or ran for less than its search for work takes.

    A page that the fork protects is waited for as well, so that a wait proves nothing. On a busy machine much time
    passes in which a worker neither waits nor runs.
    """
    if then is None or now is None:
        return False
    return now.waits == then.waits or now.ran_s - then.ran_s < _SHORTEST_YIELD_S * pool_spin_count()


def _end_soon() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _END_WITHIN_S)


class Activity(NamedTuple):
    """What the system counts of a thread that runs, or would if a core were free."""

    waits: int  # how often it gave up its core of its own accord; a `sched_yield` is none of these
    ran_s: float


def _activity(process: int, threads: Iterable[int]) -> dict[int, Activity | None]:
    """Of each of a process's threads; None for one that sleeps, has ended, or is unknown."""
    return {thread: _activity_of(Path("/proc", str(process), "task", str(thread))) for thread in threads}


def _activity_of(thread: Path) -> Activity | None:
    try:
        ran_ns = int((thread / "schedstat").read_text().split()[0])
        lines = (thread / "status").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    if fields["State"][0] not in _BUSY_STATES:
        return None
    return Activity(int(fields["voluntary_ctxt_switches"]), ran_ns / 1e9)


# --- TVM's runtime ------------------------------------------------------------------------------------------------
def _runtime() -> Any:
    return _LOADED_LIBS["tvm_runtime"]


_TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def _woken_workers() -> set[int]:
    """The system's numbers of the workers of this thread's pool, which each were given something to do."""
    used, workers = int(_runtime_function("NumThreads")()), max_concurrency()
    if used < workers:  # somebody set fewer (runtime.config_threadpool), which would leave the others asleep
        _configure_pool(workers)
    seen: list[int] = []
    _runtime().TVMBackendParallelLaunch(_TASK(lambda *_: _note_thread(seen)), None, 0)
    if used < workers:
        _configure_pool(used)
    return set(seen) - {threading.get_native_id()}


def _note_thread(seen: list[int]) -> int:
    seen.append(threading.get_native_id())
    return 0


def _reset_pool() -> None:
    """Take down this thread's pool and make it anew. The threads of a parent count as ended: glibc has seen to that."""
    _runtime_function("ResetThreadPool")()


def _configure_pool(used: int) -> None:
    import tvm_ffi

    tvm_ffi.get_global_func("runtime.config_threadpool")(_BIG_CORES, used)


def max_concurrency() -> int:
    """With how many threads TVM's pools start: ``TVM_NUM_THREADS``, else the machine's cores.

    Unlike `tvm.runtime.num_threads` it starts no pool. On a busy machine the end of a process waits for a pool's
    workers, each of which yields 300,000 times first: minutes, where others want its core.
    """
    return int(_runtime_function("MaxConcurrency")())


def address_of_max_concurrency() -> int:
    """Of ``int tvm::runtime::threading::MaxConcurrency()``: how many threads TVM's pools start with."""
    return int(ctypes.cast(_runtime_function("MaxConcurrency"), ctypes.c_void_p).value or 0)


def _runtime_function(name: str) -> Any:
    """``tvm::runtime::threading::name()``, exported by TVM's runtime under its C++ name."""
    return getattr(_runtime(), f"_ZN3tvm7runtime9threading{len(name)}{name}Ev")
