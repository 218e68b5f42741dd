"""Which expressions a CPU's dot-product instructions serve: the alignment rule of its own tensor cores (paper §3.3).

The instruction takes a group of neighbours along the reduction at once, so that a register tile is aligned with it
where the last reduction axis is that group, whole: `tir_passes/plan/dot_form.py` splits an axis for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.dot_instructions import DotInstruction, dot_instruction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import accumulator_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class DotProduct:
    """``instruction`` for the inputs number ``data`` and ``weights``; ``axis`` is the group's position."""

    instruction: DotInstruction
    data: int
    weights: int
    axis: int


def dot_product(expr: TensorExpr, device: DeviceSpec) -> DotProduct | None:
    """How an instruction serves ``expr``, if what it adds up are products; None where none does.

    The data's group must be neighbours in memory; the weights must be a constant, which is packed by groups.
    """
    if expr.combiner != "sum" or len(expr.inputs) != 2 or not expr.reduction:
        return None
    weights = next((place for place, access in enumerate(expr.inputs) if access.is_constant), None)
    if weights is None:
        return None
    data, constant, group = expr.inputs[1 - weights], expr.inputs[weights], expr.reduction[-1]
    row = dot_instruction(device, data.dtype, constant.dtype, accumulator_dtype(expr.output.dtype))
    if row is None or group.extent != row.group or data.stride(group.name) != 1 or not constant.uses(group.name):
        return None
    if any(index is None for access in expr.inputs for index in access.indices) or not _lane_axes(expr, weights):
        return None
    return DotProduct(instruction=row, data=1 - weights, weights=weights, axis=len(expr.axes) - 1)


def lane_axes(expr: TensorExpr, dot: DotProduct) -> list[str]:
    """The axes along which the sums of a register may lie: those of the weights alone."""
    return _lane_axes(expr, dot.weights)


def _lane_axes(expr: TensorExpr, weights: int) -> list[str]:
    data, constant = expr.inputs[1 - weights], expr.inputs[weights]
    return [axis.name for axis in expr.spatial if constant.uses(axis.name) and not data.uses(axis.name)]
