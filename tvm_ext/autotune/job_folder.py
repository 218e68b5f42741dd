"""A runner elsewhere that shares nothing but a folder, or a memory stick: batches out, results in.

    python -m tvm_ext.autotune.job_folder FOLDER --device cuda         # on the machine that has the device

`FolderRunner` writes a batch as a folder (`batch_files.py`) and waits for its results. `serve_folder` runs what it
finds without results, in a process of its own, and ends when it has found nothing new for a while. A server that is
started again goes on with what lacks results. Serving a GPU takes TVM's runtime and NumPy alone: the bundle of
``benchmarks/gpu/`` does it, too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tvm_ext.errors import ExportError, MeasurementError
from tvm_ext.records.kernel_job import TimingPlan
from tvm_ext.records.serialise import to_json
from tvm_ext.support.files import write_atomically

from .batch_files import (
    RESULTS,
    ReturnedBatch,
    ReturnedKernel,
    read_batch,
    read_results,
    waiting_batches,
    write_batch,
)
from .runners import IsolatedRunner
from .turns import Artifact, BatchEntry, DeviceLost

POLL_S = 0.2


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
        end = time.monotonic() + self.wait_s
        while not (batch / RESULTS).exists():
            if time.monotonic() > end or self._ended.wait(POLL_S):
                raise DeviceLost(f"{batch} had no results within {self.wait_s:g} s")
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

    def _read(self, batch: Path, count: int) -> ReturnedBatch:
        try:
            return read_results(batch, count)
        except (OSError, ValueError) as error:
            raise DeviceLost(f"{batch / RESULTS} cannot be read: {error}") from error

    def end(self) -> None:
        self._ended.set()


def serve_folder(
    folder: Path, kind: str, *, idle_s: float, stop: threading.Event | None = None, libraries: Sequence[str] = ()
) -> int:
    """Run the batches in ``folder`` until none has come for ``idle_s``, or ``stop``; how many ran.

    ``libraries``: as `IsolatedRunner`'s.
    """
    runner, ran, idle_since = IsolatedRunner(kind, libraries=libraries), 0, time.monotonic()
    stop = stop or threading.Event()
    try:
        while time.monotonic() - idle_since < idle_s:
            for batch in waiting_batches(folder):
                _run_batch(batch, runner)
                ran, idle_since = ran + 1, time.monotonic()
            if stop.wait(min(POLL_S, idle_s)):
                break
    finally:
        runner.end()
    return ran


def _run_batch(batch: Path, runner: IsolatedRunner) -> None:
    sent = read_batch(batch)
    entries = [
        BatchEntry(
            Artifact(item.job, batch / item.library, batch / item.expected if item.expected else None), item.companion
        )
        for item in sent.kernels
    ]
    lost = ""
    try:
        runner.run(entries, sent.plan)
    except DeviceLost as error:
        lost = str(error)
    kernels = tuple(
        ReturnedKernel(times_us=tuple(item.times_us), rounds=item.rounds, failure=item.failure) for item in entries
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
        print(f"{serve_folder(chosen.folder, chosen.device, idle_s=chosen.idle)} batches run")  # noqa: T201 - a command
    except (MeasurementError, ExportError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
