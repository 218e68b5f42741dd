"""Runs cases in worker processes: a crash or an endless loop is the failure of one case, never of the run.

A worker serves one case after another for as long as it lives, and is forked from a process that has imported TVM and
has run nothing: importing it takes longer than most cases.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any, Generic, TypeVar

Case = TypeVar("Case")
Result = TypeVar("Result")

CASES_PER_WORKER = 200
"""Then the process is replaced: each build leaves some memory behind."""


READY = "ready"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Generic[Case, Result]):
    """What is done with a case: ``attempt``, a module's function, in a worker; ``failure`` where that dies or is late.

    The latter takes the case, the outcome ("crashed" or "timed out"), the problem in words and the seconds.
    ``alone``: every case has a process of its own.
    """

    attempt: Callable[[Case], Result]
    failure: Callable[[Case, str, str, float], Result]
    alone: bool = False


class Worker(Generic[Case, Result]):
    """One child process, which answers each case sent to it by a result."""

    def __init__(self, trial: Trial[Case, Result]) -> None:
        self.trial = trial
        context = _context(trial)
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, trial.attempt), daemon=True)
        self.process.start()
        other.close()
        self._await_start()
        self.case: Case | None = None
        self.started = 0.0
        self.done = 0

    def _await_start(self) -> None:
        """Importing TVM takes seconds, which are not to count as the first case's."""
        try:
            assert self.connection.recv() == READY
        except EOFError:
            self.process.join()
            raise RuntimeError(f"a worker process did not start (exit code {self.process.exitcode})") from None

    def send(self, case: Case) -> None:
        self.case, self.started = case, time.monotonic()
        self.connection.send(case)

    def receive(self) -> Result:
        """The result of the case sent; a failure where the process has ended."""
        assert self.case is not None
        case, self.case = self.case, None
        try:
            result: Result = self.connection.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode
            seconds = time.monotonic() - self.started
            return self.trial.failure(case, "crashed", f"the process ended with code {code}", seconds)
        self.done += 1
        return result

    def give_up(self, limit_s: float) -> Result:
        """The failure of a case that has run out of time; ends the process."""
        assert self.case is not None
        case, self.case = self.case, None
        self.end()
        return self.trial.failure(case, "timed out", f"not done after {limit_s:g} s", limit_s)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    @property
    def usable(self) -> bool:
        return self.process.is_alive() and self.done < (1 if self.trial.alone else CASES_PER_WORKER)


def _context(trial: Trial[Case, Result]) -> ForkServerContext:
    """TVM's thread pool does not survive a fork: what is forked has imported TVM, and never runs a kernel."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tvm_ext.relay", trial.attempt.__module__])
    return context


def _serve(connection: Connection[Any, Any], attempt: Callable[[Any], Any]) -> None:
    """The child's loop: a case in, its result out, until the parent closes the pipe."""
    connection.send(READY)
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        connection.send(attempt(case))


def run_trials(cases: Iterable[Case], trial: Trial[Case, Result], *, jobs: int, limit_s: float) -> Iterator[Result]:
    """Results in the order in which they come; a case that runs for longer than ``limit_s`` seconds is ended."""
    waiting = iter(cases)
    workers: list[Worker[Case, Result]] = []
    try:
        workers += [Worker(trial) for _ in range(jobs)]
        for position in range(jobs):
            workers[position] = _next(workers[position], waiting)
        while any(worker.case is not None for worker in workers):
            yield from _collect(workers, waiting, limit_s)
    finally:
        for worker in workers:
            worker.end()


def _collect(workers: list[Worker[Case, Result]], waiting: Iterator[Case], limit_s: float) -> Iterator[Result]:
    """What is ready within the time until the next worker's limit; each worker is given its next case."""
    busy = [worker for worker in workers if worker.case is not None]
    left = min(worker.started + limit_s for worker in busy) - time.monotonic()
    ready = wait([worker.connection for worker in busy], timeout=max(0.0, left))
    for position, worker in enumerate(workers):
        if worker.case is None:
            continue
        if worker.connection in ready:
            yield worker.receive()
        elif time.monotonic() - worker.started >= limit_s:
            yield worker.give_up(limit_s)
        else:
            continue
        workers[position] = _next(worker, waiting)


def _next(worker: Worker[Case, Result], waiting: Iterator[Case]) -> Worker[Case, Result]:
    """The worker, or a fresh one in its place, with the next case if there is one."""
    case = next(waiting, None)
    if case is None:
        return worker
    if not worker.usable:
        worker.end()
        worker = Worker(worker.trial)
    worker.send(case)
    return worker
