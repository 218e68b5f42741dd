"""Measurements of TIR modules as MetaSchedule keeps them: the two files of its JSONDatabase, both ways.

Workloads and traces are taken over as the text that they are. Nothing of TVM's reads them here, so that a file of
somebody else's is no more than data; stock TVM does when it opens what was exported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

from tvm_ext.errors import ExportError, InputError
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, RefusedRecord, Trial
from tvm_ext.support.files import write_atomically

KIND = "tir"
"""`MeasuredWorkload.kind` of these; ``structure`` is a line of `WORKLOADS`, ``instructions`` the target as JSON."""

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
_FAILED_S = 1e9
"""MetaSchedule writes 1e10 seconds for a candidate that did not build or run."""

_MOST_BYTES = 256 << 20  # a choice: above the files of long searches; bounds the memory that reading takes

Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]


def is_metaschedule(folder: Path) -> bool:
    """Whether ``folder`` is a work folder of MetaSchedule's."""
    return (folder / WORKLOADS).is_file() and (folder / RECORDS).is_file()


def read_metaschedule(folder: Path) -> Iterator[Measurement | RefusedRecord]:
    """The tuning records in ``folder``; raises InputError where its files cannot be read."""
    workloads = _lines(folder / WORKLOADS)
    for number, line in enumerate(_lines(folder / RECORDS), 1):
        yield _read_record(line, workloads, f"{folder / RECORDS}, line {number}")


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} has more than {_MOST_BYTES} bytes.", "divide it")
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}.", "name MetaSchedule's work folder") from error


def _read_record(line: str, workloads: Sequence[str], place: str) -> Measurement | RefusedRecord:
    try:
        return _measurement(line, workloads)
    except (ValueError, RecursionError) as error:
        return RefusedRecord(place=place, reason=str(error)[:200])


def _measurement(line: str, workloads: Sequence[str]) -> Measurement:
    match json.loads(line):
        case [int(place), [trace, times, target, arguments]] if 0 <= place < len(workloads):
            structure = _dumped(json.loads(workloads[place]))
        case _:
            raise ValueError("it is no tuning record, or its workload is missing")
    seconds = times if isinstance(times, list) else []
    works = bool(seconds) and all(_is_time(second) for second in seconds)
    target = target if isinstance(target, dict) else {}
    cores = target.get("num-cores")
    workload = MeasuredWorkload(
        kind=KIND,
        structure=structure,
        layout="",
        dtype="",
        device=str(target.get("mcpu") or target.get("arch") or target.get("kind") or "unknown"),
        instructions=_dumped(target),
        threads=cores if isinstance(cores, int) and not isinstance(cores, bool) and cores > 0 else 0,
    )
    trial = Trial(
        configuration=_dumped({"trace": trace, "arguments": arguments}),
        outcome="ok" if works else "launch_failed",
        times_us=tuple(second * 1e6 for second in seconds) if works else (),
        reason="" if works else "MetaSchedule has no time of it",
        origin=_origin(line),
        taken_at_s=0.0,
    )
    return Measurement(workload=workload, trial=trial)


def _is_time(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _FAILED_S


def _origin(line: str) -> str:
    """The same line, imported again, is the same trial."""
    return f"metaschedule-{hashlib.sha256(line.encode()).hexdigest()[:24]}"


def write_metaschedule(measurements: Iterable[Measurement], folder: Path) -> int:
    """Write those of TIR modules into ``folder``, which becomes a work folder of MetaSchedule's; how many there are.

    Raises ExportError where that fails, InputError where ``folder`` already is one, or a record is none of
    MetaSchedule's.
    """
    if is_metaschedule(folder):
        raise InputError(f"{folder} has MetaSchedule's files already.", "name another folder")
    places: dict[str, int] = {}
    records = []
    for measurement in measurements:
        if measurement.workload.kind == KIND:
            place = places.setdefault(measurement.workload.structure, len(places))
            records.append(_dumped([place, _record(measurement)]))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot make {folder}: {error.strerror or error}.", "name another folder") from error
    for name, lines in ((WORKLOADS, places), (RECORDS, records)):
        write_atomically(folder / name, "".join(f"{line}\n" for line in lines).encode())
    return len(records)


def _record(measurement: Measurement) -> list[Json]:
    trial = measurement.trial
    seconds: list[Json] = [time_us / 1e6 for time_us in trial.times_us] or [_FAILED_S * 10]
    try:
        configuration, target = json.loads(trial.configuration), json.loads(measurement.workload.instructions)
        return [configuration["trace"], seconds, target or None, configuration["arguments"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        problem = (
            f"the configuration {trial.configuration[:60]!r} of a TIR module is no trace of MetaSchedule's: {error}."
        )
        raise InputError(problem, "export all measurements as JSON lines (without --metaschedule)") from error


def _dumped(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
