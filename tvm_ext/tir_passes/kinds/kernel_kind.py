"""What a kind of kernels is: recognise, candidates with their times, key, emit, describe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from tvm_ext._tvm import ForKind
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import PARALLEL, outer_kind
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import from_json

from ..plan.alternatives import Pick, best_programs
from ..plan.anchors import Anchor
from ..plan.chosen_tiles import CHOSEN, LEFT_OUT, NO_CHOICES, TileChoices
from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from ..plan.gpu_chain import ChainGroup
from ..plan.plan_windows import CpuGroup

Tiles = TypeVar("Tiles")
LearntNumber: TypeAlias = int | float | str
Group: TypeAlias = CpuGroup | ChainGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates(Generic[Tiles]):
    """What can be chosen of a kernel, each with the seconds that the model expects; construction's own choice first.

    ``depth``: how many elements go into one of the result. ``levels``: the numbers that a cost model learns from, left
    out where they are those of the records. ``expr``: of it all register tiles are candidates, beside those listed.
    """

    found: Sequence[tuple[Tiles, float]]
    depth: int
    levels: Sequence[Sequence[LearntNumber]] | None = None
    expr: TensorExpr | None = None


class KernelPart(ABC, Generic[Tiles]):
    """What one kernel computes of an operator, in ``context``; a `KernelKind` has recognised it."""

    context: KernelContext
    tiles: ClassVar[type | None] = None
    """The record of what can be chosen; None: nothing can."""
    is_small: ClassVar[bool] = False
    """Whether its time hardly counts beside parts of other kinds: then only the others are tuned."""

    @property
    def anchor(self) -> Anchor | None:
        """What Roller constructs rPrograms for; None where nothing has reuse."""
        return None

    @abstractmethod
    def forms(self, chosen: Tiles | None = None) -> list[Form]:
        """The kernel in the ``chosen`` tiles, or in construction's; raises IllegalRewrite where it cannot have them."""

    def ways(self, pick: Pick = best_programs) -> Iterator[list[Form]]:
        """Forms to show to the device's compiler, best first: of the rPrograms that ``pick`` takes.

        Raises IllegalRewrite, with every emitter's reason, where there are none.
        """
        yield self.forms()

    def key(self) -> MeasuredWorkload:
        """What decides how fast a choice is: under its key choices are kept. Names do not count."""
        raise IllegalRewrite(NO_CHOICE)

    def candidates(self) -> Candidates[Tiles]:
        """All choices; raises IllegalRewrite, with the reason, where there is nothing to choose."""
        raise IllegalRewrite(NO_CHOICE)

    def less_work(self, own: KernelChoice, least_tasks: int) -> Iterator[TileChoices]:
        """Tiles of less work than those of its ``own`` kernel, the least first: for schedules with too few units."""
        return iter(())

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        """The operator's record with what its ``forms`` do not say."""
        return choice


class SharedPart(KernelPart[None]):
    """What the cores share where that pays, ``busy_s`` seconds of one of them, in ``task_count`` tasks at most."""

    @property
    @abstractmethod
    def busy_s(self) -> float: ...
    @property
    @abstractmethod
    def task_count(self) -> int: ...

    @property
    def loop_kind(self) -> ForKind:
        tasks = max(1, min(self.context.device.unit_count, self.task_count))
        return outer_kind(self.busy_s / tasks, replace(self.context.device, unit_count=tasks))

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        """With the model's time."""
        device = self.context.device
        units = device.unit_count if self.loop_kind == PARALLEL else 1
        return replace(choice, expected_s=self.busy_s / units + Machine(device).launch_s)


AnyPart: TypeAlias = KernelPart[Any]


class KernelKind:
    """Recognises what its kernels compute: a whole function, or a group of an operator's computations."""

    name: ClassVar[str]
    on_gpus: ClassVar[bool] = False

    def of_function(self, operator: UnscheduledOperator) -> AnyPart | None:
        """The part that is all of ``operator``; None where it is not of this kind.

        Raises IllegalRewrite, with the reason, where it is and yet has no such kernel.
        """
        return None

    def of_group(self, group: Group, context: KernelContext) -> AnyPart | None:
        """The part that is ``group``; None where that is not of this kind."""
        return None


NO_CHOICE = "it has no tiles to choose"


def chosen_forms(part: AnyPart, choices: TileChoices = NO_CHOICES) -> list[Form]:
    """The forms of ``part`` in the tiles that ``choices`` have for its key, else in construction's; notes say which."""
    text = choices.get(part.key().key) if choices and part.tiles is not None else None
    if text is None or part.tiles is None:
        return part.forms()
    try:
        forms, said = part.forms(from_json(part.tiles, text)), f"{CHOSEN}{text}"
    except (IllegalRewrite, ValueError) as refusal:
        forms, said = part.forms(), f"{LEFT_OUT}{refusal}"
    return [*forms[:-1], forms[-1].with_notes(said)]
