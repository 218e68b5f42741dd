"""The kernel cache: entries in their files, what is dropped, and where the folder is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.support.cached_builds import files
from tvm_ext.options import kernel_cache_directory
from tvm_ext.support import kernel_cache
from tvm_ext.support.kernel_cache import CachedKernel, KernelCache, KernelParam, KernelRecord, decode, encode

KERNEL = CachedKernel(
    KernelRecord(symbol="f", choice="{}", params=(KernelParam(name="x", shape=(2, 3), dtype="float32"),)),
    b"\x7fELF\n\0",
)
KEY = "ab" + "0" * 62


# --- entries ---------------------------------------------------------------------------------------------------------


def test_an_entry_survives_its_file() -> None:
    assert decode(encode(KERNEL)) == KERNEL


@pytest.mark.parametrize("cut", range(0, len(encode(KERNEL)), 7))
def test_a_truncated_entry_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match=r"entry|checksum|schema"):
        decode(encode(KERNEL)[:cut])


@pytest.mark.parametrize("position", range(0, len(encode(KERNEL)), 11))
def test_a_changed_byte_is_noticed(position: int) -> None:
    content = bytearray(encode(KERNEL))
    content[position] ^= 1
    with pytest.raises(ValueError, match=r"entry|checksum|schema"):
        decode(bytes(content))


def test_an_entry_of_another_schema_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode(KERNEL)
    monkeypatch.setattr(kernel_cache, "SCHEMA", kernel_cache.SCHEMA + 1)
    with pytest.raises(ValueError, match="schema 1 instead of 2"):
        decode(content)


def test_what_is_put_is_found_and_the_rest_is_not(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    assert cache.get(KEY) is None
    cache.put(KEY, KERNEL)
    assert KernelCache(tmp_path).get(KEY) == KERNEL
    assert (cache.hits, cache.misses, cache.use().notes) == (0, 1, ())


def test_what_was_not_used_for_longest_is_dropped_first(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    size = len(encode(KERNEL))
    for number in range(10):
        cache.put(f"{number:064x}", KERNEL)
        os.utime(files(tmp_path)[-1], (1000 + number, 1000 + number))
        for path in files(tmp_path):
            if path.stat().st_mtime > 1e9:
                os.utime(path, (1000 + number, 1000 + number))
    assert KernelCache(tmp_path).get(f"{0:064x}") == KERNEL  # used just now: the first of all survives
    cache.limit_bytes = 5 * size
    assert cache.trim() == 6  # down to 0.8 of the limit, four entries
    kept = [number for number in range(10) if KernelCache(tmp_path).get(f"{number:064x}") is not None]
    assert kept == [0, 7, 8, 9]


def test_what_a_killed_writer_left_is_cleared_away_when_it_is_old(tmp_path: Path) -> None:
    KernelCache(tmp_path).put(KEY, KERNEL)
    fresh, old = (tmp_path / "ab" / name for name in (".x-1.kernel", ".x-2.kernel"))
    fresh.write_bytes(b"half"), old.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    assert kernel_cache.drop_oldest(tmp_path, 1 << 20) == 0
    assert (fresh.exists(), old.exists(), len(files(tmp_path))) == (True, False, 1)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_sources_that_make_kernels_decide_the_digest(tmp_path: Path) -> None:
    (tmp_path / "tir_passes").mkdir()
    (tmp_path / "bench").mkdir()
    emitter, helper = tmp_path / "tir_passes" / "emit.py", tmp_path / "bench" / "models.py"
    emitter.write_text("a = 1")
    first = kernel_cache.source_digest(tmp_path)
    helper.write_text("b = 1")
    assert kernel_cache.source_digest(tmp_path) == first
    emitter.write_text("a = 2")
    assert kernel_cache.source_digest(tmp_path) != first


# --- settings --------------------------------------------------------------------------------------------------------


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TVM_EXT_KERNEL_CACHE")
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path))
    assert kernel_cache_directory() == tmp_path / "kernels"
    assert kernel_cache_directory("off") is None
    assert kernel_cache_directory(str(tmp_path / "mine")) == tmp_path / "mine"
    monkeypatch.setenv("TVM_EXT_KERNEL_CACHE", str(tmp_path / "variable"))
    assert kernel_cache_directory() == tmp_path / "variable"
    assert kernel_cache_directory("off") is None
    monkeypatch.setenv("TVM_EXT_KERNEL_CACHE", "off")
    assert kernel_cache_directory() is None
