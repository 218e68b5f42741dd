"""Sampling between pixels on CPUs: where each sample lies is computed once for all channels, for Resize by the build.

GridSample and RoiAlign weigh the four pixels around a place. Stock TVM's expression computes the place for each channel
again. Here one function writes tables of pixels and weights, which are 0 outside of the image, and another one adds
weighted pixels up: it has no branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from tvm_ext._tvm import BlockBuilder, Call, Expr, TeTensor, relax, te, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.relax_values import is_tensor, static_shape
from tvm_ext.ir.build_ir import split_index
from tvm_ext.ir.float_ir import f32, is_number
from tvm_ext.support.arrays import Array

from .rewriting import is_for_gpu, stock_way

Tap: TypeAlias = tuple[Expr, Expr]
"""A pixel's number along an axis (int32), and its weight (float32)."""

_WAYS = (("bilinear", "NCHW", "zeros"), ("bilinear", "NCHW", "border"))

_COORDINATES = ("half_pixel", "align_corners", "asymmetric")

MOST_SAMPLES = 4
"""Of RoiAlign along an axis of a bin: more of them, each with four pixels, would be a kernel of thousands of lines."""


def _taps(place: Expr, extent: int, inside: Expr) -> tuple[Tap, Tap]:
    """The two pixels around ``place``, a number of pixels; of weight 0 where not ``inside``, or outside of the image.

    A place that is NaN has a weight that is NaN, of the first pixel.
    """
    known = tirx.Select(is_number(place), tirx.min(tirx.max(place, f32(-2.0)), f32(extent + 1.0)), f32(0.0))
    first = tirx.Cast("int32", tirx.floor(known))
    rest = place - tirx.Cast("float32", first)

    def tap(number: Expr, weight: Expr) -> Tap:
        within = tirx.all(inside, number >= 0, number < extent)
        return tirx.min(tirx.max(number, 0), extent - 1), tirx.Select(within, weight, f32(0.0))

    return tap(first, f32(1.0) - rest), tap(first + 1, rest)


def _table(shape: Sequence[Expr], taps: Callable[..., tuple[Tap, Tap]]) -> list[TeTensor]:
    """Both pixels and both weights at each point of ``shape``: pixel, weight, pixel, weight."""

    def part(tap: int, field: int) -> TeTensor:
        return te.compute(shape, lambda *at: taps(*at)[tap][field])

    return [part(*number) for number in product(range(2), range(2))]


def _joined(join: Callable[..., Expr], *tables: TeTensor) -> TeTensor:
    return te.compute(tables[0].shape, lambda *at: join(*(table(*at) for table in tables)))


def _sum(terms: Sequence[Expr]) -> Expr:
    return reduce(lambda total, term: total + term, terms)


def grid_sample(builder: BlockBuilder, call: Call) -> Expr:
    """Bilinear samples of float32 images (N, C, H, W) at a grid (N, 2, h, w), outside zero or the nearest pixel.

    The points of the grid are one axis: rows of 14 would be halves of vectors, and elements one by one.
    """
    data, grid = call.args
    attrs, shape, grid_shape = call.attrs, static_shape(data), static_shape(grid)
    ways = (attrs.method, attrs.layout, attrs.padding_mode)
    if shape is None or grid_shape is None or len(shape) != 4 or not _is_known(call) or ways not in _WAYS:
        return stock_way(builder, call)
    images, channels, height, width = shape
    _, _, rows, columns = grid_shape

    def tables(grid: TeTensor) -> list[TeTensor]:
        def axis(field: int, extent: int) -> list[TeTensor]:
            def taps(n: Expr, place: Expr) -> tuple[Tap, Tap]:
                scaled = grid(n, field, *split_index(place, (rows, columns))) + f32(1.0)
                if attrs.align_corners:
                    place = scaled * f32((extent - 1) / 2)
                else:
                    place = (scaled * f32(extent) - f32(1.0)) * f32(0.5)
                if attrs.padding_mode == "border":
                    place = tirx.min(tirx.max(place, f32(0.0)), f32(extent - 1))
                return _taps(place, extent, tirx.const(True, "bool"))

            return _table((images, rows * columns), taps)

        y, x = axis(1, height), axis(0, width)
        pixels = [_joined(lambda a, b: a * width + b, *pair) for pair in product(y[::2], x[::2])]
        return [*pixels, *(_joined(lambda a, b: a * b, *pair) for pair in product(y[1::2], x[1::2]))]

    def samples(data: TeTensor, *places: TeTensor) -> TeTensor:
        pixels, weights = places[:4], places[4:]
        return te.compute(
            (images, channels, rows * columns),
            lambda n, c, p: _sum([b[n, p] * data[n, c, a[n, p]] for a, b in zip(pixels, weights, strict=True)]),
        )

    planes = builder.emit(relax.op.reshape(data, (images, channels, height * width)))
    made = builder.emit(builder.call_te(tables, grid, primfunc_name_hint="grid_places"))
    parts = [builder.emit(relax.TupleGetItem(made, number)) for number in range(8)]
    flat = builder.emit(builder.call_te(samples, planes, *parts, primfunc_name_hint="grid_sample"))
    return relax.op.reshape(flat, (images, channels, rows, columns))


def roi_align(builder: BlockBuilder, call: Call) -> Expr:
    """The mean of bilinear samples in each bin of boxes (R, 5) on float32 images (N, C, H, W)."""
    data, rois = call.args
    attrs, shape, count = call.attrs, static_shape(data), int(call.attrs.sample_ratio)
    is_ours = (attrs.mode, attrs.layout) == ("avg", "NCHW") and 0 < count <= MOST_SAMPLES
    if shape is None or not _is_known(call) or not is_ours:
        return stock_way(builder, call)
    _, channels, height, width = shape
    bins = [int(size) for size in attrs.pooled_size]

    def tables(rois: TeTensor) -> list[TeTensor]:
        def axis(field: int, extent: int, size: int) -> list[TeTensor]:
            def taps(number: Expr, sample: Expr) -> tuple[Tap, Tap]:
                start, end = (rois[number, field + k] * f32(attrs.spatial_scale) for k in (0, 2))
                length = end - start if attrs.aligned else tirx.max(end - start, f32(1.0))
                place = start + (tirx.Cast("float32", sample) + f32(0.5)) * (length / f32(size * count))
                inside = tirx.all(place >= f32(-1.0), place <= f32(extent))
                return _taps(tirx.min(tirx.max(place, f32(0.0)), f32(extent - 1)), extent, inside)

            return _table((rois.shape[0], size * count), taps)

        y, x = axis(2, height, bins[0]), axis(1, width, bins[1])
        offsets = [_joined(lambda row: row * width, table) for table in y[::2]]
        image = te.compute((rois.shape[0],), lambda number: tirx.Cast("int32", rois[number, 0]))
        return [image, *offsets, *x[::2], *y[1::2], *x[1::2]]

    def samples(data: TeTensor, image: TeTensor, *places: TeTensor) -> TeTensor:
        rows, columns, row_weights, column_weights = (places[k : k + 2] for k in range(0, 8, 2))

        def mean(r: Expr, c: Expr, ph: Expr, pw: Expr) -> Expr:
            def pixels(y: Expr, row: TeTensor) -> Expr:
                terms = [
                    weight[r, pw * count + s] * data[image[r], c, row[r, y] + column[r, pw * count + s]]
                    for s in range(count)
                    for column, weight in zip(columns, column_weights, strict=True)
                ]
                return _sum(terms)

            lines = [
                (ph * count + s, row, weight)
                for s in range(count)
                for row, weight in zip(rows, row_weights, strict=True)
            ]
            return _sum([weight[r, y] * pixels(y, row) for y, row, weight in lines]) * f32(1 / count**2)

        return te.compute((image.shape[0], channels, *bins), mean)

    planes = builder.emit(relax.op.reshape(data, (shape[0], channels, height * width)))
    made = builder.emit(builder.call_te(tables, rois, primfunc_name_hint="roi_places"))
    parts = [builder.emit(relax.TupleGetItem(made, number)) for number in range(9)]
    return builder.call_te(samples, planes, *parts, primfunc_name_hint="roi_align")


def resize(builder: BlockBuilder, call: Call) -> Expr:
    """Linear interpolation of float32 images (N, C, H, W): of two lines, then within the line that this makes.

    Stock TVM's expression finds four pixels and their weights for each element. Here they are constants of each axis.
    """
    data, attrs, shape, wanted = call.args[0], call.attrs, static_shape(call.args[0]), static_shape(call)
    ways = (str(attrs.method), str(attrs.layout), dtype_of(call))
    mode = str(attrs.coordinate_transformation_mode)
    known = _is_known(call) and shape is not None and wanted is not None
    if not known or ways != ("linear", "NCHW", "float32") or mode not in _COORDINATES:
        return stock_way(builder, call)
    assert shape is not None and wanted is not None
    tables = [table for axis in (2, 3) for table in _line_table(shape[axis], wanted[axis], mode)]

    def interpolated(data: TeTensor, *tables: TeTensor) -> TeTensor:
        (top, bottom, low), (left, right, near) = tables[:3], tables[3:]

        def line(n: Expr, c: Expr, y: Expr, x: Expr) -> Expr:
            return data[n, c, top[y], x] * (f32(1.0) - low[y]) + data[n, c, bottom[y], x] * low[y]

        lines = te.compute((*wanted[:3], shape[3]), line, name="line")

        def pixel(n: Expr, c: Expr, y: Expr, x: Expr) -> Expr:
            return lines[n, c, y, left[x]] * (f32(1.0) - near[x]) + lines[n, c, y, right[x]] * near[x]

        return te.compute(wanted, pixel, name="resized")

    return builder.call_te(interpolated, data, *map(relax.const, tables), primfunc_name_hint="resize")


def _line_table(extent: int, size: int, mode: str) -> list[Array]:
    """Of each of ``size`` places the two elements of ``extent`` around it (int32), and the second one's weight."""
    places = np.arange(size, dtype="float64")
    if mode == "align_corners":
        places *= (extent - 1) / max(size - 1, 1)
    elif mode == "asymmetric":
        places *= extent / size
    else:
        places = (places + 0.5) * (extent / size) - 0.5
    first = np.floor(places)
    both = [np.clip(first + step, 0, extent - 1).astype("int32") for step in (0, 1)]
    return [*both, (places - first).astype("float32")]


def _is_known(call: Call) -> bool:
    """Whether it samples float32 tensors of known shapes on a CPU."""
    if is_for_gpu():
        return False
    tensors = [item for item in call.args if is_tensor(item)]
    return all(dtype_of(item) == "float32" and static_shape(item) is not None for item in tensors)


SAMPLING: dict[str, Callable[[Any, Any], Any]] = {
    "relax.image.grid_sample": grid_sample,
    "relax.image.resize2d": resize,
    "relax.vision.roi_align": roi_align,
}
