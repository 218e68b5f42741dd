"""The kinds of kernels in the order in which they are asked, and what becomes of an operator when they are."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tvm_ext.analysis.tile_workload import joint_workload
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import JointTiles
from tvm_ext.support.limits import check_time, timed_construction

from ..plan.chosen_tiles import NO_CHOICES, TileChoices
from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from ..plan.padded_stores import cpu_groups
from .cpu_attention import CpuAttention
from .cpu_cells import CpuCells
from .cpu_chains import CpuChains
from .cpu_rows import CpuRows
from .cpu_tiles import CpuTiles
from .cpu_windows import CpuWindows
from .gpu_chains import GpuChains
from .gpu_rows import GpuRows
from .gpu_tiles import GpuTiles
from .kernel_kind import AnyPart, Group, KernelKind, chosen_forms

KINDS: list[KernelKind] = [CpuAttention(), CpuChains(), CpuCells(), CpuWindows(), CpuTiles(), CpuRows()]
"""Of CPUs, the most special first: rows take what nobody else recognises."""

GPU_KINDS: list[KernelKind] = [GpuChains(), GpuTiles(), GpuRows()]


def register_kind(kind: KernelKind) -> None:
    """Ask ``kind``, of CPUs, before all others from now on; the keys of the kernel cache have its source."""
    KINDS.insert(0, kind)


def kinds_digest() -> str:
    """Of the sources of registered kinds, for the kernel cache's key; "" where all are this package's own."""
    files = {inspect.getfile(type(kind)) for kind in KINDS if not type(kind).__module__.startswith(f"{__package__}.")}
    return "".join(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Division:
    """An operator as the ``parts`` that a kernel each computes, in their order, and why there are no others."""

    kind: str  # of the one part that is all of it; "" where groups are parts
    context: KernelContext
    parts: Sequence[AnyPart]
    refusals: tuple[str, ...]


def divisions(operator: UnscheduledOperator) -> Iterator[Division]:
    """The ways to divide ``operator``, the most special first: all of it as one kind, at last group by group.

    Raises IllegalRewrite where it cannot be read.
    """
    refusals: list[str] = []
    for kind in KINDS:
        try:
            part = kind.of_function(operator)
        except IllegalRewrite as refusal:
            refusals.append(f"no kernel of {kind.name}: {refusal}")
            continue
        if part is not None:
            yield Division(kind=kind.name, context=part.context, parts=(part,), refusals=tuple(refusals))
    context = operator.simplified
    groups, windows = cpu_groups(context.operator)
    parts = [part_of(group, context) for group in groups]
    yield Division(kind="", context=context, parts=parts, refusals=(*refusals, *windows))


def part_of(group: Group, context: KernelContext) -> AnyPart:
    """The part that the first kind recognises in ``group``; the last one recognises whatever is left."""
    check_time()
    kinds = KINDS if context.device.kind == "cpu" else GPU_KINDS
    return next(part for kind in kinds if (part := kind.of_group(group, context)) is not None)


def construct(operator: UnscheduledOperator, choices: TileChoices) -> tuple[Division, list[Form]]:
    """The first division of ``operator`` of which all parts have kernels, and these, in the tiles of ``choices``.

    Raises IllegalRewrite, as the last division did, where there is none.
    """
    refused: list[str] = []
    for division in divisions(operator):
        try:
            forms = [form for part in division.parts for form in chosen_forms(part, choices)]
        except IllegalRewrite as refusal:  # noqa: PERF203 - a handful
            if not division.kind:
                raise
            refused.append(f"no kernel of {division.kind}: {refusal}")
        else:
            return replace(division, refusals=(*refused, *division.refusals)), forms
    raise AssertionError("the last division is group by group")


# --- tiles chosen from outside --------------------------------------------------------------------------------------
def tunable_parts(operator: UnscheduledOperator) -> list[AnyPart]:
    """The parts of ``operator`` that have tiles to choose; raises IllegalRewrite as construction does."""
    parts = [part for part in next(divisions(operator)).parts if part.tiles is not None]
    return [part for part in parts if not part.is_small] or parts


def workloads_of(parts: Iterable[AnyPart]) -> dict[str, MeasuredWorkload]:
    """The workloads of ``parts`` by their keys, each once."""
    return {workload.key: workload for workload in (part.key() for part in parts)}


def own_choices(operator: UnscheduledOperator, tiles: TileChoices) -> TileChoices:
    """What of ``tiles`` concerns the kernel of ``operator``: of many, those of its own parts.

    What was chosen for several parts together goes before what was chosen for one of them in other kernels.
    """
    if not tiles:
        return NO_CHOICES
    try:
        with timed_construction():
            own = workloads_of(tunable_parts(operator))
    except IllegalRewrite:
        return NO_CHOICES  # construction does not come to them either, but where the clock ended one of both
    together = tiles.get(joint_workload(list(own.values()), operator.device).key) if len(own) > 1 else None
    apart = {key: tiles[key] for key in own if key in tiles}
    return apart if together is None else {**apart, **_each_of(together, list(own))}


def _each_of(text: str, keys: Sequence[str]) -> TileChoices:
    """The choices of the parts of ``keys`` that ``text`` means; one that is damaged is every part's, to be refused."""
    try:
        parts = from_json(JointTiles, text).parts
        return {key: part for key, part in zip(keys, parts, strict=True) if part}
    except ValueError:
        return dict.fromkeys(keys, text)
