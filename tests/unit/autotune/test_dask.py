"""A Dask cluster of this machine builds; whoever has no Dask skips."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.autotune import jobs
from tests.unit.autotune.test_runners import outcomes
from tvm_ext.autotune.builders import ExecutorBuilder
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.runners import InProcessRunner
from tvm_ext.records.kernel_job import KernelJob, TimingPlan


def compile_or_die(job: KernelJob) -> bytes:
    """The compiler of a worker that one of the jobs takes down."""
    import os

    from tvm_ext.autotune.builders import compile_job

    if job.configuration == "deadly":
        os._exit(3)
    return compile_job(job)


@pytest.mark.slow
def test_a_dask_cluster_builds_and_survives_what_ends_its_workers() -> None:
    distributed: Any = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    dask: Any = pytest.importorskip("dask")
    settings = {"distributed.scheduler.allowed-failures": 1, "distributed.worker.daemon": False}
    with (
        dask.config.set(settings),
        distributed.LocalCluster(2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1") as cluster,
        distributed.Client(cluster) as client,
    ):
        builder = ExecutorBuilder(client.get_executor(), 2, compiler=compile_or_die)
        with Measurer(builder, [InProcessRunner()], plan=TimingPlan(least_rounds=2, most_rounds=2)) as measurer:
            found = list(measurer.measure([jobs.job(name) for name in ("a", "b", "deadly", "c", "d")]))
    results = outcomes(found)
    assert results == {"a": "ok", "b": "ok", "deadly": results["deadly"], "c": "ok", "d": "ok"}
    assert results["deadly"] == "compile_failed"
    assert "KilledWorker" in next(trial.reason for _, trial in found if trial.outcome == "compile_failed")
