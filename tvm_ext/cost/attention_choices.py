"""Other tiles that an attention's kernel could have than those of `attention_time.choose_tiles`; what each costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.errors import IllegalRewrite
from tvm_ext.records.attention import Attention, AttentionTiles, Copies
from tvm_ext.support.arithmetic import ceil_div

from .attention_time import (
    FLOAT_BYTES,
    MOST_QUERY_VECTORS,
    choose_tiles,
    kernel_seconds,
    most_rows,
    tiles_of_vectors,
)

SCATTERED = 1.1
"""How much longer it takes to read keys and values where they lie, if the model would rather have them copied."""


def attention_candidates(work: Attention, device: DeviceSpec) -> list[tuple[AttentionTiles, float]]:
    """All tiles with the seconds that the model expects of each, those of `choose_tiles` first; none without SIMD."""
    usual = choose_tiles(work, device)
    if usual is None:
        return []
    found = {usual: _seconds(work, usual, usual, device)}
    for vectors in range(1, MOST_QUERY_VECTORS + 1):
        base = tiles_of_vectors(work, device, usual.lanes, vectors)
        for tiles in _like(base, work, device) if base is not None else ():
            found.setdefault(tiles, _seconds(work, tiles, base or usual, device))
    return list(found.items())


def check_attention_tiles(work: Attention, tiles: AttentionTiles, device: DeviceSpec) -> None:
    """Raise IllegalRewrite where ``tiles`` are none of `attention_candidates`."""
    if not any(tiles == item for item, _ in attention_candidates(work, device)):
        raise IllegalRewrite(f"attention of {work} on {device.name} cannot have {tiles}")


def _like(base: AttentionTiles, work: Attention, device: DeviceSpec) -> Iterator[AttentionTiles]:
    """Tiles with as many registers of queries: other blocks of keys, rows of register tiles, copies."""
    rows = most_rows(base.query_vectors, device)
    for block, copies in product(_blocks(base, work), _legal_copies(work)):
        for keys, features in product(
            _rows(base.key_rows, rows, block), _rows(base.feature_rows, rows, work.value_features)
        ):
            yield replace(base, key_block=block, copies=copies, key_rows=keys, feature_rows=features)


def _blocks(base: AttentionTiles, work: Attention) -> list[int]:
    """Quarters to twice the block that L1 holds, whole registers of keys; never more than there are."""
    sizes = [base.key_block * factor // 4 // base.lanes * base.lanes for factor in (1, 2, 8)]
    return sorted({base.key_block, *(min(size, work.keys) for size in sizes if size)})


def _rows(usual: int, most: int, extent: int) -> list[int]:
    """Rows of a register tile out of ``extent``, from half of what the registers hold on."""
    sizes = (usual, *(most * share // 4 for share in (2, 3, 4)))
    return sorted({min(extent, max(1, size)) for size in sizes})


def _legal_copies(work: Attention) -> tuple[Copies, ...]:
    """Half precision is read as float32, and so copied."""
    half = any(itemsize_bytes(item.dtype) != FLOAT_BYTES for item in (work.key, work.value))
    return ("block", "shared") if half else ("none", "values", "block", "shared")


def _seconds(work: Attention, tiles: AttentionTiles, usual: AttentionTiles, device: DeviceSpec) -> float:
    """`kernel_seconds`, with the copies: a load and a store of each register, by each task or once."""
    blocks = ceil_div(work.queries, tiles.query_block)
    times = {"none": 0, "values": blocks, "block": blocks, "shared": 1}[tiles.copies]
    features = work.value_features + (work.features if tiles.copies != "values" else 0)
    cycles = 2 * work.batch * times * work.keys * features / tiles.lanes / device.unit_count
    slower = SCATTERED if tiles.copies == "none" and usual.copies != "none" else 1.0
    return slower * kernel_seconds(work, tiles, device) + cycles / Machine(device).hz
