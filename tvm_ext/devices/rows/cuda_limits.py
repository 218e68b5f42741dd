"""What a CUDA multiprocessor holds, by compute capability: facts that rows take over instead of repeating them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..device_facts import fact
from ..hal import Fact

CUDA_GUIDE = "CUDA C++ Programming Guide, technical specifications per compute capability"
CALCULATOR = "NVIDIA's occupancy calculator (cuda_occupancy.h, CUDA 13.0)"
TUNING_GUIDES = "NVIDIA Ampere and Hopper tuning guides: 1 KiB reserved for each block"
CUDA_RATES = "CUDA C++ Programming Guide, since 13.0 Best Practices Guide, throughput of native arithmetic instructions"
KIB = 1024  # bytes, by definition (IEC 80000-13)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaLimits:
    """Of one capability; shared memory in KiB, but for ``granule_bytes``: what a block's is rounded up to.

    ``opt_in_kib`` is what a block may have on request beyond 48 KiB, None where it may not. ``fma_rate`` and the like
    are results a clock in float32 of multiply-adds, maxima, 2^x and conversions; None: no source was found.
    """

    schedulers: int = 4
    threads: int = 2048
    blocks: int = 32
    registers: int = 65536
    shared_kib: int
    opt_in_kib: int | None = None
    reserved_kib: int = 0
    granule_bytes: int = 128
    fma_rate: int = 64
    max_rate: int = 64
    exp_rate: int = 16
    convert_rate: int = 16


CUDA_LIMITS: Mapping[tuple[int, int], CudaLimits] = MappingProxyType(
    {
        (3, 7): CudaLimits(
            blocks=16,
            registers=131072,
            shared_kib=112,
            granule_bytes=256,
            fma_rate=192,
            max_rate=160,
            exp_rate=32,
            convert_rate=32,
        ),
        (6, 0): CudaLimits(schedulers=2, shared_kib=64, granule_bytes=256, max_rate=32),
        (7, 0): CudaLimits(shared_kib=96, opt_in_kib=96, granule_bytes=256),
        (7, 5): CudaLimits(threads=1024, blocks=16, shared_kib=64, opt_in_kib=64, granule_bytes=256),
        (8, 0): CudaLimits(shared_kib=164, opt_in_kib=163, reserved_kib=1),
        (8, 6): CudaLimits(threads=1536, blocks=16, shared_kib=100, opt_in_kib=99, reserved_kib=1, fma_rate=128),
        (8, 9): CudaLimits(threads=1536, blocks=24, shared_kib=100, opt_in_kib=99, reserved_kib=1, fma_rate=128),
        (9, 0): CudaLimits(shared_kib=228, opt_in_kib=227, reserved_kib=1, fma_rate=128),
    }
)
"""A new device of one of these needs no new line here; one of a new capability needs one."""


def limit_facts(capability: tuple[int, int], *, schedulers: str = CUDA_GUIDE, static: str = CUDA_GUIDE) -> list[Fact]:
    """The facts of ``capability``'s row of `CUDA_LIMITS`, and those that all have.

    ``schedulers`` and ``static`` are further sources of the warp schedulers and of the 48 KiB of shared memory that a
    block has without asking.
    """
    assert capability in CUDA_LIMITS, f"CUDA_LIMITS has no line for compute capability {capability}"
    limits = CUDA_LIMITS[capability]
    guide = f"{CUDA_GUIDE} (capability {capability[0]}.{capability[1]})"
    found = [
        fact("teus_per_unit", limits.schedulers, "warp schedulers", schedulers),
        fact("max_threads_per_block", 1024, "threads", CUDA_GUIDE),
        fact("max_threads_per_unit", limits.threads, "threads", guide),
        fact("max_blocks_per_unit", limits.blocks, "blocks", guide),
        fact("max_registers_per_thread", 255, "32-bit registers", CUDA_GUIDE),
        fact("registers_per_unit", limits.registers, "32-bit registers", guide),
        fact("registers_per_block", 65536, "32-bit registers", guide),
        fact("register_granule", 256, "32-bit registers of a warp", CALCULATOR),
        fact("warp_granule", 4, "warps", f"{CALCULATOR}: sm_60, of two schedulers, refuses what sm_61 cannot run"),
        fact("layers.L1.capacity_bytes", 48 * KIB, "bytes", static),
        fact("layers.L1.unit_capacity_bytes", limits.shared_kib * KIB, "bytes", guide),
        fact("layers.L1.granule_bytes", limits.granule_bytes, "bytes", CALCULATOR),
    ]
    if limits.opt_in_kib is not None:
        found.append(fact("layers.L1.opt_in_capacity_bytes", limits.opt_in_kib * KIB, "bytes", guide))
    if limits.reserved_kib:
        found.append(fact("layers.L1.block_reserved_bytes", limits.reserved_kib * KIB, "bytes", TUNING_GUIDES))
    return found


def rate_facts(capability: tuple[int, int], peak_gflops: float) -> list[Fact]:
    """Results of instructions that are slower than multiply-adds, in 10^9/s, for a row's peak in float32.

    Worked example, exp on an A100: 16 results a clock beside 64 multiply-adds, a quarter of 9750: 2437.5.
    """
    limits = CUDA_LIMITS[capability]
    rates = {"max": limits.max_rate, "exp": limits.exp_rate, "convert": limits.convert_rate}
    return [
        fact(
            f"instruction_gops.float32.{kind}",
            peak_gflops / 2 * rate / limits.fma_rate,
            "Gop/s",
            f"{rate} results a clock, {limits.fma_rate} multiply-adds; {CUDA_RATES}",
        )
        for kind, rate in rates.items()
        if rate != limits.fma_rate
    ]
