"""Kernels whose data tiles lie in shared memory exactly as the paper stores them (§3.1), for the ablations.

Rows of memory, padded as the rProgram says, and its own reduction steps. What a build uses (`banks.choose_storage`)
transposes, sorts by phase and searches padding: it repairs what the bank rule would have, so that the rule's effect
would not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_ext.analysis.computations import Computation
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.emit.simt_tiles.banks import StoredBox, stores_vectors
from tvm_ext.tir_passes.emit.simt_tiles.box import Box, CopyShape
from tvm_ext.tir_passes.emit.simt_tiles.copy import copy_shapes
from tvm_ext.tir_passes.emit.simt_tiles.emit import emit_planned
from tvm_ext.tir_passes.emit.simt_tiles.operands import OperandPlanner
from tvm_ext.tir_passes.emit.simt_tiles.tiling import SimtTiling, tile_threads


def emit_literally(
    computation: Computation,
    expr: TensorExpr,
    prologue: Sequence[Computation],
    epilogue: Sequence[Computation],
    program: RProgram,
    device: DeviceSpec,
) -> SimtKernel:
    """`emit_simt_tile` of ``program`` to the letter: nothing is divided, deepened, transposed or searched."""
    padding = dict(program.tile("L1").storage_padding)
    planner = PlainPlanner(device, [padding.get(access.tensor, 0) for access in expr.inputs])
    tiling = tile_threads(computation, expr, program, device)
    return emit_planned(*planner.plan(tiling, prologue), prologue, epilogue, program, device)


class PlainPlanner(OperandPlanner):
    """Each load's data tile as rows of memory, ``row_padding`` elements longer."""

    def __init__(self, device: DeviceSpec, row_padding: Sequence[int]) -> None:
        super().__init__(device)
        self.row_padding = row_padding

    def vector_axis(self, box: Box, tiling: SimtTiling) -> int | None:
        return row_axis(box, super().vector_axis(box, tiling))

    def stored(
        self, number: int, box: Box, tiling: SimtTiling, vector: tuple[int | None, int]
    ) -> tuple[StoredBox, CopyShape]:
        copies = copy_shapes(box, tiling, box.shape(tiling.tile))
        return plain_storage(box, tiling, vector, copies, self.row_padding[number])


def plain_storage(
    box: Box, tiling: SimtTiling, vector: tuple[int | None, int], copies: Sequence[CopyShape], padding: int
) -> tuple[StoredBox, CopyShape]:
    """``box`` in the order of its tensor, rows ``padding`` elements longer, copied line by line.

    Copies are vectors where padded rows stay aligned to them, else element by element, neighbouring lanes side by side.
    ``vector`` is (axis, elements) that are read at once, where rows stay aligned to so many. Worked example, Figure
    5(b): a tile [3, 4] with padding 1 has rows 5 elements apart.
    """
    shape = box.shape(tiling.tile)
    strides, pitch = [1] * len(shape), 1
    for position, d in enumerate(reversed(range(len(shape)))):
        strides[d] = pitch
        pitch *= shape[d]
        if position == 0 and len(shape) > 1:
            pitch += padding
    aligned = all(stride % vector[1] == 0 for stride in strides[:-1])
    stored = StoredBox(
        box=box,
        order=tuple(range(len(shape))),
        strides=tuple(strides),
        phases=(1,) * len(shape),
        phase_strides=(0,) * len(shape),
        elements=pitch,
        vector_axis=vector[0] if aligned else None,
        width=vector[1] if aligned else 1,
    )
    line = _in_order(copies[0])
    return stored, line if stores_vectors(stored, line) else _by_elements(line)


def row_axis(box: Box, axis: int | None) -> int | None:
    """``axis`` if rows of the tensor run along it, so that vectors along it need no transposition; else None."""
    along = {p for p, _ in box.dims[-1].terms} if box.dims else set()
    return axis if axis in along else None


def _in_order(shape: CopyShape) -> CopyShape:
    """``shape`` with columns copied in their order, not sorted by the phase of a strided window."""
    if shape.phase == 1:
        return shape
    return replace(shape, phase=1, patch=shape.run_units, row_units=shape.run_units)


def _by_elements(shape: CopyShape) -> CopyShape:
    elements = shape.run_units * shape.width
    return replace(shape, width=1, patch=elements, row_units=elements)
