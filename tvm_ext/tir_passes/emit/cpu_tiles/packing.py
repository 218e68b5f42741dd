"""Packing: inputs of a kernel laid out in the order of use (paper §3.1, storage).

A *panel* holds one tile of the vector axis for every point of the reduction: ``B[k, j]`` becomes
``B'[panel, k, lane]``, so that the inner loop reads one contiguous stream. Constants are packed at compile time,
padded with zeros to whole registers; another strided input is packed when the kernel starts, if its reuse pays for it.

A strided window's input is split by *phase*. A convolution of stride s along its vector axis x reads
``in[..., s*x + r]`` lane by lane. Its copy ``phases[..., r % s, x + r // s]`` holds each row's columns sorted by their
remainder: for s = 2 the even columns, then the odd ones. Every tap r then reads consecutive elements, and each element
is copied once however many taps read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, Var, tirx
from tvm_ext.analysis.computations import Computation, dtype_of, static_shape, substitute
from tvm_ext.analysis.tensor_expr import Access, LinearIndex
from tvm_ext.cost.access_table import MIN_REUSE_TO_PACK, copied_to_panels, phase_split
from tvm_ext.cost.dot_products import DotProduct
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import (
    INDEX_DTYPE,
    SERIAL,
    allocate,
    bind,
    bind_at,
    cast_to,
    flat,
    index,
    loop,
    new_buffer,
    parallel_cut,
    sequence,
    split_index,
    store,
    tile_size,
)
from tvm_ext.records.choice import ConstantPack
from tvm_ext.support.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedInput:
    """One load of the anchor, read from a packed copy with dims (row axes..., panel, reduction axes..., lane).

    ``axes`` is the anchor's axis behind each dim; the vector axis stands for both panel and lane, the dims number
    ``panel_dim`` and ``lane_dim``. Behind the lane only groups of a dot-product instruction may follow. ``strides``
    and ``offset`` address the original, row-major, in elements.
    """

    original: Buffer
    buffer: Buffer
    axes: tuple[int, ...]
    panel_dim: int
    lane_dim: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_constant: bool

    def constant_pack(self, params: Sequence[Buffer]) -> ConstantPack:
        position = next(i for i, param in enumerate(params) if param.same_as(self.original.source))
        return ConstantPack(param_index=position, extents=self.extents, strides=self.strides, offset=self.offset)

    def indices(self, variables: Sequence[Var], panel: Expr, lane: Expr) -> list[Expr]:
        """Where in the packed buffer the element of the given axis values is."""
        at = [variables[p] for p in self.axes]
        at[self.panel_dim], at[self.lane_dim] = panel, lane
        return at

    def copy(self, computation: Computation, kind: ForKind) -> Stmt:
        """Statements that allocate the panels and copy a strided input into them, in an outer loop of ``kind``.

        Lanes beyond the axis' end stay unwritten, for no tile reads them.
        """
        vector, width = self.axes[-1], self.extents[-1]

        def panel(at: tuple[Expr, ...]) -> Stmt:
            start = at[self.panel_dim] * index(width)
            table = [(computation.variables[p], x) for p, x in zip(self.axes[:-1], at, strict=True) if p != vector]

            def copied(lane: Expr) -> Stmt:
                value = substitute(self.original, [*table, (computation.variables[vector], start + lane)])
                return store(self.buffer, value, [*at, lane])

            return loop(tile_size(computation.extents[vector], width, start), SERIAL, "lane", copied)

        return sequence(allocate(self.buffer), parallel_cut(self.extents[:-1], kind, "pack", panel))


def pack_input(
    load: TensorLoad,
    access: Access,
    computation: Computation,
    names: Sequence[str],
    vector: int,
    width: int,
    lanes: int,
    device: DeviceSpec,
    groups: Sequence[int] = (),
) -> PackedInput | PhasePack | None:
    """How ``load`` is packed for panels of ``width`` along axis ``vector``; None where it is read as it lies.

    Of a dot-product instruction's ``groups``, axes of the reduction, the elements lie beside each other in each lane.
    """
    stride = access.stride(names[vector])
    if stride is None or stride == 0:
        return None
    if not access.is_constant and stride > 1:
        phases = phase_pack(load, access, computation, names, vector)
        if phases is not None:
            enough = computation.point_count >= MIN_REUSE_TO_PACK * prod(static_shape(phases.buffer))
            return phases if enough else None
    used = [p for p, name in enumerate(names) if access.stride(name)]
    panels = ceil_div(computation.extents[vector], width)
    copied = prod(computation.extents[p] for p in used)
    if not access.is_constant:
        extents_by_name = {name: computation.extents[p] for p, name in enumerate(names)}
        reduction = [name for name, kind in zip(names, computation.kinds, strict=True) if kind == "reduce"]
        points = computation.point_count
        if stride == 1 and not copied_to_panels(access, extents_by_name, reduction, points, device):
            return None
        if stride != 1 and points < MIN_REUSE_TO_PACK * copied:
            return None
    rows = [p for p in used if computation.kinds[p] == "spatial" and p != vector]
    steps = [p for p in used if computation.kinds[p] == "reduce" and p not in groups]
    axes = (*rows, vector, *steps, vector, *(p for p in used if p in groups))
    strides = [access.stride(names[p]) or 0 for p in axes]
    extents = [computation.extents[p] for p in axes]
    panel_dim, lane_dim = len(rows), len(rows) + len(steps) + 1
    strides[panel_dim] *= width
    extents[panel_dim] = panels
    extents[lane_dim] = ceil_div(width, lanes) * lanes if access.is_constant else width
    return PackedInput(
        original=load,
        buffer=new_buffer(extents, dtype_of(load.source), f"{load.source.name}_packed"),
        axes=axes,
        panel_dim=panel_dim,
        lane_dim=lane_dim,
        extents=tuple(extents),
        strides=tuple(strides),
        offset=access.origin,
        is_constant=access.is_constant,
    )


# --- phases -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PhasePack:
    """One load of the anchor, read from a copy with dims (those of the input that are indexed ..., phase, column).

    ``dims`` holds the affine index of each, over axis names; the last one's axes besides the vector axis are the taps.
    """

    original: Buffer
    buffer: Buffer
    names: tuple[str, ...]  # of the anchor's axes
    vector_axis: str
    dims: tuple[LinearIndex, ...]
    columns: int  # of the input's last dimension
    is_constant: bool = False

    @property
    def stride(self) -> int:
        return self.dims[-1].coefficient(self.vector_axis)

    def indices(self, variables: Sequence[Var], _panel: Expr, _lane: Expr) -> list[Expr]:
        """Where in the copy the element of the given axis values is."""
        named = dict(zip(self.names, variables, strict=True))
        # a dimension with one axis holds only the elements that the axis visits
        at = [
            _value(LinearIndex(terms=((dim.terms[0][0], 1),)) if len(dim.terms) == 1 else dim, named)
            for dim in self.dims[:-1]
        ]
        taps = LinearIndex(
            terms=tuple(t for t in self.dims[-1].terms if t[0] != self.vector_axis), constant=self.dims[-1].constant
        )
        tap = _value(taps, named)
        phase, shift = tirx.floormod(tap, index(self.stride)), tirx.floordiv(tap, index(self.stride))
        return [*at, phase, cast_to(named[self.vector_axis], INDEX_DTYPE) + shift]

    def copy(self, computation: Computation, kind: ForKind) -> Stmt:
        """Statements that allocate and fill the copy, its rows in an outer loop of ``kind``."""
        *outer, phases, width = static_shape(self.buffer)
        named = dict(zip(self.names, computation.variables, strict=True))
        last = self.dims[-1]
        tap = next((name for name, _ in last.terms if name != self.vector_axis), None)

        def row(at: tuple[Expr, ...]) -> Stmt:
            table = {name: index(0) for dim in self.dims for name, _ in dim.terms}
            for dim, coordinate in zip(self.dims[:-1], at, strict=True):
                # the axis whose steps of 1 walk through the dimension, or the only one
                name = next((name for name, coefficient in dim.terms if coefficient == 1), dim.terms[0][0])
                table[name] = coordinate if len(dim.terms) == 1 else coordinate - index(dim.constant)

            def column(phase: int, x: Expr) -> Stmt:
                moved = (
                    (self.vector_axis, x)
                    if tap is None
                    else (tap, x * index(self.stride) + index(phase - last.constant))
                )
                here = {**table, moved[0]: moved[1]}
                values = bind([named[name] for name in here], here.values())
                return store(self.buffer, substitute(self.original, values), [*at, index(phase), x])

            def columns(phase: int) -> Stmt:
                held = min(width, ceil_div(self.columns - phase, self.stride))
                return loop(held, SERIAL, "column", lambda x: column(phase, x))

            return sequence(*map(columns, range(phases)))

        return sequence(allocate(self.buffer), parallel_cut(outer, kind, "row", row))


def phase_pack(
    load: TensorLoad, access: Access, computation: Computation, names: Sequence[str], vector: int
) -> PhasePack | None:
    """How ``load`` is de-interleaved along axis ``vector``; None where it is not a strided window over its last dim."""
    extents = phase_split(access, names[vector], {name: computation.extents[p] for p, name in enumerate(names)})
    if extents is None:
        return None
    return PhasePack(
        original=load,
        buffer=new_buffer(extents, dtype_of(load.source), f"{load.source.name}_phases"),
        names=tuple(names),
        vector_axis=names[vector],
        dims=tuple(item for item in access.indices if item is not None and item.terms),
        columns=access.shape[-1],
    )


def _value(dim: LinearIndex, named: dict[str, Expr]) -> Expr:
    value: Expr = index(dim.constant)
    for name, coefficient in dim.terms:
        value = value + cast_to(named[name], INDEX_DTYPE) * index(coefficient)
    return value


# --- rows of tiles ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowPack:
    """One load of the anchor, read from a copy with dims (axes that it uses ..., those of a step as one).

    The reduction's last axes, ``step``, are the row of a matrix unit's tile, ``piece`` elements of which are neighbours
    in memory. Worked example, a 1x1 convolution of channels in blocks of 16 bytes: four blocks of a pixel, from four
    places, are a row of 64 bytes.
    """

    original: TensorLoad
    buffer: Buffer
    axes: tuple[int, ...]
    step: tuple[int, ...]
    step_extents: tuple[int, ...]
    piece: int
    is_constant: bool = False

    def indices(self, variables: Sequence[Var], _panel: Expr, _lane: Expr) -> list[Expr]:
        """Where in the copy the element of the given axis values is."""
        inner = [cast_to(variables[p], INDEX_DTYPE) for p in self.step]
        return [*(variables[p] for p in self.axes), flat(inner, self.step_extents)]

    def copy(self, computation: Computation, kind: ForKind) -> Stmt:
        """Statements that allocate and fill the copy, piece by piece, in an outer loop of ``kind``."""
        *outer, length = static_shape(self.buffer)

        def row(at: tuple[Expr, ...]) -> Stmt:
            table = dict(zip(self.axes, at, strict=True))
            return loop(length // self.piece, SERIAL, "piece", lambda number: self._piece(computation, table, number))

        return sequence(allocate(self.buffer), parallel_cut(outer, kind, "row", row))

    def _piece(self, computation: Computation, table: dict[int, Expr], number: Expr) -> Stmt:
        first = number * index(self.piece)
        steps = dict(zip(self.step, split_index(first, self.step_extents), strict=True))
        read = substitute(self.original, bind_at(computation, table | steps))
        *at, last = read.indices
        value = tirx.BufferLoad(read.source, [*at, tirx.Ramp(last, tirx.const(1, last.ty.dtype), self.piece)])
        return store(self.buffer, value, [*table.values(), tirx.Ramp(first, index(1), self.piece)])


def pack_rows(
    load: TensorLoad, access: Access, computation: Computation, names: Sequence[str], dot: DotProduct
) -> RowPack:
    """The copy of ``load``, the data of ``dot``, whose neighbours in memory are no whole rows of a tile."""
    axes = [p for p, name in enumerate(names) if access.stride(name) and p not in dot.axes]
    extents = [computation.extents[p] for p in (*axes, *dot.axes)]
    return RowPack(
        original=load,
        buffer=new_buffer(
            [*extents[: len(axes)], prod(extents[len(axes) :])], dtype_of(load.source), f"{load.source.name}_rows"
        ),
        axes=tuple(axes),
        step=dot.axes,
        step_extents=tuple(extents[len(axes) :]),
        piece=prod(extents) // dot.pieces,
    )
