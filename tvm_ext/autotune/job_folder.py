"""A runner elsewhere that shares nothing but a folder, or a memory stick: batches out, results in.

    python -m tvm_ext.autotune.job_folder FOLDER --device cuda         # on the machine that has the device

`FolderRunner` writes a batch as a folder (`batch_files.py`) and waits for its results. `serve_folder` runs what it
finds without results, in a process of its own, and ends when it has found nothing new for a while. A damaged batch it
refuses by name, and goes on. A server that is started again goes on with what lacks results, and tries what was refused
once more. Serving a GPU takes TVM's runtime and NumPy alone: the bundle of
``benchmarks/gpu/`` does it, too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_ext.errors import ExportError, MeasurementError
from tvm_ext.records.kernel_job import TimingPlan
from tvm_ext.records.serialise import to_json
from tvm_ext.support.files import write_atomically

from .batch_files import (
    REFUSED,
    RESULTS,
    ReturnedBatch,
    ReturnedKernel,
    SentBatch,
    read_batch,
    read_results,
    refusal,
    refuse,
    waiting_batches,
    write_batch,
)
from .runners import IsolatedRunner
from .turns import Artifact, BatchEntry, DeviceLost

POLL_S = 0.2  # a choice: short against a batch, long against listing a folder


class FolderRunner:
    """Batches through ``folder``; a device that has not answered within ``wait_s`` is lost."""

    def __init__(self, folder: Path, *, wait_s: float = 3600.0) -> None:
        self.folder, self.wait_s = folder, wait_s
        self.name = self.device = f"folder {folder}"
        self._ended = threading.Event()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MeasurementError(f"no jobs can be put into {folder}: {error}.", "name another folder") from error

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        batch = self._send(entries, plan)
        self._wait(batch)
        returned = self._read(batch, len(entries))
        shutil.rmtree(batch, ignore_errors=True)
        self.device = returned.device
        for entry, found in zip(entries, returned.kernels, strict=True):
            entry.times_us, entry.rounds, entry.failure = list(found.times_us), found.rounds, found.failure
        if returned.lost:
            raise DeviceLost(returned.lost)

    def _send(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> Path:
        try:
            return write_batch(self.folder, entries, plan)
        except (OSError, ExportError) as error:
            raise DeviceLost(f"a batch cannot be written to {self.folder}: {error}") from error

    def _wait(self, batch: Path) -> None:
        end = time.monotonic() + self.wait_s
        while not (batch / RESULTS).exists():
            if reason := refusal(batch):
                raise DeviceLost(f"{batch} was refused by the server of the folder: {reason}")
            if time.monotonic() > end:
                raise DeviceLost(f"{batch} had no results within {self.wait_s:g} s: is the folder served (job_folder)?")
            if self._ended.wait(POLL_S):
                raise DeviceLost(f"nobody waits for {batch} any longer: the runner was ended before it had results")

    def _read(self, batch: Path, count: int) -> ReturnedBatch:
        try:
            return read_results(batch, count)
        except (OSError, ValueError) as error:
            raise DeviceLost(f"{batch / RESULTS} is damaged: {error}") from error

    def end(self) -> None:
        self._ended.set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What came of a folder: how many batches ran, and of each that was refused which one and why."""

    ran: int
    refused: tuple[str, ...]


def serve_folder(
    folder: Path, kind: str, *, idle_s: float, stop: threading.Event | None = None, libraries: Sequence[str] = ()
) -> Served:
    """Run the batches in ``folder`` until none has come for ``idle_s``, or ``stop``.

    ``libraries``: as `IsolatedRunner`'s.
    """
    runner, ran, idle_since = IsolatedRunner(kind, libraries=libraries), 0, time.monotonic()
    refused: dict[Path, str] = {}
    stop = stop or threading.Event()
    try:
        while time.monotonic() - idle_since < idle_s:
            for batch in waiting_batches(folder):
                if batch in refused:
                    continue
                try:
                    sent = read_batch(batch)
                except MeasurementError as error:
                    refused[batch] = str(error)
                    refuse(batch, error.problem)
                else:
                    _run_batch(batch, sent, runner)
                    ran += 1
                idle_since = time.monotonic()
            if stop.wait(min(POLL_S, idle_s)):
                break
    finally:
        runner.end()
    return Served(ran=ran, refused=tuple(refused.values()))


def _run_batch(batch: Path, sent: SentBatch, runner: IsolatedRunner) -> None:
    (batch / REFUSED).unlink(missing_ok=True)  # by an earlier server: it has been copied again
    entries = [
        BatchEntry(
            Artifact(kernel.job, batch / kernel.library, batch / kernel.expected if kernel.expected else None),
            kernel.companion,
        )
        for kernel in sent.kernels
    ]
    lost = ""
    try:
        runner.run(entries, sent.plan)
    except DeviceLost as error:
        lost = str(error)
    kernels = tuple(
        ReturnedKernel(times_us=tuple(entry.times_us), rounds=entry.rounds, failure=entry.failure) for entry in entries
    )
    returned = ReturnedBatch(device=runner.device, kernels=kernels, lost=lost)
    write_atomically(batch / RESULTS, to_json(returned).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the exit status."""
    parser = argparse.ArgumentParser(description="Run the batches of kernels in a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu", help='TVM\'s name of the device: "cpu", "cuda"')
    parser.add_argument("--idle", type=float, default=1.0, help="seconds without a new batch after which to end")
    chosen = parser.parse_args(arguments)
    try:
        served = serve_folder(chosen.folder, chosen.device, idle_s=chosen.idle)
    except (MeasurementError, ExportError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    print(f"{served.ran} batches run")  # noqa: T201
    for problem in served.refused:
        print(f"error: {problem}", file=sys.stderr)  # noqa: T201
    return 2 if served.refused else 0


if __name__ == "__main__":
    sys.exit(main())
