"""Take the results of a run on a GPU into ``benchmarks/results/``, and print what they come to.

    python benchmarks/gpu/import_results.py results.jsonl
    python benchmarks/gpu/import_results.py jobs --database measurements.db     # a folder of `run.py --jobs`

Writes ``benchmarks/results/<date>-gpu-<device>.json``, if the bundle was made from a clean commit. Speed-ups are
geometric means over a group's cases that both contenders did right; the counts say how many. Times and failures of our
kernels go into the store of measurements that builds read, and what came of a folder of jobs, as ``tvm-ext database
import`` does it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

sys.path.append(str(Path(__file__).resolve().parent.parent))

import typer
from _common import RESULTS, require_clean_commit
from rich.console import Console
from rich.table import Table

from tvm_ext.autotune.batch_files import is_job_folder
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.database_files import Merged, merge
from tvm_ext.errors import InputError
from tvm_ext.options import database_file
from tvm_ext.records.measurement import MOST_REASON, MeasuredWorkload, Measurement, Trial, TrialOutcome
from tvm_ext.support.files import write_atomically

OURS, TEMPLATES, MODELS = "ours", "cutlass", ("models", "schedules")
Record = dict[str, Any]
_KEYS = ("bundle", "commit", "device", "constructed_for", "id", "group", "contenders")


def read_results(path: Path) -> list[Record]:
    """The last record of each case; raises InputError for a file that `run.py` did not write, or of several bundles.

    A last line that a kill cut off is left out.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.", "name the file that run.py wrote") from error
    records = [
        _parse(path, number, line) for number, line in enumerate(lines, 1) if number < len(lines) or _is_json(line)
    ]
    if not records:
        raise InputError(f"{path} holds no results.", "run the bundle first")
    sources = {(item["bundle"], item["device"]) for item in records}
    if len(sources) > 1:
        raise InputError(f"{path} holds results of {len(sources)} bundles or devices.", "use a new file for each")
    return list({item["id"]: item for item in records}.values())


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True


def _parse(path: Path, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number} is no JSON: {error}.", "copy the file again") from error
    if not isinstance(record, dict) or not all(key in record for key in _KEYS):
        raise InputError(f"{path}:{number} is no result of run.py.", f"a result has {', '.join(_KEYS)}")
    return record


def best_of_ours(record: Record) -> float | None:
    """The time in microseconds of the fastest of our candidates; the first alone is contender "ours"."""
    times = [item.get("median_us") for name, item in record["contenders"].items() if name.startswith(OURS)]
    return min((time for time in times if time is not None), default=None)


def speedups(records: Iterable[Record], peer: str, of: str = OURS) -> list[float]:
    """``peer``'s time over that of ``of`` in every case that both did right."""
    pairs = [(_time_us(record, peer), _time_us(record, of)) for record in records]
    return [theirs / ours for theirs, ours in pairs if theirs and ours]


def _time_us(record: Record, contender: str) -> float | None:
    time: float | None = record["contenders"].get(contender, {}).get("median_us")
    return time


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def summarise(records: Sequence[Record]) -> dict[str, Any]:
    """By group: how many of ours are right, and the speed-ups over each peer."""
    groups = dict.fromkeys(record["group"] for record in records)
    return {group: _summary([item for item in records if item["group"] == group]) for group in groups}


def _summary(records: Sequence[Record]) -> dict[str, Any]:
    peers = dict.fromkeys(name for record in records for name in record["contenders"] if not name.startswith(OURS))
    states = [record["contenders"].get(OURS, {"state": "absent"})["state"] for record in records]
    gains = {peer: speedups(records, peer) for peer in peers}
    by_templates = {peer: speedups(records, peer, TEMPLATES) for peer in peers if not peer.startswith(TEMPLATES)}
    return {
        "cases": len(records),
        "states": {state: states.count(state) for state in dict.fromkeys(states)},
        "speedup": {peer: geometric_mean(values) for peer, values in gains.items()},
        "compared": {peer: len(values) for peer, values in gains.items()},
        "templates_speedup": {peer: geometric_mean(values) for peer, values in by_templates.items() if values},
    }


def show(summary: dict[str, Any], device: str) -> Table:
    """A row per group."""
    peers = list(dict.fromkeys(peer for item in summary.values() for peer in item["speedup"]))
    templates = list(dict.fromkeys(peer for item in summary.values() for peer in item["templates_speedup"]))
    titles = [*(f"vs {peer}" for peer in peers), *(f"{TEMPLATES} vs {peer}" for peer in templates)]
    table = Table("group", "cases", "ours", *titles, title=device)
    for group, item in summary.items():
        states = ", ".join(f"{count} {state}" for state, count in item["states"].items())
        cells = [_cell(item["speedup"].get(peer), item["compared"].get(peer, 0)) for peer in peers]
        gains = [item["templates_speedup"].get(peer) for peer in templates]
        cells += ["-" if gain is None else f"{gain:.2f}x" for gain in gains]
        table.add_row(group, str(item["cases"]), states, *cells)
    return table


def show_models(records: Sequence[Record]) -> Table | None:
    """Milliseconds of one run of each whole model by contender, or why there are none; None without models."""
    models = [record for record in records if record["group"] in MODELS]
    names = list(dict.fromkeys(name for record in models for name in record["contenders"]))
    table = Table("model", *names, title="one run, ms")
    for record in models:
        table.add_row(record["id"], *(_time(record["contenders"].get(name, {"state": "-"})) for name in names))
    return table if models else None


def _time(item: Record) -> str:
    return f"{item['median_us'] / 1e3:.3f}" if "median_us" in item else str(item["state"])


def _cell(gain: float | None, count: int) -> str:
    return "-" if gain is None else f"{gain:.2f}x ({count})"


def result_file(records: Sequence[Record], folder: Path = RESULTS) -> Path:
    device = re.sub(r"[^a-z0-9]+", "-", records[0]["device"].lower()).strip("-")
    return folder / f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}-gpu-{device}.json"


# --- into the store of measurements -------------------------------------------------------------------------------
OUTCOMES: dict[str, TrialOutcome] = {"ok": "ok", "wrong": "wrong", "failed": "launch_failed"}


def measurements_of(records: Iterable[Record]) -> list[Measurement]:
    """Trials of our kernels, each case a batch beside "ours", under the keys by which builds look for them.

    Raises InputError for results of another device than the kernels were made for: their keys name that one.
    """
    found = []
    for record in records:
        measured = record.get("measured", {})
        model = record["constructed_for"].rpartition("-")[2]
        if measured and model.lower() not in record["device"].lower():
            raise InputError(
                f"{record['device']} ran what was made for {record['constructed_for']}.",
                "make the bundle with --device of the GPU that runs it; --database none leaves the store alone",
            )
        name = hashlib.sha256(f"{record['bundle']} {record['device']} {record['id']}".encode()).hexdigest()[:24]
        for place, contender in enumerate(sorted(measured, key=lambda item: (item != OURS, item))):
            trial = _trial(record["contenders"][contender], measured[contender]["configuration"], f"{name}.{place}")
            about = measured[contender]["workload"]
            versions = tuple((str(key), str(value)) for key, value in about["versions"])
            found.append(Measurement(workload=MeasuredWorkload(**{**about, "versions": versions}), trial=trial))
    return found


def _trial(item: Record, configuration: str, origin: str) -> Trial:
    outcome = OUTCOMES[item["state"]]
    times = (float(item["median_us"]),) if outcome == "ok" else ()
    reason = str(item.get("why", ""))[:MOST_REASON]
    return Trial(
        configuration=configuration, outcome=outcome, times_us=times, reason=reason, origin=origin, taken_at_s=0.0
    )


def import_times(records: Sequence[Record], file: Path | None) -> int:
    """Add the trials of a bundle to the store in ``file``, or to the one that builds use; how many were new."""
    found, path = measurements_of(records), file or database_file()
    if not found or path is None:
        return 0
    with MeasurementDatabase(path) as store:
        return store.add(found)


def import_jobs(folder: Path, file: Path | None) -> Merged:
    """Add the trials of a folder of jobs to the store in ``file``, or to the one that builds use by default.

    Raises InputError without a single batch, or where builds use none.
    """
    path = file or database_file()
    if path is None:
        raise InputError("no store of measurements is in use (it is off).", "name a file with --database")
    if not is_job_folder(folder):
        raise InputError(f"{folder} has no batches of jobs.", "name the folder that run.py --jobs was given")
    with MeasurementDatabase(path) as store:
        return merge(store, folder)


def main(
    results: Annotated[Path, typer.Argument(help="what run.py wrote")],
    folder: Path = RESULTS,
    database: Annotated[Path | None, typer.Option(help="the store to add times to; none: leave it alone")] = None,
) -> None:
    """Take RESULTS into FOLDER, or into the store of measurements."""
    if results.is_dir():
        merged = import_jobs(results, database)
        print(merged, *merged.refused, sep="\n")
        return
    records = read_results(results)
    if database != Path("none"):
        print(f"{import_times(records, database)} measurements are new")
    summary = summarise(records)
    about = {key: records[0][key] for key in ("device", "constructed_for", "bundle", "commit")}
    path = result_file(records, folder)
    require_clean_commit(path, about["commit"])
    folder.mkdir(parents=True, exist_ok=True)
    document = {"what": "gpu", **about, "summary": summary, "results": records}
    write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
    console = Console(width=160)
    console.print(show(summary, about["device"]))
    models = show_models(records)
    if models is not None:
        console.print(models)
    print(path)


if __name__ == "__main__":
    typer.run(main)
