"""Quick imports of stock TVM's intrinsics: each of hundreds asks for the source of every frame, and needs none."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_source_lines() -> Iterator[None]:
    """Within it `inspect.stack` reads no source: the more frames, as within pytest, the longer it takes (a minute)."""
    original = inspect.stack
    inspect.stack = _frames
    try:
        yield
    finally:
        inspect.stack = original


def _frames(context: int = 1) -> list[inspect.FrameInfo]:
    """As `inspect.stack`, without lines of source, whatever ``context``."""
    frame: types.FrameType | None = inspect.currentframe()
    found = []
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
    return found
