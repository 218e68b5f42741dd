"""The ways to construct an operator that the paper's ablations compare, as rPrograms and as kernels. Needs no device.

A `Variant` is one bar of Table 3, Figure 16 or Figure 17 for one operator: the anchor (with or without axis fusion),
the rPrograms that a set of rules gives, and whether its kernel follows the rProgram to the letter. `emit` makes the
kernel of the first rProgram that the emitter takes, `function` a PrimFunc that can be interpreted or compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for benchmarks._ablated

from cases import Case, matmul, roller
from plain_storage import emit_literally
from programs import function_name, program

from benchmarks._ablated import construct_ablated
from tvm_ext._tvm import ALREADY_SCHEDULED, tirx
from tvm_ext.analysis.computation_exprs import tensor_expr_of
from tvm_ext.analysis.computation_rewrites import drop_unit_axes, split_divided_axes
from tvm_ext.analysis.computations import Computation, OperatorBody, read_operator
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import sequence
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.serialise import to_json
from tvm_ext.tir_passes.emit.simt_tiles.emit import emit_simt_tile
from tvm_ext.tir_passes.plan.canonical import canonical_computation
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.tir_passes.plan.plan_kernels import TileGroup
from tvm_ext.tir_passes.roller.align import BANK, MEMORY, SHAPE, UNIT
from tvm_ext.tir_passes.roller.canonical import canonicalise

WORKLOAD = Path(__file__).resolve().parent.parent / "workloads" / "roller_ops.csv"
TABLE_3, FIGURE_16, FIGURE_17 = "Table 3", "Figure 16", "Figure 17"
FIGURES = (TABLE_3, FIGURE_16, FIGURE_17)

NO_RULES: frozenset[str] = frozenset()
EVERY_RULE = frozenset({MEMORY, UNIT, SHAPE, BANK})
RULES: dict[str, frozenset[str]] = {
    "none": NO_RULES,
    "+ memory transaction": frozenset({MEMORY}),
    "+ execution unit": frozenset({MEMORY, UNIT}),
    "+ tensor shape": frozenset({MEMORY, UNIT, SHAPE}),
    "+ bank": EVERY_RULE,
}
"""The columns of Table 3, each kernel to the letter of its rProgram."""

AS_BUILT = {"none, as built": NO_RULES, "all, as built": EVERY_RULE}
"""What a build's emitter makes of the first and the last column's rPrograms: it searches storage and deepens steps."""

SHAPE_BOUNDS: dict[str, tuple[bool, float | None]] = {
    "unfused, ε 0": (False, 0.0),
    "fused, ε 0": (True, 0.0),
    "fused, ε 0.4": (True, 0.4),
    "fused, ε 1": (True, 1.0),
    "fused, ε grows": (True, None),
}
"""Figure 17's Roller-B, -F, -P0.4 and -P1.0: (axis fusion, ε); last what a build does, which keeps all it has found."""

IRREGULAR = ("C3", "C8", "C9", "C10", "C26", "C29")
CANDIDATES = 10
"""The paper takes the best of its ten; here the model ranks them, and the emitter takes the first it can."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Anchor:
    """The reduction of an operator, with what surrounds it: the arguments of `emit_simt_tile` but for the program."""

    computation: Computation
    expr: TensorExpr
    group: TileGroup
    operator: OperatorBody


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Variant:
    """One bar of a figure: ``programs`` best first; ``fused`` and ``literal`` say how the kernel is made of them."""

    figure: str
    case: Case
    label: str
    programs: tuple[RProgram, ...]
    fused: bool = True
    literal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Emitted:
    """A kernel over the parameters of ``anchor``'s operator, its rProgram, and why those before it were refused."""

    anchor: Anchor
    rprogram: RProgram
    kernel: SimtKernel
    refused: tuple[str, ...] = ()


def cases(figure: str) -> list[Case]:
    """The operators of ``figure``: the paper's 119 for Table 3, small products, irregular convolutions."""
    if figure == FIGURE_16:
        return list(_small())
    return [case for case in roller(WORKLOAD) if figure == TABLE_3 or case.id in IRREGULAR]


def _small() -> Iterator[Case]:
    """Products of too few tiles for a GPU. The paper does not name its two; these are of BERT's and LSTM's kind."""
    group = "ablation_small"
    yield matmul("small_64_256_256", 64, 256, 256, group=group)
    yield matmul("small_128_512_128", 128, 512, 128, group=group)
    yield matmul("small_128_768_768", 128, 768, 768, group=group)
    yield matmul("small_256_1024_1024", 256, 1024, 1024, group=group)


def variants(figure: str, case: Case, device: DeviceSpec) -> Iterator[Variant]:
    """What ``figure`` compares for ``case``; nothing where it has no reduction that tiles serve."""
    anchor = anchor_of(case)
    if anchor is None:
        return
    if figure == TABLE_3:
        for label, rules in {**RULES, **AS_BUILT}.items():
            found = construct_ablated(anchor.expr, device, k=CANDIDATES, rules=rules).programs
            yield Variant(figure=figure, case=case, label=label, programs=found, literal=label not in AS_BUILT)
    elif figure == FIGURE_16:
        for label, shrunk in {"original": False, "shrunk": True}.items():
            found = construct_ablated(anchor.expr, device, k=CANDIDATES, rules=EVERY_RULE, shrink_small=shrunk).programs
            yield Variant(figure=figure, case=case, label=label, programs=found)
    else:
        for label, (fused, epsilon) in SHAPE_BOUNDS.items():
            expr = (anchor if fused else _unfused(anchor)).expr
            found = construct_ablated(expr, device, k=CANDIDATES, rules=EVERY_RULE, epsilon=epsilon).programs
            yield Variant(figure=figure, case=case, label=label, programs=found, fused=fused)


def anchor_of(case: Case, *, fused: bool = True) -> Anchor | None:
    """The only tile group of ``case``, in canonical form unless not ``fused``; None where rows of threads serve it."""
    operator = simplify_for_gpu(read_operator(program(case), case.id))
    groups = plan_for_gpu(operator)
    if len(groups) != 1 or not isinstance(groups[0], TileGroup):
        return None
    group = groups[0]
    computation, expr = canonical_computation(
        group.anchor, operator.name, prologue=group.prologue, epilogue=group.epilogue, params=operator.params
    )
    anchor = Anchor(computation=computation, expr=expr, group=group, operator=operator)
    return anchor if fused else _unfused(anchor)


def _unfused(anchor: Anchor) -> Anchor:
    """``anchor`` with its axes as they were written, but for those of extent 1."""
    group = anchor.group
    computation = split_divided_axes(drop_unit_axes(group.anchor))
    expr = tensor_expr_of(computation, name=anchor.operator.name, prologue=group.prologue, epilogue=group.epilogue)
    return Anchor(
        computation=computation, expr=canonicalise(expr, fuse=False).expr, group=group, operator=anchor.operator
    )  # fmt: skip


def emit_program(anchor: Anchor, rprogram: RProgram, device: DeviceSpec, *, literal: bool) -> SimtKernel:
    """The kernel of one rProgram; raises IllegalRewrite with the reason where the emitter refuses it."""
    group = anchor.group
    parts = anchor.computation, anchor.expr, group.prologue, group.epilogue, rprogram, device
    return emit_literally(*parts) if literal else emit_simt_tile(*parts, anchor.operator.params)


def emit(variant: Variant, device: DeviceSpec) -> Emitted:
    """The kernel of the first rProgram that has one; raises IllegalRewrite, with all reasons, where none has."""
    anchor = anchor_of(variant.case, fused=variant.fused)
    assert anchor is not None, "a variant has a tile group"
    refused: list[str] = []
    for rprogram in variant.programs:
        made = _attempt(anchor, rprogram, device, literal=variant.literal)
        if isinstance(made, SimtKernel):
            return Emitted(anchor=anchor, rprogram=rprogram, kernel=made, refused=tuple(refused))
        refused.append(made)
    raise IllegalRewrite("; ".join(refused) or f"{variant.case.id}: no tile satisfies {variant.label!r}")


def _attempt(anchor: Anchor, rprogram: RProgram, device: DeviceSpec, *, literal: bool) -> SimtKernel | str:
    """The kernel of one rProgram, or why it has none."""
    try:
        return emit_program(anchor, rprogram, device, literal=literal)
    except IllegalRewrite as refusal:
        return f"tile {rprogram.tile('L1')} over {rprogram.tile('L0')}: {refusal}"


def function(emitted: Emitted, device: DeviceSpec, why: str) -> Any:
    """The kernel as a PrimFunc over its operator's parameters, with its rProgram in a `KernelChoice`."""
    operator = emitted.anchor.operator
    choice = KernelChoice(
        operator=operator.name, path="rtile", notes=(why,), device=device.name, program=emitted.rprogram
    )  # fmt: skip
    body = tirx.PrimFunc(list(operator.params), sequence(*emitted.kernel.statements))
    return body.with_attrs({"s_tir": True, ALREADY_SCHEDULED: True, CHOICE: to_json(choice)})


def all_cases() -> list[Case]:
    """The cases of every figure, each once; of the paper's list those that tiles serve."""
    listed = [case for case in cases(TABLE_3) if anchor_of(case) is not None]
    return [*listed, *cases(FIGURE_16)]


def contenders(case: Case, device: DeviceSpec, refusals: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """(name such as "table_3_bank", function) of each variant of ``case`` in any figure, to be measured on a GPU.

    What has no kernel is added to ``refusals`` with the reason.
    """
    figures = [figure for figure in FIGURES if case.id in {item.id for item in cases(figure)}]
    for variant in (variant for figure in figures for variant in variants(figure, case, device)):
        name = re.sub(r"[^a-z0-9]+", "_", f"{variant.figure} {variant.label}".lower()).strip("_")
        made = _emitted(variant, device)
        if isinstance(made, Emitted):
            func = function(made, device, f"{variant.figure}: {variant.label}")
            yield name, func.with_attr("global_symbol", function_name(case))
        else:
            refusals[name] = made


def _emitted(variant: Variant, device: DeviceSpec) -> Emitted | str:
    try:
        return emit(variant, device)
    except IllegalRewrite as refusal:
        return str(refusal)
