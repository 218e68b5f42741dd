"""How data tiles lie in a GPU's shared memory, so that its banks serve every access at once (paper §3.1, Figure 5).

The paper pads rows by a formula for lanes that read down a column. Here lanes may run over several axes, copies may
transpose, and windows may have strides, so the padding is searched: the one for which the counted turns of reads and
writes are the fewest, then the smallest. For the paper's case it finds the formula's answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tvm_ext.devices.gpu import WARP
from tvm_ext.devices.hal import MemoryLayer
from tvm_ext.devices.occupancy import layer_limit_bytes
from tvm_ext.support.arithmetic import ceil_div

from .box import Box, CopyShape, window_stride
from .tiling import Number, SimtTiling, quotient, remainder

if TYPE_CHECKING:
    from tvm_ext._tvm import Buffer

CONFLICT_COST = 8
"""A conflict counts as so many instructions when layouts are compared."""

SAMPLED_WARPS = 48
"""Warps whose accesses are counted at most: all that read, those of the first and later rounds that copy."""

PAIR_STEPS = 8
"""Paddings tried along each of two dimensions together where one alone leaves conflicts."""

MAX_GROWTH = 2.0
"""Padded size over plain size at most, beyond a few rows of banks: what is padded is missing for other blocks."""

MAX_PHASE_GROWTH = 1.25
"""Likewise of a strided window's columns that are copied as they lie in memory. Sorted by phase they need no padding,
but lanes ask for each sector once a phase: C35 on a V100 for 96.6 million, where 9 % more memory leave 72.2.
"""

PADDED_ROWS = 16
"""Rows of banks that padding may add in any case: 2 KiB."""

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredBox:
    """A box in shared memory: element ``[b0, b1, ...]`` is at ``sum(strides[d] * b_d)``.

    Dimension d with ``phases[d]`` > 1, a window of that stride, is sorted by phase: ``b`` lies at
    ``(b % phases) * phase_stride + b // phases``, so that lanes which are two columns apart read neighbours.
    ``width`` elements along ``vector_axis`` are read at once.
    """

    box: Box
    order: tuple[int, ...]  # dimensions from the outermost in
    strides: tuple[int, ...]
    phases: tuple[int, ...]
    phase_strides: tuple[int, ...]
    elements: int
    vector_axis: int | None
    width: int
    buffer: Buffer = None

    def address(self, offsets: Sequence[Number]) -> Number:
        """Where in the buffer the box's element ``offsets`` is, in elements."""
        total: Number = 0
        for d, offset in enumerate(offsets):
            if self.phases[d] > 1:
                total = total + remainder(offset, self.phases[d]) * self.phase_strides[d]
                total = total + quotient(offset, self.phases[d]) * self.strides[d]
            else:
                total = total + offset * self.strides[d]
        return total

    def read_address(self, within: Mapping[int, Number], tile: Mapping[int, int]) -> Number:
        """Where the element is for which each axis is ``within`` the tile."""
        return self.address([dim.offset(within, tile) for dim in self.box.dims])


def stored(
    box: Box, tiling: SimtTiling, order: Sequence[int], padding: Mapping[int, int], vector: tuple[int | None, int]
) -> StoredBox:
    """``box`` with its dimensions in ``order`` and ``padding[d]`` elements added to the stride of dimension d.

    For the last dimension, sorted by phase, the padding is added to the stride of the phases.
    """
    shape = box.shape(tiling.tile)
    strides, phase_strides, phases = [1] * len(shape), [0] * len(shape), [1] * len(shape)
    pitch = 1
    for position, d in enumerate(reversed(order)):
        strides[d] = pitch + (padding.get(d, 0) if position else 0)
        phase = window_stride(box, d, tiling) if position == 0 else 1
        if phase > 1:
            phases[d] = phase
            phase_strides[d] = ceil_div(shape[d], phase) + padding.get(d, 0)
            pitch = (phase - 1) * phase_strides[d] + ceil_div(shape[d], phase)
        else:
            pitch = strides[d] * shape[d]
    return StoredBox(
        box=box,
        order=tuple(order),
        strides=tuple(strides),
        phases=tuple(phases),
        phase_strides=tuple(phase_strides),
        elements=pitch,
        vector_axis=vector[0],
        width=vector[1],
    )


def stores_vectors(box: StoredBox, shape: CopyShape) -> bool:
    """Whether the units of a copy are vectors in shared memory too."""
    width, last = shape.width, len(shape.sizes) - 1
    if width == 1 or box.strides[last] != 1 or max(box.phases) > 1:
        return width == 1
    in_run = range(len(shape.sizes) - shape.run, last)
    dense = all(box.strides[d] == box.strides[d + 1] * shape.sizes[d + 1] for d in in_run)
    rows = [box.strides[d] for d in range(len(shape.sizes) - (shape.run if dense else 1))]
    return (dense or shape.sizes[last] % width == 0) and all(stride % width == 0 for stride in rows)


# --- counting ------------------------------------------------------------------------------------------------------
def turns(addresses: Offsets, itemsize: float, width: int, layer: MemoryLayer) -> npt.NDArray[np.int64]:
    """Turns beyond the fewest that accesses of ``(..., 32)`` lanes take; each reads ``width`` elements.

    Lanes of 16 bytes are served 8 at a time, lanes of 4 bytes or less 32 at a time; a turn serves one word of each
    bank, to any number of lanes. 32 lanes that read 4 bytes 2 words apart take 2 turns, one more than the fewest.
    """
    bank_bytes, bank_count = layer.bank_bytes or 4, layer.bank_count or WARP
    unit = max(int(itemsize * width), bank_bytes)
    slots = max(1, bank_bytes * bank_count // unit)
    lanes = min(WARP, slots)
    words = (addresses * int(itemsize * 8)) // (8 * unit)
    words = np.sort(words.reshape(-1, lanes), axis=-1)
    first = np.ones(words.shape, dtype=bool)
    first[:, 1:] = words[:, 1:] != words[:, :-1]
    bank = words % slots + np.arange(len(words))[:, None] * slots
    load = np.bincount(bank[first], minlength=len(words) * slots).reshape(len(words), slots).max(axis=1)
    return np.asarray((load - 1).reshape(*addresses.shape[:-1], WARP // lanes).sum(axis=-1), dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AccessPattern:
    """Offsets (warps, 32 lanes, dimensions) of one kind of access, and how often a warp makes it in a step."""

    offsets: Offsets
    weights: npt.NDArray[np.float64]  # share of the warps that do each
    width: int
    count: int

    def conflicts(self, boxes: Sequence[StoredBox], itemsize: float, layer: MemoryLayer) -> npt.NDArray[np.float64]:
        """Conflicts of a warp and step, for each of ``boxes``."""
        addresses = np.zeros((len(boxes), *self.offsets.shape[:2]), dtype=np.int64)
        for d in range(self.offsets.shape[2]):
            phase, moved = boxes[0].phases[d], self.offsets[..., d]
            step = np.array([box.strides[d] for box in boxes])[:, None, None]
            addresses += moved // phase * step
            if phase > 1:
                addresses += moved % phase * np.array([box.phase_strides[d] for box in boxes])[:, None, None]
        excess = turns(addresses, itemsize, self.width, layer) @ self.weights
        return np.asarray(excess * self.count, dtype=np.float64)


def sampled_warps(threads: int) -> Offsets:
    """Thread numbers (warps, 32) of the warps that are counted; a missing lane does what the first one does."""
    count = ceil_div(threads, WARP)
    chosen = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_WARPS)).astype(np.int64))
    lanes = chosen[:, None] * WARP + np.arange(WARP)
    return np.where(lanes < threads, lanes, lanes[:, :1])


def pattern_of(offsets: Offsets, phases: Sequence[int], width: int, count: int) -> AccessPattern:
    """The pattern of warps with ``offsets``; those that differ by a move of all their lanes are counted once.

    Such a move turns the banks, but not how many accesses a bank serves. It must keep the phase of a strided window.
    """
    base = offsets[:, :1, :]
    base = base - base % np.array(phases, dtype=np.int64)
    moved, weights = np.unique(offsets - base, axis=0, return_counts=True)
    return AccessPattern(offsets=moved, weights=weights / weights.sum(), width=width, count=count)


def read_pattern(box: Box, tiling: SimtTiling, width: int) -> AccessPattern:
    """What the lanes read first in a step; what they read later is the same, some elements on."""
    threads = sampled_warps(tiling.thread_count)
    group, at = tiling.coordinates(threads)
    at = {p: np.broadcast_to(np.asarray(x), threads.shape) for p, x in at.items()}
    within: dict[int, Number] = {p: at[p] * tiling.piece[p] for p in tiling.spatial}
    if tiling.split_axis is not None:
        within[tiling.split_axis] = group
    tile = tiling.tile
    offsets = [np.broadcast_to(np.asarray(dim.offset(within, tile)), threads.shape) for dim in box.dims]
    own = prod(tiling.register[p] for p in tiling.spatial if box.uses(p))
    points = prod(tiling.step.values()) // tiling.split
    phases = [window_stride(box, d, tiling) for d in range(len(box.dims))]
    return pattern_of(_stacked(offsets, threads), phases, width, max(1, own // width * points))


def _stacked(offsets: Sequence[Offsets], threads: Offsets) -> Offsets:
    if not offsets:
        return np.zeros((*threads.shape, 0), dtype=np.int64)
    return np.stack(offsets, axis=-1).astype(np.int64)


def write_patterns(box: StoredBox, shape: CopyShape, threads: int) -> list[AccessPattern]:
    """What the lanes write in a copy: one vector, or its elements one by one."""
    vectors = stores_vectors(box, shape)
    rounds = ceil_div(shape.units, threads)
    whole = threads % WARP == 0  # then warps of all rounds are runs of units
    sampled = sampled_warps(shape.units if whole else min(threads, shape.units))
    sampled = np.where(shape.used(sampled), sampled, sampled[:, :1])
    patterns = []
    for element in range(1 if vectors else shape.width):
        offsets = [np.broadcast_to(np.asarray(o), sampled.shape) for o in shape.offsets(sampled, element)]
        width = shape.width if vectors else 1
        patterns.append(pattern_of(_stacked(offsets, sampled), box.phases, width, rounds))
    return patterns


# --- choosing ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A layout with its cost, in instructions of a warp and step, and what of it are conflicts."""

    cost: float
    conflicts: float
    box: StoredBox
    shape: CopyShape

    @property
    def rank(self) -> tuple[float, int]:
        return self.cost, self.box.elements


def choose_storage(
    box: Box,
    tiling: SimtTiling,
    vector: tuple[int | None, int],
    copies: Sequence[CopyShape],
    itemsize: float,
    layer: MemoryLayer,
) -> tuple[StoredBox, CopyShape]:
    """The padding and the way of copying with the fewest conflicts, then the fewest instructions."""
    search = _Search(box, tiling, vector, itemsize, layer)
    best: _Found | None = None
    for shape in copies:
        found = search.best(shape)
        if search.is_worth(found) and (best is None or found.rank < best.rank):
            best = found
        if best is not None and best.conflicts == 0:
            break
    assert best is not None
    return best.box, best.shape


class _Search:
    """The search for one box's padding."""

    def __init__(
        self, box: Box, tiling: SimtTiling, vector: tuple[int | None, int], itemsize: float, layer: MemoryLayer
    ) -> None:
        self.box, self.tiling, self.vector, self.itemsize, self.layer = box, tiling, vector, itemsize, layer
        # dimensions from the outermost in: the tensor's own order, but the vector axis last
        last = [d for d, dim in enumerate(box.dims) if any(p == vector[0] for p, _ in dim.terms)][:1]
        self.order = (*(d for d in range(len(box.dims)) if d not in last), *last)
        self.read = read_pattern(box, tiling, vector[1])
        self.capacity = layer_limit_bytes(layer) / itemsize
        self.words = int((layer.bank_count or 0) * (layer.bank_bytes or 0) / itemsize)
        self.most = min(self.capacity, MAX_GROWTH * self._stored({}).elements + PADDED_ROWS * self.words)

    def best(self, shape: CopyShape) -> _Found:
        """Dimension by dimension from the inside out; two together where conflicts are left."""
        vectors = stores_vectors(self._stored({}), shape)
        extras = range(0, max(1, self.words), max(self.vector[1], shape.width if vectors else 1))
        padding: dict[int, int] = {}
        best = self._among(shape, [padding])
        dims = self._dims(shape)
        for d in dims:
            if best.conflicts == 0:
                return best
            choices = [{**padding, d: extra} for extra in extras]
            inner = d == self.order[-1]
            best = min(best, self._among(shape, choices, only_writes=inner), key=lambda f: f.rank)
            plain = self._stored(padding)
            strides, own = (plain.phase_strides, best.box.phase_strides) if inner else (plain.strides, best.box.strides)
            padding = {**padding, d: own[d] - strides[d]}
        if best.conflicts > 0 and len(dims) > 1:
            coarse = list(extras)[:: max(1, len(extras) // PAIR_STEPS)]
            pairs = [{dims[-1]: a, dims[-2]: b} for a, b in itertools.product(coarse, coarse)]
            best = min(best, self._among(shape, pairs), key=lambda f: f.rank)
        return best

    def is_worth(self, found: _Found) -> bool:
        """Whether a copy that is no `CopyShape.last_resort`, or leaves no conflict, takes no more room than it may."""
        in_order = max(found.box.phases, default=1) > 1 and found.shape.phase == found.shape.width == 1
        if in_order and found.box.elements > MAX_PHASE_GROWTH * self._stored({}).elements:
            return False
        return found.conflicts == 0 or not found.shape.last_resort

    def _dims(self, shape: CopyShape) -> list[int]:
        """Dimensions whose stride may be padded: the phases of a strided window, then rows from the inside out.

        What is copied in the order of its phases is one run of memory only without padding between them.
        """
        if not self.order or not self.words:
            return []
        phased = window_stride(self.box, self.order[-1], self.tiling) > 1 and shape.phase == 1
        inner = [self.order[-1]] if phased else []
        sizes = self.box.shape(self.tiling.tile)
        rows = [d for d in self.order[:-1] if sizes[d] > 1]
        return [*inner, *reversed(rows)]

    def _stored(self, padding: Mapping[int, int]) -> StoredBox:
        return stored(self.box, self.tiling, self.order, padding, self.vector)

    def _among(self, shape: CopyShape, choices: Sequence[Mapping[int, int]], *, only_writes: bool = False) -> _Found:
        """The best of ``choices``, which are alike but for their padding; ``only_writes`` leaves reads for later.

        Every vector starts at a multiple of its own size.
        """
        boxes, rows = [self._stored(padding) for padding in choices], self.order[:-1]
        aligned = [box for box in boxes if all(box.strides[d] % self.vector[1] == 0 for d in rows)]
        usable = [box for box in aligned if box.elements <= self.most] or boxes[:1]
        writes = write_patterns(usable[0], shape, self.tiling.thread_count)
        conflicts = sum((p.conflicts(usable, self.itemsize, self.layer) for p in writes), np.zeros(len(usable)))
        reads = self.read.conflicts(usable, self.itemsize, self.layer)
        count = self.read.count + sum(pattern.count for pattern in writes)
        judged = conflicts if only_writes else conflicts + reads
        chosen = min(range(len(usable)), key=lambda i: (judged[i], usable[i].elements))
        total = float(conflicts[chosen] + reads[chosen])
        return _Found(cost=count + CONFLICT_COST * total, conflicts=total, box=usable[chosen], shape=shape)
