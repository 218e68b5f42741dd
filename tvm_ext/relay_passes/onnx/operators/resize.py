"""Resize and Upsample, written as gathers and weighted sums along one axis after the other.

The stock importer passes the operator to a kernel that computes coordinates from the rounded output size, in float32,
without antialiasing, aspect-ratio policies or axes. Only the forms in which that is the same are left to it: nearest
elements by whole factors, and linear samples, for which CPUs have a kernel of our own (`legalize_sampling.resize`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper

from tvm_ext.support.arrays import Array

from .context import DOUBLE, FLOAT, FLOATING, INTEGERS, Pen, rule
from .resize_table import AxisTable, ResizedAxis, Sampling, axis_table

# With more taps (antialiasing) one matrix product is quicker than as many gathers.
_GATHERED_TAPS = 4
_MODES = frozenset(("nearest", "linear", "cubic"))
_NEAREST_MODES = frozenset(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"))
_COORDINATE_NAMES = "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric tf_crop_and_resize"
# Stock's kernel recognises division by an integer up to this bound (topi's can_convert_multiply_to_intdiv).
_DIVISION_EPSILON = 1e-5


@rule("Resize")
def _resize(pen: Pen) -> None:
    sampling = _sampling(pen)
    axes = [axis for axis in _axes(pen) if not axis.is_kept]
    if not _is_right_in_stock(pen, sampling, axes):
        _sampled(pen, sampling, axes)
    elif any(_is_empty(pen, place) for place in range(1, len(pen.input))):
        pen.again(["" if _is_empty(pen, place) else name for place, name in enumerate(pen.input)], [pen.out])


def _is_empty(pen: Pen, place: int) -> bool:
    """Whether an operand is left out by a constant of no elements, which the stock importer takes for a value."""
    value = pen.known_value(place) if place and pen.operand(place) else None
    return value is not None and value.size == 0


@rule("Upsample")
def _upsample(pen: Pen) -> None:
    """Upsample, of operator sets 7 to 9, is a Resize without choices."""
    sampling = _old_sampling(pen)
    given = pen.attribute("scales", None)
    scales = np.asarray(given, np.float32) if given is not None else pen.known_value(1)
    if scales is None:
        raise pen.refusal("has no scales", "export the model again")
    axes = _axes_by_scales(pen, range(len(scales)), scales, {})
    _sampled(pen, sampling, [axis for axis in axes if not axis.is_kept])


def _sampling(pen: Pen) -> Sampling:
    if pen.opset < 11:
        return _old_sampling(pen)
    sampling = Sampling(
        mode=pen.text("mode", "nearest"),
        coordinates=pen.text("coordinate_transformation_mode", "half_pixel"),
        nearest_mode=pen.text("nearest_mode", "round_prefer_floor"),
        cubic_coeff_a=float(pen.attribute("cubic_coeff_a", -0.75)),
        antialias=pen.flag("antialias"),
        exclude_outside=pen.flag("exclude_outside"),
    )
    for value, allowed in (
        (sampling.mode, _MODES),
        (sampling.coordinates, frozenset(_COORDINATE_NAMES.split())),
        (sampling.nearest_mode, _NEAREST_MODES),
    ):
        if value not in allowed:
            raise pen.refusal(f"'{value}' is none of {', '.join(sorted(allowed))}", "export it with one of these")
    if sampling.mode == "nearest" and (sampling.antialias or sampling.exclude_outside):
        raise pen.refusal("antialias and exclude_outside have no meaning in mode nearest", "leave them out")
    return sampling


def _old_sampling(pen: Pen) -> Sampling:
    """Before operator set 11: from the left edge; the element to the left, or to the right where an axis shrinks."""
    mode = pen.text("mode", "nearest")
    if mode not in ("nearest", "linear", "bilinear"):
        raise pen.refusal(f"has the mode '{mode}'", "use nearest or linear, or a newer operator set")
    return Sampling(mode="nearest" if mode == "nearest" else "linear", coordinates="asymmetric", nearest_mode="")


def _axes(pen: Pen) -> list[ResizedAxis]:
    if pen.opset < 11:
        scales = pen.known_value(1)
        return _axes_by_scales(pen, range(len(scales)) if scales is not None else (), scales, {})
    scales, sizes = _nonempty(pen.known_value(2)), _nonempty(pen.known_value(3))
    given = scales if scales is not None else sizes
    if given is None or (scales is not None and sizes is not None):
        raise pen.refusal("needs scales or sizes, one of the two", "export the model again")
    indices = _axis_indices(pen, len(given))
    rois = _rois(pen, indices)
    if scales is not None:
        return _axes_by_scales(pen, indices, scales, rois)
    return _axes_by_sizes(pen, indices, [int(size) for size in given], rois)


def _nonempty(value: Array | None) -> Array | None:
    return None if value is None or value.size == 0 else value


def _axis_indices(pen: Pen, count: int) -> list[int]:
    rank = pen.rank(pen.x)
    if rank is None:
        raise pen.refusal(f"needs the rank of '{pen.x}'", "give its shape with shape={...}")
    axes = [int(axis) % rank for axis in pen.attribute("axes", range(rank))]
    if len(axes) != count or len(set(axes)) != count:
        raise pen.refusal(f"has {count} scales or sizes for the axes {axes}", "give one for each axis")
    return axes


def _rois(pen: Pen, axes: list[int]) -> dict[int, tuple[float, float]]:
    """Start and end by axis; only "tf_crop_and_resize" reads them."""
    if pen.text("coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize":
        return {}
    roi = _nonempty(pen.known_value(1))
    if roi is None or roi.size != 2 * len(axes):
        raise pen.refusal(f"needs a roi of {2 * len(axes)} numbers for tf_crop_and_resize", "give one")
    return {axis: (float(roi[i]), float(roi[i + len(axes)])) for i, axis in enumerate(axes)}


def _axes_by_scales(
    pen: Pen, indices: range | list[int] | tuple[()], scales: Array | None, rois: Mapping[int, tuple[float, float]]
) -> list[ResizedAxis]:
    axes = []
    for index, scale in zip(indices, () if scales is None else scales, strict=True):
        if not (math.isfinite(scale) and scale > 0):
            raise pen.refusal(f"has the scale {scale} for axis {index}", "scales must be positive")
        roi = rois.get(index, (0.0, 1.0))
        if scale == 1.0 and roi == (0.0, 1.0):
            continue
        extent = _extent(pen, index)
        # In float32, as ONNX's shape inference: 10 * 0.7 is 7, though 0.7 is 0.69999999 as a float32.
        resized = int(np.floor(np.float32(extent) * np.float32(scale)))
        axes.append(ResizedAxis(index=index, extent=extent, resized=resized, scale=float(scale), roi=roi))
    return axes


def _axes_by_sizes(
    pen: Pen, indices: list[int], sizes: list[int], rois: Mapping[int, tuple[float, float]]
) -> list[ResizedAxis]:
    extents = [_extent(pen, index) for index in indices]
    if any(size < 0 for size in sizes):
        raise pen.refusal(f"has the sizes {sizes}", "sizes must not be negative")
    scales = [size / extent for size, extent in zip(sizes, extents, strict=True)]
    policy = pen.text("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        if policy not in ("not_larger", "not_smaller"):
            raise pen.refusal(f"has the keep_aspect_ratio_policy '{policy}'", "use one that ONNX has")
        common = min(scales) if policy == "not_larger" else max(scales)
        scales = [common] * len(scales)
        sizes = [int(common * extent + 0.5) for extent in extents]
    return [
        ResizedAxis(index=index, extent=extent, resized=size, scale=scale, roi=rois.get(index, (0.0, 1.0)))
        for index, extent, size, scale in zip(indices, extents, sizes, scales, strict=True)
    ]


def _extent(pen: Pen, index: int) -> int:
    extent = pen.extent(pen.x, index)
    if extent is None:
        raise pen.refusal(f"needs the extent of axis {index} of '{pen.x}'", "bind it with shape={...}")
    if extent == 0:
        raise pen.refusal(f"resizes axis {index}, which has no elements", "resize a tensor that has some")
    return extent


def _is_right_in_stock(pen: Pen, sampling: Sampling, axes: list[ResizedAxis]) -> bool:
    """Whether stock's kernel samples as our tables would: float32 images whose sizes are exactly scaled."""
    options = ("antialias", "exclude_outside", "axes", "keep_aspect_ratio_policy")
    if pen.opset < 11 or any(item.name in options for item in pen.node.attribute):
        return False
    x = pen.x
    if pen.rank(x) != 4 or pen.element_type(x) != FLOAT or {axis.index for axis in axes} != {2, 3}:
        return False
    if any(abs(axis.scale * axis.extent - axis.resized) > 1e-6 * axis.resized for axis in axes):
        return False
    if sampling.mode == "linear":
        return sampling.coordinates in ("half_pixel", "align_corners", "asymmetric") and all(
            axis.resized > 1 for axis in axes
        )
    return sampling.mode == "nearest" and all(_divides(axis, sampling) for axis in axes) and _is_left(sampling)


def _is_left(sampling: Sampling) -> bool:
    return sampling.coordinates == "asymmetric" and sampling.nearest_mode == "floor"


def _divides(axis: ResizedAxis, sampling: Sampling) -> bool:
    """Whether stock's kernel finds element i at i // factor: by integers, or by floats that are powers of two."""
    factor = axis.resized // axis.extent
    if axis.resized % axis.extent:
        return False
    return factor & (factor - 1) == 0 or axis.resized < 1 / (_DIVISION_EPSILON * (axis.extent + 1))


def _sampled(pen: Pen, sampling: Sampling, axes: list[ResizedAxis]) -> None:
    code = pen.known_type(pen.x)
    working = code if sampling.mode == "nearest" else _working_type(pen, code)
    y = pen.x if working == code else pen.cast(pen.x, working)
    for axis in axes:
        y = _sampled_axis(pen, y, axis, sampling, working)
    if working == code:
        pen.add("Identity", y, out=pen.out)
        return
    if code not in FLOATING:
        y = _clipped(pen, pen.add("Round", y), code, working)
    pen.cast(y, code, out=pen.out)


def _working_type(pen: Pen, code: int) -> int:
    """The type that weighted sums are computed in: float32, or double for what float32 cannot hold."""
    if code not in (*FLOATING, *INTEGERS):
        raise pen.refusal(f"interpolates {TensorProto.DataType.Name(code)}", "resize numbers, or use mode nearest")
    is_exact = code in FLOATING or helper.tensor_dtype_to_np_dtype(code).itemsize <= 2
    return DOUBLE if code == DOUBLE or not is_exact else FLOAT


def _clipped(pen: Pen, name: str, code: int, working: int) -> str:
    limits = np.iinfo(helper.tensor_dtype_to_np_dtype(code))
    dtype = helper.tensor_dtype_to_np_dtype(working)
    upper = pen.add("Min", name, pen.constant(limits.max, dtype))
    return pen.add("Max", upper, pen.constant(limits.min, dtype))


def _sampled_axis(pen: Pen, x: str, axis: ResizedAxis, sampling: Sampling, code: int) -> str:
    if not sampling.nearest_mode:
        sampling = replace(sampling, nearest_mode="ceil" if axis.scale < 1 else "floor")
    table = axis_table(axis, sampling)
    rank = pen.rank(pen.x)
    assert rank is not None  # the axes were found by it
    dtype = helper.tensor_dtype_to_np_dtype(code)
    trailing = (1,) * (rank - axis.index - 1)
    if table.indices.shape[1] > _GATHERED_TAPS:
        y = _product(pen, x, pen.constant(table.dense(axis.extent), dtype), axis.index, rank)
    else:
        y = _gathered(pen, x, axis.index, table, dtype, trailing)
    if table.outside is None:
        return y
    value = pen.constant(pen.attribute("extrapolation_value", 0.0), dtype)
    return pen.add("Where", pen.constant(table.outside.reshape(-1, *trailing)), value, y)


def _gathered(pen: Pen, x: str, axis: int, table: AxisTable, dtype: np.dtype, trailing: tuple[int, ...]) -> str:
    terms = []
    for indices, weights in zip(table.indices.T, table.weights.T, strict=True):
        term = pen.add("Gather", x, pen.constant(indices, np.int64), axis=axis)
        if (weights != 1.0).any():
            term = pen.add("Mul", term, pen.constant(weights.reshape(-1, *trailing), dtype))
        terms.append(term)
    return pen.chain("Add", terms)


def _product(pen: Pen, x: str, matrix: str, axis: int, rank: int) -> str:
    """The product of the matrix (resized, extent) with `x` along one axis."""
    if axis == rank - 2:
        return pen.add("MatMul", matrix, x)
    transposed = pen.add("Transpose", matrix, perm=[1, 0])
    if axis == rank - 1:
        return pen.add("MatMul", x, transposed)
    order = [*range(axis), *range(axis + 1, rank), axis]
    back = [order.index(index) for index in range(rank)]
    moved = pen.add("Transpose", x, perm=order)
    return pen.add("Transpose", pen.add("MatMul", moved, transposed), perm=back)
