"""One operator's construction, for people: its expression, its rPrograms on any device of the tables, and what lost."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

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
from tvm_ext.tir_passes.kinds.registry import divisions
from tvm_ext.tir_passes.plan.anchors import Anchor
from tvm_ext.tir_passes.plan.context import UnscheduledOperator
from tvm_ext.tir_passes.roller.construct import Construction


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorExplanation:
    """A reduction that Roller tiles: what it computes, and the construction for it."""

    expr: TensorExpr
    construction: Construction


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """An operator on a device: the reductions that Roller tiles, and what is to be said of its other kernels."""

    operator: str
    calls: int
    device: str
    anchors: tuple[AnchorExplanation, ...] = ()
    notes: tuple[str, ...] = ()


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
    operator = UnscheduledOperator(func=operators[name], name=name, device=device, options=options)
    explanation = Explanation(operator=name, calls=calls[name], device=device.name)
    try:
        *_, division = divisions(operator)
        anchors = tuple(_explained(anchor) for part in division.parts if (anchor := part.anchor) is not None)
        others = [form for part in division.parts if part.anchor is None for form in part.forms()]
    except IllegalRewrite as refusal:
        return replace(explanation, notes=(refusal.problem,))
    notes = [note for form in others for note in form.notes]
    if not anchors and all(form.path == "rows" for form in others):
        notes.append("no reduction with data reuse: nothing is kept in tiles, the rows are split among the units")
    return replace(explanation, anchors=anchors, notes=tuple(notes))


def _explained(anchor: Anchor) -> AnchorExplanation:
    return AnchorExplanation(expr=anchor.expr, construction=anchor.construction)
