"""What one operator computes, as Roller reads it: axes, affine access maps, anchor, prologue and epilogue (paper §3.1).

A `TensorExpr` is plain data made by `analyse` from a TensorIR function; construction and the performance model
never look at TensorIR again.

Worked example: ``C[i, j] += A[i, k] * B[k, j]`` with M=64, N=48, K=32 has the axes ``i`` (64, spatial),
``j`` (48, spatial), ``k`` (32, reduce); the access of ``A`` has the indices ``i`` and ``k``. A convolution's
``pad[n, c, 2*h + r, 2*w + s]`` has the index ``2*h + 1*r + 0``: a tile of h=4, r=3 touches 2*(4-1) + (3-1) + 1 = 9
rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

AxisKind = Literal["spatial", "reduce"]

FUSED = "*"
"""Joins the names of merged axes, outermost first: ``h*w``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    name: str
    extent: int
    kind: AxisKind

    def __post_init__(self) -> None:
        assert self.extent >= 1, f"axis {self.name} has extent {self.extent}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearIndex:
    """``constant + sum(coefficient * axis)``: how one dimension of a tensor is addressed."""

    terms: tuple[tuple[str, int], ...]  # (axis name, coefficient), coefficients not zero
    constant: int = 0

    def extent(self, tile: Mapping[str, int]) -> int:
        """Number of positions this index spans when each axis runs over ``tile[axis]`` consecutive values."""
        return 1 + sum(abs(coefficient) * (tile[axis] - 1) for axis, coefficient in self.terms)

    def coefficient(self, axis: str) -> int:
        for name, coefficient in self.terms:
            if name == axis:
                return coefficient
        return 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One tensor that the anchor reads or writes, row-major, with one index per dimension.

    An index is None where it is not affine in the axes (a gather, a reshape's division): a tile is then
    taken to touch the whole of that dimension. Of a gather, ``gathers`` has the axes that choose the position, in the
    dimension's place: a tile touches no more positions than it has points along them. Worked example, 128 rows of a
    table of 30522: ``gathers`` is (("row",), ()), and a tile of 8 rows touches 8.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: float
    indices: tuple[LinearIndex | None, ...]
    is_constant: bool = False  # known at compile time (a weight): may be repacked for free
    gathers: tuple[tuple[str, ...], ...] = ()  # empty where no dimension is gathered

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.indices)
        assert len(self.gathers) in (0, len(self.indices))

    def gathered_by(self, dimension: int) -> tuple[str, ...]:
        """The axes that choose the position in a gathered dimension; none of others."""
        return self.gathers[dimension] if self.gathers else ()

    def tile_shape(self, tile: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the data tile that a tile over the axes touches, clipped to the tensor (paper Figure 4)."""
        return tuple(
            min(size, self._gathered(d, tile) if index is None else index.extent(tile))
            for d, (size, index) in enumerate(zip(self.shape, self.indices, strict=True))
        )

    def _gathered(self, dimension: int, tile: Mapping[str, int]) -> int:
        """Positions that a tile may touch in a dimension whose index is not affine."""
        axes = self.gathered_by(dimension)
        # An axis of extent 1 may have been dropped from the expression; it chooses one position all the same.
        return prod(tile.get(axis, 1) for axis in axes) if axes else self.shape[dimension]

    def uses(self, axis: str) -> bool:
        return any(index is not None and index.coefficient(axis) for index in self.indices)

    @property
    def origin(self) -> int:
        """Row-major position of the element at which all axes are 0; a flipped axis starts at its end."""
        position, step = 0, 1
        for size, index in zip(reversed(self.shape), reversed(self.indices), strict=True):
            assert index is not None
            position += index.constant * step
            step *= size
        return position

    def stride(self, axis: str) -> int | None:
        """Elements between neighbours along ``axis`` (0: not used, i.e. broadcast); None where not affine in it."""
        stride, step = 0, 1
        for d in reversed(range(len(self.shape))):
            index = self.indices[d]
            if index is not None:
                stride += index.coefficient(axis) * step
            elif not self.gathered_by(d) or axis in self.gathered_by(d):
                return None
            step *= self.shape[d]
        return stride


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedComputation:
    """A computation fused around the anchor: its block's name, element-wise cost and the extra tensors it reads."""

    name: str
    flops_per_element: float
    extra_inputs: tuple[str, ...]
    extra_bytes_per_element: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorExpr:
    """One operator. ``axes`` holds the spatial axes in output order, then the reduction axes.

    ``combiner`` is "sum", "max", "min", "prod", "other", or None for an operator without reduction.
    ``flops_per_point`` counts arithmetic per point of the iteration space (a multiply-add is 2).
    """

    name: str
    axes: tuple[Axis, ...]
    inputs: tuple[Access, ...]
    output: Access
    combiner: str | None
    flops_per_point: float
    prologue: tuple[FusedComputation, ...] = ()
    epilogue: tuple[FusedComputation, ...] = ()

    @property
    def spatial(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.kind == "spatial")

    @property
    def reduction(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.kind == "reduce")

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    @property
    def extents(self) -> dict[str, int]:
        return {axis.name: axis.extent for axis in self.axes}

    @property
    def point_count(self) -> int:
        return prod(axis.extent for axis in self.axes)

    @property
    def flops(self) -> float:
        return self.flops_per_point * self.point_count

    @property
    def accesses(self) -> tuple[Access, ...]:
        return (*self.inputs, self.output)

    @property
    def digest(self) -> str:
        """Content hash of the structure: equal for equal computations whatever the operator is called."""
        return _digest(self)


def _plain(value: Any) -> Any:
    """As `dataclasses.asdict`, which copies every number."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return {own.name: _plain(getattr(value, own.name)) for own in fields(value)} if is_dataclass(value) else value


@lru_cache(maxsize=512)
def _digest(expr: TensorExpr) -> str:
    record = _plain(expr)
    del record["name"]
    for access in (*record["inputs"], record["output"]):
        if not access["gathers"]:
            del access["gathers"]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
