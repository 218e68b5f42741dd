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
