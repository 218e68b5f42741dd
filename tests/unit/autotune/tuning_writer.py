"""A tuning run in a process of its own, for tests that kill it.

What the database has answered for is appended to the run's log, one identity a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.alcop.products import product_of_matmul
from benchmarks.alcop.searches import tune
from tests.unit.autotune import jobs
from tvm_ext.autotune.builders import ExecutorBuilder
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.runners import InProcessRunner
from tvm_ext.autotune.search import AtRandom, SpaceSearch
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.kernel_job import TimingPlan
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial, Verdict
from tvm_ext.records.tuning import GpuTile


class LoggedStore:
    """A database that notes what it has answered for."""

    def __init__(self, database: MeasurementDatabase, log: Path) -> None:
        self.database, self.log = database, log

    def verdicts(self, workload: MeasuredWorkload) -> Mapping[str, Verdict]:
        return self.database.verdicts(workload)

    def add(self, measurements: Iterable[Measurement]) -> int:
        taken = tuple(measurements)
        count = self.database.add(taken)
        with self.log.open("a") as file:
            file.write("".join(f"{item.identity}\n" for item in taken))
        return count


def workload(number: int) -> MeasuredWorkload:
    return jobs.workload(f"writer {number}")


def main(database: str, log: str, number: int, trials: int) -> None:
    plan = TimingPlan(samples=1, least_rounds=1, most_rounds=1, sample_s=1e-5)
    space = MatrixTileSpace(product_of_matmul(1024, 64, 2048), lookup("nvidia-a100"))
    search = SpaceSearch(space, AtRandom(), seed=number)
    with (
        ThreadPoolExecutor(1) as executor,
        Measurer(ExecutorBuilder(executor, 1), [InProcessRunner()], plan=plan) as measurer,
        MeasurementDatabase(database) as store,
    ):

        def measure(candidates: Sequence[GpuTile]) -> list[Trial]:
            batch = [jobs.job(item.configuration, of=f"writer {number}", checked=False) for item in candidates]
            return [trial for _, trial in measurer.measure(batch)]

        tune(search, measure, workload(number), LoggedStore(store, Path(log)), trials=trials)
