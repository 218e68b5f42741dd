"""A batch of kernels as a folder: what is to be run, by whoever finds it there, and what came of it.

``batch.json`` names libraries, the arrays that they should compute, and the digests of both; ``results.json`` lies
beside them as soon as the batch has run, or ``refused.txt`` with the reason why it cannot. All are written under other
names and moved into place, so that nobody sees half of one. `measurements_in` makes measurements of all results in a
folder.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm_ext.errors import MeasurementError
from tvm_ext.records.kernel_job import Failure, KernelJob, TimingPlan
from tvm_ext.records.measurement import MOST_REASON, MOST_SAMPLES, Measurement, RefusedRecord, Trial
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.files import write_atomically

from .turns import BatchEntry

BATCH, RESULTS, REFUSED = "batch.json", "results.json", "refused.txt"
MOST_RESULT_BYTES = 1 << 26  # a choice: far more than any batch has, yet no memory is exhausted by a damaged file
MOST_REFUSAL = 500
"""Characters of the reason that whoever waits for a batch reads."""


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


def write_batch(folder: Path, entries: Sequence[BatchEntry], plan: TimingPlan) -> Path:
    """A new folder ``batch-<n>`` in ``folder``; raises OSError or ExportError where it cannot be written."""
    batch = next(path for path in (folder / f"batch-{n}" for n in itertools.count(1)) if not path.exists())
    making = folder / f".{batch.name}"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    kernels = tuple(_sent(entry, making) for entry in entries)
    write_atomically(making / BATCH, to_json(SentBatch(plan=plan, kernels=kernels)).encode())
    making.rename(batch)
    return batch


def _sent(entry: BatchEntry, folder: Path) -> SentKernel:
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


def waiting_batches(folder: Path) -> list[Path]:
    """Those without results, the oldest first."""
    waiting = [path.parent for path in folder.glob(f"batch-*/{BATCH}") if not (path.parent / RESULTS).exists()]
    return sorted(waiting, key=lambda path: (path.stat().st_mtime, path.name))


def read_batch(batch: Path) -> SentBatch:
    """Raises MeasurementError for a batch that is damaged, or names files outside of it."""
    try:
        sent = _sent_batch(batch)
        for kernel in sent.kernels:
            names = [name for name in (kernel.library, kernel.expected) if name]
            if any(Path(name).name != name for name in names):
                raise ValueError(f"{names} are no files of the batch")
            if [_digest(batch / name) for name in names] != list(kernel.digests):
                raise ValueError(f"{' or '.join(names)} is damaged")
    except (OSError, ValueError) as error:
        raise MeasurementError(f"{batch} cannot be run: {error}.", "copy the folder again") from error
    return sent


def _sent_batch(batch: Path) -> SentBatch:
    return from_json(SentBatch, (batch / BATCH).read_text(encoding="utf-8"))


def refuse(batch: Path, reason: str) -> None:
    """Tell whoever waits for ``batch`` why it has no results; raises ExportError where that cannot be written."""
    write_atomically(batch / REFUSED, reason.encode())


def refusal(batch: Path) -> str:
    """Why ``batch`` was refused; "" where it was not."""
    try:
        with (batch / REFUSED).open(encoding="utf-8", errors="replace") as file:
            return " ".join(file.read(MOST_REFUSAL).split()) or "no reason is given"
    except FileNotFoundError:
        return ""


def read_results(batch: Path, count: int) -> ReturnedBatch:
    """What came of ``count`` kernels; raises OSError, or ValueError where it is not that."""
    path = batch / RESULTS
    if path.stat().st_size > MOST_RESULT_BYTES:
        raise ValueError(f"more than {MOST_RESULT_BYTES} bytes")
    returned = from_json(ReturnedBatch, path.read_text(encoding="utf-8"))
    if len(returned.kernels) != count:
        raise ValueError(f"{len(returned.kernels)} results of {count} kernels")
    return returned


# --- into a store of measurements ---------------------------------------------------------------------------------
def is_job_folder(folder: Path) -> bool:
    """Whether there are batches in ``folder``."""
    return any(folder.glob(f"batch-*/{BATCH}"))


def measurements_in(folder: Path) -> Iterator[Measurement | RefusedRecord]:
    """A trial of every kernel in the batches of ``folder`` that have run; the same ones at every call."""
    for path in sorted(folder.glob(f"batch-*/{RESULTS}")):
        yield from _measurements(path)


def _measurements(path: Path) -> list[Measurement] | list[RefusedRecord]:
    try:
        sent, digest = _sent_batch(path.parent), _digest(path)
        returned = read_results(path.parent, len(sent.kernels))
        return [
            Measurement(
                workload=kernel.job.workload, trial=_trial(kernel.job, result, returned.lost, f"{digest[:24]}.{n}")
            )
            for n, (kernel, result) in enumerate(zip(sent.kernels, returned.kernels, strict=True))
        ]
    except (OSError, ValueError) as error:
        return [RefusedRecord(place=str(path), reason=str(error)[:200])]


def _trial(job: KernelJob, result: ReturnedKernel, lost: str, origin: str) -> Trial:
    """Times count unless the kernel failed; without either it is the device that was lost."""
    failure = result.failure
    if failure is None and not result.times_us:
        failure = Failure(outcome="lost", reason=lost or "it has no time")
    return Trial(
        configuration=job.configuration,
        outcome="ok" if failure is None else failure.outcome,
        times_us=result.times_us[:MOST_SAMPLES] if failure is None else (),
        reason="" if failure is None else failure.reason[:MOST_REASON],
        origin=origin,
        taken_at_s=0.0,
    )
