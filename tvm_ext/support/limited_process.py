"""Running compilers: for a limited time, in threads, and telling people what they said."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tvm_ext.errors import CompileError

_SHOWN_LINES = 8  # a choice: of what a tool says is wrong
_TIME_TO_CLEAN_UP_S = 0.5  # a choice: for temporary files, between SIGTERM and SIGKILL


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """What to do about a program that cannot be started, takes too long, or fails with what it printed."""

    start: str
    limit: str
    failure: Callable[[str], str]


def run_limited(command: Sequence[str], time_limit_s: float, folder: Path | None = None, *, remedies: Remedies) -> str:
    """Run ``command`` in ``folder``; answers all that it printed. After ``time_limit_s`` it and its children are ended.

    Raises CompileError, with one of ``remedies``, where it cannot be started, takes too long, or fails.
    """
    shown = shlex.join(command)
    try:
        status, text = run_to_end(command, time_limit_s, folder)
    except OSError as error:
        raise CompileError(f"`{shown}` cannot be started: {error.strerror or error}.", remedies.start) from error
    except subprocess.TimeoutExpired as error:
        problem = f"`{shown}` took longer than {time_limit_s:g} s and was stopped."
        raise CompileError(problem, remedies.limit) from error
    if status:
        raise CompileError(f"`{shown}` failed (exit status {status}): {_first_errors(text)}", remedies.failure(text))
    return text


def run_to_end(
    command: Sequence[str], time_limit_s: float | None = None, folder: Path | None = None
) -> tuple[int, str]:
    """Run ``command`` in ``folder``; its exit status, and all that it printed.

    A compiler starts an assembler and a linker: all of them are in a process group of their own, and none is left
    behind, whether by a time limit or by Ctrl-C. A linker that goes on would write what the caller has just removed.
    Raises OSError where it cannot be started, subprocess.TimeoutExpired after ``time_limit_s``.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    _RUNNING[process] = threading.get_ident()
    try:
        text, _ = process.communicate(timeout=time_limit_s)
    finally:
        _end_group(process)
        _RUNNING.pop(process, None)
    return process.returncode, text


_RUNNING: dict[subprocess.Popen[str], int] = {}
"""Processes, and the threads that run them."""


def end_running(threads: Collection[int] | None = None) -> None:
    """Kill what these threads (None: all) are running, for an end that does not wait for them."""
    for process, thread in tuple(_RUNNING.items()):
        if threads is None or thread in threads:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def worker_threads(count: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that, where something fails, finishes what it is at and drops the rest.

    Ctrl-C waits for nothing: LLVM cannot be stopped, and may be at a kernel for seconds. Compilers that the threads run
    are ended.
    """
    threads: set[int] = set()
    pool = ThreadPoolExecutor(count, name, initializer=lambda: threads.add(threading.get_ident()))
    wait = True
    try:
        yield pool
    except KeyboardInterrupt:
        wait = False
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)
        if not wait:
            end_running(threads)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End what is left of the process group: after a normal end nothing, else all of it.

    Compilers remove their temporary files when they are asked to end; those that do not in time are killed.
    """
    if process.poll() is not None:
        return
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_TIME_TO_CLEAN_UP_S if sign == signal.SIGTERM else None)


def _first_errors(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("ptxas info")]
    wrong = [line for line in lines if "error" in line.lower() or "fatal" in line.lower()] or lines
    return "\n".join(wrong[:_SHOWN_LINES]) or "it printed nothing"
