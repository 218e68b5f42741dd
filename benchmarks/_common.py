"""What every benchmark script shares: where results go, and how they are written, dated and printed.

Timing itself is `tvm_ext.bench.timing.interleave`, the machine's record `tvm_ext.bench.environment`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # for benchmarks.networks and tests.support

from rich.console import Console

from tvm_ext.bench.environment import DIRTY, Environment, current_environment, is_clean
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.support.files import write_atomically

RESULTS = Path(__file__).resolve().parent / "results"

__all__ = [
    "RESULTS", "Environment", "current_environment", "earlier_results", "progress", "require_clean_commit",
    "result_path", "show", "write_results",
]  # fmt: skip


class DirtyTreeError(UnsupportedEnvironmentError):
    """A result of the repository would not say from which sources it was measured."""


def result_path(what: str, environment: Environment, output: Path | None = None) -> Path:
    """``output``, else ``results/<date>-<what>.json``, by the date of the measurement. Call it before measuring.

    Raises DirtyTreeError where the file is one of the repository's and ``environment`` has no clean commit.
    """
    path = output or RESULTS / f"{environment.date[:10]}-{what}.json"
    require_clean_commit(path, environment.commit)
    return path


def require_clean_commit(path: Path, commit: str | None) -> None:
    """Raise DirtyTreeError where ``path`` is in `RESULTS` and ``commit`` does not name the sources measured."""
    if not path.resolve().is_relative_to(RESULTS.resolve()) or is_clean(commit):
        return
    state = f"the sources differ from commit {commit.rstrip(DIRTY)}" if commit else "this is no git checkout"
    raise DirtyTreeError(
        f"{path.name} is not written to {RESULTS}: {state}.",
        "commit what `git status` lists and run it again, or write elsewhere (the script's --output, --out, --dry)",
    )


def earlier_results(path: Path, environment: Environment) -> list[dict[str, Any]]:
    """The records that ``path`` holds, to go on with; none where it is not there yet.

    Raises DirtyTreeError where they are of another commit: one file states one.
    """
    if not path.is_file():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["environment"]["commit"] != environment.commit:
        raise DirtyTreeError(
            f"{path} was measured from commit {document['environment']['commit']}, not {environment.commit}.",
            "remove it and measure all of it, or write elsewhere (--output)",
        )
    records: list[dict[str, Any]] = document["results"]
    return records


def write_results(path: Path, what: str, environment: Environment, results: Sequence[Any]) -> None:
    """Write records as indented JSON, whole or not at all. Call it after each one: a kill then loses the last only.

    Raises DirtyTreeError as `result_path` does.
    """
    require_clean_commit(path, environment.commit)
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
