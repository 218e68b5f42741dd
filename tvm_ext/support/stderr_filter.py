"""Keeps known harmless lines, which TVM's C++ code writes whatever its log level, off the error stream."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator

CONSTANT_SCOPES = re.compile(rb"Warning: Scope (Saving|Loaded):")
"""One such line per constant, written while an executable is saved or loaded."""

_ERROR_STREAM = 2  # POSIX: STDERR_FILENO


@contextlib.contextmanager
def without_lines(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """While this runs, what anyone in the process writes to file descriptor 2 is held back; then all of it appears
    but the lines in which ``pattern`` is found. A process without an error stream is left alone, and so is one with
    several Python threads, which it belongs to all of.
    """
    if threading.active_count() > 1:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            kept = os.dup(_ERROR_STREAM)
        except OSError:
            yield
            return
        held = stack.enter_context(tempfile.TemporaryFile())
        sys.stderr.flush()
        os.dup2(held.fileno(), _ERROR_STREAM)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, _ERROR_STREAM)
            os.close(kept)
            held.seek(0)
            _write_all(b"".join(line for line in held if not pattern.search(line)))


def _write_all(text: bytes) -> None:
    while text:
        text = text[os.write(_ERROR_STREAM, text) :]
