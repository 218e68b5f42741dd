"""How an operator's accesses look to a tile: positions instead of names, data-tile sizes, use of the vector axis.

The performance model evaluates thousands of tiles for one operator; an `AccessTable` reduces each evaluation to a few
integer operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from tvm_ext.hal import DeviceSpec
from tvm_ext.tensor_expr import Access, TensorExpr

Shape = tuple[int, ...]
VectorUse = Literal["vector", "broadcast", "gather"]
"""How an access moves along the vector axis: whole registers, one value for all lanes, or lane by lane."""

MIN_REUSE_TO_PACK = 4
"""A strided input is copied into vectors where each element is used at least so often: the copy reads and writes it."""


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

    def spans(self, shape: Shape) -> list[int]:
        """Shape of the data tile that ``shape`` touches; the same as `Access.tile_shape`."""
        spans = []
        for size, terms in self.dims:
            if terms is None:
                spans.append(size)
                continue
            span = 1
            for axis, coefficient in terms:
                span += coefficient * (shape[axis] - 1)
            spans.append(span if span < size else size)
        return spans

    def elements(self, shape: Shape) -> int:
        """Elements of the data tile that are used: registers need not hold the gaps of a stride.

        Two outputs of a 1x1 window with stride 2 span 3 columns, of which 2 are read.
        """
        count = 1
        for size, terms in self.dims:
            if terms is None:
                count *= size
                continue
            used, span = 1, 1
            for axis, coefficient in terms:
                used *= shape[axis]
                span += coefficient * (shape[axis] - 1)
            count *= min(size, used, span)
        return count

    def loaded_bytes(self, shape: Shape, transaction_bytes: int) -> float:
        """Bytes of the data tile as whole transactions, row by row.

        A row runs on over the next dimension where the tile spans a whole one: in a [64, 48] tensor of 4-byte items
        the tile [3, 48] is one row of 576 bytes, the tile [3, 5] is 3 rows of 20 bytes, each one 32-byte transaction.
        """
        row, rows, open_row = 1, 1, True
        for (size, _), span in zip(reversed(self.dims), reversed(self.spans(shape)), strict=True):
            if open_row or self.packed:
                row *= span
                open_row = span == size
            else:
                rows *= span
        return rows * ceil(row * self.itemsize_bytes / transaction_bytes) * transaction_bytes


def access_table(expr: TensorExpr, access: Access, vector_axis: str | None, *, is_cpu: bool) -> AccessTable:
    """The table of one of ``expr``'s accesses under ``vector_axis``."""
    position = {axis.name: i for i, axis in enumerate(expr.axes)}
    affine = all(index is not None for index in access.indices)
    use = vector_use(access, vector_axis)
    copied = _copied_elements(expr, access) if is_cpu and use == "gather" and affine else 0
    return AccessTable(
        tensor=access.tensor,
        dims=tuple(
            (size, None if index is None else tuple((position[a], abs(c)) for a, c in index.terms))
            for size, index in zip(access.shape, access.indices, strict=True)
        ),
        itemsize_bytes=access.itemsize_bytes,
        uses_reduction=not affine or any(access.uses(axis.name) for axis in expr.reduction),
        vector_use="vector" if copied else use,
        packed=is_cpu and (access.is_constant or copied > 0),
        packed_elements=copied,
    )


def _copied_elements(expr: TensorExpr, access: Access) -> int:
    """Elements of the copy that turns a strided input into vectors; 0 where its reuse does not pay for it.

    A convolution's input is copied per point of the axes that index it, overlaps included.
    """
    if access is expr.output:
        return 0
    copied = prod(axis.extent for axis in expr.axes if access.uses(axis.name))
    return copied if expr.point_count >= MIN_REUSE_TO_PACK * copied else 0


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
