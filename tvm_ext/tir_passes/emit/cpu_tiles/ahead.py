"""Asks for the next panel of weights while tiles of rows use one: else the first of these would wait for memory.

Worked example, 100 x 256 times 256 x 512 on a core of a Cascade Lake: a panel of 64 columns is 64 KiB, which take
7.5 us from memory. A tile of 5 rows computes 1.1 us, but the first one of each panel would take as long as the panel.
20 tiles of rows go over a panel's 256 steps, and each step asks for a twentieth of what one of its own reads: 16 bytes.
Where the weights are in a cache already, the questions cost nothing: a step issues two dozen multiply-adds beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.ir.build_ir import index, load, prefetch
from tvm_ext.records.rprogram import RProgram
from tvm_ext.support.arithmetic import ceil_div

from .pack_inputs import PackedInput
from .phase_pack import PhasePack

LEAST_GAIN = 0.03
"""Of a kernel's time, what reading its weights from memory must take, for them to be asked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextPanel:
    """Each step of a reduction asks for the next ``elements`` of the panel behind its own.

    ``panels`` are those of ``buffer``, ``steps`` the extents of the reduction.
    """

    buffer: Buffer
    panels: int
    steps: tuple[int, ...]
    elements: int

    def ask(self, panel: Expr, row: Expr, ks: Sequence[Expr]) -> Stmt:
        """The question of step ``ks`` of the tile of rows number ``row``; behind the last panel, for that itself."""
        number = row
        for k, extent in zip(ks, self.steps, strict=True):
            number = number * index(extent) + k
        following = tirx.min(panel + index(1), index(self.panels - 1))
        return prefetch(load(self.buffer, [following, *[index(0)] * len(ks), number * index(self.elements)]))


def next_panel(
    packed: Sequence[PackedInput | PhasePack],
    vector: int,
    reduction: tuple[int, ...],
    row_tiles: int,
    program: RProgram,
    device: DeviceSpec,
) -> NextPanel | None:
    """What the ``row_tiles`` tiles that use a panel ask for; None where weights are no panels of one constant, where
    they hardly count, or where there are so few tiles that a step would have to ask for several lines.
    """
    own = [item for item in packed if isinstance(item, PackedInput) and item.is_constant]
    if len(own) != 1 or own[0].axes != (vector, *reduction, vector) or own[0].extents[0] < 2:
        return None
    (weights,) = own
    itemsize = itemsize_bytes(dtype_of(weights.buffer))
    elements = ceil_div(weights.extents[-1], row_tiles)
    size_bytes = prod(weights.extents) * itemsize
    memory, first = device.lowest_layer, device.layers[1]
    if size_bytes <= (first.capacity_bytes or 0) or elements * itemsize > memory.transaction_bytes:
        return None
    if size_bytes / Machine(device).rate(memory) < LEAST_GAIN * program.prediction.compute_s:
        return None
    return NextPanel(buffer=weights.buffer, panels=weights.extents[0], steps=weights.extents[1:-1], elements=elements)
