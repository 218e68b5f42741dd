"""The kinds of kernels in the order in which they are asked, and what becomes of an operator when they are."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from tvm_ext.analysis.tile_workload import joint_workload
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.measurement import MeasuredWorkload
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuning import JointTiles
from tvm_ext.support.limits import check_time, timed_construction

from ..plan.alternatives import Pick, best_programs
from ..plan.chosen_tiles import NO_CHOICES, TileChoices
from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form, flops_of
from ..plan.gpu_chain import with_chains
from ..plan.gpu_limits import check_limits
from ..plan.padded_stores import cpu_groups
from ..plan.plan_gpu_kernels import plan_for_gpu
from .cpu_attention import CpuAttention
from .cpu_cells import CpuCells
from .cpu_chains import CpuChains
from .cpu_compaction import CpuCompaction
from .cpu_packed import CpuPacked
from .cpu_rows import CpuRows
from .cpu_scans import CpuScans
from .cpu_scatters import CpuScatters
from .cpu_suppression import CpuSuppression
from .cpu_tiles import CpuTiles
from .cpu_top_k import CpuTopK
from .cpu_windows import CpuWindows
from .cpu_winograd import CpuWinograd
from .gpu_chains import GpuChains
from .gpu_rows import GpuRows
from .gpu_tiles import GpuTiles
from .kernel_kind import AnyPart, Group, KernelKind, chosen_forms

KINDS: list[KernelKind] = [
    *(
        CpuAttention(),
        CpuPacked(),
        CpuScatters(),
        CpuTopK(),
        CpuScans(),
        CpuSuppression(),
        CpuCompaction(),
        CpuChains(),
        CpuCells(),
        CpuWindows(),
        CpuWinograd(),
        CpuTiles(),
        CpuRows(),
    ),
    *(GpuChains(), GpuTiles(), GpuRows()),
]
"""The most special first: rows take what nobody else recognises."""

ATTEMPTS = 4
"""Kernels of a division that are made at most, where the device's compiler refuses them: each may cost a run of it."""


def register_kind(kind: KernelKind) -> None:
    """Ask ``kind`` before all others from now on; the keys of the kernel cache have its source."""
    KINDS.insert(0, kind)


def kinds_digest() -> str:
    """Of the sources of registered kinds, for the kernel cache's key; "" where all are this package's own."""
    files = {inspect.getfile(type(kind)) for kind in KINDS if not type(kind).__module__.startswith(f"{__package__}.")}
    return "".join(hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in sorted(files))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Division:
    """An operator as the ``parts`` that a kernel each computes, in their order, and why there are no others."""

    kind: str  # of what is special about it; "" where nothing is
    context: KernelContext
    parts: Sequence[AnyPart]
    refusals: tuple[str, ...]
    main: int = 0
    """The part that is tried in several ways."""

    def ways(self, choices: TileChoices, pick: Pick) -> Iterator[tuple[RProgram | None, list[Form]]]:
        """(rProgram of the main part, forms of all parts) for each form of that part; the others are in their best.

        Raises IllegalRewrite where a part has none.
        """
        main = self.parts[self.main]
        others: dict[AnyPart, list[Form]] | None = None
        tried = chain([chosen_forms(main, choices)], main.ways(pick)) if choices else main.ways(pick)
        for forms in tried:  # those behind the chosen one where the device's compiler refuses it
            if others is None:
                others = {part: chosen_forms(part, choices) for part in self.parts if part is not main}
            made = {**others, main: forms}
            yield forms[0].program, [form for part in self.parts for form in made[part]]


def divisions(operator: UnscheduledOperator) -> Iterator[Division]:
    """The ways to divide ``operator``, the most special first: all of it as one kind, at last group by group.

    Raises IllegalRewrite where it cannot be read, TargetError where the device cannot run it.
    """
    refusals: list[str] = []
    for kind in _kinds_for(operator.device):
        try:
            part = kind.of_function(operator)
        except IllegalRewrite as refusal:
            refusals.append(f"no kernel of {kind.name}: {refusal}")
            continue
        if part is not None:
            yield Division(kind=kind.name, context=part.context, parts=(part,), refusals=tuple(refusals))
    for kind_name, groups, refused in _groups_of(operator.simplified):
        yield _by_groups(kind_name, groups, operator.simplified, (*refusals, *refused))


def _kinds_for(device: DeviceSpec) -> list[KernelKind]:
    return [kind for kind in KINDS if kind.on_gpus == (device.kind != "cpu")]


def _groups_of(context: KernelContext) -> Iterator[tuple[str, Sequence[Group], Sequence[str]]]:
    """(what is special, groups, why there are no others); on GPUs first with products that follow each other as one."""
    if context.device.kind == "cpu":
        yield "", *cpu_groups(context.operator)
        return
    check_limits(context)
    groups, asked = plan_for_gpu(context.operator), context.options.enable_persistent_fusion
    remarks: Sequence[str] = ()
    if asked is not False:
        chained, remarks = with_chains(groups, context.operator, context.device, always=asked is True)
        if len(chained) < len(groups):
            yield "a chain", chained, remarks
            remarks = ()
    yield "", groups, remarks


def _by_groups(kind: str, groups: Sequence[Group], context: KernelContext, refusals: tuple[str, ...]) -> Division:
    flops = [sum(flops_of(computation) for computation in group.computations) for group in groups]
    parts = [part_of(group, context) for group in groups]
    return Division(kind=kind, context=context, parts=parts, refusals=refusals, main=flops.index(max(flops)))


def part_of(group: Group, context: KernelContext) -> AnyPart:
    """The part that the first kind recognises in ``group``; the last one recognises whatever is left."""
    check_time()
    return next(part for kind in _kinds_for(context.device) if (part := kind.of_group(group, context)) is not None)


def constructions(
    operator: UnscheduledOperator, choices: TileChoices = NO_CHOICES, pick: Pick = best_programs
) -> Iterator[tuple[Division, RProgram | None, list[Form]]]:
    """(division, rProgram of its main part, forms) for the kernels of ``operator``, in the order to try them.

    Of each division `ATTEMPTS`; one of which a part has no kernel is left out. Raises IllegalRewrite, as the last
    division did, where that is group by group.
    """
    refused: list[str] = []
    for division in divisions(operator):
        told = replace(division, refusals=(*refused, *division.refusals))
        try:
            yield from ((told, *made) for made in islice(division.ways(choices, pick), ATTEMPTS))
        except IllegalRewrite as refusal:
            if not division.kind:
                raise
            refused.append(f"no kernel of {division.kind}: {refusal}")


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
