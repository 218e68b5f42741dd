"""What a CPU's emitter takes from an rProgram, as a `CpuTile`, and the rProgram that a chosen tile means.

The one place that says which loops an rProgram has: the emitter writes them, the space of candidates counts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rprogram import RProgram, RTile
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div

from .access_table import Shape, loop_order, vector_use
from .dot_products import dot_product, lane_axes
from .perf_model import PerfModel


def legal_vector_axes(expr: TensorExpr, device: DeviceSpec) -> list[str | None]:
    """Axes whose neighbours may share a register, or None alone where no axis is contiguous anywhere.

    Spatial axes along which the output or an input is contiguous, or a constant can be repacked; where there are none
    (a sum over everything) the contiguous reduction axes. Of what a dot-product instruction serves, those of the
    weights alone. On a GPU: the axis along which the output is contiguous.
    """
    if device.kind != "cpu":
        last = [axis.name for axis in expr.spatial if expr.output.stride(axis.name) == 1]
        return [last[-1] if last else None]
    dot = dot_product(expr, device)
    if dot is not None:
        return list(lane_axes(expr, dot.weights))
    for axes in (expr.spatial, expr.reduction):
        names = [a.name for a in axes if any(vector_use(access, a.name) == "vector" for access in expr.accesses)]
        if names:
            return list(names)
    return [None]


def tile_of(program: RProgram, expr: TensorExpr) -> CpuTile:
    """The loops of ``program``, whose tiles name the axes of ``expr``.

    An rTile of a cache is rounded down to whole register tiles, and a task's to whole blocks of L1 unless it has the
    whole axis. Raises IllegalRewrite where no spatial axis is vectorised.
    """
    names = [axis.name for axis in expr.spatial]
    if program.vector_axis not in names:
        raise IllegalRewrite(f"{expr.name}: its rProgram has no spatial vector axis")
    tiles = dict(program.tiles)
    register = [min(tiles["L0"].sizes.get(axis.name, 1), axis.extent) for axis in expr.spatial]
    inner, outer = [], []
    for axis, size in zip(expr.spatial, register, strict=True):
        count = ceil_div(axis.extent, size)
        task, block = (tiles[layer].sizes.get(axis.name, 1) // size if layer in tiles else 1 for layer in ("L2", "L1"))
        block = min(max(1, block), count)
        task = min(max(block, task), count)
        inner.append(block)
        outer.append(task if task == count else task // block * block)
    sizes = tuple(register)
    order = tuple(names.index(name) for name in program.order) or usual_order(expr, sizes)
    return CpuTile(
        vector=names.index(program.vector_axis), register=sizes, inner=tuple(inner), outer=tuple(outer), order=order
    )


def usual_order(expr: TensorExpr, register: Sequence[int]) -> tuple[int, ...]:
    """`loop_order` by positions among the spatial axes."""
    names = [axis.name for axis in expr.spatial]
    return tuple(names.index(name) for name in loop_order(expr, dict(zip(names, register, strict=True))))


def shapes_of(tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> tuple[Shape, ...]:
    """The rTiles of ``tile``, highest layer first: register tile, L1 block, task; caches beyond hold tasks."""
    counts = {axis.name: i for i, axis in enumerate(expr.spatial)}

    def shape(multiples: tuple[int, ...] | None) -> Shape:
        sizes = []
        for axis in expr.axes:
            if axis.kind == "reduce":
                sizes.append(axis.extent if multiples else 1)
            else:
                place = counts[axis.name]
                sizes.append(tile.register[place] * (multiples[place] if multiples else 1))
        return tuple(sizes)

    below = [tile.inner, *(tile.outer for _ in device.layers[2:-1])]
    return (shape(None), *(shape(multiples) for multiples in below[: len(device.layers) - 2]))


def program_of(tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> RProgram:
    """The rProgram with the loops of ``tile`` and what the model predicts of it.

    Raises IllegalRewrite where it does not fit ``expr`` or the device's registers.
    """
    check_tile(tile, expr, device)
    spatial = [axis.name for axis in expr.spatial]
    model = PerfModel(expr, device, spatial[tile.vector])
    shapes = shapes_of(tile, expr, device)
    if model.footprint_bytes(0, shapes[0]) > model.capacity_bytes(0):
        raise IllegalRewrite(f"{expr.name}: {tile} takes more than {device.register_limit} registers")
    partitions = model.partition_count(shapes)
    order = () if tile.order == usual_order(expr, tile.register) else tuple(spatial[place] for place in tile.order)
    return RProgram(
        device=device.name,
        expr_digest=expr.digest,
        tiles=tuple(
            (layer.name, RTile(axes=model.names, shape=shape))
            for layer, shape in zip(device.layers, shapes, strict=False)
        ),
        vector_axis=spatial[tile.vector],
        unit_count=min(device.unit_count, partitions),
        partition_count=partitions,
        epsilon=0.0,
        shrunk=False,
        prediction=model.predict(shapes, order=[model.spatial[place] for place in tile.order]),
        order=order,
    )


def check_tile(tile: CpuTile, expr: TensorExpr, device: DeviceSpec) -> None:
    """Raise IllegalRewrite where ``tile`` is of another expression: one of its sizes passes its axis, or vectors."""
    spatial = expr.spatial
    if len(tile.register) != len(spatial):
        raise IllegalRewrite(f"{expr.name} has {len(spatial)} spatial axes, {tile} is one of {len(tile.register)}")
    if spatial[tile.vector].name not in legal_vector_axes(expr, device):
        raise IllegalRewrite(f"{expr.name} has no vectors along axis {spatial[tile.vector].name}, which {tile} wants")
    for axis, size, inner, outer in zip(spatial, tile.register, tile.inner, tile.outer, strict=True):
        count = ceil_div(axis.extent, size)
        whole = outer <= count and inner <= outer and (outer == count or outer % inner == 0)
        if size > axis.extent or not whole:
            raise IllegalRewrite(f"{expr.name}: {tile} does not divide axis {axis.name} of {axis.extent}")
