"""The tiles of a chain of products on a GPU, constructed by alignment and ranked by the model (Roller's way, §3.1).

Threadblock residence leaves little to choose: columns are those of the products, in whole fragments or vectors; rows
are whole warps'; factors are staged in steps of whole memory transactions, those behind the first product whole where
they fit. A few dozen tiles are left; all are predicted, what does not fit the device says what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tvm_ext.analysis.gemm_form import reduction_step, uses_mfma, uses_mma_sync, uses_wmma
from tvm_ext.devices.capabilities import MATRIX_UNITS_SINCE, MMA_SYNC_SINCE, has
from tvm_ext.devices.gpu import (
    CHUNKS_OF_ALL_BANKS,
    EVEN_PITCHES,
    FRAGMENT,
    ODD_PITCHES,
    REGISTER_BYTES,
    VECTOR_BYTES,
    WARP,
    padded_chunks,
)
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import (
    blocks_per_unit,
    max_block_threads,
    max_thread_registers,
    shared_limit_bytes,
    static_shared_bytes,
)
from tvm_ext.support.arithmetic import ceil_div

from .gpu_chain import ChainTile, ChainTime, ChainUnits, ProductChain, ProductTile, Residence, padded, predict_chain

# A choice: what is looked at with matrix units, powers of two that whole fragments fill.
ROWS = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8)
WARP_ROWS = (16, 32, 48, 64)
DEPTHS_BYTES = (128, 64, 32)
"""Reduction steps, by the bytes of one line: a cache line of four memory transactions, two, one."""
ADDRESS_REGISTERS = 44
"""Registers of a thread beside accumulators and fragments: addresses, copies under way."""

VECTOR = VECTOR_BYTES // REGISTER_BYTES
"""Floats that a thread of the vector units reads at a time."""
# A choice: what is looked at with vector units, powers of two that divide a block's threads.
THREADS_ACROSS = (1, 2, 4, 8, 16, 32)
THREADS = (64, 128, 256)
THREAD_ROWS = (1, 2, 4, 8)
MAX_THREAD_ELEMENTS = 64
SIMT_DEPTHS = (32, 16, 8, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainTiles:
    """The tiles that fit, best predicted first, each with its time; where there is none, ``refusal`` says why."""

    ranked: tuple[tuple[ChainTile, ChainTime], ...]
    refusal: str | None


def construct_chain(chain: ProductChain, device: DeviceSpec, units: ChainUnits) -> ChainTiles:
    """All tiles of ``chain`` for ``units`` of ``device`` that fit its registers and shared memory."""
    if units == "matrix units" and not (uses_mfma(device) or has(device, MATRIX_UNITS_SINCE)):
        return ChainTiles(ranked=(), refusal=f"{device.name} has no matrix units")
    if units == "matrix units" and uses_mfma(device) and chain.dtype != "float16":
        return ChainTiles(ranked=(), refusal=f"chains of {chain.dtype} have no kernel for AMD's matrix cores")
    found, lacking = [], []
    tiles = _mma_tiles(chain, device) if units == "matrix units" else _simt_tiles(chain, device)
    for tile in dict.fromkeys(tiles):
        why = why_no_room(tile, device)
        if why is None:
            found.append((tile, predict_chain(chain, tile, device)))
        else:
            lacking.append((tile.shared_bytes + REGISTER_BYTES * tile.registers * tile.threads, why))
    if not found:
        columns = " -> ".join(str(product.columns) for product in chain.products)
        why = min(lacking)[1] if lacking else "no tile has whole warps for them"
        return ChainTiles(ranked=(), refusal=f"{columns} columns do not stay in a threadblock: {why}")
    # among equals, which memory or the launch binds, the one that loads its layers least, then in the fewest steps
    found.sort(
        key=lambda item: (item[1].time_s, item[1].busy_s, item[1].loads_s, _step_count(item[0]), item[0].shared_bytes)
    )
    return ChainTiles(ranked=tuple(found), refusal=None)


def _step_count(tile: ChainTile) -> int:
    return sum(product.steps for product in tile.products)


def why_no_room(tile: ChainTile, device: DeviceSpec) -> str | None:
    """None where ``device`` has room for a block of ``tile``, else what it lacks."""
    registers, threads = max_thread_registers(device), max_block_threads(device)
    if tile.registers > registers:
        return f"{tile.registers} registers of a thread exceed {device.name}'s {registers}"
    limit, needed = shared_limit_bytes(device), tile.shared_bytes
    if declared_shared(tile, device):
        limit, needed = static_shared_bytes(device), needed - staging_bytes(tile, device)
    if needed > limit:
        return f"{needed} bytes of shared memory exceed {device.name}'s {limit}"
    if threads is not None and tile.threads > threads:
        return f"{tile.threads} threads exceed {device.name}'s {threads}"
    if blocks_per_unit(tile.use, device) < 1:
        return f"not one block of {tile.threads} threads with {tile.registers} registers fits a unit of {device.name}"
    return None


def declared_shared(tile: ChainTile, device: DeviceSpec) -> bool:
    """Whether tiles keep to shared memory that a kernel declares: OpenCL has no other, and wmma's floats have the rest.

    (Stock StorageRewrite would put the floats into a tile of halves, then refuse.)
    """
    return tile.units == "vector units" or not has(device, MMA_SYNC_SINCE)


def staging_bytes(tile: ChainTile, device: DeviceSpec) -> int:
    """Of a tile's shared memory, what is wmma's floats."""
    wmma = tile.units == "matrix units" and uses_wmma(device)
    return tile.warps * STAGING_BYTES if wmma else 0


# ---- matrix units ---------------------------------------------------------------------------------------------------


def _mma_tiles(chain: ProductChain, device: DeviceSpec) -> Iterator[ChainTile]:
    """Wmma's accumulators are opaque, and mfma's are in other lanes than its factors: values stay in shared memory."""
    step, lanes = reduction_step("float16", device), device.teu_lanes
    columns = [padded(product.columns, step) for product in chain.products]
    wmma, registers = uses_wmma(device), uses_mma_sync(device)
    residences: tuple[Residence, ...] = ("registers", "shared memory") if registers else ("shared memory",)
    for warps in WARPS:
        for rows in ROWS:
            for residence in residences:
                across = _warps_across(columns, rows, warps, residence)
                if across is None:
                    continue
                for depth in _depths(chain, step):
                    for whole in (True, False):
                        tile = _mma_tile(chain, columns, rows, warps, across, depth, residence, lanes, whole=whole)
                        yield _by_wmma(tile, chain) if wmma else tile


def _warps_across(columns: Sequence[int], rows: int, warps: int, residence: Residence) -> list[int] | None:
    """Warps along the columns of each product; None where warps cannot be laid out on whole fragments.

    In registers each warp has whole rows. Through shared memory each product has the layout whose warps load least.
    Worked example, 64 rows of 64 columns in 4 warps: 2 x 2 warps of 32 x 32 load 4 x 64 lines, 4 x 1 of 16 x 64 4 x 80.
    """
    found = []
    for count in columns:
        best: tuple[int, int] | None = None
        for across in (1, 2, 4, 8) if residence == "shared memory" else (1,):
            down = warps // across
            if warps % across or count % (FRAGMENT * across) or rows % (FRAGMENT * max(1, down)):
                continue
            if rows // down not in WARP_ROWS:
                continue
            load = rows // down + count // across
            best = min(best, (load, across)) if best else (load, across)
        if best is None:
            return None
        found.append(best[1])
    return found


def _depths(chain: ProductChain, fragment: int) -> list[int]:
    """Reduction steps of the first product, none padding it by more than a fragment."""
    depth = padded(chain.products[0].depth, fragment)
    steps = [size // chain.itemsize for size in DEPTHS_BYTES if not size // chain.itemsize % fragment]
    return [step for step in steps if ceil_div(depth, step) * step - depth < fragment] or [fragment]


def _mma_tile(
    chain: ProductChain,
    columns: Sequence[int],
    rows: int,
    warps: int,
    across: Sequence[int],
    depth: int,
    residence: Residence,
    lanes: int,
    *,
    whole: bool,
) -> ChainTile:
    first = ProductTile(
        columns=columns[0], depth=depth, steps=ceil_div(chain.products[0].depth, depth), across=across[0]
    )
    rest = [
        _staged(reduction, own, count, whole=whole, steps=(64, 32, 16))
        for reduction, own, count in zip(columns, columns[1:], across[1:], strict=False)
    ]
    tiles = (first, *rest)
    shared = (rows + columns[0]) * depth + sum(tile.columns * tile.depth for tile in rest)
    if residence == "shared memory":
        shared += rows * sum(columns[:-1])
    return ChainTile(
        units="matrix units",
        residence=residence,
        rows=rows,
        threads=warps * lanes,
        products=tiles,
        registers=_mma_registers(tiles, rows, warps, residence, lanes),
        shared_bytes=shared * chain.itemsize,
        lanes=lanes,
    )


STAGING_BYTES = 1536
"""Of each warp, through which it takes one of wmma's accumulators apart: 16 rows of 16 floats, 24 apart."""


def _by_wmma(tile: ChainTile, chain: ProductChain) -> ChainTile:
    """``tile`` with what wmma takes: rows are padded, at most by so much, and fragments have every element twice."""
    first, chunk = tile.products[0], VECTOR_BYTES // chain.itemsize
    shapes = [(tile.rows, first.depth), *((product.columns, product.depth) for product in tile.products)]
    shapes += [(product.columns, tile.rows) for product in tile.products[:-1]]
    size = sum(_padded_bytes(shape, chunk) for shape in shapes) + tile.warps * STAGING_BYTES
    registers = 0
    for position, product in enumerate(tile.products):
        rows, columns = tile.warp_rows(position), product.columns // product.across
        registers = max(registers, rows * columns // WARP + 8 * (1 + columns // FRAGMENT))
    return replace(tile, shared_bytes=size, registers=registers + ADDRESS_REGISTERS)


def _padded_bytes(shape: tuple[int, int], chunk: int) -> int:
    """The most that a tile takes, whichever of its sides is the row and whichever pitch that gets."""
    rows = ((side // chunk, count) for side, count in (shape, shape[::-1]))
    return max(padded_chunks(row, p) * count for row, count in rows for p in (ODD_PITCHES, EVEN_PITCHES)) * VECTOR_BYTES


def _staged(reduction: int, columns: int, across: int, *, whole: bool, steps: Sequence[int]) -> ProductTile:
    """The tile of a later product: its factor whole, or in the longest of ``steps`` that divides its reduction."""
    depth = reduction if whole else next((step for step in steps if reduction % step == 0), reduction)
    return ProductTile(columns=columns, depth=depth, steps=reduction // depth, across=across)


def _mma_registers(tiles: Sequence[ProductTile], rows: int, warps: int, residence: Residence, lanes: int) -> int:
    """32-bit registers of a thread: accumulators, a step's fragments, and the half as wide values that are held."""
    most = 0
    for position, tile in enumerate(tiles):
        warp_rows, warp_columns = rows * tile.across // warps, tile.columns // tile.across
        size = warp_rows * warp_columns // lanes + warp_columns // 4
        if position and residence == "registers":
            size += warp_rows * tiles[position - 1].columns // (2 * WARP)
        else:
            size += warp_rows // 4
        if position < len(tiles) - 1 and residence == "registers":
            size = max(size, 3 * warp_rows * warp_columns // (2 * WARP))
        most = max(most, size)
    return most + ADDRESS_REGISTERS


# ---- vector units ---------------------------------------------------------------------------------------------------


def _simt_tiles(chain: ProductChain, device: DeviceSpec) -> Iterator[ChainTile]:
    for threads in THREADS:
        if threads % device.teu_lanes:
            continue
        for across in THREADS_ACROSS:
            columns = [ceil_div(p.columns, across * VECTOR) * across * VECTOR for p in chain.products]
            if any(across > 1 and size >= 2 * p.columns for size, p in zip(columns, chain.products, strict=True)):
                continue  # half of the threads would compute nothing
            for thread_rows in THREAD_ROWS:
                if thread_rows * max(columns) // across > MAX_THREAD_ELEMENTS:
                    continue
                for depth in SIMT_DEPTHS:
                    if depth < 2 * chain.products[0].depth or depth == SIMT_DEPTHS[-1]:
                        yield _simt_tile(chain, columns, threads, across, thread_rows, depth)


def _simt_tile(
    chain: ProductChain, columns: Sequence[int], threads: int, across: int, thread_rows: int, depth: int
) -> ChainTile:
    rows = threads // across * thread_rows
    first = ProductTile(columns=columns[0], depth=depth, steps=ceil_div(chain.products[0].depth, depth), across=across)
    rest = [_staged(reduction, own, across, whole=False, steps=(32, 16, 8, 4)) for reduction, own in pairwise(columns)]
    tiles = (first, *rest)
    shared = rows * row_pitch(depth, across) + sum(tile.columns * tile.depth for tile in tiles)
    shared += rows * sum(row_pitch(size, across) for size in columns[:-1])
    elements = thread_rows * max(columns) // across
    return ChainTile(
        units="vector units",
        residence="shared memory",
        rows=rows,
        threads=threads,
        products=tiles,
        registers=elements + thread_rows * VECTOR + max(columns) // across + ADDRESS_REGISTERS // 2,
        shared_bytes=shared * REGISTER_BYTES,
    )


def row_pitch(row: int, across: int) -> int:
    """Floats from row to row of a tile whose rows ``across`` threads share: eight threads in a row meet all banks.

    They read one chunk of 16 bytes of each of 8 / ``across`` rows, and write ``across`` chunks of each. Worked example,
    rows of 8 chunks and 2 threads a row: 10 apart, so that rows 0 ... 3 start at chunks 0, 2, 4, 6 of the banks.
    """
    chunks = row // VECTOR
    if across >= CHUNKS_OF_ALL_BANKS:
        return row
    wanted = {1: (1, 3, 5, 7), 2: (2, 6), 4: (4,)}[across]
    while chunks % CHUNKS_OF_ALL_BANKS not in wanted:
        chunks += 1
    return chunks * VECTOR
