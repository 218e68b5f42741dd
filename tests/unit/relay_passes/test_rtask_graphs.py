"""What rTasks of a graph are made of before they are scheduled."""

from __future__ import annotations

import pytest

from tvm_ext.devices import device_db
from tvm_ext.records.rtask_split import RTaskSplit, RTaskStep
from tvm_ext.relay_passes.rtask_kernels import core_seconds


def step(operations: float) -> RTaskStep:
    return RTaskStep(
        kernel="k", iterations=8, buffers=(0,), reads=(), writes=(0,), alignments=(4,), operations=operations
    )


@pytest.mark.parametrize("time_s", [None, 1e-6])
@pytest.mark.parametrize("others", [(), (100.0,)])
def test_steps_that_only_store_what_is_known_take_time(time_s: float | None, others: tuple[float, ...]) -> None:
    """The zeros around an average pool's input have no instruction besides their stores."""
    stores, device = step(0.0), device_db.lookup("cpu-cascade-lake-avx2")
    split = RTaskSplit(param_count=1, steps=(stores, *map(step, others)), time_s=time_s)
    times = [core_seconds(split, item, device) for item in split.steps]
    assert min(times) > 0
    assert time_s is None or max(times) <= time_s
