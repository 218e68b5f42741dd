"""Runs cases in worker processes, so that a crash or a hang costs one case and is seen.

    python -m tests.onnx_backend.harness --system ours --output results.json

writes {system: {case: outcome}}. An outcome is "pass", "pass bound", or begins with

    refused:  an error of ours says why, when the model is imported, built or run
    wrong:    another answer than ONNX's, without an error
    error:    an exception that is none of ours
    crash:    the process died
    hang      it did not come back
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.onnx_backend.cases import Case, load_cases, of_each_operator
from tests.onnx_backend.systems import SYSTEMS, NothingToBindError, WrongAnswerError
from tvm_ext.errors import TvmExtError

_FORK = multiprocessing.get_context("fork")
# Some hundred times the slowest case: what exceeds it hangs.
CASE_SECONDS = 90.0
NOT_APPLICABLE = "not applicable"
KINDS = ("pass", "pass bound", "refused", "wrong", "error", "crash", "hang")


@dataclass(kw_only=True, slots=True)
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    case: str

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def run_cases(
    cases: Mapping[str, Case], systems: Sequence[str], workers: int, log: Path | None = None
) -> dict[str, dict[str, str]]:
    """{system: {case: outcome}} for every case, in `workers` forked processes; `log` gets a line for each at once."""
    todo = iter([(system, name) for system in systems for name in cases])
    outcomes: dict[str, dict[str, str]] = {system: {} for system in systems}
    active: dict[Connection, tuple[str, _Worker]] = {}

    def start_next(worker: _Worker | None) -> None:
        job = next(todo, None)
        if job is None:
            if worker is not None:
                worker.stop()
            return
        worker = worker or _start(cases)
        worker.case = job[1]
        worker.connection.send(job)
        active[worker.connection] = (job[0], worker)

    for _ in range(workers):
        start_next(None)
    while active:
        ready = wait(list(active), timeout=CASE_SECONDS)
        if not ready:
            # Nobody has finished for the whole limit: every active case hangs.
            for system, worker in _drain(active):
                outcomes[system][worker.case] = "hang"
                worker.stop()
                start_next(None)
            continue
        for connection in ready:
            assert isinstance(connection, Connection)
            system, worker = active.pop(connection)
            outcome, survivor = _receive(worker)
            outcomes[system][worker.case] = outcome
            if log is not None:
                with log.open("a") as stream:
                    stream.write(f"{system} {worker.case} {outcome}\n")
            start_next(survivor)
    return {system: dict(sorted(found.items())) for system, found in outcomes.items()}


def _drain(active: dict[Connection, tuple[str, _Worker]]) -> Iterator[tuple[str, _Worker]]:
    jobs = list(active.values())
    active.clear()
    yield from jobs


def _receive(worker: _Worker) -> tuple[str, _Worker | None]:
    try:
        return str(worker.connection.recv()), worker
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        worker.stop()
        return f"crash: exit code {code}", None


def _start(cases: Mapping[str, Case]) -> _Worker:
    ours, theirs = _FORK.Pipe()
    process = _FORK.Process(target=_serve, args=(ours, theirs, cases), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process=process, connection=ours, case="")


def _serve(parents: Connection, connection: Connection, cases: Mapping[str, Case]) -> None:
    # With this copy of the parent's end open, the parent's death would go unnoticed.
    parents.close()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    warnings.simplefilter("ignore")
    while True:
        try:
            system, name = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(system, cases[name]))


def _outcome(system: str, case: Case) -> str:
    """`pass`; `pass bound` where the first way is refused and a later one passes; otherwise the worst failure."""
    first, *others = SYSTEMS[system]
    failure = _failure(first, case)
    if failure is None:
        return "pass"
    if not failure.startswith("refused"):
        return failure
    # A way that does not apply to the case (nothing to bind) says so.
    failures = [found for found in (_failure(way, case) for way in others) if found != NOT_APPLICABLE]
    if failures and all(found is None for found in failures):
        return "pass bound"
    return next((found for found in failures if found is not None and not found.startswith("refused")), failure)


def _failure(way: Callable[[Case], None], case: Case) -> str | None:
    try:
        way(case)
    except NothingToBindError:
        return NOT_APPLICABLE
    except WrongAnswerError as error:
        return f"wrong: {_one_line(error)}"
    except TvmExtError as error:
        return f"refused: {type(error).__name__}: {_one_line(error)}"
    except Exception as error:  # noqa: BLE001 - a case fails by whatever the system under test raises
        return f"error: {type(error).__name__}: {_one_line(error)}"
    return None


def _one_line(error: Exception) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", " ".join(str(error).split()))[:300]


def kind_of(outcome: str) -> str:
    """The kind of an outcome, one of `KINDS`."""
    return outcome.partition(":")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", action="append", choices=sorted(SYSTEMS), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--log", type=Path, help="a file to append each outcome to as it comes")
    parser.add_argument("--only", type=Path, help="a file with one case name a line")
    parser.add_argument("--match", default="", help="a regular expression that the names contain")
    parser.add_argument("--each-operator", type=int, metavar="N", help="take one case of each N-th operator only")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)
    chosen = set(given.only.read_text().split()) if given.only else None
    loaded = load_cases()
    cases = {
        name: case
        for name, case in (of_each_operator(loaded, given.each_operator) if given.each_operator else loaded).items()
        if (chosen is None or name in chosen) and re.search(given.match, name)
    }
    outcomes = run_cases(cases, given.system, given.workers, given.log)
    given.output.write_text(json.dumps(outcomes, indent=1) + "\n")
    for system, found in outcomes.items():
        counts = Counter(kind_of(outcome) for outcome in found.values())
        print(f"{system}: {len(found)} cases: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
