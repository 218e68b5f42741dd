"""Rows in shared memory by the banks that they meet, counted in chunks of 16 bytes, the widest access of a thread."""

from __future__ import annotations

from .gpu import ALL_BANKS_BYTES, VECTOR_BYTES

CHUNKS_OF_ALL_BANKS = ALL_BANKS_BYTES // VECTOR_BYTES
"""Chunks of 16 bytes that shared memory's banks serve at once."""

ODD_PITCHES, EVEN_PITCHES = (3, 5), (2, 6)
"""Distances between padded rows, in chunks modulo `CHUNKS_OF_ALL_BANKS`, that wmma's loads may want."""


def padded_chunks(chunks: int, pitches: tuple[int, int] = ODD_PITCHES) -> int:
    """Chunks from row to row of a tile that wmma reads, for rows of ``chunks``: one of ``pitches`` modulo all banks.

    None of them lets 32 bytes of two neighbouring rows meet. Worked example: 64 halves, 8 chunks, are 11 apart.
    """
    return next(size for size in range(chunks, chunks + CHUNKS_OF_ALL_BANKS) if size % CHUNKS_OF_ALL_BANKS in pitches)
