"""Random operators as kernels for a GPU that is not there: for a row of the tables, run through OpenCL on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from tests.support.opencl_graph import run_graph
from tvm_ext import recorder
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.reports.record import OperatorReport

from .record import Array

DEVICES = ("nvidia-v100", "nvidia-a100", "nvidia-h200", "amd-mi50")
"""Rows with different registers, shared memory, unit counts and, on AMD's, 64 lanes a warp."""


class Numbered(Protocol):
    """A record with a number and a device that it is built for."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def index(self) -> int: ...
    @property
    def device(self) -> str: ...


Case = TypeVar("Case", bound=Numbered)


def in_turn(case: Case, devices: Sequence[str]) -> Case:
    """``case`` for the one of ``devices`` whose turn it is by the case's number; as it is where there are none."""
    return replace(case, device=devices[case.index % len(devices)]) if devices else case


def is_gpu(device: str) -> bool:
    """Whether ``device``, a row of the tables or empty, is a GPU."""
    return bool(device) and lookup(device).kind != "cpu"


class OpenClMachine:
    """The kernels of module ``mod``, whose constants are bound, for GPU ``device``.

    Every result lies in a buffer of its own that is full of NaN (or of the lowest integer) before its kernels run, so
    that one run shows what was never written. Raises UnsupportedEnvironmentError where OpenCL cannot be run, and what
    `plan_build` and kernel construction raise.
    """

    def __init__(self, mod: Any, device: str, options: BuildOptions) -> None:
        plan = plan_build("opencl", options.updated(device=device))
        with plan.target:
            self._kernels = plan.construct(mod)
        self.operators: tuple[OperatorReport, ...] = recorder.operators(self._kernels, plan, plan.options)

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        """The outputs for the parameters of ``main`` in order."""
        names = [param.name for param in self._kernels["main"].params]
        return [np.asarray(value) for value in run_graph(self._kernels, dict(zip(names, inputs, strict=True)))]
