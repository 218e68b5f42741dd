"""An `Explanation` as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rprogram import RProgram
from tvm_ext.reports.text import format_time

from .explain import AnchorExplanation, Explanation

_KIBI, _MEBI = 1024, 1024 * 1024  # bytes, by definition (IEC 80000-13)


def render(explanation: Explanation, device: DeviceSpec, alternatives: int) -> Iterator[RenderableType]:
    """What to print, top to bottom; at most ``alternatives`` programs that lost."""
    where = escape(f"{device.name}: {device.description}")
    yield f"[bold]{explanation.operator}[/] ({explanation.calls} call(s)) on {where}"
    yield from map(escape, explanation.notes)
    for anchor in explanation.anchors:
        yield from _anchor(anchor, device, alternatives)


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
