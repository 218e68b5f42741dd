"""What every benchmark script shares: where results go, and how they are written, dated and printed.

Timing itself is `tvm_ext.bench.timing.interleave`, the machine's record `tvm_ext.bench.environment`.
"""

from __future__ import annotations

import json
import statistics
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

RAW = frozenset(("samples", "samples_s", "samples_us", "programs"))
"""Fields that hold samples, or every candidate looked at: the repository keeps their count and quantiles."""

DETAILS = frozenset((
    "block_tile", "counted_blocks", "counted_bound", "counted_shape", "explanation", "paper_name", "parameters",
    "plan", "predicted_bound", "refused", "refusals", "register_tile", "storage_padding", "tile", "unpipelined_bound",
))  # fmt: skip
"""Fields that say how a kernel was made: the repository leaves them out."""

DIGITS = 5
"""Significant digits of a number in the repository: more than any measurement has."""

RESULTS = Path(__file__).resolve().parent / "results"

__all__ = [
    "RESULTS", "Environment", "current_environment", "earlier_results", "median_of", "progress",
    "require_clean_commit", "result_path", "show", "summary", "write_results",
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
    """Write records as JSON, a line each, whole or not at all. Call it after each one: a kill then loses the last only.

    The repository keeps summaries: a path outside `RESULTS` gets the samples themselves. Raises DirtyTreeError as
    `result_path` does.
    """
    require_clean_commit(path, environment.commit)
    records: list[Any] = [_plain(item) for item in results]
    if path.resolve().is_relative_to(RESULTS.resolve()):
        records = [summary(item) for item in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({"what": what, "environment": asdict(environment)})[:-1]
    lines = ",\n".join(json.dumps(item) for item in records)
    write_atomically(path, f'{head},\n"results": [\n{lines}\n]}}\n'.encode())


def summary(value: Any) -> Any:
    """``value`` in short: numbers of five digits, quantiles of samples, other raw lists as their count, no details."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list | tuple):
        return [summary(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: item for key, item in value.items() if key not in DETAILS}
    return {key: summary(_brief(item)) if key in RAW else summary(item) for key, item in kept.items()}


def _brief(raw: Any) -> Any:
    if isinstance(raw, dict):  # of several contenders, or brief already
        return {key: _brief(item) for key, item in raw.items()}
    if not isinstance(raw, list | tuple) or not raw:
        return raw
    if not all(isinstance(item, int | float) for item in raw):
        return {"count": len(raw)}
    order = sorted(raw)
    high = order[min(len(order) - 1, len(order) * 9 // 10)]
    return {"count": len(raw), "least": order[0], "median": statistics.median(order), "p90": high}


def median_of(samples: Any) -> float:
    """Of a list of samples, or of what `summary` makes of it."""
    return float(samples["median"] if isinstance(samples, dict) else statistics.median(samples))


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
