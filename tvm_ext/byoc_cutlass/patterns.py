"""The regions of a function that CUTLASS takes: each product that templates serve, with the epilogue that pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from tvm_ext._tvm import Call, Expr, Node, Var, relax
from tvm_ext.analysis.relax_values import described, dtype_of, is_tensor, operator_name, static_shape, value_bytes
from tvm_ext.cost.epilogue_traffic import EpilogueStage, best_prefix, instructions_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.partition import REDUCTION_STEPS, CutlassProblem, CutlassRefusal, CutlassRegion, EpilogueStep

from .epilogues import FUNCTORS, REDUCTIONS, Cut, EpilogueGrowth
from .graph_values import GraphValues
from .layout_changes import PlanesSource, pays, reading_planes, source_of, storing_planes, transposed_result
from .matmul_problems import transposed_source
from .support import ANCHORS, MATMUL, problem_of

ABSORBING = REDUCTIONS | {"mean", "min", *FUNCTORS} - {"cast"}
"""Operators whose kernel computes what is element by element before it as it reads (stock TVM's FuseOps)."""

OF_MODEL = "the model: "
"""How the reason begins where an epilogue ended for what it would cost."""

TILE_ROWS = 64
"""Rows that a threadblock adds up before it adds to memory, at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A region of the graph: its record, the values that it is made of, in program order, and what they read."""

    record: CutlassRegion
    members: tuple[Var, ...]
    operands: tuple[Expr, ...]
    source: PlanesSource | None = None  # of a first factor in NCHW

    @property
    def result(self) -> Var:
        return self.members[-1]


@dataclass(slots=True)
class Regions:
    """What was found in one function."""

    taken: list[Region] = field(default_factory=list)
    refused: list[CutlassRefusal] = field(default_factory=list)


def regions_of(values: GraphValues, device: DeviceSpec, others: Sequence[Region] = ()) -> Regions:
    """Products in program order: of two whose sum is one value, the first has the addition in its epilogue.

    What belongs to the ``others`` is not looked at.
    """
    regions = Regions()
    owner = {member: region for region in others for member in region.members}
    for variable, call in values.bindings.items():
        if operator_name(call) not in ANCHORS or variable in owner:
            continue
        try:
            problem = problem_of(call, values, device)
        except IllegalRewrite as refusal:
            regions.refused.append(_refusal(variable, call, refusal))
            continue
        assert problem is not None
        factors = factors_of(call, values)
        growth = EpilogueGrowth(variable, factors, values, owner, batched=problem.batch > 1)
        region = _region(growth, factors, problem, values, device)
        regions.taken.append(region)
        owner.update(dict.fromkeys(region.members, region))
    regions.taken = [_with_layout_changes(region, values, device) for region in regions.taken]
    regions.refused += _nested(values)
    return regions


def _with_layout_changes(region: Region, values: GraphValues, device: DeviceSpec) -> Region:
    """The region with the transpositions beside it where it is a network's first or last convolution and that pays."""
    if region.record.problem.window is None:
        return region
    call = values.bindings[region.members[0]]
    source = source_of(call, values)
    if source is not None:
        changed = reading_planes(region.record, source)
        if pays(changed, region.record, (source.planes, call.args[0]), device):
            places = dict(zip(region.record.factors, (source.planes, source.weight), strict=True))
            operands = tuple(places.get(i, operand) for i, operand in enumerate(region.operands))
            members = (*source.skipped, *region.members)
            region = Region(record=changed, members=members, operands=operands, source=source)
    transposed = transposed_result(region.result, region.record, values)
    if transposed is not None:
        changed = storing_planes(region.record, transposed)
        if pays(changed, region.record, (region.result, transposed), device):
            region = replace(region, record=changed, members=(*region.members, transposed))
    return region


def _nested(values: GraphValues) -> list[CutlassRefusal]:
    """Products inside branches and inner functions, which the function's own values do not show."""
    shown, inner = set(values.bindings.values()), []

    def visit(node: Node) -> None:
        if operator_name(node) in ANCHORS and node not in shown:
            inner.append(node)

    relax.analysis.post_order_visit(values.func, visit)
    return [
        _refusal(
            None,
            call,
            IllegalRewrite(
                f"{operator_name(call)} of {' and '.join(map(described, call.args))} is in a branch or inner function",
                "inline the branch where its condition is known",
            ),
        )
        for call in inner
    ]


def _refusal(variable: Var | None, call: Call, refusal: IllegalRewrite) -> CutlassRefusal:
    name = operator_name(call)
    assert name is not None
    return CutlassRefusal(
        value="" if variable is None else variable.name, operator=name, reason=refusal.problem, remedy=refusal.remedy
    )


def factors_of(call: Call, values: GraphValues) -> tuple[Expr, Expr]:
    """The tensors that a product reads as A and B: what a `permute_dims` that is read through permutes."""
    first, second = call.args[:2]
    if operator_name(call) != MATMUL:
        return first, second
    sources = [transposed_source(operand, values) for operand in (first, second)]
    read = [own if source is None else source.args[0] for own, source in zip((first, second), sources, strict=True)]
    return read[0], read[1]


def _region(
    growth: EpilogueGrowth, factors: tuple[Expr, Expr], problem: CutlassProblem, values: GraphValues, device: DeviceSpec
) -> Region:
    cuts = growth.cuts
    stages = [_stage(cut, before, values, problem, device) for before, cut in zip([None, *cuts], cuts, strict=False)]
    best, saved_us = best_prefix(stages, device, absorbed=_is_absorbed(cuts[-1], growth))
    cut = cuts[best]
    more = cuts[best + 1 :]
    ended = _of_model(more[0]) if more else growth.reason_of_end(cut)
    record = CutlassRegion(
        value=cut.value.name,
        pattern="_".join([problem.anchor, *map(_step_name, cut.steps)]),
        problem=problem,
        epilogue=cut.steps,
        factors=(cut.tensors.index(factors[0]), cut.tensors.index(factors[1])),
        expression=cut.expression,
        operands=cut.operands,
        out_dtype=dtype_of(cut.value),
        ended=ended,
        saved_us=saved_us,
    )
    members = (*_transposes(cuts[0].value, values), *cut.members)
    return Region(record=record, members=members, operands=cut.tensors)


def _of_model(cut: Cut) -> str:
    return f"{OF_MODEL}{cut.steps[-1].function} costs more in the epilogue than in the kernel that reads it"


def _transposes(anchor: Var, values: GraphValues) -> list[Var]:
    """The `permute_dims` before a matrix product that it reads through."""
    call = values.bindings[anchor]
    if operator_name(call) != MATMUL:
        return []
    read = [operand for operand in call.args if transposed_source(operand, values) is not None]
    return list(dict.fromkeys(read))


def _step_name(step: EpilogueStep) -> str:
    """``bias`` and ``residual_add`` are what the field calls an addition of a row and of a matrix."""
    special = {("add", "row"): "bias", ("add", "matrix"): "residual_add", ("multiply", "matrix"): "residual_multiply"}
    return special.get((step.function, step.operand or ""), step.function)


def _is_absorbed(cut: Cut, growth: EpilogueGrowth) -> bool:
    """Whether the one user is a kernel that computes as it reads; another product's epilogue reads what is there."""
    values = growth.values
    users = values.users_of(cut.value)
    if len(users) != 1 or isinstance(users[0], str) or users[0] in growth.taken:
        return False
    operator = values.operator_of(values.bindings.get(users[0]))
    return operator is not None and operator[0] in ABSORBING


def _stage(
    cut: Cut, before: Cut | None, values: GraphValues, problem: CutlassProblem, device: DeviceSpec
) -> EpilogueStage:
    if before is None:
        return EpilogueStage(value_bytes=value_bytes(cut.value))
    added = cut.members[len(before.members) :]
    outside = {
        operand
        for member in added
        for operand in (values.operator_of(values.bindings[member]) or ("", []))[1]
        if is_tensor(operand) and operand not in cut.members
    }
    steps = cut.steps[len(before.steps) :] or cut.steps[-1:]
    elements = prod(static_shape(before.value) or ())
    sums = any(step.function in REDUCTION_STEPS for step in steps)
    partial = value_bytes(cut.value) * max(1, problem.rows // TILE_ROWS) if sums else 0.0
    return EpilogueStage(
        value_bytes=value_bytes(cut.value),
        read_bytes=sum(map(value_bytes, outside)) + partial,
        instructions=elements * sum(instructions_of(step.function, device) for step in steps),
        launches=int(sums),
    )
