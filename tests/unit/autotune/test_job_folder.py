"""Batches out to a folder, results in: by a server, by none, damaged on the way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.unit.autotune import jobs
from tests.unit.autotune.test_measure import Builder, job
from tests.unit.autotune.test_runners import outcomes
from tvm_ext.autotune import job_folder
from tvm_ext.autotune.batch_files import BATCH, REFUSED, RESULTS, measurements_in, write_batch
from tvm_ext.autotune.builders import ExecutorBuilder
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.database_files import merge
from tvm_ext.autotune.job_folder import FolderRunner, Served, main, serve_folder
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.turns import Artifact, BatchEntry, DeviceLost
from tvm_ext.records.kernel_job import Failure, TimingPlan

PLAN = TimingPlan(limit_s=60.0, least_rounds=2, most_rounds=3)


class FakeRunner:
    """Stands in for the process that runs a batch on the other machine."""

    def __init__(self, kind: str, *, libraries: Sequence[str] = ()) -> None:
        self.device = f"{kind} over there"

    def run(self, entries: Sequence[BatchEntry], plan: TimingPlan) -> None:
        for entry in entries:
            assert entry.artifact.library.read_bytes()
            if entry.artifact.job.configuration == "crash":
                entry.failure = Failure(outcome="crashed", reason="SIGSEGV")
            elif entry.artifact.job.configuration == "last":
                raise DeviceLost("the driver is gone")
            else:
                entry.times_us, entry.rounds = [2.0] * 6, 2

    def end(self) -> None:
        """Nothing to end."""


def test_batches_go_out_and_results_come_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_folder, "IsolatedRunner", FakeRunner)
    stop = threading.Event()
    server = threading.Thread(target=serve_folder, args=(tmp_path, "cuda"), kwargs={"idle_s": 100.0, "stop": stop})
    server.start()
    with Measurer(Builder(), [FolderRunner(tmp_path)], plan=PLAN, batch=2) as measurer:
        found = list(measurer.measure([job(name, reference="r") for name in ("a", "crash", "b")]))
    assert outcomes(found) == {"a": "ok", "crash": "crashed", "b": "ok"}
    assert measurer.report.devices == {"cuda over there"}
    assert list(tmp_path.iterdir()) == []
    stop.set()
    server.join()


def test_a_folder_that_nobody_serves_loses_its_trials(tmp_path: Path) -> None:
    with Measurer(Builder(), [FolderRunner(tmp_path, wait_s=0.05)], plan=PLAN) as measurer:
        assert outcomes(list(measurer.measure([job("a")]))) == {"a": "lost"}


def test_what_ran_elsewhere_goes_into_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written now, run somewhere, imported later, and imported again: failures and a device that went away included."""
    monkeypatch.setattr(job_folder, "IsolatedRunner", FakeRunner)
    library = tmp_path / "kernel.so"
    library.write_bytes(b"code")
    folder = tmp_path / "jobs"
    for names in (("a", "crash", "b"), ("c", "last"), ("never",)):
        write_batch(folder, [BatchEntry(Artifact(job(name), library)) for name in names], PLAN)
    (folder / "batch-3" / RESULTS).write_text("{")
    assert serve_folder(folder, "cuda", idle_s=0.01) == Served(ran=2, refused=())
    with MeasurementDatabase(tmp_path / "store.db") as store:
        merged = merge(store, folder)
        assert (merged.added, merged.known) == (5, 0) and len(merged.refused) == 1
        assert "batch-3" in merged.refused[0].place
        assert (merge(store, folder).added, len(store)) == (0, 5)
        found = store.verdicts(job("a").workload)
    assert {name: item.outcome for name, item in found.items()} == {
        "a": "ok", "b": "ok", "c": "ok", "crash": "crashed", "last": "lost",
    }  # fmt: skip
    assert found["a"].time_us == 2.0 and found["last"].reason == "the driver is gone"
    assert list(measurements_in(tmp_path)) == []


def _harm(batch: Path, harm: str) -> None:
    if harm == "library":
        next(batch.glob("*.so")).write_bytes(b"damaged")
        return
    text = (batch / BATCH).read_text()
    (batch / BATCH).write_text(text.replace('"library":"', '"library":"../') if harm == "outside" else text[:-9])


@pytest.mark.parametrize("harm", ["library", "outside", "text"])
def test_a_damaged_batch_is_refused_by_name_and_the_others_run(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_folder, "IsolatedRunner", FakeRunner)
    library, folder = tmp_path / "kernel.so", tmp_path / "jobs"
    library.write_bytes(b"code")
    damaged, whole, last = (write_batch(folder, [BatchEntry(Artifact(job("a"), library))], PLAN) for _ in range(3))
    kept = {path.name: path.read_bytes() for path in damaged.iterdir()}
    _harm(damaged, harm)
    assert main([str(folder), "--idle", "0.01"]) == 2
    said = capsys.readouterr()
    assert said.out == "2 batches run\n" and (whole / RESULTS).exists() and (last / RESULTS).exists()
    assert said.err.count(f"{damaged} cannot be run") == 1 and "copy the folder again" in said.err
    assert not (damaged / RESULTS).exists() and "cannot be run" in (damaged / REFUSED).read_text()

    for name, content in kept.items():
        (damaged / name).write_bytes(content)
    assert main([str(folder), "--idle", "0.01"]) == 0
    assert (damaged / RESULTS).exists() and not (damaged / REFUSED).exists()


def test_whoever_waits_is_told_of_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and by the batch's name: without it the runner would wait for an hour."""
    monkeypatch.setattr(job_folder, "IsolatedRunner", FakeRunner)
    library, stop = tmp_path / "kernel.so", threading.Event()
    library.write_bytes(b"code")
    folder = tmp_path / "jobs"
    send = job_folder.write_batch
    server = threading.Thread(target=serve_folder, args=(folder, "cuda"), kwargs={"idle_s": 100.0, "stop": stop})

    def damaged_on_the_way(*arguments: Any) -> Path:
        batch = send(*arguments)
        _harm(batch, "text")
        server.start()
        return batch

    monkeypatch.setattr(job_folder, "write_batch", damaged_on_the_way)
    runner = FolderRunner(folder)
    with pytest.raises(DeviceLost, match=r"batch-1 was refused by the server of the folder: .*batch-1 cannot be run"):
        runner.run([BatchEntry(Artifact(job("a"), library))], PLAN)
    stop.set()
    server.join()


def test_whoever_ends_is_not_told_of_a_time_limit(tmp_path: Path) -> None:
    library = tmp_path / "kernel.so"
    library.write_bytes(b"code")
    runner = FolderRunner(tmp_path / "jobs")
    runner.end()
    with pytest.raises(DeviceLost, match="batch-1 any longer: the runner was ended"):
        runner.run([BatchEntry(Artifact(job("a"), library))], PLAN)
    with pytest.raises(DeviceLost, match=r"batch-2 had no results within 0 s: is the folder served"):
        FolderRunner(tmp_path / "jobs", wait_s=0.0).run([BatchEntry(Artifact(job("a"), library))], PLAN)


@pytest.mark.slow
def test_a_served_folder_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    stop = threading.Event()
    server = threading.Thread(target=serve_folder, args=(tmp_path, "cpu"), kwargs={"idle_s": 500.0, "stop": stop})
    server.start()
    batch = [jobs.job("a"), jobs.job("wrong", jobs.scaled(3.0)), jobs.job("crash", jobs.calling("abort"))]
    with (
        ThreadPoolExecutor(1) as executor,
        Measurer(ExecutorBuilder(executor, 1), [FolderRunner(tmp_path)], plan=PLAN) as measurer,
    ):
        found = list(measurer.measure(batch))
    stop.set()
    server.join()
    assert outcomes(found) == {"a": "ok", "wrong": "wrong", "crash": "crashed"}
