"""Quick imports: stock TVM asks for the source of every frame at each function of TVMScript, and imports PyTorch."""

from __future__ import annotations

import inspect
import os
import types
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = str(_TESTS / "support" / "without_torch")
PATH_WITHOUT_TORCH = os.pathsep.join((WITHOUT_TORCH, str(_TESTS.parent)))
"""PYTHONPATH of processes that find this source tree and no PyTorch, which TVM would import for two seconds."""


def start_without_torch() -> None:
    """Processes that are started from now on find this source tree, and no PyTorch; this one still does."""
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*PATH_WITHOUT_TORCH.split(os.pathsep), *before]))


def environment_with_torch() -> dict[str, str]:
    """The environment of processes that need PyTorch."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != WITHOUT_TORCH]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def leave_out_source_lines() -> None:
    """From now on `inspect.stack` reads no source, which takes the longer the more frames there are.

    Within pytest a function of TVMScript took half a second, and importing stock TVM's hundreds of intrinsics a minute.
    """
    inspect.stack = _frames


def _frames(context: int = 1) -> list[inspect.FrameInfo]:
    """As `inspect.stack`, without lines of source, whatever ``context``."""
    frame: types.FrameType | None = inspect.currentframe()
    found = []
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
    return found
