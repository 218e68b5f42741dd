"""Times that come from a device's own clock, which may be set while it measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.autotune import jobs
from tvm_ext._tvm import tvm
from tvm_ext.autotune.kernel_host import KernelError, KernelHost


class OtherDevice:
    """A device whose evaluator answers what it is told to; its kernels do nothing."""

    own_clock = False

    def __init__(self, times_s: Iterator[float]) -> None:
        self.device, self.times_s = tvm.cpu(), times_s

    def open(self, library: Path) -> Any:
        return self

    def __getitem__(self, name: str) -> Any:
        return lambda *arguments: None

    def time_evaluator(self, name: str, device: Any, *, number: int, repeat: int) -> Any:
        return lambda *arguments: SimpleNamespace(results=[next(self.times_s)])

    def is_there(self) -> bool:
        return True


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
