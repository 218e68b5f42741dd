"""rPrograms for tensor cores: lists of tiles of whole fragments, ranked by a model of their own (`mma_model.py`).

Whole fragments leave few tiles: fixed sides of a warp's, one to eight warps, three reduction steps, as far as they fit
the device. All are predicted, which is not the paper's construction: ordinary tiles are grown greedily (`search.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext.analysis.gemm_form import FRAGMENT, GemmForm, TileSplit, gemm_expr, gemm_form, reduction_step, split_of
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.mma_model import GemmShape, fragment_registers, predict_mma, shape_of, tile_bytes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import static_shared_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rprogram import Prediction, RProgram, RTile
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.arithmetic import ceil_div

from .align import padding_waste
from .canonical import CanonicalForm
from .construct import Alternative, Construction, narrower_places

WARP_SIDES = (16, 32, 48, 64, 80, 96, 128)  # a choice: multiples of a fragment whose accumulators registers hold
WARP_GRIDS = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1), (2, 3), (3, 2), (2, 4), (4, 2))
"""Warps of a threadblock along rows and columns: up to eight."""
DEPTH_BYTES = (128, 64, 32)
"""Reduction steps, by the bytes of one line: a cache line of four memory transactions, two, one."""
MAX_DEPTH_WASTE = 0.0625
"""Padding of the reduction beyond the finest step's that a longer step may add: longer steps wait less often."""
SPLITS = (2, 3, 4, 6, 8, 12, 16)  # a choice: growing steps; each adds a partial sum to store and load
MIN_SPLIT_STEPS = 4
"""Reduction steps that a block must keep for split-K to pay."""
SPLIT_CANDIDATES = 12  # a choice: unsplit programs, best first, of which split ones are made
MIN_SPLIT_GAIN = 0.85
"""Share of the unsplit program's predicted time below which a split one is taken: the model flatters partial sums."""


@dataclass(frozen=True, slots=True)
class _MmaCandidate:
    split: TileSplit
    splits: int
    prediction: Prediction

    @property
    def rank(self) -> tuple[float, float, int]:
        """Predicted time; among equals the one that loads its layers least, then the larger tile."""
        loads = sum(cost.time_s for cost in self.prediction.layers)
        return self.prediction.time_s, loads, -self.split.rows * self.split.columns


def construct_mma(expr: TensorExpr, device: DeviceSpec, *, k: int = 10) -> Construction:
    """Up to ``k`` tensor-core rPrograms for ``expr``, best predicted first; empty where no tile fits.

    ``expr`` must be one that `supports_mma` accepts. Tiles are over the axes of the implicit GEMM, (batch,) rows,
    columns and reduction: L0 is a warp's tile for one step of the reduction, L1 the threadblock's. A program with more
    ``partition_count`` than tiles divides each tile's reduction among so many times as many blocks (split-K).
    """
    form = gemm_form(expr)
    if isinstance(form, str):
        return Construction(programs=(), steps=(), canonical=_canonical(expr, expr, None), rejected=())
    product = gemm_expr(expr, form)
    shape, dtype = shape_of(product), expr.inputs[0].dtype
    candidates = [
        _MmaCandidate(split, 1, predict_mma(shape, split, 1, dtype, device)) for split in _tiles(shape, dtype, device)
    ]
    candidates.sort(key=lambda candidate: candidate.rank)
    if candidates:
        candidates = _with_split_k(candidates, shape, dtype, device)
    digest = expr.digest
    programs = [_program(candidate, product, shape, device, digest) for candidate in candidates[: k + 10]]
    return Construction(
        programs=tuple(programs[:k]),
        steps=(),
        canonical=_canonical(product, expr, form),
        rejected=tuple(
            Alternative(
                program=program,
                reason=f"predicted {program.prediction.time_s / programs[0].prediction.time_s:.2f}x as slow, "
                f"bound by {program.prediction.bound}",
            )
            for program in programs[1:]
        ),
        narrower=tuple(
            _program(candidates[place], product, shape, device, digest)
            for place in narrower_places([_blocks(candidate, shape) for candidate in candidates])
        ),
    )


def matrix_program(tile: GpuTile, expr: TensorExpr, device: DeviceSpec) -> RProgram:
    """The rProgram of ``tile``; raises IllegalRewrite where matrix units do not compute ``expr`` in such tiles."""
    form = gemm_form(expr)
    if isinstance(form, str) or not tile.matrix:
        raise IllegalRewrite(f"{tile} is no tile of a product on matrix units")
    product = gemm_expr(expr, form)
    shape, dtype = shape_of(product), expr.inputs[0].dtype
    (rows, columns, depth), (warp_rows, warp_columns) = tile.block, tile.inner
    split = TileSplit(rows=rows, columns=columns, depth=depth, warp_rows=warp_rows, warp_columns=warp_columns)
    prediction = predict_mma(shape, split, tile.splits, dtype, device)
    return _program(_MmaCandidate(split, tile.splits, prediction), product, shape, device, expr.digest)


def tile_of_matrix(program: RProgram, expr: TensorExpr) -> GpuTile:
    """What `matrix_program` makes ``program`` of, without pipelines."""
    form = gemm_form(expr)
    assert not isinstance(form, str), form
    shape, split = shape_of(gemm_expr(expr, form)), split_of(program)
    tiles = shape.batch * ceil_div(shape.rows, split.rows) * ceil_div(shape.columns, split.columns)
    return GpuTile(
        matrix=True,
        inner=(split.warp_rows, split.warp_columns),
        block=(split.rows, split.columns, split.depth),
        splits=max(1, program.partition_count // tiles),
    )


def _tiles(shape: GemmShape, dtype: str, device: DeviceSpec) -> list[TileSplit]:
    """All aligned tiles that fit the device: registers of a thread, threads and shared memory of a block."""
    step = reduction_step(dtype, device)
    depths = _depths(shape.depth, step, shape.itemsize)
    capacity = static_shared_bytes(device)
    found = []
    for warp_rows in _sides(shape.rows):
        for warp_columns in _sides(shape.columns):
            warp = TileSplit(
                rows=warp_rows, columns=warp_columns, depth=step, warp_rows=warp_rows, warp_columns=warp_columns
            )
            if fragment_registers(warp, dtype, device) > (device.matrix_register_limit or device.register_limit):
                continue
            for down, across in WARP_GRIDS:
                rows, columns = warp_rows * down, warp_columns * across
                if _beyond(shape.rows, rows, warp_rows) or _beyond(shape.columns, columns, warp_columns):
                    continue
                tile = _deepest(rows, columns, warp_rows, warp_columns, depths, dtype, device, capacity)
                if tile is not None:
                    found.append(tile)
    return found


def _sides(extent: int) -> list[int]:
    """Sides of warp tiles, none more than a fragment beyond the axis."""
    return [side for side in WARP_SIDES if side < extent + FRAGMENT]


def _beyond(extent: int, size: int, warp_size: int) -> bool:
    """Whether whole warps of a tile of ``size`` would lie outside of the tensor."""
    return size - warp_size >= extent


def _depths(extent: int, step: int, itemsize: int) -> list[int]:
    """Reduction steps to try, the longest first: 64 halves of 576; 16 of 147, which 3 x 64 would pad by a fifth."""
    least = ceil_div(extent, step) * step
    return [
        size
        for size in (max(step, width // itemsize) for width in DEPTH_BYTES)
        if ceil_div(extent, size) * size <= least * (1 + MAX_DEPTH_WASTE) or size == step
    ]


def _deepest(
    rows: int,
    columns: int,
    warp_rows: int,
    warp_columns: int,
    depths: list[int],
    dtype: str,
    device: DeviceSpec,
    capacity: float,
) -> TileSplit | None:
    for depth in depths:
        tile = TileSplit(rows=rows, columns=columns, depth=depth, warp_rows=warp_rows, warp_columns=warp_columns)
        if tile_bytes(tile, dtype, device) <= capacity:
            return tile
    return None


def _with_split_k(
    candidates: list[_MmaCandidate], shape: GemmShape, dtype: str, device: DeviceSpec
) -> list[_MmaCandidate]:
    """The candidates and, where even smaller tiles leave units idle, split ones that gain enough to be worth it."""
    best = candidates[0].prediction.time_s
    found = []
    tried: set[tuple[int, int]] = set()
    by_size = sorted(candidates, key=lambda c: (-c.split.rows * c.split.columns, c.rank))
    for candidate in (*candidates[:SPLIT_CANDIDATES], *by_size):
        split = candidate.split
        tiles = shape.batch * ceil_div(shape.rows, split.rows) * ceil_div(shape.columns, split.columns)
        if tiles >= device.unit_count or (split.rows, split.columns) in tried:
            continue
        tried.add((split.rows, split.columns))
        steps = ceil_div(shape.depth, split.depth)
        for splits in SPLITS:
            if steps // splits < MIN_SPLIT_STEPS:
                break
            prediction = predict_mma(shape, split, splits, dtype, device)
            if prediction.time_s < MIN_SPLIT_GAIN * best:
                found.append(_MmaCandidate(split, splits, prediction))
    return sorted((*candidates, *found), key=lambda candidate: candidate.rank)


def _program(
    candidate: _MmaCandidate, product: TensorExpr, shape: GemmShape, device: DeviceSpec, digest: str
) -> RProgram:
    split = candidate.split
    axes = tuple(axis.name for axis in product.axes)
    batch = (1,) * (len(axes) - 3)
    step = reduction_step(product.inputs[0].dtype, device)
    warp = RTile(axes=axes, shape=(*batch, split.warp_rows, split.warp_columns, step))
    block = RTile(axes=axes, shape=(*batch, split.rows, split.columns, split.depth))
    blocks = _blocks(candidate, shape)
    waste = max(padding_waste(shape.rows, split.rows), padding_waste(shape.columns, split.columns))
    return RProgram(
        device=device.name,
        expr_digest=digest,
        tiles=(("L0", warp), ("L1", block)),
        vector_axis=axes[-2],
        unit_count=min(device.unit_count, blocks),
        partition_count=blocks,
        epsilon=waste,
        shrunk=False,
        prediction=candidate.prediction,
    )


def _blocks(candidate: _MmaCandidate, shape: GemmShape) -> int:
    tiles = shape.batch * ceil_div(shape.rows, candidate.split.rows) * ceil_div(shape.columns, candidate.split.columns)
    return tiles * candidate.splits


def _canonical(product: TensorExpr, expr: TensorExpr, form: GemmForm | None) -> CanonicalForm:
    if form is None:
        return CanonicalForm(expr=product, groups=tuple((a.name, (a.name,)) for a in expr.axes), dropped=())
    parts = [form.batch] if form.batch else []
    groups = tuple(
        (axis.name, tuple(expr.axes[i].name for i in positions))
        for axis, positions in zip(product.axes, (*parts, form.rows, form.columns, form.reduction), strict=True)
    )
    return CanonicalForm(expr=product, groups=groups, dropped=())
