"""Roller's hardware abstraction layer (paper §3.3, Figure 9): what a device is, as plain data.

A `DeviceSpec` describes multiple homogeneous execution units over a hierarchy of memory layers. It needs
no device to be present: the rows live in `device_db.py`, and `probe.py` fills a row for the CPU at hand.

Worked example, V100: 80 units (SMs) of 4 TEUs (warp schedulers, 32 lanes each); layers
``L0`` registers, ``L1`` shared memory (48 KiB a unit, 32 banks of 4 bytes), ``L2`` global memory (32-byte
transactions).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Literal

MemoryScope = Literal["teu", "unit", "device"]
"""Who owns one instance of a memory layer: each TEU, each execution unit (SM, core), or the whole device."""

DeviceKind = Literal["cpu", "cuda", "rocm", "opencl", "ipu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One published or measured number behind a field of a `DeviceSpec`, with where it comes from.

    Where sources differ, each has its own `Fact` and exactly one of them is ``used``.
    """

    field: str  # dotted path in the DeviceSpec, e.g. "layers.L1.capacity_bytes"
    value: float | int | str
    unit: str  # "bytes", "GB/s", "GFLOP/s", "GHz", "count", ...
    source: str
    used: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLayer:
    """One layer of the memory hierarchy; layer 0 is the highest (registers).

    ``bandwidth_gb_per_s`` is the device-wide rate (all units together) at which the layer *above* can load
    from this layer; it is ``None`` for the highest layer, from which the TEU reads for free. For a layer
    shared by all units, the model splits it evenly among them (paper §3.3).
    """

    name: str  # "L0", "L1", ...
    description: str  # "zmm registers", "shared memory", ...
    scope: MemoryScope
    capacity_bytes: int | None  # of one instance; None: the lowest layer, taken as unbounded
    bandwidth_gb_per_s: float | None
    transaction_bytes: int  # smallest useful unit of movement from this layer (cache line, memory sector)
    bank_count: int | None = None
    bank_bytes: int | None = None
    latency_ns: float | None = None  # of one read, from request to arrival
    write_latency_ns: float | None = None
    opt_in_capacity_bytes: int | None = None  # reachable only by asking for it (CUDA dynamic shared memory)
    unit_capacity_bytes: int | None = None  # of all blocks of a unit together, where it is more than one may have
    block_reserved_bytes: int | None = None  # taken from it for each block beside what the block asks for
    granule_bytes: int | None = None  # what is taken for a block is rounded up to whole ones of these
    cache_bytes: int | None = None  # of the hardware cache in front of a lowest layer (a GPU's L2 cache)
    cache_latency_ns: float | None = None  # of a read that hits that cache
    cache_bandwidth_gb_per_s: float | None = None  # of reads that hit it, all units together

    def __post_init__(self) -> None:
        assert self.capacity_bytes is None or self.capacity_bytes > 0
        assert self.bandwidth_gb_per_s is None or self.bandwidth_gb_per_s > 0
        assert self.transaction_bytes > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec:
    """A device as Roller sees it (paper §3.3).

    ``peak_gflops`` holds (key, GFLOP/s of the whole device) pairs, a multiply-add counting as two. A key is a dtype
    (the vector units' rate) or a dtype with ``_tensor`` appended (the rate of the matrix units): ``float16_tensor``.
    ``teu_lanes`` is the parallelism of one TEU in 32-bit elements: a warp (32), a wavefront (64), a SIMD register
    (4, 8, 16). ``register_limit`` is the number of architectural vector registers (CPU) or the per-thread register
    budget (GPU, IPU).
    ``instruction_gops`` holds (type and operation, results of all units in 10^9/s) pairs of the vector units, a
    multiply-add being one: ``float32.exp``. What it does not name runs at the rate that the peak says.
    ``row_shares`` holds (cache and bytes of a row, share of its bandwidth) of a CPU's rows far apart: ``L3.64``.
    ``function_cycles`` holds (function, cycles of a CPU's core for one register of float32 results) pairs: ``tanh``.
    ``tensor_core_shape`` is the (m, n, k) of the matrix instruction that rTiles align with, if any.
    """

    name: str
    kind: DeviceKind
    description: str
    row: str | None = None  # a machine's: the row of the tables that its rates are of, and whether they were measured
    aliases: tuple[str, ...] = ()
    target: tuple[tuple[str, str | int | tuple[str, ...]], ...] = ()  # stock TVM target as sorted (key, value) pairs
    compute_capability: tuple[int, int] | None = None
    unit_count: int
    teus_per_unit: int
    teu_lanes: int
    clock_ghz: float | None
    register_limit: int
    register_bytes: int  # of one register: 64 for zmm, 4 for a GPU thread's register
    max_threads_per_block: int | None = None
    max_threads_per_unit: int | None = None
    max_blocks_per_unit: int | None = None
    max_registers_per_thread: int | None = None  # the hardware's, where ``register_limit`` is the construction's budget
    matrix_register_limit: int | None = None  # the budget of matrix units' tiles, where it is another
    registers_per_unit: int | None = None  # of ``register_bytes`` each, shared by the unit's resident threads
    registers_per_block: int | None = None  # where one block may not have all of a unit's
    register_granule: int | None = None  # a warp's registers are rounded up to whole ones of these
    warp_granule: int | None = None  # and a block's warps, where its registers are compared with the limit of a block
    layers: tuple[MemoryLayer, ...]
    peak_gflops: tuple[tuple[str, float], ...]
    instruction_gops: tuple[tuple[str, float], ...] = ()
    function_cycles: tuple[tuple[str, float], ...] = ()
    row_shares: tuple[tuple[str, float], ...] = ()
    tensor_core_shape: tuple[int, int, int] | None = None
    power_share: float | None = None  # of the matrix units' peak, what the board's power leaves where they go on
    mma_sync_share: float | None = None  # of the matrix units' peak, what mma.sync reaches where other instructions do
    fma_pipes: int | None = None  # CPU: vector FMAs started per cycle and core
    fma_latency_cycles: int | None = None  # CPU: before the next FMA on the same accumulator may start
    loads_per_cycle: int | None = None  # CPU: vector loads or broadcasts started per cycle and core
    stores_per_cycle: int | None = None  # CPU: stores started per cycle and core
    l2_ways: int | None = None  # CPU: lines that one set of a core's L2 cache holds
    tlb_pages: int | None = None  # CPU: pages that a core's second-level TLB covers
    page_bytes: int | None = None
    launch_overhead_us: float | None = None  # starting one parallel region or kernel
    least_kernel_us: float | None = None  # GPU: what the shortest kernel takes behind its launch
    unplanned_registers: int | None = None  # GPU: of a thread of a kernel that no emitter planned
    dispatch_ns: float | None = None  # a unit's way from one rTask of a schedule to the next
    barrier_ns: float | None = None  # GPU: from one barrier of a threadblock to the next
    handoff_ns: float | None = None  # from one unit's release of a counter to another's going on that waits for it
    facts: tuple[Fact, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        assert min(self.unit_count, self.teus_per_unit, self.teu_lanes) > 0
        assert len(self.layers) >= 2, "a device has at least registers and one memory"
        assert [layer.name for layer in self.layers] == [f"L{i}" for i in range(len(self.layers))]

    @property
    def load_rate(self) -> float:
        """``loads_per_cycle``; infinite where the table has none: models leave out what nobody knows."""
        return self.loads_per_cycle or inf

    @property
    def store_rate(self) -> float:
        """``stores_per_cycle``; infinite where the table has none."""
        return self.stores_per_cycle or inf

    @property
    def fma_rate(self) -> int:
        """``fma_pipes``; 1 where the table has none: any core starts one, and arithmetic cannot be left out."""
        return self.fma_pipes or 1

    @property
    def lowest_layer(self) -> MemoryLayer:
        return self.layers[-1]

    def layer(self, name: str) -> MemoryLayer:
        """The layer called ``name``; raises KeyError where there is none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def peak_gflops_of(self, dtype: str) -> float | None:
        """Peak GFLOP/s of the whole device for ``dtype``, or None where it is not known."""
        return dict(self.peak_gflops).get(dtype)

    def least_multiplying_s(self, flops: float, key: str) -> float:
        """Seconds that the board's power asks of ``flops`` on matrix units; 0.0 where the table has no such limit.

        Where they go on, the clock falls until the board keeps its limit: however a kernel feeds them, it is no faster.
        """
        peak = self.peak_gflops_of(key)
        if self.power_share is None or peak is None or not key.endswith("_tensor"):
            return 0.0
        return flops / (peak * self.power_share * 1e9)

    def emitted_gflops_of(self, key: str) -> float | None:
        """`peak_gflops_of` for the instructions that kernels here have: mma.sync and wmma, not Hopper's wgmma."""
        peak = self.peak_gflops_of(key)
        share = self.mma_sync_share if key.endswith("_tensor") else None
        return peak if peak is None or share is None else peak * share
