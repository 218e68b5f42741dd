"""Tiles of attention on every CPU of the tables."""

from __future__ import annotations

import pytest

from tests.support.attentions import packed
from tvm_ext.cost.attention_time import AttentionClock
from tvm_ext.devices import device_db
from tvm_ext.records.attention import Attention, AttentionTiles
from tvm_ext.records.serialise import from_json, to_json

CPUS = [name for name in device_db.names() if device_db.lookup(name).kind == "cpu"]
SHAPES = [(128, 128, 64), (512, 512, 64), (1, 1024, 64), (197, 197, 80), (17, 17, 64), (1024, 77, 256), (5, 3, 1)]


def attention(queries: int, keys: int, features: int, dtype: str = "float32", order: str = "brhc") -> Attention:
    query, key = (packed((1, 12), rows, features, dtype, order) for rows in (queries, keys))
    return Attention(
        batch=12,
        queries=queries,
        keys=keys,
        features=features,
        value_features=features,
        scale=0.125,
        query=query,
        key=key,
        value=key,
        output=query,
    )


def tiles_of(work: Attention, cpu: str) -> AttentionTiles:
    tiles = AttentionClock(work, device_db.lookup(cpu)).usual_tiles()
    assert tiles is not None
    return tiles


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_fit_registers_and_first_cache(cpu: str, shape: tuple[int, int, int]) -> None:
    device, tiles = device_db.lookup(cpu), tiles_of(attention(*shape), cpu)
    _, keys, features = shape
    for rows in (tiles.key_rows, tiles.feature_rows):
        assert rows >= 1 and rows * tiles.query_vectors + tiles.query_vectors + 1 <= device.register_limit
    assert 1 <= tiles.key_rows <= tiles.key_block <= keys and tiles.feature_rows <= features
    capacity = device.layers[1].capacity_bytes
    assert capacity is not None
    block = tiles.key_block * tiles.query_block * 4
    assert block <= capacity or tiles.key_block <= tiles.lanes


def test_equal_tiles_where_they_hide_the_latency() -> None:
    tiles = tiles_of(attention(512, 512, 64), "cpu-cascade-lake")
    assert (tiles.key_block % tiles.key_rows, 64 % tiles.feature_rows) == (0, 0)
    assert 100 % tiles_of(attention(128, 100, 64), "cpu-cascade-lake").key_block == 0


def test_what_is_copied() -> None:
    """Heads behind each other are read in place; side by side, rows thrash; many blocks of queries share one copy."""
    assert tiles_of(attention(512, 512, 64, order="bhrc"), "cpu-cascade-lake").copies == "none"
    assert tiles_of(attention(512, 512, 64), "cpu-cascade-lake").copies == "shared"
    assert tiles_of(attention(128, 128, 64), "cpu-cascade-lake").copies == "values"
    assert tiles_of(attention(64, 64, 64, dtype="float16", order="bhrc"), "cpu-cascade-lake").copies == "block"
    assert tiles_of(attention(1, 128, 64), "cpu-cascade-lake").copies == "none"


def test_rows_that_lie_apart_are_asked_for_ahead() -> None:
    """Heads side by side are; not heads behind each other, what is copied once, a single matrix, or what fills L2."""
    cpu = "cpu-cascade-lake"
    assert tiles_of(attention(49, 49, 32), cpu).ahead_bytes == 64
    assert tiles_of(attention(49, 49, 32, order="bhrc"), cpu).ahead_bytes == 0
    assert tiles_of(attention(512, 512, 64), cpu).ahead_bytes == 0
    assert tiles_of(attention(1, 8192, 64), cpu).ahead_bytes == 0


def test_gpus_have_no_registers_for_queries() -> None:
    assert AttentionClock(attention(128, 128, 64), device_db.lookup("nvidia-a100")).usual_tiles() is None


def test_records_go_through_json() -> None:
    work = attention(17, 19, 8)
    assert from_json(Attention, to_json(work)) == work
    tiles = tiles_of(work, "cpu-avx2")
    assert from_json(AttentionTiles, to_json(tiles)) == tiles
    assert "queries" in str(work) and "keys" in str(tiles)
