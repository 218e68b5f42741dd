"""Times by a device's own clock, which may be set while it measures; with how many threads they are taken."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.autotune import jobs
from tvm_ext._tvm import IRModule, tirx, tvm
from tvm_ext.autotune.kernel_host import KernelError, KernelHost, LocalDevice
from tvm_ext.autotune.runners import InProcessRunner
from tvm_ext.ir.build_ir import PARALLEL, loop, store
from tvm_ext.records.kernel_job import KernelJob, TimingPlan


class OtherDevice:
    """A device whose evaluator answers what it is told to; its kernels do nothing."""

    own_clock = False

    def __init__(self, times_s: Iterator[float], cores: int = 2) -> None:
        self.device, self.times_s, self.cores = tvm.cpu(), times_s, cores
        self.asked: list[int] = []

    def open(self, library: Path) -> Any:
        self.asked.append(0)
        return self

    def __getitem__(self, name: str) -> Any:
        return lambda *arguments: None

    def time_evaluator(self, name: str, device: Any, *, number: int, repeat: int) -> Any:
        return lambda *arguments: SimpleNamespace(results=[next(self.times_s)])

    def is_there(self) -> bool:
        return True

    def use_threads(self, count: int) -> int:
        self.asked.append(count)
        return min(count, self.cores)


def test_a_clock_that_is_set_back_or_forth_is_asked_again() -> None:
    times_s = iter([1e-7, 1e-7, 1e-7, 2e-7, -3600.0, 2e-7, 7200.0, 3e-7, 4e-7])
    host = KernelHost(OtherDevice(times_s))
    host.load(0, Path(), jobs.job("a"), None)
    assert host.time(0, 3, 1e-6) == pytest.approx([0.2, 0.3, 0.4])


def test_a_clock_that_is_never_right_is_no_fault_of_the_kernels() -> None:
    times_s = iter([1e-7] * 3 + [-1.0] * 100)
    host = KernelHost(OtherDevice(times_s))
    host.load(0, Path(), jobs.job("a"), None)
    with pytest.raises(KernelError, match="clock was set") as wrong:
        host.time(0, 3, 1e-6)
    assert wrong.value.outcome == "timed_out"  # may be tried again


def test_a_kernel_that_fails_once_it_is_warm_has_failed() -> None:
    """Its first run was right; those that say how long it takes are the kernel's, too."""

    def times_s() -> Iterator[float]:
        yield 1e-7
        raise RuntimeError("CUDA: an illegal memory access")

    host = KernelHost(OtherDevice(times_s()))
    with pytest.raises(KernelError, match="illegal memory access") as failed:
        host.load(0, Path(), jobs.job("a"), None)
    assert failed.value.outcome == "launch_failed"


# --- threads ---------------------------------------------------------------------------------------------------------
def of_threads(count: int) -> KernelJob:
    job = jobs.job("a")
    return replace(job, workload=replace(job.workload, threads=count))


def test_each_kernel_has_as_many_threads_as_its_workload_says() -> None:
    """Kernels of one batch may differ in it: a tile that is timed on one core says nothing of two."""
    device = OtherDevice(itertools.repeat(1e-7))
    host = KernelHost(device)
    for number, threads in enumerate((1, 2, 0)):
        host.load(number, Path(), of_threads(threads), None)
    for number in (0, 0, 1, 2, 0):
        host.time(number, 1, 1e-6)
    assert device.asked == [0, 1, 0, 2, 0, 1, 2, 1]  # loaded first: our own teams follow from then on


def test_a_device_with_fewer_threads_gives_no_time() -> None:
    host = KernelHost(OtherDevice(itertools.repeat(1e-7), cores=2))
    with pytest.raises(KernelError, match="with 2 threads here, not with 3") as wrong:
        host.load(0, Path(), of_threads(3), None)
    assert wrong.value.outcome == "lost"  # which is not the candidate's fault


def test_a_kernel_under_the_name_of_another_is_itself(tmp_path: Path) -> None:
    """Clients of a server, and searches of one process, may use a file's name again."""
    device, found = LocalDevice(), []
    for value in (1, 2):
        module = _who_runs(tirx.IntImm("int32", value))
        found.append(device.open(_library_of(module, tmp_path))["kernel"])
    for value, kernel in zip((1, 2), found, strict=True):
        result = tvm.runtime.empty((64,), "int32")
        kernel(result)
        assert set(result.numpy().tolist()) == {value}


def _who_runs(value: Any = None) -> IRModule:
    """A parallel loop that writes down which thread runs it; or ``value``."""
    buffer = tirx.decl_buffer((64,), "int32", "A", data_alignment=4)
    value = tirx.call_extern("int32", "gettid") if value is None else value
    body = loop(64, PARALLEL, "i", lambda i: store(buffer, value, [i]))
    return IRModule({"kernel": tirx.PrimFunc([buffer], body).with_attrs({"global_symbol": "kernel", "s_tir": True})})


def _library_of(module: IRModule, folder: Path) -> Path:
    tvm.tirx.build(module, target="llvm", pipeline="default").export_library(str(folder / "kernel.so"))
    return folder / "kernel.so"


def _threads_of(kernel: Any) -> int:
    seen: set[int] = set()
    for _ in range(100):
        result = tvm.runtime.empty((64,), "int32")
        kernel(result)
        seen |= set(result.numpy().tolist())
    return len(seen)


def test_this_process_has_its_threads_back() -> None:
    before = tvm.runtime.num_threads()
    device = LocalDevice()
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.delenv("TVM_EXT_THREAD_POOL", raising=False)
        kernel = device.open(_library_of(_who_runs(), Path(folder)))["kernel"]
        assert device.use_threads(1) == tvm.runtime.num_threads() == 1
        assert _threads_of(kernel) == 1
        assert device.use_threads(before) == before
        assert _threads_of(kernel) <= before
    assert device.use_threads(10_000) < 10_000
    device.use_threads(before)
    runner = InProcessRunner()
    runner.run([], TimingPlan())
    assert tvm.runtime.num_threads() == before
