"""Checks a finished rProgram against the alignment facts of §3.1, for reports and tests; None: does not apply."""

from __future__ import annotations

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import AccessTable, Shape
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices.hal import DeviceSpec, MemoryLayer
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.roller.align import TENSOR_CORE, Aligner, padding_waste, tensor_core_steps
from tvm_ext.tir_passes.roller.rtile import conflict_degree, storage_padding


def alignment_facts(expr: TensorExpr, program: RProgram, device: DeviceSpec) -> dict[str, bool | None]:
    """Per rule whether ``program``'s tiles obey it; ``expr`` is the expression whose axes the tiles name.

    "unit": a threadblock is whole warps (or the whole, smaller operator) of whole tensor-core fragments, a CPU's
    register tile whole vectors. "memory": every data tile from the
    lowest layer starts on a transaction. "shape": padding stays within the program's ε. "bank": reads of the padded
    shared tiles do not conflict. "capacity": every tile fits its layer.
    """
    model = PerfModel(expr, device, program.vector_axis)
    model.tensor_core = tensor_core_steps(expr, device) is not None
    shapes = [tuple(tile.sizes[name] for name in model.names) for _, tile in program.tiles]
    return {
        "unit": _unit(model, shapes),
        "memory": _memory(model, shapes),
        "shape": _shape(model, shapes, program.epsilon),
        "bank": _bank(model, program, shapes),
        "capacity": _capacity(model, program, shapes),
    }


def _unit(model: PerfModel, shapes: list[Shape]) -> bool | None:
    if model.is_cpu:
        return None if model.vector is None else shapes[0][model.vector] % model.lanes == 0
    steps = tensor_core_steps(model.expr, model.device) or {}
    fragments = all(shapes[0][model.names.index(axis)] % step == 0 for axis, step in steps.items())
    whole = all(shapes[-1][axis] >= model.extents[axis] for axis in model.spatial)
    warps = len(shapes) < 2 or model.threads(shapes[0], shapes[1]) % model.device.teu_lanes == 0
    return fragments and (warps or whole)


def _memory(model: PerfModel, shapes: list[Shape]) -> bool | None:
    if model.is_cpu:
        return None  # a CPU's last tile is cut, and its caches fetch whole lines in any case
    aligner = Aligner(model, len(shapes) - 1, shapes[-2], frozenset({"memory", TENSOR_CORE}), 0.0)
    return all(
        size % step == 0 or size >= aligner.whole(axis)
        for axis, (size, step) in enumerate(zip(shapes[-1], aligner.steps, strict=True))
    )


def _shape(model: PerfModel, shapes: list[Shape], epsilon: float) -> bool:
    """The waste of the lowest tile, which partitions the operator, against ε and what a single step rounds up to."""
    aligner = Aligner(model, len(shapes) - 1, shapes[-2] if len(shapes) > 1 else None, frozenset(), 0.0)
    return all(
        size >= aligner.whole(axis) or padding_waste(aligner.whole(axis), size) <= epsilon
        for axis, size in enumerate(shapes[-1])
        if axis in model.spatial
    )


def _bank(model: PerfModel, program: RProgram, shapes: list[Shape]) -> bool | None:
    if model.is_cpu or len(shapes) < 2 or model.device.layers[1].bank_count is None:
        return None
    stored = dict(program.tiles[1][1].storage_padding)
    needed = storage_padding(model, shapes[1], shapes[0])
    layer = model.device.layers[1]
    return all(
        need == 0 or _conflict_free(model, table, shapes, stored.get(table.tensor, 0), layer)
        for table, need in zip(model.inputs, needed, strict=True)
    )


def _conflict_free(model: PerfModel, table: AccessTable, shapes: list[Shape], padding: int, layer: MemoryLayer) -> bool:
    width = max(1, int((layer.bank_bytes or 1) / table.itemsize_bytes))
    row = table.spans(shapes[1])[-1] + padding
    read = table.spans(model.one_reduction_step(shapes[0]))[-1]
    return conflict_degree(row, read, model.device.teu_lanes, layer.bank_count or 1, width) == 1


def _capacity(model: PerfModel, program: RProgram, shapes: list[Shape]) -> bool:
    if model.is_cpu:
        return model.footprint_bytes(0, shapes[0]) <= model.capacity_bytes(0)
    stored = dict(program.tiles[1][1].storage_padding) if len(program.tiles) > 1 else {}
    padding = [stored.get(table.tensor, 0) for table in model.inputs]
    return all(
        model.footprint_bytes(level, shape, padding if level == 1 else ()) <= model.capacity_bytes(level)
        for level, shape in enumerate(shapes)
    )
