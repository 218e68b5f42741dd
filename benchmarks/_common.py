"""What every benchmark script shares: where results go, and how they are written, dated and printed.

Timing itself is `tvm_ext.testing.timing.interleave`, the machine's record `tvm_ext.testing.environment`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tvm_ext.files import write_atomically
from tvm_ext.testing.environment import Environment, current_environment

RESULTS = Path(__file__).resolve().parent / "results"

__all__ = ["RESULTS", "Environment", "current_environment", "progress", "result_path", "show", "write_results"]


def result_path(what: str, environment: Environment, folder: Path = RESULTS) -> Path:
    """``results/<date>-<what>.json``, by the date of the measurement."""
    return folder / f"{environment.date[:10]}-{what}.json"


def write_results(path: Path, what: str, environment: Environment, results: Sequence[Any]) -> None:
    """Write records as indented JSON, whole or not at all. Call it after each one: a kill then loses the last only."""
    document = {"what": what, "environment": asdict(environment), "results": [_plain(item) for item in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())


def _plain(record: Any) -> dict[str, Any]:
    fields = dict(record) if isinstance(record, dict) else asdict(record)
    fields.pop("environment", None)  # stated once for the file
    return fields


def show(renderable: Any) -> None:
    """Print a rich table, wide enough to be whole when the output is a file."""
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(renderable)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that says what is being done; silent when stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _step: None
        return
    with console.status("starting") as status:
        yield lambda step: status.update(step)
