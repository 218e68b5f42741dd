"""rPrograms for tensor cores by Roller's construction (paper §3.1-3.3), with `mma_model.py` as the model.

A warp's tile grows from one fragment to all sizes that registers hold; a threadblock's from each warp's, along the
axis whose data reuse score is best (Figure 8). The matrix instruction is the alignment rule: sides are whole fragments.
Where there are several (mfma's), tiles grow from the fragments of each, and the model chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from tvm_ext.analysis.gemm_form import (
    GemmForm,
    TileSplit,
    fragment_sides,
    gemm_expr,
    gemm_form,
    reduction_step,
    split_of,
)
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.cost.mma_model import WARPS_PER_TEU, GemmShape, fragment_registers, predict_mma, shape_of, tile_bytes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads, static_shared_bytes
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.rprogram import Prediction, RProgram, RTile
from tvm_ext.records.tuning import GpuTile
from tvm_ext.support.arithmetic import ceil_div

from .align import GROWTH, padding_waste
from .canonical import CanonicalForm
from .construct import Alternative, Construction, narrower_places

LINE_TRANSACTIONS = 4
"""Memory transactions of a cache line: no step of the reduction reads more of each row."""
MAX_DEPTH_WASTE = 0.0625
"""Padding of the reduction beyond the finest step's that a longer step may add: longer steps wait less often."""
MIN_SPLIT_STEPS = 4
"""Reduction steps that a block must keep for split-K to pay."""
SPLIT_CANDIDATES = 12  # a choice: unsplit programs, best first, of which split ones are made
MIN_SPLIT_GAIN = 0.85
"""Share of the unsplit program's predicted time below which a split one is taken: the model flatters partial sums."""


Sides = tuple[int, int]


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
    tiles = [tile for side in fragment_sides(device) for tile in _tiles(shape, dtype, device, side)]
    candidates = sorted(_by_best_instruction(tiles, 1, shape, dtype, device), key=lambda candidate: candidate.rank)
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
    whole = [side for side in fragment_sides(device) if not any(size % side for size in tile.inner)]
    steps = [step for side in whole if not depth % (step := reduction_step(dtype, device, side))]
    splits = [replace(split, step=step) for step in steps or [reduction_step(dtype, device)]]
    (candidate,) = _by_best_instruction(splits, tile.splits, shape, dtype, device)
    return _program(candidate, product, shape, device, expr.digest)


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


def _by_best_instruction(
    tiles: Iterable[TileSplit], splits: int, shape: GemmShape, dtype: str, device: DeviceSpec
) -> list[_MmaCandidate]:
    """Of ``tiles`` that differ in their instruction and its steps alone those that are predicted fastest."""
    found: dict[tuple[int, ...], _MmaCandidate] = {}
    for tile in tiles:
        candidate = _MmaCandidate(tile, splits, predict_mma(shape, tile, splits, dtype, device))
        size = (tile.rows, tile.columns, tile.warp_rows, tile.warp_columns)
        if size not in found or candidate.rank < found[size].rank:
            found[size] = candidate
    return list(found.values())


def _tiles(shape: GemmShape, dtype: str, device: DeviceSpec, side: int) -> list[TileSplit]:
    """Scale-up: the threadblocks' tiles that grow from each warp's tile that registers hold, by ``side``."""
    growth, found = _Growth(shape, dtype, device, reduction_step(dtype, device, side)), list[TileSplit]()
    for warp in sorted(growth.sizes((side, side), growth.fits_registers, all_orders=True)):
        blocks = sorted(growth.sizes(warp, partial(growth.holds, warp)))
        found += [tile for size in blocks if (tile := growth.block(warp, size)) is not None]
    return found


@dataclass(frozen=True, slots=True)
class _Growth:
    """EnlargeTile (Figure 8) over the rows and columns of ``shape``, from one layer's aligned size to the next."""

    shape: GemmShape
    dtype: str
    device: DeviceSpec
    step: int  # of the matrix instruction

    def sizes(self, step: Sides, fits: Callable[[Sides], bool], *, all_orders: bool = False) -> list[Sides]:
        """The sizes that growing by whole ``step``s passes, the axis of the best score first, until none ``fits``.

        All are candidates of scale-out: where the largest leave units idle, the paper shrinks them to smaller ones.
        """
        found: dict[Sides, None] = {}
        if fits(step):
            self._enlarge(step, step, fits, found, all_orders=all_orders)
        return list(found)

    def _enlarge(
        self, size: Sides, step: Sides, fits: Callable[[Sides], bool], found: dict[Sides, None], *, all_orders: bool
    ) -> None:
        found[size] = None
        for larger in sorted(self._next(size, step), key=lambda larger: -self._score(size, larger)):
            if larger in found and not all_orders:
                return  # line 12: better orders of the same steps have been followed
            if larger not in found and fits(larger):
                self._enlarge(larger, step, fits, found, all_orders=all_orders)

    def _next(self, size: Sides, step: Sides) -> list[Sides]:
        """The next aligned sizes, none of which adds a step that is all padding."""
        (rows, columns), (down, across) = size, step
        grown = [(rows + down, columns)] if rows < self.shape.rows else []
        return [*grown, (rows, columns + across)] if columns < self.shape.columns else grown

    def _score(self, size: Sides, larger: Sides) -> float:
        """Data reuse score (§3.1), elements of a reduction step: of 16 x 16, 16 more rows save a quarter of all."""
        return (self._traffic(size) - self._traffic(larger)) / (sum(larger) - sum(size))

    def _traffic(self, size: Sides) -> int:
        return ceil_div(self.shape.rows, size[0]) * ceil_div(self.shape.columns, size[1]) * sum(size)

    def fits_registers(self, warp: Sides) -> bool:
        """L0's capacity: a thread's registers."""
        split = self._split(warp, warp, 0)
        limit = self.device.matrix_register_limit or self.device.register_limit
        return fragment_registers(split, self.dtype, self.device) <= limit

    def holds(self, warp: Sides, size: Sides) -> bool:
        """L1's capacity: `block`."""
        return self.block(warp, size) is not None

    def block(self, warp: Sides, size: Sides) -> TileSplit | None:
        """L1's tile with the longest aligned step of the reduction; None where nothing holds it.

        Warps that saturate all TEUs are the most: a larger block leaves a unit fewer others to run beside it.
        """
        warps = size[0] // warp[0] * (size[1] // warp[1])
        most = (max_block_threads(self.device) or 1024) // self.device.teu_lanes
        if warps > min(most, WARPS_PER_TEU * self.device.teus_per_unit):
            return None
        for depth in self._depths():
            tile = self._split(warp, size, depth)
            if tile_bytes(tile, self.dtype, self.device) <= static_shared_bytes(self.device):
                return tile
        return None

    def _split(self, warp: Sides, size: Sides, depth: int) -> TileSplit:
        (rows, columns), (warp_rows, warp_columns) = size, warp
        return TileSplit(
            rows=rows, columns=columns, depth=depth, warp_rows=warp_rows, warp_columns=warp_columns, step=self.step
        )

    def _depths(self) -> list[int]:
        """Steps of the reduction, the longest first: whole transactions, doubled up to a line, that pad little.

        Worked example: 64 halves of 576; 16 of 147, which 3 x 64 would pad by a fifth.
        """
        step, extent = self.step, self.shape.depth
        size = max(step, self.device.lowest_layer.transaction_bytes // self.shape.itemsize)
        sizes = sorted({step} | {size * 2**power for power in range(LINE_TRANSACTIONS.bit_length())}, reverse=True)
        least = ceil_div(extent, step) * step * (1 + MAX_DEPTH_WASTE)
        return [size for size in sizes if ceil_div(extent, size) * size <= least or size == step]


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
        for splits in _splits(min(steps // MIN_SPLIT_STEPS, 2 * device.unit_count // tiles)):
            prediction = predict_mma(shape, split, splits, dtype, device)
            if prediction.time_s < MIN_SPLIT_GAIN * best:
                found.append(_MmaCandidate(split, splits, prediction))
    return sorted((*candidates, *found), key=lambda candidate: candidate.rank)


def _splits(most: int) -> Iterator[int]:
    """Numbers of parts of a reduction, a `GROWTH`-th apart at least: 2, 3 ... 8, 10."""
    parts = 2
    while parts <= most:
        yield parts
        parts += max(1, parts // GROWTH)


def _program(
    candidate: _MmaCandidate, product: TensorExpr, shape: GemmShape, device: DeviceSpec, digest: str
) -> RProgram:
    split = candidate.split
    axes = tuple(axis.name for axis in product.axes)
    batch = (1,) * (len(axes) - 3)
    warp = RTile(axes=axes, shape=(*batch, split.warp_rows, split.warp_columns, split.step))
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
