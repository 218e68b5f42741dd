"""Forked children for tests: what a function answers there, or how the child ended."""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0


def in_child(function: Callable[[], Any]) -> Any:
    """What ``function`` answers in a forked child, or the error it raises, raised here; a hang is an AssertionError."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _answer(function, writer)
    os.close(writer)
    try:
        return _outcome(child, reader)
    finally:
        os.close(reader)


def _answer(function: Callable[[], Any], writer: int) -> None:
    """Ends the process: what pytest would do at its end is the parent's business."""
    try:
        try:
            outcome: tuple[bool, Any] = True, function()
        except Exception as error:  # noqa: BLE001 - goes to the parent, whatever it is
            traceback.print_exc()
            outcome = False, error
        with os.fdopen(writer, "wb") as file:
            pickle.dump(outcome, file)
    finally:
        os._exit(0)


def _outcome(child: int, reader: int) -> Any:
    status = wait(child)
    assert status is not None, "the child hangs"
    assert status == 0, f"the child ended with status {status}"
    with os.fdopen(os.dup(reader), "rb") as file:
        worked, value = pickle.load(file)
    if not worked:
        raise value
    return value


def wait(child: int, limit_s: float = LIMIT_S) -> int | None:
    """The wait status of process ``child``; None, and it is killed, where it takes longer than ``limit_s``."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
