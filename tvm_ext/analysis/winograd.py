"""Recognises the convolutions that Winograd's form serves on CPUs (Lavin & Gray, CVPR 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Expr, TensorLoad, Var, tirx
from tvm_ext.analysis.computation_exprs import access_of, axis_names, linear_form
from tvm_ext.analysis.computations import Computation, dtype_of, mentions, substitute
from tvm_ext.analysis.predicates import factors_of, is_in
from tvm_ext.support.toom_cook import TAPS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Convolution:
    """A 3x3 convolution of step 1 over blocks of channels, without padding of its own, as Winograd's kernels read it:

        out[image, filter, y, x, lane] += data[image, channel, y + ky, x + kx, c] * weights[filter, lane, channel, c]

    ``data`` is read at dimensions ``row`` and ``column`` by the axes ``y`` and ``x`` and their taps. ``images`` are the
    axes of the data alone. Of ``filters``, the axes of the weights alone, and of ``channels``, those summed over, the
    last ones lie side by side in the output and in the data. ``groups``, where filters read channels of their own group
    alone, is an axis of both: data are read at ``group * channels + channel``, weights at ``group * filters + filter``.
    """

    anchor: Computation
    data: TensorLoad
    weights: TensorLoad
    row: int
    column: int
    y: Var
    x: Var
    images: tuple[Var, ...]
    filters: tuple[Var, Var]
    channels: tuple[Var, Var]
    taps: tuple[Var, Var]
    groups: tuple[Var, ...] = ()

    def extents(self, *axes: Var) -> list[int]:
        return [self.anchor.extent(axis) for axis in axes]

    def count(self, axes: Sequence[Var]) -> int:
        """Points of ``axes``."""
        return prod(self.extents(*axes))

    def source(self, at: Sequence[tuple[Var, Expr]], row: Expr, column: Expr) -> Expr:
        """The data's element at ``row`` and ``column`` of its dimensions; ``at`` has the other axes."""
        indices = [substitute(index, at) for index in self.data.indices]
        indices[self.row], indices[self.column] = row, column
        return tirx.BufferLoad(self.data.source, indices)

    def strides(self, *axes: Var) -> list[int]:
        """Elements from one point of each axis to the next in the weights."""
        access = access_of(self.weights.source, self.weights.indices, self.anchor)
        named = list(zip(self.anchor.variables, axis_names(self.anchor), strict=True))
        return [access.stride(next(name for v, name in named if v.same_as(axis))) or 0 for axis in axes]


def find_convolution(anchor: Computation) -> Convolution | None:
    """The convolution that ``anchor`` is; None where it is none, or one of another form."""
    factors = factors_of(anchor) if anchor.combiner == "sum" and dtype_of(anchor.target) == "float32" else None
    for data, weights in (factors, factors[::-1]) if factors else ():
        found = _convolution(anchor, data, weights)
        if found is not None:
            return found
    return None


def _convolution(anchor: Computation, data: TensorLoad, weights: TensorLoad) -> Convolution | None:
    axes = [_axes_of(index, anchor) for index in data.indices]
    groups = tuple(group for index in data.indices if (group := _group_of(index, anchor)) is not None)
    if dtype_of(data) != "float32" or dtype_of(weights) != "float32" or any(found is None for found in axes):
        return None
    windows = [place for place, found in enumerate(axes) if found is not None and len(found) == 2]
    if len(windows) != 2:
        return None
    (y, ky), (x, kx) = (sorted(axes[place] or (), key=lambda v: is_in(v, anchor.reduction)) for place in windows)
    taps = (ky, kx)
    if not all(is_in(tap, anchor.reduction) and anchor.extent(tap) == TAPS for tap in taps):
        return None
    if not all(is_in(v, anchor.spatial) for v in (y, x)):
        return None
    alone = [found[0] for found in axes if found is not None and len(found) == 1]
    others = [v for v in anchor.spatial if not is_in(v, (y, x, *groups))]
    images = tuple(v for v in others if is_in(v, alone))
    filters = tuple(v for v in others if not is_in(v, alone))
    channels = tuple(v for v in alone if is_in(v, anchor.reduction))
    if len(filters) != 2 or len(channels) != 2 or len(alone) != len(images) + len(channels) or y.same_as(x):
        return None
    if any(mentions(index, v) for index in weights.indices for v in (y, x, *images)):
        return None
    if len(anchor.reduction) != 4 or not anchor.indices[-1].same_as(filters[-1]) or not alone[-1].same_as(channels[-1]):
        return None
    found = Convolution(
        anchor=anchor,
        data=data,
        weights=weights,
        row=windows[0],
        column=windows[1],
        y=y,
        x=x,
        images=images,
        filters=(filters[0], filters[1]),
        channels=(channels[0], channels[1]),
        taps=taps,
        groups=groups,
    )
    steps = found.strides(filters[0])[0] * anchor.extent(filters[0])
    fits = all(step == steps for step in found.strides(*groups))
    return found if fits and all(found.strides(*filters, *channels, *taps)) else None


def _axes_of(index: Expr, anchor: Computation) -> list[Var] | None:
    """The axes whose sum ``index`` is, but for a group's; None where it is something else."""
    form = linear_form(index, anchor.variables)
    if form is None or form[1]:
        return None
    group = _group_of(index, anchor)
    terms = [(v, step) for v, step in zip(anchor.variables, form[0], strict=True) if step and not v.same_as(group)]
    return [v for v, _ in terms] if all(step == 1 for _, step in terms) else None


def _group_of(index: Expr, anchor: Computation) -> Var | None:
    """The spatial axis ``group`` of ``group * n + channel``, of which a group has n that are summed over."""
    form = linear_form(index, anchor.variables)
    terms = [(v, step) for v, step in zip(anchor.variables, form[0], strict=True) if step] if form else []
    summed = [anchor.extent(v) for v, step in terms if step == 1 and is_in(v, anchor.reduction)]
    found = [v for v, step in terms if is_in(v, anchor.spatial) and step > 1 and [step] == summed]
    return found[0] if len(found) == 1 and len(terms) == 2 else None
