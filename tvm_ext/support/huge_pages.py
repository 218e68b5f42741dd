"""Pages of 2 MiB for constants that TVM reads from a library: TVM asks for none. NumPy does, whose arrays builds have.

A product of one row by 1024 x 4096 touches 4,096 pages of 4 KiB, more than a core finds without walking its tables.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

HUGE_BYTES = 2 << 20  # of x86-64, and of AArch64 with pages of 4 KiB
_HUGEPAGE, _COLLAPSE = 14, 25  # advice for madvise(2); the second takes effect at once, and Linux has it since 6.1
_POLICY = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")

Range = tuple[int, int]
"""First address, and the first behind."""


@contextlib.contextmanager
def in_huge_pages() -> Iterator[None]:
    """What this process allocates meanwhile lies in pages of 2 MiB, where the system gives them to whoever asks.

    By address alone: TVM does not tell where its constants are. What other threads allocate has larger pages, too.
    """
    before = _anonymous() if _may_ask() else None
    yield
    if before is not None:
        for start, end in whole_pages(_anonymous(), before):
            if _advise(start, end, _COLLAPSE) == errno.EINVAL:
                _advise(start, end, _HUGEPAGE)  # an older kernel, which merges pages by and by


def whole_pages(now: Sequence[Range], before: Sequence[Range]) -> list[Range]:
    """The pages of 2 MiB, in runs, in ranges of ``now`` that touch none of ``before``; both are sorted.

    Worked example, in MiB: of 0-9 now, 3-4 before, there are 0-2 and 4-8.
    """
    found = []
    for start, end in now:
        first = start
        for low, high in [*((low, high) for low, high in before if low < end and high > start), (end, end)]:
            pages = -(-first // HUGE_BYTES) * HUGE_BYTES, low // HUGE_BYTES * HUGE_BYTES
            if pages[0] < pages[1]:
                found.append(pages)
            first = max(first, high)
    return found


def _may_ask() -> bool:
    try:
        return "[never]" not in _POLICY.read_text()
    except OSError:
        return False


def _anonymous() -> list[Range]:
    """The process's memory without a file behind it that can be written."""
    found = []
    for line in _MAPS.read_text().splitlines():
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end))
    return found


def _advise(start: int, end: int, advice: int) -> int:
    """Call ``madvise``; 0, or what was wrong: no reason not to go on."""
    call = ctypes.CDLL(None, use_errno=True).madvise
    failed = call(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(advice))
    return ctypes.get_errno() if failed else 0
