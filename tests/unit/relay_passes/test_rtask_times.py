"""Measured times of rTasks: from a run to the store, and from there to the next build's schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext._tvm import IRModule, relax
from tvm_ext.autotune.store import MeasurementStore
from tvm_ext.options import BuildOptions
from tvm_ext.rammer_runtime import native
from tvm_ext.records.rtask_split import KernelCode
from tvm_ext.records.rtask_times import RTaskTimes
from tvm_ext.records.rtasks import RTaskGraph


def code(function: str, per_task: int) -> KernelCode:
    return KernelCode(function=function, iterations=64, per_task=per_task, alignments=())


def test_another_division_takes_in_proportion() -> None:
    times = RTaskTimes({"k": {8: 6e-6, 32: 20e-6}, "empty": {}})
    assert times.of(code("k", 8)) == pytest.approx(6e-6)
    assert times.of(code("k", 16)) == pytest.approx(12e-6)
    assert times.of(code("k", 64)) == pytest.approx(40e-6)
    assert times.of(code("empty", 8)) is None
    assert times.of(code("other", 8)) is None


def softmaxes() -> IRModule:
    x, y = inputs_of((64, 400), (64, 700))
    return module_of([x, y], relax.op.nn.softmax(x), relax.op.nn.softmax(y))


@pytest.mark.skipif(not native.is_available(), reason="this installation has no native runtime")
def test_a_build_schedules_by_the_times_of_an_earlier_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    settings: dict[str, Any] = {"enable_rammer": True, "num_threads": 2, "database": str(tmp_path / "times.db")}
    first = relay.build(softmaxes(), "llvm", kernel_cache="off", **settings)
    assert first.report.rammer is not None
    assert first.report.rammer.known == 0
    store = MeasurementStore.for_build(BuildOptions.create(**settings))
    request.addfinalizer(store.close)
    first.profile(repeat=2, store=store)
    again = relay.build(softmaxes(), "llvm", kernel_cache="off", **settings).report
    assert again.rammer is not None
    assert again.rammer.known == len(again.rammer.workloads) > 0
    assert "by measured times of" in str(again)
    workloads = dict(again.rammer.workloads)
    (region,) = again.rammer.scheduled
    for operator in RTaskGraph.from_json(region.graph).operators:
        for kernel in operator.kernels:
            function, _, iterations = kernel.name.rpartition("/")
            known = store.verdicts(workloads[function])
            if iterations in known:
                assert kernel.task_s == pytest.approx((known[iterations].time_us or 0) / 1e6)
            else:
                rates = [(item.time_us or 0) / 1e6 / int(count) for count, item in known.items()]
                assert min(rates) <= kernel.task_s / int(iterations) * (1 + 1e-9) <= max(rates) * (1 + 1e-8)
