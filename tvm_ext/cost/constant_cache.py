"""Which constants a vEU's own cache still holds (a CPU's L2): those of the rTasks that it ran last.

Worked example, LSTM cells of 256 units as two rTasks of 512 KiB of weights each, a cache of 1 MiB: a vEU that runs the
first half of layer 0 step after step reads its weights once. One that takes turns between three layers reads them
every time, since what was used longest ago leaves first. Activations are not counted.
"""

from __future__ import annotations

from collections import OrderedDict

ConstantKey = tuple[str, str]
"""What is read and by which code: the operator's constants, the kernel's name."""


class ConstantCache:
    """The cache of one vEU, of ``capacity_bytes``; it holds one range of rTasks' constants for each `ConstantKey`."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._held: OrderedDict[ConstantKey, tuple[int, int, int]] = OrderedDict()  # begin, end, bytes of one rTask
        self._used = 0

    def copy(self) -> ConstantCache:
        """One that goes its own way from here."""
        other = ConstantCache(self._capacity)
        other._held, other._used = self._held.copy(), self._used
        return other

    def missing_bytes(self, key: ConstantKey, begin: int, end: int, task_bytes: int) -> int:
        """What rTasks ``begin`` to ``end`` - 1 would have to bring in."""
        first, behind, _ = self._held.get(key, (0, 0, 0))
        there = max(0, min(end, behind) - max(begin, first))
        return (end - begin - there) * task_bytes

    def run(self, key: ConstantKey, begin: int, end: int, task_bytes: int) -> int:
        """Have rTasks ``begin`` to ``end`` - 1 run: what they bring in, and what leaves for it."""
        missing = self.missing_bytes(key, begin, end, task_bytes)
        old_begin, old_end, old_bytes = self._held.pop(key, (begin, end, 0))
        self._used -= (old_end - old_begin) * old_bytes
        if old_begin <= end and begin <= old_end and old_bytes == task_bytes:
            begin, end = min(begin, old_begin), max(end, old_end)
        self._hold(key, begin, end, task_bytes)
        return missing

    def _hold(self, key: ConstantKey, begin: int, end: int, task_bytes: int) -> None:
        size = (end - begin) * task_bytes
        if not size or size > self._capacity:
            return
        self._held[key] = (begin, end, task_bytes)
        self._used += size
        while self._used > self._capacity:
            _, (first, behind, each) = self._held.popitem(last=False)
            self._used -= (behind - first) * each
