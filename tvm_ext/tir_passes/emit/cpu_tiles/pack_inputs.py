"""Packing: inputs of a kernel laid out in panels of its vector axis, in the order of use (paper §3.1, storage).

A panel holds one tile of the vector axis for every point of the reduction: ``B[k, j]`` becomes
``B'[panel, k, lane]``, so that the inner loop reads one contiguous stream. Constants are packed at compile time,
padded with zeros to whole registers; another strided input is packed when the kernel starts, if its reuse pays for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, ForKind, Stmt, TensorLoad, Var
from tvm_ext.analysis.computations import Computation, dtype_of, static_shape, substitute
from tvm_ext.analysis.tensor_expr import Access
from tvm_ext.cost.access_table import MIN_REUSE_TO_PACK, copied_to_panels
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import SERIAL, allocate, index, loop, new_buffer, sequence, split_index, store, tile_size
from tvm_ext.records.choice import ConstantPack
from tvm_ext.support.arithmetic import ceil_div

from .phase_pack import PhasePack, phase_pack


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedInput:
    """One load of the anchor, read from a packed copy with dims (row axes..., panel, reduction axes..., lane).

    ``axes`` is the anchor's axis behind each dim; the vector axis stands for both panel and lane. ``strides`` and
    ``offset`` address the original, row-major, in elements.
    """

    original: Buffer
    buffer: Buffer
    axes: tuple[int, ...]
    panel_dim: int
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
        at[self.panel_dim], at[-1] = panel, lane
        return at


def pack_input(
    load: TensorLoad,
    access: Access,
    computation: Computation,
    names: Sequence[str],
    vector: int,
    width: int,
    lanes: int,
    device: DeviceSpec,
) -> PackedInput | PhasePack | None:
    """How ``load`` is packed for panels of ``width`` along axis ``vector``; None where it is read as it lies."""
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
    axes = (*rows, vector, *(p for p in used if computation.kinds[p] == "reduce"), vector)
    strides = [access.stride(names[p]) or 0 for p in axes]
    extents = [computation.extents[p] for p in axes]
    panel_dim = len(rows)
    strides[panel_dim] *= width
    extents[panel_dim] = panels
    extents[-1] = ceil_div(width, lanes) * lanes if access.is_constant else width
    return PackedInput(
        original=load,
        buffer=new_buffer(extents, dtype_of(load.source), f"{load.source.name}_packed"),
        axes=axes,
        panel_dim=panel_dim,
        extents=tuple(extents),
        strides=tuple(strides),
        offset=access.origin,
        is_constant=access.is_constant,
    )


def pack_on_entry(
    packed: PackedInput | PhasePack, computation: Computation, vector: int, width: int, kind: ForKind
) -> Stmt:
    """Copy a strided input into panels; lanes beyond the axis' end stay unwritten, for no tile reads them."""
    if isinstance(packed, PhasePack):
        return packed.copy(computation, kind)
    outer = packed.extents[:-1]
    variable = computation.variables[vector]
    extent = computation.extents[vector]

    def body(task: Expr) -> Stmt:
        coordinates = split_index(task, outer)
        start = coordinates[packed.panel_dim] * index(width)

        def copy(lane: Expr) -> Stmt:
            table = [
                (computation.variables[p], value)
                for p, value in zip(packed.axes[:-1], coordinates, strict=True)
                if p != vector
            ]
            value = substitute(packed.original, [*table, (variable, start + lane)])
            return store(packed.buffer, value, [*coordinates, lane])

        return loop(tile_size(extent, width, start), SERIAL, "lane", copy)

    total = prod(outer)
    return sequence(allocate(packed.buffer), loop(total, kind, "pack", body))
