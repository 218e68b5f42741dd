"""A runner elsewhere that shares nothing but a folder, or a memory stick: batches out, results in.

    python -m tvm_ext.autotune.job_folder FOLDER --device cuda         # on the machine that has the device

`FolderRunner` writes a batch as a folder (libraries, what they should compute, ``batch.json`` with digests of all),
and waits for its ``results.json``. `serve_folder` runs what it finds without results, in a process of its own, and
ends when it has found nothing new for a while. Both are written under other names and moved into place, so that neither
side sees half of one. A server that is started again goes on with what lacks results.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm_ext.errors import ExportError, MeasurementError
from tvm_ext.records.kernel_job import Failure, KernelJob, TimingPlan
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.files import write_atomically

from .runners import IsolatedRunner
from .turns import Artifact, BatchEntry, DeviceLost

BATCH, RESULTS = "batch.json", "results.json"
MOST_RESULT_BYTES = 1 << 26
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class SentKernel:
    """One kernel of a batch: file names in the batch's folder, with their SHA-256."""

    job: KernelJob
    library: str
    expected: str
    companion: bool
    digests: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentBatch:
    """A batch as it lies in its folder."""

    plan: TimingPlan
    kernels: tuple[SentKernel, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnedKernel:
    """What came of a kernel: times, or a failure."""

    times_us: tuple[float, ...]
    rounds: int
    failure: Failure | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnedBatch:
    """What came of a batch, in its order. ``lost``: why the device went away, "" where it did not."""

    device: str
    kernels: tuple[ReturnedKernel, ...]
    lost: str = ""


class FolderRunner:
    """Batches through ``folder``; a device that has not answered within ``wait_s`` is lost."""

    def __init__(self, folder: Path, *, wait_s: float = 3600.0) -> None:
        self.folder, self.wait_s = folder, wait_s
        self.name = self.device = f"folder {folder}"
        self._numbers = itertools.count(1)
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
        returned = self._read(batch / RESULTS, len(entries))
        shutil.rmtree(batch, ignore_errors=True)
        self.device = returned.device
        for entry, found in zip(entries, returned.kernels, strict=True):
            entry.times_us, entry.rounds, entry.failure = list(found.times_us), found.rounds, found.failure
        if returned.lost:
            raise DeviceLost(returned.lost)

    def _send(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> Path:
        batch = next(path for path in (self.folder / f"batch-{n}" for n in self._numbers) if not path.exists())
        making = self.folder / f".{batch.name}"
        try:
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            kernels = tuple(_sent(entry, number, making) for number, entry in enumerate(entries))
            write_atomically(making / BATCH, to_json(SentBatch(plan=plan, kernels=kernels)).encode())
            making.rename(batch)
        except (OSError, ExportError) as error:
            raise DeviceLost(f"a batch cannot be written to {self.folder}: {error}") from error
        return batch

    def _read(self, path: Path, count: int) -> ReturnedBatch:
        try:
            if path.stat().st_size > MOST_RESULT_BYTES:
                raise ValueError(f"more than {MOST_RESULT_BYTES} bytes")
            returned = from_json(ReturnedBatch, path.read_text(encoding="utf-8"))
            if len(returned.kernels) != count:
                raise ValueError(f"{len(returned.kernels)} results of {count} kernels")
        except (OSError, ValueError) as error:
            raise DeviceLost(f"{path} cannot be read: {error}") from error
        return returned

    def end(self) -> None:
        self._ended.set()


def _sent(entry: BatchEntry, number: int, folder: Path) -> SentKernel:
    artifact = entry.artifact
    files = [path for path in (artifact.library, artifact.expected) if path is not None]
    for path in files:
        shutil.copyfile(path, folder / path.name)
    return SentKernel(
        job=replace(artifact.job, module="", reference=""),
        library=artifact.library.name,
        expected="" if artifact.expected is None else artifact.expected.name,
        companion=entry.companion,
        digests=tuple(_digest(path) for path in files),
    )


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def serve_folder(folder: Path, kind: str, *, idle_s: float, stop: threading.Event | None = None) -> int:
    """Run the batches in ``folder`` until none has come for ``idle_s``, or ``stop``; how many ran."""
    runner, ran, idle_since = IsolatedRunner(kind), 0, time.monotonic()
    stop = stop or threading.Event()
    try:
        while time.monotonic() - idle_since < idle_s:
            waiting = [path.parent for path in folder.glob(f"batch-*/{BATCH}") if not (path.parent / RESULTS).exists()]
            for batch in sorted(waiting, key=lambda path: path.stat().st_mtime):
                _run_batch(batch, runner)
                ran, idle_since = ran + 1, time.monotonic()
            if stop.wait(min(POLL_S, idle_s)):
                break
    finally:
        runner.end()
    return ran


def _run_batch(batch: Path, runner: IsolatedRunner) -> None:
    sent = _read_batch(batch)
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


def _read_batch(batch: Path) -> SentBatch:
    """Raises MeasurementError for a batch that is damaged, or names files outside of it."""
    try:
        sent = from_json(SentBatch, (batch / BATCH).read_text(encoding="utf-8"))
        for item in sent.kernels:
            names = [name for name in (item.library, item.expected) if name]
            if any(Path(name).name != name for name in names):
                raise ValueError(f"{names} are no files of the batch")
            if [_digest(batch / name) for name in names] != list(item.digests):
                raise ValueError(f"{' or '.join(names)} is damaged")
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{batch} cannot be run: {error}.", "copy the folder again") from error
    return sent


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
