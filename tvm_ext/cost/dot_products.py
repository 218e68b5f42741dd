"""Which expressions a CPU's dot-product instructions serve: the alignment rule of its own tensor cores (paper §3.3).

The instruction takes a group of neighbours along the reduction at once, so that a register tile is aligned with it
where the last reduction axis is that group, whole: `tir_passes/plan/dot_form.py` splits an axis for it. A tile
instruction also takes the reduction axes before the group, as long as the data's elements stay neighbours and fit a
row of a tile, and rows of data along one spatial axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.devices.dot_instructions import TILE_INSTRUCTIONS, DotInstruction, dot_instruction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import accumulator_dtype
from tvm_ext.support.arithmetic import ceil_div

PIECE_CYCLES = 2
"""Of copying a piece of data into its row: a load, and a store of fewer bytes than a register. Assumed."""

TILE_END_CYCLES = 32
"""Of a tile of sums: 16 stores of its rows, and as many loads by the epilogue, which wait for the last. Assumed."""


SHUFFLES = 1
"""Of a vector register with sums of two rows, to have those of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DotProduct:
    """``instruction`` for the inputs number ``data`` and ``weights``.

    ``axes`` are the positions of the reduction axes that a step takes whole, the group last. Of a tile instruction,
    ``rows`` is the axis of which a step takes several points; None of others. ``pieces`` are of data that are copied
    into rows first, so many for all of it: they are no neighbours in memory. 0 where they are.
    """

    instruction: DotInstruction
    data: int
    weights: int
    axes: tuple[int, ...]
    rows: int | None = None
    pieces: int = 0

    @property
    def has_tile_registers(self) -> bool:
        """Whether sums and operands are in registers of a matrix unit's own (AMX), not in vectors."""
        return self.rows is not None and self.instruction.tile is not None and bool(self.instruction.tile.registers)


def dot_product(expr: TensorExpr, device: DeviceSpec) -> DotProduct | None:
    """How an instruction serves ``expr``, if what it adds up are products; None where none does.

    The data's group must be neighbours in memory. The weights must be a constant, which is packed by groups, or lie so.
    """
    if expr.combiner != "sum" or len(expr.inputs) != 2 or not expr.reduction:
        return None
    weights = next((place for place, access in enumerate(expr.inputs) if access.is_constant), None)
    weights = _grouped_already(expr) if weights is None else weights
    if weights is None:
        return None
    data, constant, group = expr.inputs[1 - weights], expr.inputs[weights], expr.reduction[-1]
    types = (data.dtype, constant.dtype, accumulator_dtype(expr.output.dtype))
    row = dot_instruction(device, *types)
    if row is None or group.extent != row.group or data.stride(group.name) != 1 or not constant.uses(group.name):
        return None
    if any(index is None for access in expr.inputs for index in access.indices) or not lane_axes(expr, weights):
        return None
    by_vectors = DotProduct(instruction=row, data=1 - weights, weights=weights, axes=(len(expr.axes) - 1,))
    tile_row = dot_instruction(device, *types, TILE_INSTRUCTIONS) if constant.is_constant else None
    return by_vectors if tile_row is None else _by_tiles(expr, by_vectors, tile_row, device) or by_vectors


def _grouped_already(expr: TensorExpr) -> int | None:
    """The input that is no constant and yet lies as one is packed: a group of signed bytes for each lane."""
    group = expr.reduction[-1]
    grouped = [access.dtype == "int8" and access.stride(group.name) == 1 for access in expr.inputs]
    return next((place for place, found in enumerate(grouped) if found and lane_axes(expr, place)), None)


def is_grouped_already(expr: TensorExpr, access: Access, dot: DotProduct | None) -> bool:
    """Whether ``access`` is the weights of ``dot``, of a run, which are read as they lie."""
    return dot is not None and access is expr.inputs[dot.weights] and not access.is_constant


def lane_axes(expr: TensorExpr, weights: int) -> list[str]:
    """The axes along which the sums of a register may lie: those of the weights alone."""
    data, constant = expr.inputs[1 - weights], expr.inputs[weights]
    own = [axis.name for axis in expr.spatial if constant.uses(axis.name) and not data.uses(axis.name)]
    return own if constant.is_constant else [name for name in own if constant.stride(name) == expr.reduction[-1].extent]


# --- tiles ------------------------------------------------------------------------------------------------------------
def _by_tiles(expr: TensorExpr, by_vectors: DotProduct, row: DotInstruction, device: DeviceSpec) -> DotProduct | None:
    """The product by the tile instruction of ``row``; None where it has no rows, or takes longer than by vectors."""
    unit, data, constant = row.tile, expr.inputs[by_vectors.data], expr.inputs[by_vectors.weights]
    extents = {axis.name: axis.extent for axis in expr.axes}
    rows = [axis for axis in expr.spatial if data.stride(axis.name) and not constant.uses(axis.name)]
    if unit is None or not rows or row.register_bytes != device.register_bytes:
        return None
    own = max(reversed(rows), key=lambda axis: axis.extent / ceil_div(axis.extent, unit.rows))
    lane = max(extents[name] for name in lane_axes(expr, by_vectors.weights))
    registers = prod(axis.extent for axis in expr.spatial) // lane * ceil_div(lane, row.register_bytes // 4)
    tiles = registers // own.extent * ceil_div(own.extent, unit.rows)
    depth = prod(axis.extent for axis in expr.reduction)
    step, end = unit.cycles, float(TILE_END_CYCLES)
    if not unit.registers:
        step, end = (unit.rows * count / device.fma_rate for count in (row.operations, SHUFFLES))

    def cycles(run: int, pieces: int = 0) -> float:
        return tiles * (depth // run * step + end) + pieces * PIECE_CYCLES

    axes, run = _row_of_a_tile(expr, by_vectors, unit.groups, as_it_lies=True)
    copied_axes, copied_run = _row_of_a_tile(expr, by_vectors, unit.groups, as_it_lies=False)
    elements, pieces = prod(axis.extent for axis in expr.axes if data.uses(axis.name)), 0
    copied_once = elements <= prod(data.shape)
    if copied_once and cycles(copied_run, elements // run) < cycles(run):
        axes, run, pieces = copied_axes, copied_run, elements // run
    groups = depth // row.group
    if not unit.registers and run < row.group * unit.groups:
        return None
    if cycles(run, pieces) >= registers * groups * by_vectors.instruction.operations / device.fma_rate:
        return None
    return replace(by_vectors, instruction=row, axes=axes, rows=list(extents).index(own.name), pieces=pieces)


def _row_of_a_tile(expr: TensorExpr, dot: DotProduct, groups: int, *, as_it_lies: bool) -> tuple[tuple[int, ...], int]:
    """The reduction axes that a tile's row of so many ``groups`` takes, and their elements: of data in memory, or in
    the order of the axes.
    """
    data, constant = expr.inputs[dot.data], expr.inputs[dot.weights]
    axes, run = list(dot.axes), dot.instruction.group
    while axes[0] and (outer := expr.axes[axes[0] - 1]).kind == "reduce":
        longer = run * outer.extent
        follows = data.stride(outer.name) == run if as_it_lies else data.uses(outer.name)
        if not follows or longer > dot.instruction.group * groups or not constant.uses(outer.name):
            break
        axes, run = [axes[0] - 1, *axes], longer
    return tuple(axes), run
