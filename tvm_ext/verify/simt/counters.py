"""Counts what a warp's request costs: 32-byte sectors of global memory, wavefronts of shared memory.

Sources: CUDA Best Practices Guide, "Coalesced Access to Global Memory"; CUDA Programming Guide, "Shared Memory" (32
banks of 4 bytes; lanes of 8 bytes are served by half-warps, of 16 bytes by quarter-warps).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tvm_ext.support.arrays import Array

INACTIVE = -1
"""The address of a lane that takes no part in a request."""


def distinct_in_rows(rows: Array) -> Array:
    """Of ``(n, m)`` non-negative integers (`INACTIVE` ones left out): how many distinct ones each row has, ``(n,)``."""
    ordered = np.sort(rows, axis=1)
    first = np.ones(ordered.shape, bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    return np.asarray((first & (ordered >= 0)).sum(axis=1))


def global_request(addresses: Array, width_bytes: int, sector_bytes: int) -> tuple[int, int, int]:
    """(requests, sectors, distinct bytes) of byte addresses ``(warps, lanes)``, ``width_bytes`` read at each.

    Worked example: 32 lanes read 4 bytes each, side by side and aligned: one request, 4 sectors of 32 bytes, 128 bytes.
    Two float apart: 8 sectors for 128 bytes, an efficiency of 50 %.
    """
    active = addresses >= 0
    requests = int(active.any(axis=1).sum())
    if width_bytes <= sector_bytes and not (np.where(active, addresses, 0) % width_bytes).any():
        pieces = addresses  # no access crosses a sector
        useful = int(distinct_in_rows(np.where(active, addresses // width_bytes, INACTIVE)).sum()) * width_bytes
    else:
        pieces = _every_byte(addresses, width_bytes)
        useful = int(distinct_in_rows(pieces).sum())
    sectors = np.where(pieces >= 0, pieces // sector_bytes, INACTIVE)
    return requests, int(distinct_in_rows(sectors).sum()), useful


def _every_byte(addresses: Array, width_bytes: int) -> Array:
    """``(warps, lanes)`` to ``(warps, lanes * width)``: all bytes of each access."""
    every = addresses[:, :, None] + np.arange(width_bytes)
    return np.where(addresses[:, :, None] >= 0, every, INACTIVE).reshape(len(addresses), -1)


def shared_request(addresses: Array, width_bytes: int, banks: int, bank_bytes: int) -> tuple[int, int, int]:
    """(requests, wavefronts, least possible wavefronts) of byte addresses ``(warps, lanes)`` in shared memory.

    A phase (32 lanes of up to 4 bytes, 16 of 8, 8 of 16) takes as many wavefronts as its busiest bank has distinct
    words. Worked example: 32 lanes read floats 32 apart: one bank, 32 words, 32 wavefronts where 1 would do.
    """
    words = max(1, width_bytes // bank_bytes)
    lanes = max(1, min(addresses.shape[1], banks * bank_bytes // max(width_bytes, bank_bytes)))
    phases = addresses.reshape(-1, lanes)
    active = phases >= 0
    word = phases[:, :, None] // bank_bytes + np.arange(words)
    word = np.where(active[:, :, None], word, INACTIVE).reshape(len(phases), -1)
    wavefronts = _busiest_bank(word, banks)
    requests = int((addresses >= 0).any(axis=1).sum())
    return requests, int(wavefronts.sum()), int(active.any(axis=1).sum())


def _busiest_bank(words: Array, banks: int) -> Array:
    """Per row of ``(n, m)`` word numbers: the largest number of distinct words in one bank."""
    ordered = np.sort(words, axis=1)
    fresh = ordered >= 0
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    row = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    load = np.bincount((row * banks + ordered % banks)[fresh], minlength=len(words) * banks)
    return np.asarray(load.reshape(len(words), banks).max(axis=1))


@dataclass(kw_only=True, slots=True)
class AccessCount:
    """What one access of the source cost in all its executions.

    ``scope`` is "global", "shared" or "local"; ``requests`` counts warps' instructions. Global: ``sectors`` moved and
    ``useful_bytes`` (distinct bytes asked for). Shared: ``wavefronts`` and the least that would do.
    """

    statement: str
    buffer: str
    scope: str
    store: bool
    width_bytes: int
    requests: int = 0
    lanes: int = 0
    useful_bytes: int = 0
    sectors: int = 0
    wavefronts: int = 0
    least_wavefronts: int = 0

    @property
    def bytes(self) -> int:
        """Asked for by all lanes together."""
        return self.lanes * self.width_bytes

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the least."""
        return self.wavefronts - self.least_wavefronts


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Totals of a run; ``accesses`` has them for each access of the source, in order of first execution.

    ``sector_bytes`` is the device's (32 on NVIDIA GPUs). ``flops`` counts floating-point additions, multiplications,
    divisions, minima and maxima of active lanes, and two per multiply-add of mma and wmma.
    """

    accesses: tuple[AccessCount, ...]
    sector_bytes: int
    barriers: int
    mma_count: int
    flops: int

    def select(self, *, scope: str, store: bool | None = None) -> tuple[AccessCount, ...]:
        """The accesses of ``scope``, loads and stores unless ``store`` says which."""
        return tuple(a for a in self.accesses if a.scope == scope and store in (None, a.store))

    def total(self, name: str, *, scope: str, store: bool | None = None) -> int:
        """The sum of one field of `AccessCount`."""
        return sum(getattr(access, name) for access in self.select(scope=scope, store=store))

    def sector_efficiency(self, *, store: bool | None = False) -> float | None:
        """Useful bytes over moved bytes of global memory; None where there was no such access."""
        return efficiency(self.select(scope="global", store=store), self.sector_bytes)

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts of shared memory beyond the least possible."""
        return self.total("conflicts", scope="shared")


def efficiency(accesses: Iterable[AccessCount], sector_bytes: int) -> float | None:
    """Useful over moved bytes of these accesses of global memory."""
    chosen = tuple(accesses)
    moved = sum(a.sectors for a in chosen) * sector_bytes
    return sum(a.useful_bytes for a in chosen) / moved if moved else None


def as_rows(counters: Counters) -> list[dict[str, Any]]:
    """``counters.accesses`` as plain dictionaries, for JSON."""
    return [{f.name: getattr(access, f.name) for f in fields(access)} for access in counters.accesses]
