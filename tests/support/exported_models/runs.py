"""Each network in processes of its own, with a time limit: a crash or a hang is the failure of one of them."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.quick_imports import environment_with_torch
from tvm_ext.records.serialise import from_json

from .record import PROGRAM, ExportResult, Outcome

PACKAGE = "tests.support.exported_models"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One network, exported by one exporter into ``folder``, for each of ``devices``."""

    network: str
    exporter: str
    devices: tuple[str, ...]
    folder: Path
    seed: int = 0
    limit_s: float = 300.0

    @property
    def model(self) -> Path:
        return self.folder / f"{self.network}-{self.exporter}-{self.seed}.onnx"


def run_all(runs: Iterable[Run], jobs: int) -> Iterator[ExportResult]:
    """Results in the order of ``runs``, each run's devices in their order."""
    with ThreadPoolExecutor(max_workers=jobs) as threads:
        for results in threads.map(run_one, runs):
            yield from results


def run_one(run: Run) -> list[ExportResult]:
    """Export the network unless its file is there, then build it for each device; programs for this CPU alone."""
    if run.exporter == PROGRAM:
        return [_answered(run, run.devices[0], [f"{PACKAGE}.programs", run.network, str(run.seed)])]
    run.folder.mkdir(parents=True, exist_ok=True)
    if not run.model.is_file():
        arguments = [f"{PACKAGE}.export", run.network, run.exporter, str(run.model), str(run.seed)]
        _, problem = attempt(arguments, run.limit_s)
        if problem:
            return [_failure(run, device, "not exported", problem) for device in run.devices]
    checks = {device: [f"{PACKAGE}.check", run.network, run.exporter, device, str(run.model)] for device in run.devices}
    return [_answered(run, device, arguments) for device, arguments in checks.items()]


def _answered(run: Run, device: str, arguments: Sequence[str]) -> ExportResult:
    """What a process of ``arguments``, and the path of a file for its answer, has found."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        outcome, problem = attempt([*arguments, str(answer)], run.limit_s)
        if outcome != "passed":
            return _failure(run, device, outcome, problem)
        return from_json(ExportResult, answer.read_text(encoding="utf-8"))


def attempt(arguments: Sequence[str], limit_s: float) -> tuple[Outcome, str]:
    """Run `python -m` with ``arguments``: ("passed", ""), or what became of it and the last that it said."""
    command = [sys.executable, "-W", "ignore", "-m", *arguments]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s,
            check=False, env=environment_with_torch(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "timed out", f"not done after {limit_s:g} s"
    if done.returncode == 0:
        return "passed", ""
    if done.returncode < 0:
        return "crashed", f"{signal.Signals(-done.returncode).name}: {_last_words(done.stderr)}"
    return "failed", _last_words(done.stderr)


def _last_words(text: str) -> str:
    """The exception's line and what follows it: tracebacks end with them."""
    lines = [line for line in text.splitlines() if line.strip()]
    started = [index for index, line in enumerate(lines) if line.lstrip().startswith("File ")]
    return "\n".join(lines[started[-1] + 1 if started else -1 :][-8:])


def _failure(run: Run, device: str, outcome: Outcome, problem: str) -> ExportResult:
    return ExportResult(network=run.network, exporter=run.exporter, device=device, outcome=outcome, problem=problem)
