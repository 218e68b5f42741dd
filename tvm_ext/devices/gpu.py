"""What is the same for all GPUs that kernels are emitted for. What differs between them is in the device tables.

`tests/unit/devices/test_occupancy.py` compares the tables' CUDA rows with these.
"""

from __future__ import annotations

WARP = 32
"""Threads of a CUDA warp. Lanes whose accesses to shared memory are served together, on wavefronts of 64 too."""

SECTOR_BYTES = 32
"""What a GPU's caches move at least: whole ones should be read and written (CUDA C++ Programming Guide).

The cost models take the device's own, ``transaction_bytes`` of the lowest layer, which is 64 on AMD's.
"""

VECTOR_BYTES = 16
"""The widest access of one thread: ``float4``, ``ld.global.v4.b32``, ``cp.async`` of 16 bytes, GCN's ``dwordx4``."""

FRAGMENT = 16
"""Rows and columns of what a warp multiplies at least: wmma's 16x16, a pair of mma's 16x8 (PTX ISA, mma.m16n8k16)."""

REGISTER_BYTES = 4
"""A thread's registers have 32 bits; ``register_bytes`` of every row of a GPU."""

ALL_BANKS_BYTES = 128
"""What shared memory serves at once: 32 banks of 4 bytes. (The K80's have 8; nothing here is laid out for that.)"""


# --- Rows in shared memory by the banks that they meet, counted in chunks of 16 bytes, the widest access of a thread --
CHUNKS_OF_ALL_BANKS = ALL_BANKS_BYTES // VECTOR_BYTES
"""Chunks of 16 bytes that shared memory's banks serve at once."""

ODD_PITCHES, EVEN_PITCHES = (3, 5), (2, 6)
"""Distances between padded rows, in chunks modulo `CHUNKS_OF_ALL_BANKS`, that wmma's loads may want."""


def padded_chunks(chunks: int, pitches: tuple[int, int] = ODD_PITCHES) -> int:
    """Chunks from row to row of a tile that wmma reads, for rows of ``chunks``: one of ``pitches`` modulo all banks.

    None of them lets 32 bytes of two neighbouring rows meet. Worked example: 64 halves, 8 chunks, are 11 apart.
    """
    return next(size for size in range(chunks, chunks + CHUNKS_OF_ALL_BANKS) if size % CHUNKS_OF_ALL_BANKS in pitches)
