"""Roller's construction with parts left out: what Table 3 and Figures 16 and 17 of the paper compare."""

from __future__ import annotations

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import Shape
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.rprogram import Prediction
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.tir_passes.roller.align import ALL_RULES, BANK
from tvm_ext.tir_passes.roller.construct import Construction, Constructor
from tvm_ext.tir_passes.roller.rtile import conflict_degree, storage_padding


def construct_ablated(
    expr: TensorExpr,
    device: DeviceSpec,
    *,
    k: int = 10,
    rules: frozenset[str] = ALL_RULES,
    epsilon: float | None = None,
    shrink_small: bool = True,
) -> Construction:
    """`construct` by some alignment rules, with one bound ε on padding, without shrinking small operators."""
    return _Ablated(expr, device, k, rules, epsilon, shrink_small).run()


class _Ablated(Constructor):
    def __init__(
        self,
        expr: TensorExpr,
        device: DeviceSpec,
        k: int,
        rules: frozenset[str],
        epsilon: float | None,
        shrink_small: bool,
    ) -> None:
        super().__init__(expr, device, k, 0.0, rules)
        self.epsilon, self.shrink_small = epsilon, shrink_small

    def relaxations(self) -> list[tuple[float, frozenset[str]]]:
        return super().relaxations() if self.epsilon is None else [(self.epsilon, self.rules)]

    def shrunk(self, model: PerfModel, shapes: tuple[Shape, ...]) -> tuple[Shape, ...] | None:
        return super().shrunk(model, shapes) if self.shrink_small else None

    def predicted(self, model: PerfModel, shapes: tuple[Shape, ...]) -> tuple[tuple[int, ...], Prediction]:
        if BANK in self.rules or model.is_cpu or len(shapes) < 2:
            return super().predicted(model, shapes)
        return (), _Conflicting(model, conflicts(model, shapes)).predict(shapes)


class _Conflicting(PerfModel):
    """``model`` where each read of shared memory takes so many turns."""

    def __init__(self, model: PerfModel, turns: float) -> None:
        super().__init__(model.expr, model.device, model.vector_axis)
        self.tensor_core, self.turns = model.tensor_core, turns

    def layer_s(self, level: int, traffic_bytes: float) -> float:
        return super().layer_s(level, traffic_bytes) * (self.turns if level == 0 else 1.0)


def conflicts(model: PerfModel, shapes: tuple[Shape, ...]) -> float:
    """Turns per read of shared memory where nothing is padded (the ablation without bank alignment), over all inputs.

    As `storage_padding` sees them: lanes go down the rows of what it would pad. They lie along the output's contiguous
    axis first, so that of an input without that axis a warp reads as many rows as runs of lanes. Worked example:
    A[i, k] of rows of 32 floats under 16 x 16 threads is read at 2 rows, in 2 turns; B[k, j] 8 floats a lane, 4 lanes
    a turn, and rows of 128 floats put all 4 on the same banks: 4 turns. With 8 elements of each the mean is 3.
    """
    layer, lanes = model.device.layers[1], model.device.teu_lanes
    if not layer.bank_count or not layer.bank_bytes:
        return 1.0
    step = model.one_reduction_step(shapes[0])
    run = 1 if model.vector is None else ceil_div(shapes[1][model.vector], shapes[0][model.vector])
    turns = reads = 0.0
    for table, padding in zip(model.inputs, storage_padding(model, shapes[1], shapes[0]), strict=True):
        degree = 1
        if padding:
            width = max(1, int(layer.bank_bytes / table.itemsize_bytes))
            along = model.vector is not None and table.uses(model.vector)
            rows = lanes if along else max(1, lanes // run)
            row, read = table.spans(shapes[1])[-1], table.spans(step)[-1]
            degree = conflict_degree(row, read, rows, layer.bank_count, width)
        turns += table.elements(step) * degree
        reads += table.elements(step)
    return turns / reads
