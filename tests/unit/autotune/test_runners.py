"""Kernels that are wrong, crash, hang and eat memory, and processes that are killed, cost themselves only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.unit.autotune import jobs
from tvm_ext.autotune.builders import ExecutorBuilder, LocalBuilder, compile_job, reference_results
from tvm_ext.autotune.kernel_host import KernelError, KernelHost, LocalDevice, draw_inputs
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.runners import InProcessRunner, IsolatedRunner
from tvm_ext.records.choice import ConstantPack
from tvm_ext.records.kernel_job import JobArgument, KernelJob, TimingPlan
from tvm_ext.records.measurement import Trial

PLAN = TimingPlan(limit_s=60.0, least_rounds=2, most_rounds=3)


def processes_of(parent: int) -> dict[int, str]:
    """Children of a process by number, with their state: "Z" is one that nobody waited for."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, owner = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(owner) == parent:
            found[int(path.parent.name)] = state
    return found


@pytest.fixture
def clean() -> Iterator[None]:
    """Whatever was started is gone afterwards, and nothing of it is a zombie."""
    before = processes_of(os.getpid())
    yield
    assert processes_of(os.getpid()).keys() <= before.keys()


def outcomes(found: list[tuple[KernelJob, Trial]]) -> dict[str, str]:
    assert len({job.configuration for job, _ in found}) == len(found)
    return {job.configuration: trial.outcome for job, trial in found}


@pytest.mark.usefixtures("clean")
def test_a_wrong_and_a_crashing_candidate_cost_themselves_only() -> None:
    batch = [jobs.job("right"), jobs.job("wrong", jobs.scaled(3.0)), jobs.job("crash", jobs.calling("abort"))]
    runner = IsolatedRunner()
    with Measurer(LocalBuilder(1), [runner], plan=PLAN) as measurer:
        found = list(measurer.measure([*batch, jobs.job("no module", "{}")]))
    assert outcomes(found) == {"right": "ok", "wrong": "wrong", "crash": "crashed", "no module": "compile_failed"}
    reasons = {job.configuration: trial.reason for job, trial in found}
    assert reasons["wrong"] == "result 0 errs by 0.5, allowed are 1.1e-06"
    assert "SIGABRT" in reasons["crash"]
    assert 0.0 < measurer.report.busy_share <= 1.0


def test_a_kernel_in_this_process_is_checked_packed_and_timed(tmp_path: Path) -> None:
    flipped = JobArgument(
        shape=(jobs.SIZE,), dtype="float32",
        pack=ConstantPack(param_index=0, extents=(jobs.SIZE,), strides=(-1,), offset=jobs.SIZE - 1),
    )  # fmt: skip
    library, right = tmp_path / "kernel.so", tmp_path / "right.npz"
    plain = jobs.job("plain")
    library.write_bytes(compile_job(plain))
    right.write_bytes(reference_results(plain))
    host = KernelHost(LocalDevice())
    host.load(0, library, plain, right)
    times = host.time(0, 4, 1e-4)
    assert len(times) == 4
    assert min(times) > 0
    with np.load(right) as file:
        assert np.array_equal(file["arr_0"], 2.0 * draw_inputs(plain)[0])
    with pytest.raises(KernelError, match="errs by") as wrong:  # its kernel reads an input that is laid out backwards
        host.load(1, library, jobs.job("flipped", argument=flipped), right)
    assert wrong.value.outcome == "wrong"
    assert len(host._packed) == 1
    host.unload(1)
    assert host._packed == {}


def test_any_executor_builds(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as executor:
        builder = ExecutorBuilder(executor, 2)
        with Measurer(builder, [InProcessRunner()], plan=PLAN) as measurer:
            found = list(measurer.measure([jobs.job("a"), jobs.job("no module", "{}")]))
    assert outcomes(found) == {"a": "ok", "no module": "compile_failed"}


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_hanging_and_hungry_candidates_cost_themselves_only() -> None:
    hungry = jobs.calling("memset", jobs.calloc(8 << 30), 1, 8 << 30)
    batch = [
        jobs.job("a"),
        jobs.job("hang", jobs.calling("pause")),
        jobs.job("hungry", hungry),
        jobs.job("b", jobs.repeated(200)),
    ]
    plan = TimingPlan(limit_s=3.0, memory_bytes=1 << 30, least_rounds=2, most_rounds=3)
    with Measurer(LocalBuilder(1), plan=plan) as measurer:
        found = list(measurer.measure(batch))
    assert outcomes(found) == {"a": "ok", "hang": "timed_out", "hungry": "crashed", "b": "ok"}


@pytest.mark.slow
@pytest.mark.usefixtures("clean")
def test_killed_builders_and_runners_are_replaced() -> None:
    builder, runner = LocalBuilder(2), IsolatedRunner()
    with Measurer(builder, [runner], plan=PLAN, batch=3) as measurer:
        found = []
        for number, item in enumerate(measurer.measure([jobs.job(f"a{index}") for index in range(24)])):
            found.append(item)
            if number % 4 == 0:
                victims = builder.pids if number % 8 else [runner.pid] * (runner.pid is not None)
                for victim in victims[:1]:
                    with contextlib.suppress(ProcessLookupError):  # killed before, and not replaced yet
                        os.kill(victim, signal.SIGKILL)
    assert outcomes(found) == {f"a{index}": "ok" for index in range(24)}


_INTERRUPTED = """
import sys
from tests.unit.autotune import jobs
from tvm_ext.autotune.builders import LocalBuilder
from tvm_ext.autotune.measure import Measurer
for job, trial in Measurer(LocalBuilder(2)).measure(jobs.job(str(number)) for number in range(10 ** 6)):
    print(job.configuration, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_no_end_of_a_run_leaves_a_process_behind(sign: signal.Signals) -> None:
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().strip().isdigit()  # whichever is built first
        children = processes_of(run.pid)
        assert len(children) >= 2
        run.send_signal(sign)
        run.wait(30)
        end = time.monotonic() + 20
        while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < end:
            time.sleep(0.1)
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []
    assert run.returncode == (-sign if sign == signal.SIGKILL else -signal.SIGINT)
