"""How the threads of a GPU kernel get at its inputs: through boxes in shared memory, or straight from global memory.

And what that takes of a thread's registers and of a block's shared memory; refusals have the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, static_shape
from tvm_ext.cost.thread_losses import OTHER_REGISTERS
from tvm_ext.devices.gpu import VECTOR_BYTES, WARP
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import registers_left, shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.ir.simt_ir import gpu_buffer
from tvm_ext.support.arithmetic import ceil_div

from .banks import StoredBox, choose_storage
from .box import Box, CopyShape, box_of
from .copy import copy_shapes
from .tiling import SimtTiling

if TYPE_CHECKING:
    from tvm_ext._tvm import Buffer, TensorLoad


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operand:
    """One load of the anchor. ``box`` and ``shape`` are None where it is read from global memory ("direct").

    ``fragment`` holds what a thread needs of it at one point of the reduction, over ``axes``, the vector axis last.
    """

    load: TensorLoad
    producers: tuple[Computation, ...]
    box: StoredBox | None
    shape: CopyShape | None
    fragment: Buffer
    axes: tuple[int, ...]

    @property
    def registers(self) -> int:
        """32-bit registers of the fragment."""
        size = prod(int(extent) for extent in static_shape(self.fragment))
        return ceil_div(int(size * itemsize_bytes(dtype_of(self.fragment))), 4)

    def stepped(self, tiling: SimtTiling) -> bool:
        """Whether its box moves with the steps of the reduction."""
        computation = tiling.computation
        return self.box is not None and any(
            self.box.box.uses(p) and tiling.step[p] < computation.extents[p] for p in tiling.reduction
        )


def plan_operands(
    tiling: SimtTiling, producers: Sequence[Computation], device: DeviceSpec
) -> tuple[SimtTiling, tuple[Operand, ...]]:
    """The operands of the anchor, and the tiling with the pieces that their vectors ask for."""
    return OperandPlanner(device).plan(tiling, producers)


class OperandPlanner:
    """Plans operands, data tiles in the storage with the fewest bank conflicts.

    The storage is two methods, which `benchmarks/gpu/plain_storage.py` replaces by the paper's.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def vector_axis(self, box: Box, tiling: SimtTiling) -> int | None:
        """The axis of ``box`` along which lanes or a thread read neighbours."""
        return _vector_axis(box, tiling)

    def stored(
        self, number: int, box: Box, tiling: SimtTiling, vector: tuple[int | None, int]
    ) -> tuple[StoredBox, CopyShape]:
        """The data tile of load ``number`` in shared memory, read by ``vector`` (axis, elements), and its copy."""
        copies = copy_shapes(box, tiling, box.shape(tiling.tile))
        return choose_storage(box, tiling, vector, copies, itemsize_bytes(box.dtype), self.device.layer("L1"))

    def plan(self, tiling: SimtTiling, producers: Sequence[Computation]) -> tuple[SimtTiling, tuple[Operand, ...]]:
        computation = tiling.computation
        loads = computation.loads()
        boxes = [box_of(load, computation, _behind(load, producers)) for load in loads]
        staged = [None if box is None or _streams(box, tiling) else box for box in boxes]
        vectors = [None if box is None else self.vector_axis(box, tiling) for box in staged]
        piece = {p: _piece(p, tiling, staged, vectors) for p in tiling.spatial}
        tiling = replace(tiling, piece=piece, outer=_thread_order(tiling, staged))
        found = zip(loads, staged, vectors, strict=True)
        return tiling, tuple(self._operand(number, tiling, producers, *parts) for number, parts in enumerate(found))

    def _operand(
        self,
        number: int,
        tiling: SimtTiling,
        producers: Sequence[Computation],
        load: TensorLoad,
        box: Box | None,
        vector: int | None,
    ) -> Operand:
        variables = tiling.computation.variables
        used = [p for p in tiling.order if tiling.register[p] > 1 and mentions(list(load.indices), variables[p])]
        last = vector if vector is not None else tiling.lane
        axes = (*(p for p in used if p != last), *(p for p in used if p == last))
        size, name = prod(tiling.register[p] for p in axes), f"{load.source.name}_{number}_fragment"
        stored = shape = None
        if box is not None:
            width = tiling.piece[vector] if vector is not None and vector in axes and _single(box, vector) else 1
            stored, shape = self.stored(number, box, tiling, (vector, width))
        return Operand(
            load=load,
            producers=_behind(load, producers),
            box=stored,
            shape=shape,
            fragment=gpu_buffer((size,), dtype_of(load), name, "local"),
            axes=axes,
        )


def _behind(load: TensorLoad, producers: Sequence[Computation]) -> tuple[Computation, ...]:
    """The producers, if the load reads one of them."""
    return tuple(producers) if any(load.source.same_as(p.target) for p in producers) else ()


def _streams(box: Box, tiling: SimtTiling) -> bool:
    """Whether each element is used once, and neighbouring lanes read neighbours: then shared memory gains nothing."""
    tile = tiling.tile
    uses = prod(tile.values()) / prod(box.shape(tile)) if box.dims else 0.0
    last = box.dims[-1] if box.dims else None
    coalesced = last is not None and last.terms == ((tiling.lane, 1),) and last.step == 1
    return uses <= 1 and coalesced and not box.producers


def _thread_order(tiling: SimtTiling, boxes: Sequence[Box | None]) -> tuple[int, ...]:
    """The outer axes of the thread number. Next to the lane axis comes the one with which it best fills warps exactly.

    Among equals it is one that does not move the boxes which lanes read along. Worked example, X[n, c, y + r, x + s]
    with threads 2 x 16 x 5 x 8 over n, f, y, x: a warp is 8 neighbours x, each for 4 of the 16 filters, and reads 8
    neighbours; with the 5 rows y next to x, every other warp would read the ends and beginnings of tiles.
    """
    along = [box for box in boxes if box is not None and box.uses(tiling.lane)]
    missing = max(1, WARP // tiling.lane_run)

    def fit(axis: int) -> tuple[int, bool]:
        return min(missing, _power_of_two(tiling.threads[axis])), not any(box.uses(axis) for box in along)

    return tuple(sorted(tiling.outer, key=fit))


def _single(box: Box, axis: int) -> bool:
    """Whether the axis alone moves along one dimension of the box, by neighbours."""
    using = [dim for dim in box.dims if any(p == axis for p, _ in dim.terms)]
    return len(using) == 1 and using[0].terms == ((axis, 1),)


def _vector_axis(box: Box, tiling: SimtTiling) -> int | None:
    """The axis along which lanes or a thread read neighbours: the lane axis, else that of most elements a thread."""
    if box.uses(tiling.lane) and tiling.threads[tiling.lane] > 1:
        return tiling.lane
    last = [p for p, _ in box.dims[-1].terms] if box.dims else []
    if any(p in tiling.spatial for p in last):  # only what is contiguous along the reduction is worth transposing
        last = [p for p in last if tiling.register.get(p, 1) > 1 and _single(box, p)]
        return last[0] if last else None
    usable = [p for p in tiling.spatial if tiling.register[p] > 1 and _single(box, p)]
    return max(usable, key=lambda p: (_power_of_two(tiling.register[p]), tiling.register[p]), default=None)


def _power_of_two(value: int) -> int:
    """The largest power of two that divides ``value``."""
    return value & -value


def _piece(axis: int, tiling: SimtTiling, boxes: Sequence[Box | None], vectors: Sequence[int | None]) -> int:
    """Neighbouring elements of a thread along ``axis``: as many as every box that is read along it can give at once."""
    users = [(box, vector) for box, vector in zip(boxes, vectors, strict=True) if box is not None and box.uses(axis)]
    read = [box for box, vector in users if vector == axis]
    if axis == tiling.lane:
        if any(not _single(box, axis) for box, _ in users):
            return 1
    elif not any(_single(box, axis) for box in read):
        return 1
    widest = max(
        [itemsize_bytes(box.dtype) for box in read], default=itemsize_bytes(dtype_of(tiling.computation.target))
    )
    if axis == tiling.lane:
        widest = max(widest, itemsize_bytes(dtype_of(tiling.computation.target)))
    return int(min(_power_of_two(tiling.register[axis]), max(1, VECTOR_BYTES // widest)))


def tail_shape(operand: Operand, tiling: SimtTiling, tile: Mapping[int, int]) -> CopyShape:
    """How the operand's box is copied for a step of size ``tile``, the last one being smaller."""
    assert operand.box is not None and operand.shape is not None
    sizes = operand.box.box.shape(tile)
    if sizes == operand.shape.sizes:
        return operand.shape
    shapes = copy_shapes(operand.box.box, tiling, sizes)
    same = [shape for shape in shapes if shape.patch == operand.shape.patch]
    return (same or shapes)[0]


# --- limits -----------------------------------------------------------------------------------------------------------
def planned_registers(tiling: SimtTiling, operands: Sequence[Operand], device: DeviceSpec) -> int:
    """Registers that the plan needs; raises IllegalRewrite where a thread has not so many."""
    accumulators = ceil_div(int(tiling.accumulators * itemsize_bytes(tiling.accumulator_dtype)), 4)
    fragments = sum(operand.registers for operand in operands)
    needed = accumulators + fragments + OTHER_REGISTERS
    limit = min(device.register_limit + OTHER_REGISTERS, registers_left(tiling.thread_count, device))
    if needed > limit:
        raise IllegalRewrite(
            f"{tiling.computation.name}: {accumulators} accumulators, {fragments} operands and {OTHER_REGISTERS} "
            f"others are {needed} registers; {device.name} leaves {limit} to each of {tiling.thread_count} threads"
        )
    return needed


def rest_in_loop_bytes(tiling: SimtTiling, operands: Sequence[Operand]) -> int:
    """Shared memory of the tiles of smaller steps that run in an outer loop over steps; 0 where there are none."""
    whole = [tiling.computation.extents[p] // tiling.step[p] for p in tiling.reduction]
    rests = [bool(tiling.computation.extents[p] % tiling.step[p]) for p in tiling.reduction]
    if not any(rest and max(whole[:at], default=1) > 1 for at, rest in enumerate(rests)):
        return 0
    return _tile_bytes([operand for operand in operands if operand.stepped(tiling)])


def _shared_bytes(tiling: SimtTiling, operands: Sequence[Operand]) -> int:
    return _tile_bytes(operands, int(_partial_elements(tiling) * itemsize_bytes(tiling.accumulator_dtype)))


def _tile_bytes(operands: Sequence[Operand], *more: int) -> int:
    sizes = [*(int(o.box.elements * itemsize_bytes(o.box.box.dtype)) for o in operands if o.box is not None), *more]
    return sum(ceil_div(size, VECTOR_BYTES) * VECTOR_BYTES for size in sizes)


def _partial_elements(tiling: SimtTiling) -> int:
    """Sums that thread groups leave in shared memory, at most."""
    return tiling.split // 2 * tiling.accumulators * tiling.group_threads


def in_shared_memory(
    tiling: SimtTiling, operands: tuple[Operand, ...], prologue: Sequence[Computation], device: DeviceSpec
) -> tuple[SimtTiling, tuple[Operand, ...], str, int]:
    """The operands with their buffers, and the scope; fewer thread groups where their sums do not fit."""
    capacity, most = static_shared_bytes(device), shared_limit_bytes(device)
    while _shared_bytes(tiling, operands) > capacity and tiling.split > 1:
        fewer = tiling.split // 2
        tiling = replace(tiling, split=fewer, split_axis=tiling.split_axis if fewer > 1 else None)
        tiling, operands = plan_operands(tiling, prologue, device)
    total = _shared_bytes(tiling, operands)
    if total > most:
        raise IllegalRewrite(
            f"{tiling.computation.name}: its data tiles take {total} bytes of shared memory, {device.name} has "
            f"{most} for a block"
        )
    scope = "shared" if total <= capacity else "shared.dyn"
    return tiling, tuple(_with_buffer(operand, scope) for operand in operands), scope, total


def _with_buffer(operand: Operand, scope: str) -> Operand:
    if operand.box is None:
        return operand
    name = operand.fragment.name.replace("_fragment", "_shared")
    buffer = gpu_buffer((operand.box.elements,), operand.box.box.dtype, name, scope)
    return replace(operand, box=replace(operand.box, buffer=buffer))


def partial_sums(tiling: SimtTiling, scope: str) -> Buffer | None:
    """Where thread groups leave their sums; None where there is one group."""
    if tiling.split == 1:
        return None
    return gpu_buffer((_partial_elements(tiling),), tiling.accumulator_dtype, "partial", scope)
