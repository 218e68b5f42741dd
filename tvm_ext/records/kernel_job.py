"""What is to be built and measured: one configuration of a workload as code, its arguments, and how times are taken."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from .choice import ConstantPack
from .measurement import MeasuredWorkload, TrialOutcome


@dataclass(frozen=True, kw_only=True, slots=True)
class JobArgument:
    """A parameter of a kernel: the tensor as the operator has it, and how this kernel wants it packed, if it does."""

    shape: tuple[int, ...]
    dtype: str
    pack: ConstantPack | None = None

    def __post_init__(self) -> None:
        if any(extent < 1 for extent in self.shape):
            raise ValueError(f"a tensor of shape {self.shape} has no elements")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelJob:
    """A kernel to build, to check and to time.

    ``module`` is an IRModule with the PrimFunc ``function`` in TVM's JSON, ``target`` what TVM's Target takes. The last
    ``outputs`` of ``arguments`` are results; the others are drawn from ``seed``. ``reference`` is a module of the same
    form that computes what is right, on a CPU and without any packing ("": results are not compared); ``depth`` is how
    many elements go into one of the result, by which the allowed error grows.
    """

    workload: MeasuredWorkload
    configuration: str
    module: str
    function: str
    target: str
    arguments: tuple[JobArgument, ...]
    outputs: int = 1
    seed: int = 0
    reference: str = ""
    depth: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.outputs <= len(self.arguments):
            raise ValueError(f"{self.outputs} outputs of {len(self.arguments)} arguments")
        if any(argument.pack is not None for argument in self.arguments[len(self.arguments) - self.outputs :]):
            raise ValueError("a result is not packed")

    @property
    def inputs(self) -> tuple[JobArgument, ...]:
        return self.arguments[: len(self.arguments) - self.outputs]

    @property
    def results(self) -> tuple[JobArgument, ...]:
        return self.arguments[len(self.arguments) - self.outputs :]

    @property
    def reference_key(self) -> str:
        """Jobs of one key have the same right results."""
        forms = [(argument.shape, argument.dtype) for argument in self.arguments]
        return hashlib.sha256(f"{self.reference}\n{self.seed}\n{forms}".encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingPlan:
    """How the times of a batch are taken: in rounds, in each of which every kernel has a turn of ``samples`` samples.

    A kernel has had enough when the 95 % interval of its median is within ``interval`` of it on either side, or after
    ``most_rounds``; one whose interval lies above ``hopeless`` times the fastest's after ``least_rounds`` is slow, and
    how slow matters little. ``limit_s`` is for a single load or turn: what takes longer hangs. ``memory_bytes`` is what
    a batch may take, its arguments included, in a process of its own (0: no limit).
    """

    samples: int = 3
    sample_s: float = 0.002
    least_rounds: int = 3
    most_rounds: int = 15
    interval: float = 0.02
    hopeless: float = 1.5
    limit_s: float = 20.0
    memory_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if not 1 <= self.least_rounds <= self.most_rounds or self.samples < 1:
            raise ValueError(f"{self.least_rounds} to {self.most_rounds} rounds of {self.samples} samples")
        if not all(math.isfinite(item) and item > 0 for item in (self.sample_s, self.interval, self.limit_s)):
            raise ValueError("times and the interval of a plan are positive")
        if self.hopeless < 1 or self.memory_bytes < 0:
            raise ValueError(f"hopeless is {self.hopeless}, memory {self.memory_bytes} bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a kernel has no time. ``outcome`` "lost" blames the machine, anything else the kernel."""

    outcome: TrialOutcome
    reason: str
