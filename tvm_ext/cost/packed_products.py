"""Products of bytes by weights of four bits: the register tile, how constants are packed for it, and the time.

A register tile has two registers for each of its vectors: the whole number that a block adds up, and the float sum of
all blocks. Beside them are the codes of a step, lower and upper bits apart, a scale and a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod

from tvm_ext.devices.dot_instructions import DotInstruction, dot_instruction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import WARM, Machine
from tvm_ext.records.choice import ConstantPack
from tvm_ext.support.arithmetic import ceil_div

OTHER_REGISTERS = 2
"""Of a scale and of a factor."""

MOST_VECTORS = 4
"""Of columns: as many sums as hide the latency of an instruction, where there is one row."""

MOST_SUMS = 15
"""Vectors of sums that stock TVM leaves on the stack, from which LLVM takes registers (`build_ir.STACK_BYTES`)."""

BLOCK_OPERATIONS = 3.0
"""Of a vector of sums behind each block: a conversion, a product of scales, a multiply-add."""


MOST_WEIGHTS = 256
"""Of a block: its numbers are rounded without a loop. ONNX Runtime has no larger ones."""


def rounding_instruction(device: DeviceSpec) -> DotInstruction | None:
    """The instruction of ``device`` that gains by rounding: one for a group of products, not a sequence of several."""
    row = dot_instruction(device, "uint8", "int8", "int32")
    return row if row is not None and row.operations <= 1 else None


def rounds_blocks(device: DeviceSpec, half: int) -> bool:
    """Whether kernels for ``device`` add up blocks of twice ``half`` weights as whole numbers."""
    row = rounding_instruction(device)
    return row is not None and half % row.group == 0 and 2 * half <= MOST_WEIGHTS


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTiles:
    """Tiles of ``height`` rows by ``vectors`` registers of columns, for a product of the given extents."""

    rows: int
    columns: int
    blocks: int
    half: int
    row: DotInstruction
    height: int
    vectors: int

    @classmethod
    def of(cls, rows: int, columns: int, blocks: int, half: int, device: DeviceSpec) -> PackedTiles | None:
        """The tile with the most sums in registers, of these the one with most rows; None without an instruction."""
        row = rounding_instruction(device)
        if row is None or not rounds_blocks(device, half):
            return None

        def most(vectors: int) -> int:
            """Rows of a tile."""
            registers = (device.register_limit - OTHER_REGISTERS - 2 * vectors) // (2 * vectors)
            return min(registers, MOST_SUMS // vectors)

        widths = range(1, min(MOST_VECTORS, ceil_div(columns, row.register_bytes // 4)) + 1)
        shapes = [(ceil_div(rows, ceil_div(rows, most(width))), width) for width in widths if most(width)]
        tall, wide = max(shapes, key=lambda shape: (prod(shape), shape[0]))
        return cls(rows=rows, columns=columns, blocks=blocks, half=half, row=row, height=tall, vectors=wide)

    @property
    def lanes(self) -> int:
        return self.row.register_bytes // 4

    @property
    def width(self) -> int:
        """Columns of a tile, and of a panel of packed constants."""
        return self.lanes * self.vectors

    @property
    def panels(self) -> int:
        return ceil_div(self.columns, self.width)

    @property
    def groups(self) -> int:
        """Groups of products of half a block."""
        return self.half // self.row.group

    @property
    def read_lanes(self) -> int:
        """Elements of x that are rounded at once, of which there are whole vectors in a block."""
        return gcd(2 * self.half, self.lanes)

    def codes_pack(self, place: int) -> ConstantPack:
        """Panel, block, group, column, place in the group: what lies behind the last column belongs to others."""
        columns, group = self.columns, self.row.group
        return ConstantPack(
            param_index=place,
            extents=(self.panels, self.blocks, self.groups, self.width, group),
            strides=(self.width, self.half * columns, group * columns, 1, columns),
        )

    def block_pack(self, place: int) -> ConstantPack:
        """Panel, block, column of scales or zero points."""
        extents, strides = (self.panels, self.blocks, self.width), (self.width, self.columns, 1)
        return ConstantPack(param_index=place, extents=extents, strides=strides)

    def seconds(self, device: DeviceSpec) -> float:
        """Of all units: arithmetic, or reading the weights once."""
        machine, vectors = Machine(device), ceil_div(self.columns, self.lanes)
        operations = self.rows * vectors * self.blocks * (2 * self.groups + BLOCK_OPERATIONS)
        weights = self.blocks * self.columns * (self.half + 4)
        computing = operations / device.fma_rate / device.unit_count / machine.vector_hz
        return max(computing, weights / machine.held_rate(weights, WARM))
