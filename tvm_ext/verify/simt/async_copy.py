"""The queue of asynchronous copies of every thread: cp.async, commit_group, wait_group.

Source: PTX ISA "cp.async", "cp.async.commit_group", "cp.async.wait_group". A copy belongs to the group that its thread
commits next; ``wait_group n`` ends when at most the n latest committed groups are unfinished. The hardware may finish
any copy earlier. Here none does: data lands when a wait demands it, so that what is read too early is caught.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from tvm_ext.errors import InputError
from tvm_ext.support.arrays import Array

Payload = TypeVar("Payload")
COPY_BYTES = (4, 8, 16)  # PTX ISA, cp.async: "cp-size"


def check_copy_size(size_bytes: int) -> None:
    """Raises InputError unless cp.async can copy that many bytes at once."""
    if size_bytes not in COPY_BYTES:
        raise InputError(f"cp.async cannot copy {size_bytes} bytes", f"copy {', '.join(map(str, COPY_BYTES))} bytes")


@dataclass(slots=True, eq=False)
class _Issued(Generic[Payload]):
    payload: Payload
    group: Array  # int, per lane
    waiting: Array  # bool, per lane


class AsyncCopyQueue(Generic[Payload]):
    """Copies in flight of a lane array of threads: ``shape`` is that of all masks given to the methods.

    Threads count their own groups, so that divergent commits are modelled. ``payload`` is the caller's: addresses,
    values.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._committed = np.zeros(shape, np.int64)
        self._issued: list[_Issued[Payload]] = []

    def issue(self, active: Array, payload: Payload) -> None:
        """The threads of ``active`` start one copy each, in the group that they will commit next."""
        if active.any():
            self._issued.append(_Issued(payload=payload, group=self._committed.copy(), waiting=active.copy()))

    def commit(self, active: Array) -> None:
        """``cp.async.commit_group``: what these threads issued since their last becomes a group, maybe empty."""
        self._committed += active

    def wait(self, active: Array, in_flight: int) -> list[tuple[Payload, Array]]:
        """``cp.async.wait_group in_flight``: (payload, threads) of all copies that land now, in the order of issue.

        Worked example: groups 0, 1, 2 committed, ``in_flight`` 1: groups 0 and 1 land, group 2 stays, and so does what
        was issued since and not committed, even for ``in_flight`` 0.
        """
        landed = []
        for copy in self._issued:
            now = copy.waiting & active & (copy.group < self._committed - in_flight)
            if now.any():
                copy.waiting &= ~now
                landed.append((copy.payload, now))
        self._issued = [copy for copy in self._issued if copy.waiting.any()]
        return landed

    def pending(self) -> list[tuple[Payload, Array]]:
        """(payload, threads) of all copies that have not landed, in the order of issue."""
        return [(copy.payload, copy.waiting.copy()) for copy in self._issued]
