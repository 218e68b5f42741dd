"""The alignment rules of §3.1, each a small function, behind `Aligner.next_size` (GetNextAlignedAxisSize).

A rule says which sizes of an axis are aligned, either as a *step* (sizes must be multiples of it) or as a test of one
size or of a whole tile. New hardware is a new rule: write it and call it from `Aligner`. Each can be switched off by
name, as in the ablation of Table 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.access_table import AccessTable, Shape
from tvm_ext.cost.perf_model import PerfModel
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads
from tvm_ext.support.arithmetic import ceil_div

UNIT, MEMORY, SHAPE, BANK, TENSOR_CORE = "unit", "memory", "shape", "bank", "tensor_core"
ALL_RULES = frozenset({UNIT, MEMORY, SHAPE, BANK, TENSOR_CORE})

GROWTH = 4
"""Below the registers a size grows by at least a GROWTH-th of itself, so that large axes take few steps."""

MAX_AXIS_ATTEMPTS = 64
"""Sizes tried along one axis before giving up on making the whole tile fit the execution unit."""


def padding_waste(extent: int, size: int) -> float:
    """Share of an axis that tiles of ``size`` add: (S - N % S) / N, 0 where S divides N (tensor-shape rule).

    N=1000, S=64: 1000 % 64 = 40, so 24 are added: 0.024. S=16 wastes 8 / 1000.
    """
    rest = extent % size
    return (size - rest) / extent if rest else 0.0


def next_shape_aligned(extent: int, size: int, step: int, epsilon: float) -> int | None:
    """The smallest multiple of ``step`` that is >= ``size`` and wastes at most ``epsilon``; None past the extent.

    With the number of tiles q fixed the waste (q*S - N) / N grows with S, so after a failure the next candidate is
    the first size that needs q - 1 tiles. N=49, step 7, epsilon 0: 14 fails (4 tiles, 56), 21 is the first with
    3 tiles (63), 28 with 2 (56), 49 with 1: aligned.
    """
    whole = ceil_div(extent, step) * step
    while size < whole:
        if padding_waste(extent, size) <= epsilon:
            return size
        tiles = ceil_div(whole, size)
        fewer_tiles = ceil_div(whole, tiles - 1)
        size = max(size + step, ceil_div(fewer_tiles, step) * step)
    return whole if size == whole else None


def transaction_step(model: PerfModel, level: int, axis: int) -> int:
    """Step of ``axis`` for which every data tile starts on a transaction boundary (memory-transaction rule).

    The leading dimension of a tensor moves by ``coefficient * size`` elements per tile, which must be whole
    transactions: 32 bytes hold 8 floats, so k moves in steps of 8, and an index ``2*h`` in steps of 4. A compile-time
    constant is packed tile by tile and asks for nothing; a tile that spans the dimension is aligned anyway.
    """
    transaction = model.device.layers[level + 1].transaction_bytes
    step = 1
    for table in (*model.inputs, model.output):
        terms, behind = _leading(model, table)
        for position, coefficient in terms:
            if position == axis:
                moved = max(1, int(coefficient * behind * table.itemsize_bytes))
                step = lcm(step, transaction // gcd(moved, transaction))
    return step


def _leading(model: PerfModel, table: AccessTable) -> tuple[tuple[tuple[int, int], ...], int]:
    """(terms of the leading dimension, elements of the dimensions behind it): those spanned by a GPU's whole windows.

    Weights [f, c, 3, 3] are whole along 3 x 3 in every tile, so that c moves by 9 elements: 36 bytes, hence steps of 8.
    Only a reduction axis is asked for that: the weights [c, 3, 3] of a depthwise convolution are few.
    """
    if table.packed or not table.dims:
        return (), 1
    last = table.dims[-1][1] or ()
    behind = 1
    for size, terms in () if model.is_cpu else reversed(table.dims):
        if terms is None or any(axis not in model.reduction for axis, _ in terms):
            return last, 1
        if len(terms) != 1 or terms[0][0] not in model.windows or model.extents[terms[0][0]] != size:
            return terms, behind
        behind *= size
    return last, 1


def tensor_core_steps(expr: TensorExpr, device: DeviceSpec) -> dict[str, int] | None:
    """Steps of the axes (m, n, k) of a matrix instruction, or None where the expression is not a product of two.

    m is the last spatial axis that only the first input uses, n the last that only the second uses, k the last
    reduction axis that both use. Needs the device to publish a rate for the inputs' type on its matrix units.
    """
    if device.tensor_core_shape is None or expr.combiner != "sum" or len(expr.inputs) != 2:
        return None
    first, second = expr.inputs
    if first.dtype != second.dtype or device.peak_gflops_of(f"{first.dtype}_tensor") is None:
        return None
    m = [a.name for a in expr.spatial if first.uses(a.name) and not second.uses(a.name)]
    n = [a.name for a in expr.spatial if second.uses(a.name) and not first.uses(a.name)]
    k = [a.name for a in expr.reduction if first.uses(a.name) and second.uses(a.name)]
    if not (m and n and k):
        return None
    return dict(zip((m[-1], n[-1], k[-1]), device.tensor_core_shape, strict=True))


@dataclass(slots=True)
class Aligner:
    """The rules as they apply to tiles of one layer that are made of ``upper`` tiles of the layer above."""

    model: PerfModel
    level: int
    upper: Shape | None  # None in the highest layer
    rules: frozenset[str]
    epsilon: float
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.steps = tuple(self._step(axis) for axis in range(len(self.model.extents)))

    def _nesting_step(self, axis: int) -> int:
        """Execution-unit step: whole vectors (CPU), whole fragments (tensor core), whole tiles of the layer above."""
        model = self.model
        if self.upper is not None:
            return self.upper[axis]
        if TENSOR_CORE in self.rules and model.tensor_core:
            steps = tensor_core_steps(model.expr, model.device) or {}
            return steps.get(model.names[axis], 1)
        return model.lanes if axis == model.vector and UNIT in self.rules else 1

    def _step(self, axis: int) -> int:
        step = self._nesting_step(axis)
        if MEMORY in self.rules and self.level > 0:
            step = lcm(step, transaction_step(self.model, self.level, axis))
        return step

    def may_grow(self, axis: int) -> bool:
        """Reduction axes take one step at a time in registers, and are kept whole in a CPU's caches."""
        return axis not in self.model.reduction or (self.level > 0 and not self.model.is_cpu)

    def whole(self, axis: int) -> int:
        """The size that spans the axis: its extent rounded up to tiles of the layer above."""
        nest = self._nesting_step(axis)
        return ceil_div(self.model.extents[axis], nest) * nest

    def start(self, shape: Shape) -> Shape:
        """``shape`` with each axis at its first aligned size: whole vectors, fragments, transactions.

        Reduction axes that may not grow stay as they are, but for a tensor core's k and a vectorised one.
        """
        return tuple(
            self._aligned(axis, size) if self.may_grow(axis) or (self.level == 0 and self.steps[axis] > 1) else size
            for axis, size in enumerate(shape)
        )

    def next_size(self, shape: Shape, axis: int) -> int | None:
        """The next larger size of one axis that satisfies every rule; None where there is none."""
        if not self.may_grow(axis):
            return None
        size, whole = shape[axis], self.whole(axis)
        for _ in range(MAX_AXIS_ATTEMPTS):
            if size >= whole:
                return None
            size = self._aligned(axis, size + (max(1, size // GROWTH) if self.level > 0 else 1))
            if self.fits_execution_unit((*shape[:axis], size, *shape[axis + 1 :])):
                return size
        return None

    def doubled_size(self, shape: Shape, axis: int) -> int | None:
        """The first aligned size of one axis of at least twice the present one, whatever the whole tile then is."""
        if not self.may_grow(axis) or shape[axis] >= self.whole(axis):
            return None
        return self._aligned(axis, 2 * shape[axis])

    def _aligned(self, axis: int, size: int) -> int:
        """The smallest size >= ``size`` that the rules for one axis allow; the whole axis at the latest."""
        whole, step = self.whole(axis), self.steps[axis]
        size = ceil_div(size, step) * step
        if size >= whole:
            return whole
        if SHAPE not in self.rules:
            return size
        aligned = next_shape_aligned(self.model.extents[axis], size, step, self._allowed_waste(axis, step))
        return whole if aligned is None or aligned > whole else aligned

    def _allowed_waste(self, axis: int, step: int) -> float:
        """ε, or what one vector rounds up to: 1000 columns are 63 registers of 16, whatever the tile (0.008)."""
        if self.model.is_cpu and axis == self.model.vector:
            return max(self.epsilon, padding_waste(self.model.extents[axis], step))
        return self.epsilon

    def fits_execution_unit(self, shape: Shape) -> bool:
        """Execution-unit rule of a whole tile: a GPU's threadblock is a multiple of the TEU's lanes (a warp)."""
        model = self.model
        if UNIT not in self.rules or model.is_cpu or self.upper is None or self.level > 1:
            return True
        return model.threads(self.upper, shape) % model.device.teu_lanes == 0 or self.is_whole(shape)

    def filled_lanes(self, shape: Shape) -> int:
        """Lanes that the threads fill in whole rounds of a TEU: 24 threads fill 8 of 32, 64 fill all; 0 on a CPU."""
        if self.model.is_cpu or self.upper is None:
            return 0
        return gcd(self.model.threads(self.upper, shape), self.model.device.teu_lanes)

    def is_whole(self, shape: Shape) -> bool:
        """Whether one tile covers the whole operator, which may be too small for a warp."""
        return all(shape[i] >= self.whole(i) for i in self.model.spatial)

    def threads_fit(self, shape: Shape) -> bool:
        """Limits of a GPU's threadblock: threads, and the unit's registers where the table has them."""
        model, device = self.model, self.model.device
        if model.is_cpu or self.upper is None:
            return True
        limit = max_block_threads(device, registers=device.register_limit)
        return limit is None or model.threads(self.upper, shape) <= limit
