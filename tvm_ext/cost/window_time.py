"""A window kernel as an rProgram with its prediction, as reports show any other (paper §3.2, §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tvm_ext.analysis.computation_exprs import axis_names, tensor_expr_of
from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.analysis.window import Window
from tvm_ext.cost.perf_model import MEMORY_OVERLAP
from tvm_ext.cost.register_tiles import overlapped
from tvm_ext.cost.window_layouts import WindowLayout, scratch_bytes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import FITTING, Machine
from tvm_ext.records.rprogram import LayerCost, Prediction, RProgram, RTile
from tvm_ext.support.arithmetic import ceil_div


def window_program(layout: WindowLayout, epilogue: Sequence[Computation], device: DeviceSpec) -> RProgram:
    """The rProgram of ``layout``: its register tile in L0, one band of one plane in each cache."""
    expr = window_expr(layout.window, epilogue)
    caches = [layer.name for layer in device.layers[1:-1]]
    band = _tile(layout, rows=layout.band, columns=layout.window.x.extent)
    columns = layout.vectors * (layout.lanes if layout.is_flat else layout.width)
    partitions = layout.task_count
    return RProgram(
        device=device.name,
        expr_digest=expr.digest,
        tiles=(
            ("L0", _tile(layout, rows=layout.rows, columns=min(columns, layout.window.x.extent))),
            *((name, band) for name in caches),
        ),
        vector_axis=_names(layout)[-1],
        unit_count=min(device.unit_count, partitions),
        partition_count=partitions,
        epsilon=0.0,
        shrunk=False,
        prediction=predict_window(layout, expr, device),
    )


def window_expr(window: Window, epilogue: Sequence[Computation]) -> TensorExpr:
    """The operator as an expression; what pads its tensor is none of it."""
    return tensor_expr_of(window.anchor, name=window.anchor.name, epilogue=epilogue)


def _names(layout: WindowLayout) -> tuple[str, ...]:
    """The anchor's axis names, the one along x last."""
    computation = layout.window.anchor
    names = dict(zip([v.name for v in computation.variables], axis_names(computation), strict=True))
    along_x = layout.window.x.variable
    assert along_x is not None, "a window kernel has outputs along x"
    x = names[along_x.name]
    return (*(name for name in axis_names(computation) if name != x), x)


def _tile(layout: WindowLayout, *, rows: int, columns: int) -> RTile:
    """One plane's tile: all taps, ``rows`` along y and ``columns`` along x."""
    window, computation = layout.window, layout.window.anchor
    shape = []
    for variable, extent, kind in zip(computation.variables, computation.extents, computation.kinds, strict=True):
        if variable.same_as(window.x.variable):
            shape.append(columns)
        elif window.y.variable is not None and variable.same_as(window.y.variable):
            shape.append(rows)
        else:
            shape.append(extent if kind == "reduce" else 1)
    return RTile(axes=axis_names(computation), shape=tuple(shape))


def predict_window(layout: WindowLayout, expr: TensorExpr, device: DeviceSpec) -> Prediction:
    """Cycles of the register tiles and of staging against moving each tensor once, in the slowest layer it needs."""
    waves = ceil_div(layout.task_count, device.unit_count)
    balance = layout.task_count / (waves * device.unit_count)
    machine = Machine(device)
    compute_s = layout.cycles / machine.hz / device.unit_count / balance
    extra = sum(computation.extra_bytes_per_element for computation in expr.epilogue)
    moved = sum(access.itemsize_bytes * prod(access.shape) for access in expr.accesses)
    moved += extra * prod(expr.output.shape)
    held = device.layers.index(machine.holder(moved, FITTING))  # the operator stays here between its neighbours
    times = [(layer.name, moved / machine.rate(layer) / balance) for layer in device.layers[2 : held + 1]]
    costs = [LayerCost(layer=name, footprint_bytes=moved, traffic_bytes=moved, time_s=time) for name, time in times]
    return machine.bind(compute_s, costs)


def window_seconds(layout: WindowLayout, expr: TensorExpr, device: DeviceSpec, *, forks: bool) -> float:
    """`predict_window`, where arithmetic and memory run nearly at once, and a band that L1 does not hold costs more."""
    said = predict_window(layout, expr, device)
    waves = ceil_div(layout.task_count, device.unit_count) * device.unit_count / layout.task_count
    near = _from_l2_s(layout, device) * waves
    times = [said.compute_s, near, *(cost.time_s for cost in said.layers)]
    alone = 1.0 if forks else device.unit_count / waves
    launch = Machine(device).launch_s if forks else 0.0
    return alone * overlapped(times, MEMORY_OVERLAP) + launch


def _from_l2_s(layout: WindowLayout, device: DeviceSpec) -> float:
    """Seconds of all cores for writing and reading the scratch memory of bands that L1 does not hold.

    Worked example, 3 x 3 in register tiles of 4 rows: 6 rows are read for 4, so that each byte is read 1.5 times.
    """
    window = layout.window
    size = scratch_bytes(window, layout.band, device)
    if size <= (device.layer("L1").capacity_bytes or size):
        return 0.0
    step = layout.rows * window.y.stride
    read = (step + window.y.dilation * (window.y.taps - 1)) / step
    return layout.task_count * size * (1 + read) / Machine(device).l2_rate
