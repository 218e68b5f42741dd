"""What a register tile asks of memory before it is needed: lines that no prefetcher of the processor would bring.

* `NextTile`: of an input that streams through the tiles, what the following tile of rows reads. A blocked 1x1
  convolution of 512 channels reads a few pixels in each of 32 rows far apart, and goes on in all of them.
* `EpilogueReads`: of the epilogue, what the tile's own end reads, a residual say. It comes while the tile computes.
* `NextPanel`: the next panel of weights.

Measured on two cores of a Zen 5, eight images, ms before and after: 1x1 of 256 to 64 channels on 56x56 3.0 and 1.7 (1.6
is the cores' peak), 64 to 256 channels with a residual 2.3 and 1.75, 3x3 of stride 2 on 128 channels 8.7 and 4.5, 1x1
of 512 to 32 channels on 7x7 0.17 and 0.145. Where the caches had all of it before, the questions cost nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tvm_ext._tvm import Buffer, Expr, Stmt, TensorLoad, nodes_in, structural_equal, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import Computation, dtype_of
from tvm_ext.analysis.tensor_expr import Access, Axis, TensorExpr
from tvm_ext.cost.reduction_chunks import is_asked_for, line_steps, moving_axes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.ir.build_ir import flat, if_all, index, load, prefetch, sequence, split_index
from tvm_ext.records.rprogram import RProgram
from tvm_ext.records.tuning import CpuTile
from tvm_ext.support.arithmetic import ceil_div

from .packing import PackedInput, PhasePack, RowPack


# --- the next tile of rows --------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class NewTaps:
    """Output axis ``outputs`` and tap number ``tap`` of the reduction read the same dimension: of its taps those from
    ``first_new`` on read what no output before reads.
    """

    outputs: int
    tap: int
    first_new: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextTile:
    """``source`` at the following tile of rows, for which each step of the reduction's outer ``depth`` loops asks.

    ``moving`` are the axes whose tiles, of which there are ``counts``, follow each other, the last one first; ``steps``
    the bytes between neighbours along each axis of a tile. Worked example, tiles of 2 rows by 7 columns of a 3x3 window
    in blocks of 16 channels: each of 9 taps asks for 14 pixels, but taps that the window moves to later for those
    alone that are new.
    """

    source: TensorLoad
    depth: int
    moving: tuple[int, ...]
    counts: tuple[int, ...]
    steps: Mapping[int, int]
    windows: tuple[NewTaps, ...]
    line_bytes: int

    def following(self, at: Mapping[int, Expr]) -> dict[int, Expr]:
        """The coordinates of the tile behind that ``at``; behind the last one, of that itself."""
        number = flat([at[p] for p in self.moving], self.counts) + index(1)
        last = index(prod(self.counts) - 1)
        return {**at, **dict(zip(self.moving, split_index(tirx.min(number, last), self.counts), strict=True))}

    def ask(self, first: Expr, sizes: Mapping[int, int], ks: Sequence[Expr]) -> Stmt:
        """For all lines of a tile of ``sizes`` whose ``first`` element is a load, at steps ``ks``."""
        asked: dict[tuple[int, ...], list[Stmt]] = {}
        for offsets, offset_bytes in _lines(self.steps, sizes, self.line_bytes):
            new = [
                number
                for number, window in enumerate(self.windows)
                if window.outputs == self.moving[-1] or offsets[window.outputs]
            ]
            asked.setdefault(tuple(new), []).append(prefetch(first, offset_bytes, cache=1))
        return sequence(*(self._if_new(numbers, ks, sequence(*lines)) for numbers, lines in asked.items()))

    def _if_new(self, numbers: Sequence[int], ks: Sequence[Expr], lines: Stmt) -> Stmt:
        own = [self.windows[number] for number in numbers]
        return if_all([ks[window.tap] >= index(window.first_new) for window in own], lines) if own else lines


def _lines(steps: Mapping[int, int], sizes: Mapping[int, int], line_bytes: int) -> list[tuple[dict[int, int], int]]:
    """(offsets along the axes, bytes) of the elements by which all lines of a tile are touched."""
    places = []
    for axis, step in steps.items():
        stride = max(1, line_bytes // max(1, abs(step)))
        places.append(dict.fromkeys([*range(0, sizes[axis], stride), sizes[axis] - 1]))
    return [
        (dict(zip(steps, offsets, strict=True)), sum(o * step for o, step in zip(offsets, steps.values(), strict=True)))
        for offsets in itertools.product(*places)
    ]


def next_tiles(
    computation: Computation, expr: TensorExpr, loops: CpuTile, reduction: Sequence[int], device: DeviceSpec
) -> tuple[NextTile, ...]:
    """Of the inputs whose next tile is asked for (`is_asked_for`); ``reduction`` are the axes of the loops."""
    return tuple(
        _next_tile(source, access, expr, loops, reduction, device.layers[1].transaction_bytes)
        for source, access in zip(computation.loads(), expr.inputs, strict=True)
        if is_asked_for(access, loops, expr, device)
    )


def _next_tile(
    source: TensorLoad, access: Access, expr: TensorExpr, loops: CpuTile, reduction: Sequence[int], line_bytes: int
) -> NextTile:
    spatial = [p for p, axis in enumerate(expr.axes) if axis.kind == "spatial"]
    steps = [expr.axes[p] for p in reduction]
    far = [number for number, axis in enumerate(steps) if line_steps(access, axis.name, line_bytes)]
    moving = moving_axes(access, loops, expr)
    strides = [access.stride(axis.name) or 0 for axis in expr.spatial]
    return NextTile(
        source=source,
        depth=far[-1] + 1,
        moving=tuple(spatial[place] for place in moving),
        counts=tuple(ceil_div(expr.spatial[place].extent, loops.register[place]) for place in moving),
        steps={p: int(step * access.itemsize_bytes) for p, step in zip(spatial, strides, strict=True) if step},
        windows=tuple(_windows(access, expr, {number: steps[number] for number in far})),
        line_bytes=line_bytes,
    )


def _windows(access: Access, expr: TensorExpr, far: Mapping[int, Axis]) -> Iterator[NewTaps]:
    names = [axis.name for axis in expr.axes]
    for item in access.indices:
        terms = dict(item.terms) if item is not None else {}
        taps = [number for number, axis in far.items() if terms.get(axis.name) == 1]
        outputs = [axis.name for axis in expr.spatial if axis.name in terms]
        if len(taps) == len(outputs) == 1 and len(terms) == 2:
            extent, stride = far[taps[0]].extent, terms[outputs[0]]
            if 0 < stride < extent:
                yield NewTaps(outputs=names.index(outputs[0]), tap=taps[0], first_new=extent - stride)


# --- what the epilogue reads ------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EpilogueReads:
    """``buffers`` of the anchor's shape, which the epilogue reads where the tile is written; ``steps`` as above."""

    buffers: tuple[Buffer, ...]
    steps: Mapping[int, int]
    line_bytes: int

    def ask(self, first: Sequence[Expr], sizes: Mapping[int, int]) -> list[Stmt]:
        """For all lines of a tile of ``sizes`` whose ``first`` element has these indices."""
        lines = _lines(self.steps, sizes, self.line_bytes)
        return [prefetch(load(item, first), offset, cache=1) for item in self.buffers for _, offset in lines]


def epilogue_reads(
    computation: Computation, expr: TensorExpr, epilogue: Sequence[Computation], device: DeviceSpec
) -> EpilogueReads | None:
    """None where the epilogue reads nothing but what a core's first cache holds."""
    target = computation.target
    if prod(expr.output.shape) * expr.output.itemsize_bytes <= (device.layers[1].capacity_bytes or 0):
        return None
    found: list[Buffer] = []
    for consumer in epilogue:
        for item in nodes_in(consumer.value, TensorLoad):
            source = item.source
            alike = structural_equal(source.ty.shape, target.ty.shape) and dtype_of(source) == dtype_of(target)
            own = len(item.indices) == len(consumer.spatial) and all(
                structural_equal(one, variable) for one, variable in zip(item.indices, consumer.spatial, strict=True)
            )
            if alike and own and not any(source.same_as(known) for known in (target, *found)):
                found.append(source)
    steps = {p: expr.output.stride(axis.name) for p, axis in enumerate(expr.axes) if axis.kind == "spatial"}
    if not found or None in steps.values():
        return None
    return EpilogueReads(
        buffers=tuple(found),
        steps={p: int(step * expr.output.itemsize_bytes) for p, step in steps.items() if step},
        line_bytes=device.layers[1].transaction_bytes,
    )


# --- the next panel ---------------------------------------------------------------------------------------------------
LEAST_GAIN = 0.03
"""Of a kernel's time, what reading its weights from memory must take, for them to be asked for."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NextPanel:
    """Each step of a reduction asks for the next ``elements`` of the panel behind its own, while tiles of rows use that
    one: else the first of these would wait for memory. ``panels`` are those of ``buffer``, ``steps`` the extents of the
    reduction.

    Worked example, 100 x 256 times 256 x 512 on a core of a Cascade Lake: a panel of 64 columns is 64 KiB, which take
    7.5 us from memory. A tile of 5 rows computes 1.1 us, but the first one of each panel would take as long as the
    panel. 20 tiles of rows go over a panel's 256 steps, and each step asks for a twentieth of what one of its own
    reads: 16 bytes. Where the weights are in a cache already, the questions cost nothing: a step issues two dozen
    multiply-adds beside.
    """

    buffer: Buffer
    panels: int
    steps: tuple[int, ...]
    elements: int
    dims: int  # of the buffer behind those of the steps: lanes, and groups

    def ask(self, panel: Expr, row: Expr, ks: Sequence[Expr]) -> Stmt:
        """The question of step ``ks`` of the tile of rows number ``row``; behind the last panel, for that itself."""
        number = row
        for k, extent in zip(ks, self.steps, strict=True):
            number = number * index(extent) + k
        following = tirx.min(panel + index(1), index(self.panels - 1))
        inner = [index(0)] * (len(ks) + self.dims - 1)
        return prefetch(load(self.buffer, [following, *inner, number * index(self.elements)]))


def next_panel(
    packed: Sequence[PackedInput | PhasePack | RowPack],
    axes: tuple[int, ...],
    row_tiles: int,
    program: RProgram,
    device: DeviceSpec,
) -> NextPanel | None:
    """What the ``row_tiles`` tiles that use a panel ask for; None where weights are no panels of one constant by
    ``axes``, where they hardly count, or where there are so few tiles that a step would have to ask for several lines.
    """
    own = [item for item in packed if isinstance(item, PackedInput) and item.is_constant]
    if len(own) != 1 or own[0].axes != axes or own[0].extents[0] < 2:
        return None
    (weights,) = own
    itemsize = itemsize_bytes(dtype_of(weights.buffer))
    dims = len(axes) - 1 - axes[1:].index(axes[0])
    elements = ceil_div(prod(weights.extents[-dims:]), row_tiles)
    size_bytes = prod(weights.extents) * itemsize
    memory, first = device.lowest_layer, device.layers[1]
    if size_bytes <= (first.capacity_bytes or 0) or elements * itemsize > memory.transaction_bytes:
        return None
    if size_bytes / Machine(device).rate(memory) < LEAST_GAIN * program.prediction.compute_s:
        return None
    steps = weights.extents[1:-dims]
    return NextPanel(buffer=weights.buffer, panels=weights.extents[0], steps=steps, elements=elements, dims=dims)
