"""``tvm-ext compile --target graphcore-ipu``: a folder of vertices and exchange plans, one for each operator."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape
from rich.table import Table

from tvm_ext.devices.device_db import lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, TargetError
from tvm_ext.options import BuildOptions
from tvm_ext.records.exchange_plan import ExchangePlan
from tvm_ext.records.serialise import to_json
from tvm_ext.reports.text import format_time
from tvm_ext.support.files import write_atomically
from tvm_ext.support.limits import timed_construction
from tvm_ext.tir_passes.emit.ipu_vertices.emit import emit_for_ipu
from tvm_ext.tir_passes.plan.context import UnscheduledOperator

from . import common
from .explain import operator_names, operators_of


def ipu_called(target: str) -> DeviceSpec | None:
    """The IPU that ``target`` names; None where it names another device, or none of the tables."""
    try:
        device = lookup(target)
    except TargetError:
        return None
    return device if device.kind == "ipu" else None


def write_for_ipu(
    model: str,
    folder: Path,
    device: DeviceSpec,
    shape: list[str] | None,
    batch: int,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Write ``folder``/OPERATOR/vertices.cpp and plan.json for each operator of the model, and say what it takes."""
    from tvm_ext import relay

    options = BuildOptions.current(**settings)
    made: list[tuple[str, int, ExchangePlan | str]] = []
    with common.progress_bar(2) as steps:
        steps.begin("importing")
        operators = operators_of(relay.prepare(*common.import_model(model, shape, batch)), device, options)
        steps.begin("constructing")
        for name, calls in operator_names(operators):
            steps.detail(name)
            operator = UnscheduledOperator(func=operators[name], name=name, device=device, options=options)
            try:
                with timed_construction():
                    code = emit_for_ipu(operator)
            except IllegalRewrite as refusal:
                made.append((name, calls, refusal.problem))
                continue
            (folder / name).mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name / "vertices.cpp", code.vertices.encode())
            write_atomically(folder / name / "plan.json", (to_json(code.plan) + "\n").encode())
            made.append((name, calls, code.plan))
    if as_json:
        typer.echo(json.dumps([_facts(*row) for row in made]))
        return
    common.output_console().print(_table(made))
    written = sum(isinstance(plan, ExchangePlan) for _, _, plan in made)
    typer.echo(f"wrote {folder}: vertices and exchange plans of {written} of {len(made)} operators for {device.name}")


def _facts(name: str, calls: int, plan: ExchangePlan | str) -> dict[str, object]:
    if isinstance(plan, str):
        return {"operator": name, "calls": calls, "refused": plan}
    kept = {"peak_bytes": plan.peak_bytes, "exchanged_bytes": plan.exchanged_bytes}
    return {"operator": name, "calls": calls, "supersteps": len(plan.supersteps), **kept, **asdict(plan.times)}


def _table(made: list[tuple[str, int, ExchangePlan | str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("operator", overflow="fold")
    for header in ("calls", "predicted", "compute", "exchange", "supersteps", "fullest tile"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("refused", overflow="fold")
    for name, calls, plan in made:
        if isinstance(plan, str):
            table.add_row(escape(name), str(calls), "-", "-", "-", "-", "-", escape(plan))
            continue
        times = plan.times
        seconds = [format_time(value) for value in (times.time_s, times.compute_s, times.exchange_s)]
        peak = f"{plan.peak_bytes / 1024:.1f} KiB"
        table.add_row(escape(name), str(calls), *seconds, str(len(plan.supersteps)), peak, "")
    return table
