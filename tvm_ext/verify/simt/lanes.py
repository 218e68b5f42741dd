"""The lanes of a launch: every thread of a batch of blocks is one position on a single NumPy axis.

Lane ``l`` of a batch is thread ``l % padded_threads`` of its block number ``l // padded_threads``. Blocks are padded to
whole warps; padding lanes are never active. Worked example: blocks of 48 threads, warps of 32: 64 lanes a block, of
which the last 16 are padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.arrays import Array

AXES = "xyz"


class Mask:
    """Which lanes are active: ``flags`` (bool, one a lane), ``index`` (their numbers) or None where all are."""

    __slots__ = ("count", "flags", "index")

    def __init__(self, flags: Array) -> None:
        self.flags = flags
        index = np.flatnonzero(flags)
        self.count = len(index)
        self.index: Array | None = None if self.count == len(flags) else index


class Lanes:
    """Geometry of a batch of blocks.

    * ``extents``: thread tag (``"threadIdx.x"``, ``"blockIdx.y"``, ...) to extent; absent tags count as 1.
    * ``blocks``: linear numbers of the batch's blocks, ``x`` fastest.
    * ``warp_lanes``: threads of a warp: 32, or 64 of an AMD wavefront.
    """

    def __init__(self, extents: Mapping[str, int], blocks: Sequence[int], warp_lanes: int) -> None:
        self.warp_lanes = warp_lanes
        self.thread_extents = [extents.get(f"threadIdx.{axis}", 1) for axis in AXES]
        self.block_extents = [extents.get(f"blockIdx.{axis}", 1) for axis in AXES]
        self.threads = prod(self.thread_extents)
        self.padded_threads = ceil_div(self.threads, warp_lanes) * warp_lanes
        self.blocks = np.asarray(blocks, np.int64)
        self.count = len(self.blocks) * self.padded_threads
        self.number = np.arange(self.count)
        self.thread = self.number % self.padded_threads
        self.row = self.number // self.padded_threads  # of the block in this batch
        self.identity = self.blocks[self.row] * self.padded_threads + self.thread  # the same in every batch
        self.valid = Mask(self.thread < self.threads)

    def coordinate(self, tag: str) -> Array | int:
        """The value of ``threadIdx.x``, ``blockIdx.y``, ... in each lane (int32); one int where all agree."""
        kind, axis = tag.split(".")
        position = AXES.index(axis)
        extents = self.thread_extents if kind == "threadIdx" else self.block_extents
        if extents[position] == 1:
            return 0
        flat = self.thread if kind == "threadIdx" else self.blocks[self.row]
        if kind == "blockIdx" and len(self.blocks) == 1:
            return int(self.blocks[0]) // prod(extents[:position]) % extents[position]
        return (flat // prod(extents[:position]) % extents[position]).astype(np.int32)

    def name(self, identity: int) -> str:
        """A lane's identity in words: ``"thread 7 of block 3"``."""
        block, thread = divmod(int(identity), self.padded_threads)
        return f"thread {thread} of block {block}"
