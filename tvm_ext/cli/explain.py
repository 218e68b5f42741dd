"""One operator's construction, for people: its expression, its rPrograms on any device of the tables, and what lost."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import tirx

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import graph_passes, layout_passes, operator_passes
from tvm_ext.recorder import call_counts
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.relay_passes.move_padding import whole_operator
from tvm_ext.tir_passes.kinds.cpu_windows import window_kernel
from tvm_ext.tir_passes.plan.anchors import construct_anchor, construct_gpu_anchor
from tvm_ext.tir_passes.plan.context import KernelContext, UnscheduledOperator
from tvm_ext.tir_passes.plan.padded_stores import cpu_groups
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.tir_passes.plan.plan_kernels import RowGroup, TileGroup
from tvm_ext.tir_passes.plan.plan_windows import WindowGroup
from tvm_ext.tir_passes.roller.construct import Construction


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorExplanation:
    """One reduction of an operator that Roller tiles: what it computes, and the construction for it."""

    expr: TensorExpr
    epilogue: tuple[str, ...]
    construction: Construction


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """An operator on a device. ``note`` says why there is nothing to construct, where there is nothing."""

    operator: str
    calls: int
    device: str
    anchors: tuple[AnchorExplanation, ...]
    row_computations: tuple[str, ...]  # computations without data reuse: they run row by row, with nothing to choose
    note: str = ""


def operators_of(
    mod: tvm.IRModule, device: DeviceSpec | None = None, options: BuildOptions | None = None
) -> tvm.IRModule:
    """``mod``, parameters bound, as one unscheduled PrimFunc per fused operator: what construction starts from.

    With a ``device`` the operators are in the layouts in which a build with ``options`` has them.
    """
    _, target = device_for_target("llvm")
    blocked = layout_passes(device, options or BuildOptions()) if device is not None else []
    passes = [*graph_passes(), *blocked, *operator_passes(target), AnnotateConstants()]
    with target:
        return tvm.transform.Sequential(passes, name="tvm_ext.operators")(mod)


def operator_names(operators: tvm.IRModule) -> list[tuple[str, int]]:
    """(name, call sites) of every operator, in the order of their first call."""
    calls = call_counts(operators)
    known = [gvar.name_hint for gvar, func in operators.functions_items() if isinstance(func, tirx.PrimFunc)]
    return [(name, count) for name, count in calls.items() if name in known]


def explain(operators: tvm.IRModule, name: str, device: DeviceSpec, options: BuildOptions) -> Explanation:
    """Construct for the operator ``name``; raises InputError for an unknown one, with the nearest names."""
    calls = dict(operator_names(operators))
    name = name if name in calls else whole_operator(name)
    if name not in calls:
        nearest = difflib.get_close_matches(name, calls, n=5, cutoff=0.3) or list(calls)
        raise InputError(f"the model has no operator {name!r}.", f"did you mean {', '.join(nearest)}?")
    function = operators[name]
    try:
        context, groups = _groups(UnscheduledOperator(func=function, name=name, device=device, options=options))
    except IllegalRewrite as refusal:
        return Explanation(
            operator=name, calls=calls[name], device=device.name, anchors=(), row_computations=(), note=refusal.problem
        )
    tiled = [group for group in groups if isinstance(group, TileGroup)]
    rows = [computation.name for group in groups if isinstance(group, RowGroup) for computation in group.computations]
    windows = [
        window_kernel(group.window, group.epilogue, device)[2] for group in groups if isinstance(group, WindowGroup)
    ]
    return Explanation(
        operator=name,
        calls=calls[name],
        device=device.name,
        anchors=tuple(_anchor(group, context) for group in tiled),
        row_computations=tuple(rows),
        note="; ".join(windows)
        if tiled or windows
        else "no reduction with data reuse: nothing is kept in tiles, the rows are split among the units",
    )


def _groups(operator: UnscheduledOperator) -> tuple[KernelContext, Sequence[Any]]:
    """The operator as its kernels compute it, and its groups of computations, one for each kernel."""
    if operator.device.kind != "cpu":
        simple = simplify_for_gpu(operator.as_read.operator)
        return replace(operator.as_read, operator=simple), plan_for_gpu(simple)
    return operator.simplified, cpu_groups(operator.simplified.operator)[0]


def _anchor(group: TileGroup, context: KernelContext) -> AnchorExplanation:
    if context.device.kind != "cpu":
        _, expr, construction = construct_gpu_anchor(group, context.operator, context.device, context.options)
    else:
        anchor = construct_anchor(group, context)
        expr, construction = anchor.expr, anchor.construction
    return AnchorExplanation(
        expr=expr,
        epilogue=tuple(item.name for item in group.epilogue),
        construction=construction,
    )
