"""One operator's construction, for people: its expression, its rPrograms on any device of the tables, and what lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import tvm
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from tvm import tirx

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import graph_passes, layout_passes, operator_passes
from tvm_ext.recorder import call_counts
from tvm_ext.records.exchange_plan import ExchangePlan
from tvm_ext.records.rprogram import RProgram
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.relay_passes.move_padding import whole_operator
from tvm_ext.reports.text import format_time
from tvm_ext.tir_passes.emit.ipu_vertices.emit import emit_for_ipu
from tvm_ext.tir_passes.kinds.registry import divisions
from tvm_ext.tir_passes.plan.anchors import Anchor
from tvm_ext.tir_passes.plan.context import UnscheduledOperator
from tvm_ext.tir_passes.roller.construct import Construction

from .common import nearest


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
        raise InputError(f"the model has no operator {name!r}.", nearest(name, calls))
    operator = UnscheduledOperator(func=operators[name], name=name, device=device, options=options)
    explanation = Explanation(operator=name, calls=calls[name], device=device.name)
    try:
        *_, division = divisions(operator)
        anchors = tuple(_explained(anchor) for part in division.parts if (anchor := part.anchor) is not None)
        others = [form for part in division.parts if part.anchor is None for form in part.forms()]
    except IllegalRewrite as refusal:
        return replace(explanation, notes=(refusal.problem,))
    notes = [note for form in others for note in form.notes]
    if device.kind == "ipu":
        try:
            notes.append(_of_tiles(emit_for_ipu(operator).plan))
        except IllegalRewrite as refusal:
            notes.append(f"no vertices: {refusal.problem}")
    if not anchors and all(form.path == "rows" for form in others):
        notes.append("no reduction with data reuse: nothing is kept in tiles, the rows are split among the units")
    return replace(explanation, anchors=anchors, notes=tuple(notes))


def _explained(anchor: Anchor) -> AnchorExplanation:
    return AnchorExplanation(expr=anchor.expr, construction=anchor.construction)


# --- An `Explanation` as tables for the terminal ----------------------------------------------------------------------
_KIBI, _MEBI = 1024, 1024 * 1024  # bytes, by definition (IEC 80000-13)


def render(explanation: Explanation, device: DeviceSpec, alternatives: int) -> Iterator[RenderableType]:
    """What to print, top to bottom; at most ``alternatives`` programs that lost."""
    where = escape(f"{device.name}: {device.description}")
    yield f"[bold]{explanation.operator}[/] ({explanation.calls} call(s)) on {where}"
    yield from map(escape, explanation.notes)
    for anchor in explanation.anchors:
        yield from _anchor(anchor, device, alternatives)


def _of_tiles(plan: ExchangePlan) -> str:
    """The plan in a line: what is predicted of it, by the device's row."""
    times, tiles = plan.times, max(len({run.tile for run in step.runs}) for step in plan.supersteps)
    return (
        f"as vertices: {len(plan.supersteps)} superstep(s) on up to {tiles} tiles, predicted "
        f"{format_time(times.time_s)} "
        f"(compute {format_time(times.compute_s)}, exchange {format_time(times.exchange_s)}, "
        f"synchronisation {format_time(times.synchronise_s)}); {plan.exchanged_bytes / 2**20:.3g} MiB exchanged; the "
        f"fullest tile keeps {plan.peak_bytes / 1024:.1f} of {plan.tile_bytes / 1024:.0f} KiB"
    )


def _anchor(anchor: AnchorExplanation, device: DeviceSpec, alternatives: int) -> Iterator[RenderableType]:
    yield _expression(anchor.expr)
    if anchor.expr.epilogue:
        yield "fused behind it: " + ", ".join(fused.name for fused in anchor.expr.epilogue)
    construction = anchor.construction
    if not construction.programs:
        yield f"no aligned rTile fits {device.name}"
        return
    best = construction.programs[0]
    yield ""
    yield "[bold]chosen rProgram[/]" + escape(f": {_facts(best)}")
    yield _layers(best, device)
    yield _steps(anchor)
    if construction.rejected and alternatives:
        yield _rejected(anchor, alternatives)


def _expression(expr: TensorExpr) -> str:
    axes = ", ".join(
        f"{axis.name}={axis.extent}" + ("" if axis.kind == "spatial" else " (reduce)") for axis in expr.axes
    )
    tensors = ", ".join(
        f"{access.tensor}{list(access.shape)} {access.dtype}" + (" constant" if access.is_constant else "")
        for access in expr.accesses
    )
    return escape(f"axes: {axes}\ntensors: {tensors}\n{expr.flops / 1e6:.4g} MFLOP")


def _facts(program: RProgram) -> str:
    prediction = program.prediction
    return (
        f"predicted {format_time(prediction.time_s)} (compute {format_time(prediction.compute_s)}), bound by "
        f"{prediction.bound}; vector axis {program.vector_axis}; {program.partition_count} partitions on "
        f"{program.unit_count} units; padding bound {program.epsilon:g}" + ("; shrunk" if program.shrunk else "")
    )


def _layers(program: RProgram, device: DeviceSpec) -> Table:
    """One line per layer that holds a tile: its traffic and time are those of loading it from the layer below."""
    costs = {cost.layer: cost for cost in program.prediction.layers}
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layer")
    table.add_column("rTile", overflow="fold")
    for header in ("footprint", "capacity", "traffic from below", "time"):
        table.add_column(header, justify="right", no_wrap=True)
    for index, (name, tile) in enumerate(program.tiles):
        layer, below = device.layer(name), device.layers[index + 1]
        cost = costs.get(below.name)
        table.add_row(
            escape(f"{name} {layer.description}"),
            escape(str(tile) + "".join(f", {tensor} padded by {pad}" for tensor, pad in tile.storage_padding)),
            "-" if cost is None else _bytes(cost.footprint_bytes),
            "-" if layer.capacity_bytes is None else _bytes(layer.capacity_bytes),
            "-" if cost is None else _bytes(cost.traffic_bytes),
            "-" if cost is None else format_time(cost.time_s),
        )
    return table


def _steps(anchor: AnchorExplanation) -> Table:
    table = Table(
        title="construction, step by step (paper Figure 8)", title_justify="left", box=None, header_style="bold"
    )
    for header in ("layer", "axis"):
        table.add_column(header, no_wrap=True)
    table.add_column("enlarged to", overflow="fold")
    for header in ("reuse score", "footprint", "capacity", "MemPerf", "MaxComputePerf"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    for step in anchor.construction.steps:
        table.add_row(
            step.layer,
            step.axis or "-",
            escape(str(step.larger)),
            f"{step.reuse_score:.3g}",
            _bytes(step.footprint_bytes),
            _bytes(step.capacity_bytes),
            f"{step.mem_perf_gflops:.4g} GFLOP/s",
            f"{step.max_compute_gflops:.4g} GFLOP/s",
            escape(step.outcome),
        )
    return table


def _rejected(anchor: AnchorExplanation, alternatives: int) -> Table:
    table = Table(title="why the alternatives lost", title_justify="left", box=None, header_style="bold")
    table.add_column("rTiles", overflow="fold")
    table.add_column("vector axis", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for item in anchor.construction.rejected[:alternatives]:
        program = item.program
        tiles = " ".join(f"{layer}{tile}" for layer, tile in program.tiles)
        table.add_row(
            escape(tiles), str(program.vector_axis), format_time(program.prediction.time_s), escape(item.reason)
        )
    return table


def _bytes(count: float) -> str:
    if count >= _MEBI:
        return f"{count / _MEBI:.3g} MiB"
    return f"{count / _KIBI:.3g} KiB" if count >= _KIBI else f"{count:.0f} B"
