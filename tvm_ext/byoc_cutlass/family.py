"""A family of CUTLASS's templates: all that serve one kind of region, on one device, with the region's epilogues.

What is the same for every family stands here, once: what is proposed and in which order, why there is nothing, and the
launch. An instance says the rest: its candidates, the reasons against one, its time, its text and its numbers.
`products`, `convolutions` and `pairs` are the instances; another one is a file beside them and a line in
`selection.family_of`.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from tvm_ext.devices.capabilities import has
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import TargetError
from tvm_ext.records.partition import LINK, CutlassProblem, CutlassRegion, operand_name, parameter_of

from .elements import TEMPLATES_SINCE, element, multiplier
from .epilogue import Epilogue
from .host import CallForm, KernelCall
from .kernel_text import kernel_symbol

MOST_CONFIGS = 48
"""Configurations that `TemplateFamily.propose` answers at most: tens, as a profiler can run."""


class TemplateConfig(Protocol):
    """What every family's configuration has: a frozen record, JSON both ways."""

    @property
    def name(self) -> str:
        """A name of the template in C: whatever is compiled in, and nothing else."""


Config = TypeVar("Config", bound=TemplateConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedTime:
    """Of one launch. ``full_clock_us`` is without the board's limit of power.

    Where that limit decides, all are alike fast, and what moves least asks for least power: it tells them apart.
    """

    time_us: float
    full_clock_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked(Generic[Config]):
    """A configuration and its predicted time."""

    config: Config
    predicted: PredictedTime

    @property
    def time_us(self) -> float:
        return self.predicted.time_us

    @property
    def order(self) -> tuple[float, float]:
        """Fastest first, to the nanosecond."""
        return round(self.predicted.time_us, 3), round(self.predicted.full_clock_us, 3)


class TemplateFamily(ABC, Generic[Config]):
    """The templates for ``problem`` on ``device``, with its ``epilogue``.

    Raises TargetError where CUTLASS has no template for the device: not CUDA, or older than sm_75, which no compiler
    that it works with still compiles for. Raises InputError for types that templates do not have.
    """

    form: ClassVar[CallForm]
    does: ClassVar[str]  # "multiplies"

    def __init__(self, problem: CutlassProblem, device: DeviceSpec, epilogue: Epilogue) -> None:
        check_device(device)
        self.problem, self.device, self.epilogue = problem, device, epilogue
        self.multiplier, self.out = multiplier(problem.arithmetic), element(epilogue.out_dtype)

    # ---- what an instance says ---------------------------------------------------------------------------------------

    @abstractmethod
    def candidates(self) -> Iterator[Config]:
        """Configurations worth a look, legal or not."""

    @abstractmethod
    def reasons(self, config: Config) -> Iterator[str | None]:
        """Why ``config`` does not compile or run, rule by rule, None where it keeps the rule; cheap rules first."""

    @abstractmethod
    def predict(self, config: Config) -> PredictedTime:
        """Predicted time of one launch; raises TargetError where the device's table lacks what the model asks for."""

    @abstractmethod
    def preference(self, config: Config) -> tuple[int, int]:
        """Of configurations that are alike fast, the least is taken."""

    def symbol(self, config: Config) -> str:
        """The kernel's entry point: templates and epilogues that are the same have one name."""
        return kernel_symbol(config.name, self.epilogue)

    @abstractmethod
    def source(self, config: Config) -> str:
        """The text of the kernel; raises UnsupportedEnvironmentError without the package in its version."""

    @abstractmethod
    def numbers(self, config: Config) -> tuple[int, ...]:
        """What a launch is told of extents, distances and tuning, in the order of ``form``."""

    def splits(self, config: Config) -> Iterable[Config]:
        """The legal ``config`` in as many parts as are worth a look."""
        return (config,)

    def variants(self, config: Config) -> Iterable[Config]:
        """Other values of what the same program takes at run time: a profiler tries them for the price of a run."""
        del config
        return ()

    def spread(self, ranked: list[Ranked[Config]]) -> list[Ranked[Config]]:
        """``ranked``, fastest first, in the order in which they are worth measuring."""
        return ranked

    def summary(self, reasons: Sequence[str]) -> str:
        """One reason for all candidates' ``reasons``: the most frequent."""
        if not reasons:
            return f"{self.device.name} has no template that {self.does} {self.problem.arithmetic}"
        return Counter(reasons).most_common(1)[0][0]

    # ---- what follows ------------------------------------------------------------------------------------------------

    def why_illegal(self, config: Config) -> str | None:
        """The first reason against ``config``; None where it is legal."""
        return next((reason for reason in self.reasons(config) if reason is not None), None)

    def legal(self) -> Iterator[Config]:
        """All legal candidates, in the order in which they are looked at, without splits."""
        return (config for config in self.candidates() if self.why_illegal(config) is None)

    def why_none(self) -> str | None:
        """Why no candidate is legal; None where one is."""
        reasons = []
        for config in self.candidates():
            reason = self.why_illegal(config)
            if reason is None:
                return None
            reasons.append(reason)
        return self.summary(reasons)

    def propose(self, count: int = MOST_CONFIGS) -> tuple[Ranked[Config], ...]:
        """The ``count`` legal configurations that are best worth measuring, the fastest by the model first.

        Empty where there is none; raises as `predict`.
        """
        split = [each for config in self.legal() for each in self.splits(config)]
        ranked = [Ranked(config=each, predicted=self.predict(each)) for each in split]
        ranked.sort(key=lambda each: (each.order, self.preference(each.config), each.config.name))
        return tuple(self.spread(ranked)[:count])

    def moved_bytes(self, split: int = 1) -> float:
        """The factors and the result once, what the epilogue reads, and the sums of ``split`` parts there and back."""
        problem, epilogue = self.problem, self.epilogue
        m, n = problem.rows, problem.columns
        sums = 2 * m * n * 32 * split if split > 1 else 0
        stored = epilogue.stored_elements(m, n, problem.batch) * self.out.bits
        factors = sum(problem.factor_elements) * self.multiplier.bits
        return (factors + stored + sums) / 8 + epilogue.read_bytes(m, n, problem.batch)

    def call(self, config: Config, region: CutlassRegion) -> KernelCall:
        """The launch of ``config`` for the ``region``'s own extents and distances."""
        operands = [parameter for part in region.parts for parameter in shared_epilogue(part)[1]]
        strides = [operand.batch_stride for part in region.parts for operand in part.operands]
        return KernelCall(
            symbol=self.symbol(config),
            form=self.form,
            numbers=self.numbers(config),
            factors=tuple(parameter for part in region.parts for parameter in part.factors if parameter != LINK),
            operands=tuple(operands),
            distances=tuple(strides) if self.form.has_distances else (),
        )


def check_device(device: DeviceSpec) -> None:
    """Raise TargetError unless CUTLASS has templates for ``device``."""
    if not has(device, TEMPLATES_SINCE):
        raise TargetError(
            f"CUTLASS has no templates for {device.name}: they begin with CUDA's compute capability 7.5.",
            "such devices are served by the kernels that are constructed here",
        )


def shared_epilogue(region: CutlassRegion) -> tuple[Epilogue, tuple[int, ...]]:
    """The region's epilogue in a form that regions of one kind share, and its operands' places among the parameters.

    Operands are named in their order, and of a batch's distances only counts whether there is one.
    """
    new = {operand.name: operand_name(index) for index, operand in enumerate(region.operands)}
    expression = re.sub(r"\boperand\d+\b", lambda match: new[match[0]], region.expression)
    operands = tuple(
        dataclasses.replace(operand, name=new[operand.name], batch_stride=min(1, operand.batch_stride))
        for operand in region.operands
    )
    parameters = tuple(parameter_of(operand.name) for operand in region.operands)
    return Epilogue(expression=expression, operands=operands, out_dtype=region.out_dtype), parameters
