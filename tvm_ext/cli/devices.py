"""Devices of the tables as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from tvm_ext._tvm import PrimFunc
from tvm_ext.devices import device_db
from tvm_ext.devices.capabilities import is_like
from tvm_ext.devices.gpu_measurement import measured_gpu, read_measurement
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import OptionError, TargetError
from tvm_ext.options import recorded_cpu
from tvm_ext.tir_passes.expressions.on_cpu import on_cpu


def require_this_machine(name: str) -> None:
    """Raise OptionError where ``name`` is another device, or where a row stands for this machine."""
    if name.strip().lower() not in device_db.HOST_NAMES:
        raise OptionError(f"{name!r} cannot be measured here: it is not this machine's CPU.", "measure 'cpu'")
    stand_in = recorded_cpu()
    if stand_in is not None:
        raise OptionError(
            f"TVM_EXT_CPU lets {stand_in} stand for this machine.", "unset TVM_EXT_CPU to measure this machine"
        )


def with_functions(kernel: PrimFunc, device: DeviceSpec) -> PrimFunc:
    """``kernel`` with functions as kernels for ``device`` have them."""
    return kernel.with_body(on_cpu(kernel.body, device))


def imported(path: Path, name: str | None) -> DeviceSpec:
    """The row ``name``, left out: the one of the capability and units that were measured, with the figures of ``path``.

    Raises InputError for a file that is none, or of another device, TargetError where no row is like it.
    """
    found = read_measurement(path)
    if name is None:
        rows = [device_db.lookup(item) for item in device_db.names() if item not in device_db.HOST_NAMES]
        alike = [row for row in rows if is_like(row, found.capability, found.units)]
        close = [row for row in alike if row.name.rpartition("-")[2] in found.device.lower()]
        if not alike:
            raise TargetError(f"no row is of a GPU like {found.device}", "write one (docs/add-a-device.md)")
        name = (close or alike)[0].name
    return measured_gpu(device_db.lookup(name), found)


def overview(specs: Sequence[DeviceSpec]) -> Table:
    """One line per device."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("name", "kind"):
        table.add_column(header, no_wrap=True)
    for header in ("units", "GFLOP/s fp32", "GB/s memory"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("description", overflow="fold")
    for spec in specs:
        values = (_number(spec.peak_gflops_of("float32")), _number(spec.lowest_layer.bandwidth_gb_per_s))
        table.add_row(spec.name, spec.kind, str(spec.unit_count), *values, escape(spec.description))
    return table


def describe(spec: DeviceSpec) -> Iterator[RenderableType]:
    """One device in full: its memory layers, peaks, and every number with its source."""
    yield f"[bold]{escape(spec.name)}[/]: {escape(spec.description)}"
    if spec.row:
        yield f"row: {escape(spec.row)}"
    yield f"{spec.unit_count} units of {spec.teus_per_unit} TEU(s), {spec.teu_lanes} lanes each"
    peaks = ", ".join(f"{dtype} {_number(gflops)}" for dtype, gflops in spec.peak_gflops) or "unknown"
    yield f"peak GFLOP/s: {peaks}"
    yield _layers(spec)
    yield _sources(spec)


def _layers(spec: DeviceSpec) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in ("layer", "what", "owned by"):
        table.add_column(header, no_wrap=True)
    for header in ("capacity (bytes)", "GB/s, whole device", "transaction (bytes)", "banks"):
        table.add_column(header, justify="right", no_wrap=True)
    for layer in spec.layers:
        banks = "-" if layer.bank_count is None else f"{layer.bank_count} x {layer.bank_bytes} B"
        capacity = "unbounded" if layer.capacity_bytes is None else f"{layer.capacity_bytes:,}"
        bandwidth, unit = _number(layer.bandwidth_gb_per_s), str(layer.transaction_bytes)
        table.add_row(layer.name, escape(layer.description), layer.scope, capacity, bandwidth, unit, banks)
    return table


def _sources(spec: DeviceSpec) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("quantity", no_wrap=True)
    table.add_column("value", no_wrap=True, justify="right")
    table.add_column("source", overflow="fold")
    for fact in device_db.describe(spec, every_source=True):
        used = "" if fact.used else " (not used)"
        table.add_row(escape(fact.quantity), escape(fact.value + used), escape(fact.source))
    return table


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"
