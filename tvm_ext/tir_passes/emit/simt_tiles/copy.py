"""Cooperative copies from global to shared memory: coalesced, in the widest legal vectors, predicated at edges only.

Worked example, A[65536, 1024] in steps of 128 rows by 8 columns, 256 threads, stored transposed as [8][128 + 4]: units
of 4 columns, 256 of them, one a thread. Lanes 0 and 1 read the 32 bytes of a row (one sector), lane 2 starts the next
row; lane 2*r + h writes columns 4*h .. 4*h + 3 of row r to banks (4*h + e) * 132 + r, which are 32 different ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from tvm_ext._tvm import Analyzer, Buffer, Expr, Stmt, TensorLoad, Var, ir, nodes_in, tirx
from tvm_ext.analysis.computation_exprs import itemsize_bytes, linear_index
from tvm_ext.analysis.computations import dtype_of, mentions, replace_loads, static_shape
from tvm_ext.devices.gpu import SECTOR_BYTES, VECTOR_BYTES, WARP
from tvm_ext.ir.build_ir import (
    SERIAL,
    UNROLLED,
    VECTORIZED,
    allocate,
    below,
    if_all,
    index,
    load,
    loop,
    sequence,
    store,
)
from tvm_ext.ir.simt_ir import gpu_buffer, unrolled
from tvm_ext.support.arithmetic import ceil_div

from .banks import StoredBox, stores_vectors
from .box import Box, CopyShape, window_stride
from .tiling import SimtTiling

LEAST_USED = 0.65
"""Share of the lanes that copy something, below which lines are not ended where warps end."""

MAX_UNROLLED_ROUNDS = 8  # a choice: bounds the code of a copy


def copy_shapes(box: Box, tiling: SimtTiling, sizes: Sequence[int]) -> list[CopyShape]:
    """How a box of ``sizes`` may be copied.

    In lines of memory; in patches of a sector's width and many rows; in lines that end where a warp ends; columns of a
    strided window also in the order of their phases.
    """
    phased = bool(sizes) and window_stride(box, len(sizes) - 1, tiling) > 1  # rows are sorted one by one
    longest = 1 if phased else _run_length(box, sizes)
    shapes = _run_shapes(box, tiling, sizes, longest)
    # A run of the whole box goes across what may be stored transposed; patches do only within its rows.
    if longest >= max(2, len(sizes)):
        shapes += _run_shapes(box, tiling, sizes, longest - 1)
    return shapes if phased else [*shapes, *_element_patches(box, sizes)]


def _element_patches(box: Box, sizes: Sequence[int]) -> list[CopyShape]:
    """Copies element by element in patches of one or two sectors along the last dimensions, and many rows.

    Worked example, weights [64, 8, 1, 3] stored transposed, read in vectors of 4 filters: element k of filter f is at
    68 * k + f. Lanes along k alone meet 8 banks, for strides are multiples of 4; patches of 8 k by 4 f meet all 32.
    """
    shapes = []
    sector = int(SECTOR_BYTES // itemsize_bytes(box.dtype))
    for run in range(1, len(sizes)):
        units = prod(sizes[len(sizes) - run :])
        for patch in (sector, 2 * sector):
            whole = ceil_div(units, patch) * patch
            if patch < min(units, WARP) and units >= LEAST_USED * whole:
                shape = CopyShape(sizes=tuple(sizes), run=run, width=1, patch=patch, row_units=whole, last_resort=True)
                shapes.append(shape)
    return shapes


def _run_shapes(box: Box, tiling: SimtTiling, sizes: Sequence[int], run: int) -> list[CopyShape]:
    """The ways of copying with the last ``run`` dimensions as rows."""
    width = _copy_width(box, tiling, sizes, run)
    units = prod(sizes[len(sizes) - run :]) // width
    line = CopyShape(sizes=tuple(sizes), run=run, width=width, patch=units, row_units=units)
    phase = window_stride(box, len(sizes) - 1, tiling) if sizes else 1
    if phase > 1 and width == 1 and run == 1:
        by_phase = phase * ceil_div(units, phase)
        phased = replace(line, phase=phase, patch=by_phase, row_units=by_phase)
        in_order = [line, *_ended(line, units)] if units > WARP else []  # shorter rows are asked for once anyway
        return [*in_order, phased, *_ended(phased, by_phase)]
    shapes = [line]
    patch = max(1, int(SECTOR_BYTES // (itemsize_bytes(box.dtype) * width)))
    whole = ceil_div(units, patch) * patch
    if patch < units and units >= LEAST_USED * whole:
        shapes.append(replace(line, patch=patch, row_units=whole))
    return [*shapes, *_ended(line, units)]


def _ended(line: CopyShape, units: int) -> list[CopyShape]:
    """``line`` with lines that end where a warp, a half or a quarter of one ends."""
    shapes = []
    for lanes in (WARP, WARP // 2, WARP // 4):
        whole = ceil_div(units, lanes) * lanes
        if whole != units and units >= LEAST_USED * whole:
            shapes.append(replace(line, patch=whole, row_units=whole))
    return shapes


def _run_length(box: Box, sizes: Sequence[int]) -> int:
    """Trailing dimensions of the box that are one run of memory: all but the first of them whole."""
    run = 1
    for d in range(len(sizes) - 1, 0, -1):
        dim, outer = box.dims[d], box.dims[d - 1]
        neighbours = not box.producers and outer.step == 1 and outer.places[-1] + 1 == dim.places[0]
        if not neighbours or dim.step != 1 or sizes[d] != dim.length or dim.constant:
            break
        run += 1
    return run if sizes else 0


def _copy_width(box: Box, tiling: SimtTiling, sizes: Sequence[int], run: int) -> int:
    """Elements of a unit: the legal vector with which all threads together need the fewest rounds."""
    total, length = 1, 1
    for d, size in enumerate(sizes):
        total *= size
        length *= size if d >= len(sizes) - run else 1
    threads = tiling.thread_count
    widths = [w for w in (16, 8, 4, 2) if w * itemsize_bytes(box.dtype) <= VECTOR_BYTES and length % w == 0]
    best, best_key = 1, (ceil_div(total, threads), int(total % threads != 0), -1)
    for width in widths:
        units = total // width
        key = (ceil_div(units, threads), int(units % threads != 0), -width)
        if key < best_key and _is_vector(box, tiling, sizes, run, width):
            best, best_key = width, key
    return best


def _is_vector(box: Box, tiling: SimtTiling, sizes: Sequence[int], run: int, width: int) -> bool:
    """Whether every unit of ``width`` is one aligned vector of the tensor, wherever the tile starts."""
    starts, unit, element = tiling.any_starts(), tiling.variable("unit"), tiling.variable("e")
    rows = [tiling.variable(f"b{d}") for d in range(len(sizes) - run)]
    own = tuple(sizes[len(sizes) - run :])
    line = CopyShape(sizes=own, run=run, width=width, patch=1, row_units=prod(own) // width)
    inner = line.offsets(unit, element)
    last = box.dims[-1]
    if _overhangs(box, tiling, len(sizes) - 1) and last.length % width:
        return False
    positions = [
        dim.position(starts, tiling.tile, offset) for dim, offset in zip(box.dims, [*rows, *inner], strict=True)
    ]
    return is_vector(box.value_at(positions), element, width)


def is_vector(value: Expr, element: Var, width: int) -> bool:
    """Whether ``value`` for ``element`` in range(width) is made of aligned vectors and of what they share.

    Every load must be of ``width`` neighbours from a multiple of ``width``, or not depend on ``element``; nor may
    anything outside the loads (a padding's condition).
    """
    loads = nodes_in(value, TensorLoad)
    if mentions(replace_loads(value, lambda item: tirx.const(0, dtype_of(item))), element):
        return False
    return all(is_vector_access(item.source, item.indices, element, width) for item in loads)


def is_vector_access(buffer: Buffer, indices: Sequence[Expr], element: Var, width: int) -> bool:
    """Whether ``buffer[indices]`` for ``element`` in range(width) is one aligned vector, or does not depend on it."""
    if width * itemsize_bytes(dtype_of(buffer)) > VECTOR_BYTES and any(mentions(i, element) for i in indices):
        return False
    flat: Expr = tirx.const(0, dtype_of(element))
    for position, size in zip(indices, static_shape(buffer), strict=True):
        flat = flat * size + position
    analyzer = Analyzer()
    analyzer.bind(element, ir.Range(0, width))
    flat = analyzer.simplify(flat)
    if not mentions(flat, element):
        return True
    form = linear_index(_without_others(flat, element), [element], ["e"])
    if form is None or form.coefficient("e") != 1:
        return False
    known = analyzer.modular_set(analyzer.simplify(flat - element))
    return int(known.coeff) % width == 0 and int(known.base) % width == 0


def _without_others(flat: Expr, element: Var) -> Expr:
    """The terms of a sum that contain ``element``; a sum of the rest has no say in how it moves."""
    kind = type(flat).__name__
    if kind == "Add":
        sides = [side for side in (flat.a, flat.b) if mentions(side, element)]
        return sum((_without_others(side, element) for side in sides[1:]), _without_others(sides[0], element))
    return flat


# --- emission ------------------------------------------------------------------------------------------------------
def emit_copy(
    box: StoredBox,
    shape: CopyShape,
    tiling: SimtTiling,
    thread: Expr,
    starts: Mapping[int, Expr],
    tile: Mapping[int, int],
) -> Stmt:
    """Copy the box of the tile at ``starts``; ``tile`` is smaller than the tiling's in a last step."""
    threads = tiling.thread_count
    rounds = ceil_div(shape.units, threads)

    def one(number: Expr) -> Stmt:
        unit = number * index(threads) + thread if rounds > 1 else thread
        body = _copy_unit(box, shape, tiling, unit, starts, tile)
        body = if_all([shape.used(unit) if shape.has_idle_units else None], body)
        return if_all([below(unit, shape.units, threads)], body)

    return unrolled(rounds, "round", one) if rounds <= MAX_UNROLLED_ROUNDS else loop(rounds, SERIAL, "round", one)


def _copy_unit(
    box: StoredBox,
    shape: CopyShape,
    tiling: SimtTiling,
    unit: Expr,
    starts: Mapping[int, Expr],
    tile: Mapping[int, int],
) -> Stmt:
    def value(element: Expr) -> Expr:
        return _element(box.box, tiling, shape.offsets(unit, element), shape.offsets(unit, index(0)), starts, tile)

    def target(element: Expr) -> list[Expr]:
        return [box.address(shape.offsets(unit, element))]

    if shape.width == 1:
        return store(box.buffer, value(index(0)), target(index(0)))
    if stores_vectors(box, shape):
        return loop(shape.width, VECTORIZED, "e", lambda e: store(box.buffer, value(e), target(e)))
    vector = gpu_buffer((shape.width,), box.box.dtype, f"{box.buffer.name}_vector", "local")
    return sequence(
        allocate(vector),
        loop(shape.width, VECTORIZED, "e", lambda e: store(vector, value(e), [e])),
        loop(shape.width, UNROLLED, "e", lambda e: store(box.buffer, load(vector, [e]), target(e))),
    )


def _element(
    box: Box,
    tiling: SimtTiling,
    offsets: Sequence[Expr],
    first: Sequence[Expr],
    starts: Mapping[int, Expr],
    tile: Mapping[int, int],
) -> Expr:
    """The value at ``offsets``; zero beyond the tensor, which is tested for the ``first`` element of the vector."""
    positions = [dim.position(starts, tile, offset) for dim, offset in zip(box.dims, offsets, strict=True)]
    value = box.value_at(positions)
    for d, (dim, offset) in enumerate(zip(box.dims, first, strict=True)):
        if _overhangs(box, tiling, d):
            at = dim.position(starts, tile, offset)
            low, _ = dim.bounds(_ends(tiling))
            inside = at < index(dim.length)
            inside = tirx.And(index(0) <= at, inside) if low < 0 else inside
            value = tirx.if_then_else(inside, value, tirx.const(0, dtype_of(value)))
    return value


def _ends(tiling: SimtTiling) -> dict[int, int]:
    """How far the tiles of each axis reach: spatial ones beyond their end, reduction steps never."""
    ends = {p: count * tiling.tile[p] for p, count in zip(tiling.spatial, tiling.grid, strict=True)}
    return {**ends, **{p: tiling.computation.extents[p] for p in tiling.reduction}}


def _overhangs(box: Box, tiling: SimtTiling, d: int) -> bool:
    """Whether some tile's box reaches beyond the tensor's dimension ``d``."""
    low, high = box.dims[d].bounds(_ends(tiling))
    return low < 0 or high >= box.dims[d].length
