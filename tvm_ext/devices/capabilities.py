"""CUDA's compute capabilities: how architectures are written, and what came with which.

A capability is a pair of ints, so that (12, 0) is newer than (9, 0); an architecture is the text that compilers take
("sm_90a"), whose number (90) is what they print and what stands in fatbins.
"""

from __future__ import annotations

import re

from tvm_ext.errors import OptionError

from .hal import DeviceSpec

MATRIX_UNITS_SINCE = (7, 0)
"""Tensor cores, and wmma to use them (CUDA C++ Programming Guide)."""

ACQUIRING_LOADS_SINCE = (7, 0)
"""ld.acquire and red.release at the scope of a GPU (PTX ISA, "Memory Consistency Model")."""

LDMATRIX_SINCE = (7, 5)
"""Fragments loaded by ldmatrix (PTX ISA); wmma's loads compile to it."""

MMA_SYNC_SINCE = (8, 0)
"""mma.sync.m16n8k16 of halves and bfloat16, m16n8k32 of int8 (PTX ISA)."""

ASYNC_COPIES_SINCE = (8, 0)
"""cp.async: copies from global to shared memory past the registers (PTX ISA)."""

BULK_COPIES_SINCE = (9, 0)
"""cp.async.bulk, the TMA engine, with transaction counts of mbarriers (PTX ISA)."""

ARCHITECTURE = re.compile(r"sm_(?P<suffix>(?P<number>\d+)[af]?)")


def has(device: DeviceSpec, since: tuple[int, int]) -> bool:
    """Whether kernels for ``device`` may use what came with the capability ``since``; False for all but CUDA."""
    capability = device.compute_capability
    return device.kind == "cuda" and capability is not None and capability >= since


def has_wide_bytes(device: DeviceSpec) -> bool:
    """Whether v_mfma of bytes takes 8 of each lane, as of CDNA 3, not 4, as of those before (their ISA guides)."""
    return dict(device.target).get("mcpu") == "gfx942"


def blocks_may_wait(device: DeviceSpec) -> bool:
    """Whether blocks of one launch on ``device`` can hand work to each other (`ir.device_sync`)."""
    return device.kind == "rocm" or has(device, ACQUIRING_LOADS_SINCE)


def is_of(device: DeviceSpec, capability: tuple[int, int]) -> bool:
    """Whether ``device`` is a CUDA device of just that capability: machine code for it runs there."""
    return device.kind == "cuda" and device.compute_capability == capability


def is_like(device: DeviceSpec, capability: tuple[int, int], units: int) -> bool:
    """Whether ``device`` has just that capability, and as many units."""
    return (device.compute_capability, device.unit_count) == (capability, units)


def capability_text(device: DeviceSpec) -> str:
    """``"8.0"``, for messages; empty for a device without a capability."""
    return ".".join(map(str, device.compute_capability or ()))


def architecture_number(architecture: str) -> int:
    """80 for ``"sm_80"``, 90 for ``"sm_90a"``; raises OptionError for anything else."""
    return int(_parsed(architecture)["number"])


def architecture_suffix(architecture: str) -> str:
    """``"90a"`` for ``"sm_90a"``: what nvcc's and NVRTC's options call compute_90a. Raises as `architecture_number`."""
    return _parsed(architecture)["suffix"]


def capability_of(architecture: str) -> tuple[int, int]:
    """(9, 0) for ``"sm_90a"``, (12, 1) for ``"sm_121"``: the last digit is the minor. Raises as the others."""
    major, minor = divmod(architecture_number(architecture), 10)
    return major, minor


def _parsed(architecture: str) -> re.Match[str]:
    match = ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise OptionError(f"{architecture!r} is not a CUDA architecture.", 'write e.g. "sm_80" or "sm_90a"')
    return match
