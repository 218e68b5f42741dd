"""Products by weights of four bits as one kernel, which rounds the left operand to bytes, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_ext._tvm import tirx
from tvm_ext.analysis.computations import dtype_of, static_shape
from tvm_ext.analysis.predicates import is_in
from tvm_ext.cost.packed_products import PackedTiles
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.build_ir import outer_kind
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.packed import ROUNDED

from ..emit.cpu_packed.emit import emit_packed_product
from ..plan.context import KernelContext, UnscheduledOperator
from ..plan.form import Form
from .kernel_kind import KernelKind, KernelPart

ROUNDING_CYCLES = 1.0
"""Of a number of the left operand. Measured on a Zen 4."""


class CpuPacked(KernelKind):
    name = "a product by packed weights"

    def of_function(self, operator: UnscheduledOperator) -> PackedPart | None:
        if not operator.has(ROUNDED):
            return None
        constants, context = operator.as_read.constants, operator.parameters_only()
        if not all(is_in(param, constants) for param in context.operator.params[1:-1]):
            raise IllegalRewrite("its weights are known at run time alone")
        x, codes = (static_shape(param) for param in context.operator.params[:2])
        tiles = PackedTiles.of(x[0], codes[2], codes[0], codes[1], operator.device)
        if tiles is None:
            raise IllegalRewrite(f"{operator.device.name} has no instruction for blocks of {2 * codes[1]} bytes")
        return PackedPart(plan=tiles, context=context)


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedPart(KernelPart[None]):
    """A function with attribute `ROUNDED`, in the tiles of its ``plan``."""

    plan: PackedTiles
    context: KernelContext

    def forms(self, chosen: None = None) -> list[Form]:
        (x, *weights, out), tiles = self.context.operator.params, self.plan
        bias = weights.pop() if len(static_shape(weights[-1])) == 1 else None
        packs = [tiles.codes_pack(1), *(tiles.block_pack(place) for place in range(2, 1 + len(weights)))]
        packed = [
            tirx.decl_buffer(how.extents, dtype_of(param), param.name, data_alignment=64)
            for param, how in zip(weights, packs, strict=True)
        ]
        device = self.context.device
        rounding_s = 2 * tiles.half * tiles.blocks * tiles.rows * ROUNDING_CYCLES / Machine(device).vector_hz
        kinds = (outer_kind(rounding_s / device.unit_count, device), outer_kind(tiles.seconds(device), device))
        statements = emit_packed_product(tiles, (x, *packed), bias, out, kinds)
        note = f"int8 by four bits, blocks of {2 * tiles.half}, tiles of {tiles.height} x {tiles.width} sums"
        packing = tuple(zip(packed, packs, strict=True))
        return [Form(path="rtile", statements=statements, program=None, notes=(note,), packs=packing)]

    def describe(self, choice: KernelChoice, forms: Sequence[Form]) -> KernelChoice:
        tiles, device = self.plan, self.context.device
        flops = 4.0 * tiles.rows * tiles.columns * tiles.blocks * tiles.half
        return replace(choice, flops=flops, expected_s=tiles.seconds(device) + Machine(device).launch_s)
