"""How an operator's accesses look to a tile: positions instead of names, data-tile sizes, use of the vector axis.

The performance model evaluates thousands of tiles for one operator; an `AccessTable` reduces each evaluation to a few
integer operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd, hypot, prod
from typing import Any, Literal

import numpy as np

from tvm_ext.analysis.tensor_expr import Access, TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import BETWEEN_CORES, Machine
from tvm_ext.support.quantities import chosen

from .dot_products import dot_product, is_grouped_already

Shape = tuple[int, ...]
"""A tile's size along each axis. Where it says so all sizes may be arrays, with one entry for each of many tiles."""

VectorUse = Literal["vector", "broadcast", "gather"]
"""How an access moves along the vector axis: whole registers, one value for all lanes, or lane by lane."""

MIN_REUSE_TO_PACK = 4
"""A strided input is copied into vectors where each element is used at least so often: the copy reads and writes it."""


MOST_OF_ALL_WAYS = 0.75
"""Of all ways in the places of a tile's rows, the share that the rows may not reach.

Pages lie in memory at random, so that some places have more rows than others, and other operands take ways, too.
Measured under 128 rows (Cascade Lake, one thread, others busy): where B's rows need half of the ways, panels make a
product 0.95 to 1.1 times as fast, at three quarters 1.13 to 1.25 times, at all of them 1.35 times and more.
"""

LEAST_PANEL_GAIN = 1.1
"""By how much a copy into panels must make a kernel faster by `copied_to_panels`, where it is all bandwidth."""

REGISTERS_PER_ROW = 4
"""Of a core's vector registers for each row of a register tile: 8 rows of 48 floats in 32, 4 of 24 in 16."""


_COLUMN = np.ndarray


def is_columns(shape: Shape) -> bool:
    """Whether ``shape`` is of many candidates."""
    return bool(shape) and isinstance(shape[0], np.ndarray)


@dataclass(frozen=True, slots=True)
class AccessTable:
    """An `Access` with its axes as positions, so that spans are a few integer operations."""

    tensor: str
    dims: tuple[tuple[int, tuple[tuple[int, int], ...] | None], ...]  # (size, ((axis position, |coefficient|), ...))
    itemsize_bytes: float
    uses_reduction: bool
    vector_use: VectorUse
    packed: bool  # laid out tile by tile (a constant at compile time, else on entry): its data tiles are contiguous
    packed_elements: int  # copied on entry, once per call
    padded: bool  # a constant, whose panels are padded to whole registers
    gathered: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (dimension, axes that choose its position)
    extents: Shape = ()
    starts: tuple[int, ...] | None = None  # of a GPU's row-major tensor: by dimension, where all axes are 0

    def uses(self, axis: int) -> bool:
        """Whether the access moves along the axis at this position."""
        return any(axis == position for _, terms in self.dims for position, _ in terms or ())

    def moves_by_one(self, axis: int) -> bool:
        """Whether neighbours along ``axis`` are neighbours in memory."""
        terms = self.dims[-1][1] if self.dims else None
        return terms is not None and (axis, 1) in terms

    def spans(self, shape: Shape) -> list[int]:
        """Shape of the data tile that ``shape`` touches; the same as `Access.tile_shape`. Sizes may be arrays."""
        spans: list[Any] = []
        for d, (size, terms) in enumerate(self.dims):
            if terms is None:
                spans.append(self._gathered(d, shape))
                continue
            span: Any = 1
            for axis, coefficient in terms:
                span += coefficient * (shape[axis] - 1)
            spans.append(np.minimum(span, size) if isinstance(span, _COLUMN) else span if span < size else size)
        return spans

    def _gathered(self, dimension: int, shape: Shape) -> int:
        """Positions touched in a dimension whose index is not affine: of a gather, one for each of its points."""
        size, axes = self.dims[dimension][0], dict(self.gathered).get(dimension, ())
        return min(size, prod(shape[axis] for axis in axes)) if axes else size

    def elements(self, shape: Shape) -> int:
        """Elements of the data tile that are used: registers need not hold the gaps of a stride.

        Two outputs of a 1x1 window with stride 2 span 3 columns and read 2.
        """
        count = 1
        for d, (size, terms) in enumerate(self.dims):
            if terms is None:
                count *= self._gathered(d, shape)
                continue
            used, span = 1, 1
            for axis, coefficient in terms:
                used *= shape[axis]
                span += coefficient * (shape[axis] - 1)
            count *= min(size, used, span)
        return count

    def carried(self, shape: Shape, tap_axis: int, taps: int) -> int:
        """Elements of the data tile of one tap that later taps along ``tap_axis`` use again.

        Row x + r of a tile x = 4 holds columns r .. r+3: three of them are used by tap r + 1 too. With 2*x + r they
        are used by tap r + 2, so that those of two taps are kept: 6, where there are as many taps.
        """
        for _, terms in self.dims:
            coefficients = dict(terms or ())
            if tap_axis not in coefficients or len(coefficients) != 2:
                continue
            (axis, stride) = next(item for item in coefficients.items() if item[0] != tap_axis)
            dilation = coefficients[tap_axis]
            every = stride // gcd(stride, dilation)  # taps until an element is used again,
            steps = dilation // gcd(stride, dilation)  # by the window so many before
            again = max(0, shape[axis] - steps) * max(0, min(every, taps - every))
            return again * self.elements((*shape[:axis], 1, *shape[axis + 1 :]))
        return 0

    def loaded_bytes(self, shape: Shape, transaction_bytes: int) -> float:
        """Bytes of the data tile as whole transactions, row by row.

        A row runs on over the next dimension where the tile spans a whole one: in a [64, 48] tensor of 4-byte items
        the tile [3, 48] is one row of 576 bytes, the tile [3, 5] is 3 rows of 20 bytes, each one 32-byte transaction.
        Where rows begin anywhere they touch more, in the mean: of a [64, 49] tensor 20 bytes begin at any multiple of
        4, and touch 1.5. A CPU's caches keep the line that two rows share.
        """
        spans = self.spans(shape)
        row: Any = 1
        rows: Any = 1
        open_row: Any = True  # of many candidates: an array
        if self.packed:
            row = prod(spans)
        else:
            for (size, _), span in zip(reversed(self.dims), reversed(spans), strict=True):
                if open_row is True:
                    row = row * span
                    open_row = span == size
                elif open_row is False:
                    rows = rows * span
                else:
                    row, rows = row * np.where(open_row, span, 1), rows * np.where(open_row, 1, span)
                    open_row = open_row & (span == size)
        aligned = transaction_bytes if self.starts is None else self._aligned_bytes(shape, transaction_bytes)
        units: Any = row * self.itemsize_bytes / aligned
        whole: Any = np.ceil(units) if isinstance(units, _COLUMN) else ceil(units)
        loaded: float = rows * (whole * aligned + transaction_bytes - aligned)
        return loaded

    def row_bytes(self, shape: Shape, line_bytes: int) -> Any:
        """Length of the data tile's rows, those as one between which less than a line lies; sizes may be arrays.

        48 floats of each of 4 rows of 56, in 64 channels: 3 * 224 + 192 bytes in each channel, 12.5 KB apart.
        """
        length: Any = self.itemsize_bytes
        near: Any = True
        behind = self.itemsize_bytes
        for (size, _), span in zip(reversed(self.dims), reversed(self.spans(shape)), strict=True):
            near = near & (self.packed | (behind - length < line_bytes))
            length = length + chosen(near, (span - 1) * behind, 0)
            behind *= size
        return length

    def _aligned_bytes(self, shape: Shape, transaction_bytes: int) -> int:
        """Of which all rows of a tile begin at multiples, at most a transaction: the first one, tiles' steps, rows."""
        assert self.starts is not None
        aligned, behind, inside = transaction_bytes, self.itemsize_bytes, True
        for (size, terms), start, span in zip(
            reversed(self.dims), reversed(self.starts), reversed(self.spans(shape)), strict=True
        ):
            if inside and span < size:
                moves = [step * shape[axis] for axis, step in terms or () if shape[axis] < self.extents[axis]]
                aligned = gcd(aligned, *(max(1, int(behind * move)) for move in (start, *moves) if move))
            elif not inside and size > 1:
                aligned = gcd(aligned, max(1, int(behind)))
            behind, inside = behind * size, inside and span == size
        return aligned


Unmoved = Mapping[str, Sequence[tuple[float, Sequence[str]]]]
"""By spatial axis the inputs that stay put along it: bytes of an element, and the axes along which they do move."""


def unmoved_inputs(expr: TensorExpr) -> Unmoved:
    """What `loop_order` asks of the inputs, whatever the tile."""
    strides = [{axis.name: access.stride(axis.name) for axis in expr.axes} for access in expr.inputs]
    return {
        axis.name: [
            (access.itemsize_bytes, [name for name, stride in own.items() if stride])
            for access, own in zip(expr.inputs, strides, strict=True)
            if own[axis.name] == 0
        ]
        for axis in expr.spatial
    }


def loop_order(expr: TensorExpr, register: Mapping[str, int], unmoved: Unmoved | None = None) -> tuple[str, ...]:
    """Spatial axes of a CPU's loops over tiles, outermost first: the axis along which the most loaded bytes stay put
    goes last.

    Worked example, matmul with 4 x 64 tiles and K = 512: along j the 4 x 512 tile of A stays (8 KiB), along i the
    512 x 64 panel of B (128 KiB), so i is the innermost loop. ``unmoved``: `unmoved_inputs`, for whoever asks often.
    """
    sizes = {axis.name: axis.extent if axis.kind == "reduce" else register[axis.name] for axis in expr.axes}
    inputs = unmoved_inputs(expr) if unmoved is None else unmoved

    def kept_bytes(name: str) -> float:
        return sum(itemsize * prod([sizes[axis] for axis in axes]) for itemsize, axes in inputs[name])

    return tuple(sorted(inputs, key=kept_bytes))


def access_table(expr: TensorExpr, access: Access, vector_axis: str | None, device: DeviceSpec) -> AccessTable:
    """The table of one of ``expr``'s accesses under ``vector_axis`` on ``device``."""
    is_cpu = device.kind == "cpu"
    position = {axis.name: i for i, axis in enumerate(expr.axes)}
    affine = all(index is not None for index in access.indices)
    use = vector_use(access, vector_axis)
    kept = [
        (d, index)
        for d, index in enumerate(access.indices)
        if is_cpu or access.shape[d] > 1 or index is None or index.terms  # [f, c, 1, 1] is contiguous along c
    ]
    if is_cpu and access.dtype == "int8" and is_grouped_already(expr, access, dot_product(expr, device)):
        use, copied = "vector" if use == "gather" else use, 0
    else:
        copied = _copied_elements(expr, access, vector_axis, device) if is_cpu and use != "broadcast" and affine else 0
    return AccessTable(
        tensor=access.tensor,
        dims=tuple(
            (access.shape[d], None if index is None else tuple((position[a], abs(c)) for a, c in index.terms))
            for d, index in kept
        ),
        itemsize_bytes=access.itemsize_bytes,
        uses_reduction=not affine or any(access.uses(axis.name) for axis in expr.reduction),
        vector_use="vector" if copied else use,
        packed=is_cpu and (access.is_constant or copied > 0),
        packed_elements=copied,
        padded=is_cpu and access.is_constant and affine,
        extents=tuple(axis.extent for axis in expr.axes),
        starts=tuple(index.constant for _, index in kept if index is not None) if affine and not is_cpu else None,
        gathered=tuple(
            (place, tuple(position[axis] for axis in access.gathered_by(d)))
            for place, (d, _) in enumerate(kept)
            if access.gathered_by(d)
        ),
    )


def _copied_elements(expr: TensorExpr, access: Access, vector_axis: str | None, device: DeviceSpec) -> int:
    """Elements of the copy that turns a strided input into vectors; 0 where its reuse does not pay for it.

    A strided window is split by phase. Otherwise the input is copied per point of the axes that index it, overlaps
    included.
    """
    if access is expr.output or access.is_constant or vector_axis is None:
        return 0
    if access.stride(vector_axis) == 1:
        reduction = [axis.name for axis in expr.reduction]
        if not copied_to_panels(access, expr.extents, reduction, expr.point_count, device):
            return 0
        return prod(axis.extent for axis in expr.axes if access.uses(axis.name))
    split = phase_split(access, vector_axis, expr.extents)
    copied = prod(split or (axis.extent for axis in expr.axes if access.uses(axis.name)))
    return copied if expr.point_count >= MIN_REUSE_TO_PACK * copied else 0


def copied_to_panels(
    access: Access, extents: Mapping[str, int], reduction: Sequence[str], points: int, device: DeviceSpec
) -> bool:
    """Whether a contiguous input of a kernel of ``points`` multiply-adds is copied into panels on entry.

    It is where its rows thrash and the copy takes less than it saves. Read as they lie, rows come anew for every
    register tile from the layer below L2, beside the arithmetic; the copy reads them once and writes them once.
    Where the device's table lacks the rates to compare, it is read as it lies.

    Worked example, one core of 150 GFLOP/s whose L3 serves 24 GB/s, B of 1024 x 1024 under 64 rows: 0.9 ms of
    arithmetic beside 8 readings of 4 MiB, 1.4 ms, together 1.7 ms; copied 0.9 + 0.35 ms. Under 16 rows: 0.22 beside
    0.35 ms, together 0.41, and copied 0.57. Measured (Cascade Lake, one thread, others busy): under 128, 64,
    32 and 16 rows a copy makes it 1.7, 1.5, 1.1 and 0.6 times as fast.
    """
    if not rows_thrash(access, extents, reduction, device):
        return False
    copied = prod(extent for axis, extent in extents.items() if access.uses(axis))
    copied_bytes = copied * access.itemsize_bytes
    below = Machine(device).holder(copied_bytes, BETWEEN_CORES)
    peak = device.peak_gflops_of("float32")
    if not below.bandwidth_gb_per_s or not peak or not device.register_limit:
        return False
    arithmetic_ns = 2 * points / peak
    once_ns = copied_bytes / below.bandwidth_gb_per_s
    readings = ceil(points / copied / (device.register_limit / REGISTERS_PER_ROW))
    return hypot(arithmetic_ns, readings * once_ns) > LEAST_PANEL_GAIN * (arithmetic_ns + 2 * once_ns)


def rows_thrash(access: Access, extents: Mapping[str, int], reduction: Sequence[str], device: DeviceSpec) -> bool:
    """Whether the rows that a tile reads over the whole reduction push each other out of the L2 cache or the TLB.

    Rows a power of two apart share a few sets of the cache. Worked example, 1 MiB in 16 ways: rows of 4096 bytes lie in
    65536 / 4096 = 16 places; 16 ways hold 256 of them, a reduction of 1024 reads each anew for every tile. Rows of 4000
    bytes lie in 2048 places. Rows further apart than a page each take an entry of the TLB.
    """
    steps = [
        (abs(step) * access.itemsize_bytes, extents[axis])
        for axis in reduction
        if (step := access.stride(axis)) and extents[axis] > 1
    ]
    if not steps or not (device.l2_ways and device.tlb_pages and device.page_bytes):
        return False
    pitch = int(max(step for step, _ in steps))
    l2 = device.layer("L2")
    rows = prod(extent for step, extent in steps if step >= l2.transaction_bytes)
    way = (l2.capacity_bytes or 0) // device.l2_ways
    places = way // gcd(pitch, way)
    pages = rows * min(1.0, pitch / device.page_bytes)
    return rows >= MOST_OF_ALL_WAYS * places * device.l2_ways or pages > device.tlb_pages


def phase_split(access: Access, vector_axis: str, extents: Mapping[str, int]) -> tuple[int, ...] | None:
    """Shape of the copy in which a strided window's columns are sorted by phase (`cpu_tiles/packing.py`), or None.

    Its dims are those of the tensor that are indexed, then phase and column. Worked example: ``in[c, 2*y+r, 2*x+q]``
    of [3, 227, 227] with x = 113 and q = 3 becomes [3, 227, 2, 114]; ``in[c, 2*y, 2*x]`` becomes [3, 113, 1, 113].
    """
    dims = [
        (size, index) for size, index in zip(access.shape, access.indices, strict=True) if index is None or index.terms
    ]
    if not dims or dims[-1][1] is None or access.indices[-1] is not dims[-1][1]:
        return None
    last = dims[-1][1]
    taps = [(name, coefficient) for name, coefficient in last.terms if name != vector_axis]
    stride = last.coefficient(vector_axis)
    if stride < 2 or len(taps) > 1 or any(coefficient != 1 for _, coefficient in taps):
        return None
    shape: list[int] = []
    seen = [name for name, _ in last.terms]
    for size, item in dims[:-1]:
        if item is None or item.constant < 0 or any(c < 0 for _, c in item.terms):
            return None
        if len(item.terms) > 1 and all(coefficient != 1 for _, coefficient in item.terms):
            return None
        seen += [name for name, _ in item.terms]
        shape.append(extents[item.terms[0][0]] if len(item.terms) == 1 else size)
    if len(seen) != len(set(seen)) or last.constant < 0 or (not taps and last.constant):
        return None
    reach = (last.constant + (extents[taps[0][0]] - 1 if taps else 0)) // stride
    return (*shape, min(stride, access.shape[-1]) if taps else 1, extents[vector_axis] + reach)


def vector_use(access: Access, axis: str | None) -> VectorUse:
    """How ``access`` moves along ``axis``: a repackable constant or stride 1 is "vector", unused is "broadcast"."""
    if axis is None:
        return "broadcast"
    affine = all(index is not None for index in access.indices)
    if affine and not access.uses(axis):
        return "broadcast"
    if affine and access.is_constant:
        return "vector"
    return "vector" if access.stride(axis) == 1 else "gather"


def vector_lanes(expr: TensorExpr, device: DeviceSpec) -> int:
    """Elements of the output's type in one SIMD register; narrower floats are computed as 32-bit."""
    itemsize = expr.output.itemsize_bytes
    if expr.output.dtype.startswith(("float", "bfloat")):
        itemsize = max(itemsize, 4.0)
    return max(1, int(device.teu_lanes * 4 / max(itemsize, 1.0)))
