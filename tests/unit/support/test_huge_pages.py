"""Constants that are loaded lie in pages of 2 MiB."""

from __future__ import annotations

import errno
import mmap
import sys
from pathlib import Path

import pytest

from tvm_ext.support import huge_pages
from tvm_ext.support.huge_pages import HUGE_BYTES, Range, in_huge_pages, whole_pages

MIB = 1 << 20


def mib(ranges: list[Range]) -> list[Range]:
    return [(start // MIB, end // MIB) for start, end in ranges]


@pytest.mark.parametrize(
    ("now", "before", "found"),
    [
        ([(0, 9)], [(3, 4)], [(0, 2), (4, 8)]),
        ([(0, 9)], [], [(0, 8)]),
        ([(1, 9)], [(1, 5)], [(6, 8)]),  # memory that was there and has grown
        ([(0, 4), (7, 13)], [(0, 4), (20, 30)], [(8, 12)]),
        ([(2, 4)], [(0, 10)], []),
        ([(3, 5)], [], []),  # two halves of pages
    ],
)
def test_whole_pages_are_those_that_are_new(now: list[Range], before: list[Range], found: list[Range]) -> None:
    scaled = [[(start * MIB, end * MIB) for start, end in ranges] for ranges in (now, before)]
    assert mib(whole_pages(*scaled)) == found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("failure", [0, errno.EINVAL])
def test_what_is_allocated_meanwhile_is_asked_for(failure: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second advice is for kernels that do not know the first."""
    asked: list[tuple[int, Range]] = []

    def advise(start: int, end: int, advice: int) -> int:
        asked.append((advice, (start, end)))
        return failure if advice == huge_pages._COLLAPSE else 0

    monkeypatch.setattr(huge_pages, "_advise", advise)
    monkeypatch.setattr(huge_pages, "_may_ask", lambda: True)
    size = 6 * HUGE_BYTES
    known = huge_pages._anonymous()
    with in_huge_pages():
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        made = huge_pages._anonymous()
    collapsed = [own for advice, own in asked if advice == huge_pages._COLLAPSE]
    later = [own for advice, own in asked if advice == huge_pages._HUGEPAGE]
    assert sum(end - start for start, end in collapsed) >= size - 2 * HUGE_BYTES
    assert collapsed == whole_pages(made, known)
    assert later == (collapsed if failure else [])
    memory.close()


def test_a_system_that_gives_none_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "enabled"
    monkeypatch.setattr(huge_pages, "_POLICY", policy)
    assert not huge_pages._may_ask()
    for text, may in (("always madvise [never]\n", False), ("always [madvise] never\n", True)):
        policy.write_text(text)
        assert huge_pages._may_ask() is may
