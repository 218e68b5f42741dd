"""ALCOP's analytical model: how long a kernel takes whose loads run ahead of their use (paper §4, Table 1).

A threadblock loads tiles into shared memory (the outer loop) and from there into registers (the inner loop), and
computes. Blocks that all units run at a time are a threadblock-batch; the kernel is its batches one after another, a
block is start (T_init), main loop and epilogue. What Table 1 leaves open, or what cannot be as it is printed, is
decided here; `predict(..., as_printed=True)` follows the print.

* *Which use is hidden behind a load.* Table 1 compares T_load with (N_pipe * N_mplx - 1) * T_use, then takes T_use or
  (T_load + T_use) / N_pipe an iteration. The two meet only if T_use is one worker's use in the comparison and all
  workers' together in the result: at T_load = 7 us, T_use = 1 us, N_pipe = 4, N_mplx = 2 the second gives 2 us, and two
  blocks that each compute 1 us on one unit do take 2 us. So an iteration is the longer of both: all workers' use, or
  the wait for one load.
* *How many iterations hide a load.* A slot is loaded anew right after the barrier that frees it, at the start of an
  iteration, so with n stages a load has n - 1 iterations to arrive: T_load / (n - 1), not (T_load + T_use) / n. With
  n = 2, T_load = 3 us and T_use = 1 us an iteration takes 3 us, where the print has 2 us. Registers that look s of ext
  steps ahead need the next tile s steps early: (T_load + T_use * s / ext) / (n - 1). One stage: T_load + T_use.
* *Bandwidth.* Loads in flight overlap their latency, not their bytes. An iteration is never shorter than its bytes at
  full bandwidth; the print divides both by N_pipe.
* *Shared memory* is written as well: an iteration's tiles, as many bytes as are loaded, take its bandwidth beside the
  fragments that are read.
* *The first load* is T_init's. The last iteration waits for nothing: N iterations are N - 1 steady ones and a use.
* *Warps* hide each other's loads where they share a scheduler (TEU): N_mplx of the inner loop is the unit's warps
  divided by its TEUs, where the print has the block's warps.
* *The last batch* is rarely full, and takes what its own blocks take: 300 blocks on 108 units with 2 each are a batch
  of 216 and one of 84, in which a block has its unit for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import GLOBAL, SHARED
from tvm_ext.support.arithmetic import ceil_div

from .pipeline_workload import PipelineWorkload, blocks_per_unit, registers, shared_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLatency:
    """The terms of Table 1 for one kernel, all in seconds; those of a batch are of the first one.

    ``bound`` names what an iteration of the main loop waits for, or "start and end" where T_init and T_epilogue take
    longer than the main loop.
    """

    shared_stages: int
    register_stages: int
    shared_bytes: int  # of a block
    registers: int  # of a thread
    blocks_per_unit: int  # N_threadblk_per_SM
    blocks_per_batch: int  # N_threadblk_per_threadblk_batch
    batches: int  # N_threadblk_batch, a partial one included
    llc_load_s: float  # T_LLC_load
    dram_load_s: float  # T_DRAM_load
    smem_load_s: float  # T_smem_load
    reg_load_s: float  # T_reg_load
    compute_s: float  # T_compute: of the inner loop's iteration in all blocks of a unit
    smem_use_s: float  # T_smem_use: of the outer loop's iteration in all blocks of a unit
    iteration_s: float  # of the outer loop, in the steady state
    init_s: float  # T_init
    main_loop_s: float  # T_main_loop
    epilogue_s: float  # T_epilogue
    threadblock_s: float  # T_threadblk
    time_s: float  # T_kernel
    bound: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """The simpler model that the paper compares with (§5.4): the slowest of three resources, each fully used."""

    compute_s: float
    shared_memory_s: float
    memory_s: float

    @property
    def time_s(self) -> float:
        return max(self.compute_s, self.shared_memory_s, self.memory_s)


# ---- the model ------------------------------------------------------------------------------------------------------


def pipeline_latency(load_s: float, use_s: float, loops: int, pipe: int, mplx: float) -> float:
    """Table 1's Pipeline Latency Model as it is printed: seconds of ``loops`` iterations that load and use."""
    if load_s <= (pipe * mplx - 1) * use_s:
        return use_s * loops
    return (load_s + use_s) * loops / pipe


def predict(
    workload: PipelineWorkload,
    device: DeviceSpec,
    shared_stages: int,
    register_stages: int,
    *,
    asynchronous: bool = True,
    as_printed: bool = False,
) -> PipelineLatency:
    """Predicted latency with so many versions of shared tiles and of register fragments (1: not pipelined).

    Without ``asynchronous`` copies, loads run ahead in registers. A latency that the tables do not know counts as 0, an
    unknown bandwidth of the cache as its memory's. The launch is not counted.

    Raises
    ------
    IllegalRewrite
        where shared memory of a block, registers of a thread or of a unit are exceeded, with the numbers.
    """
    assert shared_stages >= 1 and register_stages >= 1
    size = shared_bytes(workload, shared_stages)
    count = registers(workload, device, shared_stages, register_stages, not asynchronous)
    resident = blocks_per_unit(workload, device, size, count)
    stages = _Stages(shared=shared_stages, register=register_stages, as_printed=as_printed)
    full, rest = divmod(workload.blocks, resident * device.unit_count)
    first = _batch(workload, device, stages, resident * device.unit_count if full else rest)
    last = _batch(workload, device, stages, rest) if full and rest else None
    if as_printed:
        total = first.total_s * (full + bool(rest))
    else:
        total = first.total_s * max(full, 1) + (last.total_s if last else 0.0)
    return PipelineLatency(
        shared_stages=shared_stages,
        register_stages=register_stages,
        shared_bytes=size,
        registers=count,
        blocks_per_unit=first.per_unit,
        blocks_per_batch=first.blocks,
        batches=full + bool(rest),
        llc_load_s=first.memory.llc_load_s,
        dram_load_s=first.memory.dram_load_s,
        smem_load_s=first.memory.load_s,
        reg_load_s=first.inner.load_s,
        compute_s=first.inner.compute_s,
        smem_use_s=first.inner.use_s,
        iteration_s=first.iteration_s,
        init_s=first.init_s,
        main_loop_s=first.main_loop_s,
        epilogue_s=first.epilogue_s,
        threadblock_s=first.total_s,
        time_s=total,
        bound=first.bound,
    )


def predict_bottleneck(workload: PipelineWorkload, device: DeviceSpec) -> Bottleneck:
    """The bottleneck-based analysis of §5.4: agnostic of stages, latencies and occupancy."""
    trips = workload.blocks * workload.shared_trips
    inner = trips * workload.register_trips
    batches = workload.blocks / workload.workset_blocks
    loaded = workload.workset_bytes * workload.shared_trips * max(1.0, batches)
    return Bottleneck(
        compute_s=inner * workload.flops_per_register_trip / _throughput(workload, device),
        shared_memory_s=(inner * workload.shared_bytes_per_register_trip + trips * workload.bytes_per_shared_trip)
        / _bytes_per_s(device.layer(SHARED).bandwidth_gb_per_s),
        memory_s=(loaded + workload.blocks * workload.output_bytes_per_block)
        / _bytes_per_s(device.layer(GLOBAL).bandwidth_gb_per_s),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stages:
    shared: int
    register: int
    as_printed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """Loading the tiles of one batch for one iteration: T_LLC_load, T_DRAM_load, and the part that is bandwidth."""

    llc_load_s: float
    dram_load_s: float
    llc_bytes_s: float
    dram_bytes_s: float

    @property
    def load_s(self) -> float:
        """T_smem_load = MAX(T_LLC_load, T_DRAM_load)."""
        return max(self.llc_load_s, self.dram_load_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Inner:
    """The inner loop of one outer iteration: T_reg_load, T_compute, T_smem_use of a unit's blocks and of one alone."""

    load_s: float
    compute_s: float
    use_s: float
    alone_s: float
    bound: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    blocks: int
    per_unit: int
    memory: _Memory
    inner: _Inner
    iteration_s: float
    init_s: float
    main_loop_s: float
    epilogue_s: float
    bound: str

    @property
    def total_s(self) -> float:
        """T_threadblk = T_init + T_main_loop + T_epilogue."""
        return self.init_s + self.main_loop_s + self.epilogue_s


def _batch(workload: PipelineWorkload, device: DeviceSpec, stages: _Stages, blocks: int) -> _Batch:
    """Threadblock Latency Model for a batch of ``blocks``, which the units share evenly."""
    per_unit = ceil_div(blocks, device.unit_count)
    memory = _memory(workload, device, blocks)
    inner = (
        _inner_printed(workload, device, stages, per_unit)
        if stages.as_printed
        else _inner(workload, device, stages, per_unit)
    )
    if stages.as_printed:
        main = pipeline_latency(memory.load_s, inner.use_s, workload.shared_trips, stages.shared, per_unit)
        iteration, bound = (
            main / workload.shared_trips,
            "use" if main == inner.use_s * workload.shared_trips else "load",
        )
    else:
        iteration, bound = _iteration(workload, stages, memory, inner)
        main = (workload.shared_trips - 1) * iteration + inner.use_s
    init = memory.load_s + inner.load_s
    epilogue = _epilogue(workload, device, blocks)
    return _Batch(
        blocks=blocks,
        per_unit=per_unit,
        memory=memory,
        inner=inner,
        iteration_s=iteration,
        init_s=init,
        main_loop_s=main,
        epilogue_s=epilogue,
        bound=bound if main >= init + epilogue else "start and end",
    )


def _memory(workload: PipelineWorkload, device: DeviceSpec, blocks: int) -> _Memory:
    """Memory Latency Model: a round trip, and the batch's bytes at the bandwidth that its blocks share."""
    layer = device.layer(GLOBAL)
    memory_rate = _bytes_per_s(layer.bandwidth_gb_per_s)
    cache_rate = _bytes_per_s(layer.cache_bandwidth_gb_per_s or layer.bandwidth_gb_per_s)
    llc = workload.bytes_per_shared_trip * blocks / cache_rate
    dram = workload.workset_of(blocks) / memory_rate
    return _Memory(
        llc_load_s=_seconds(layer.cache_latency_ns) + llc,
        dram_load_s=_seconds(layer.latency_ns) + dram,
        llc_bytes_s=llc,
        dram_bytes_s=dram,
    )


def _iteration(workload: PipelineWorkload, stages: _Stages, memory: _Memory, inner: _Inner) -> tuple[float, str]:
    """Seconds of one outer iteration in the steady state, and what it waits for."""
    if stages.shared == 1:
        waited = memory.load_s + inner.alone_s
    else:
        ahead = min(stages.register - 1, workload.register_trips) / workload.register_trips
        waited = (memory.load_s + inner.alone_s * ahead) / (stages.shared - 1)
    times = {
        inner.bound: inner.use_s,
        "L2 cache": memory.llc_bytes_s,
        "memory": memory.dram_bytes_s,
        "load latency": waited,
    }
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def _inner(workload: PipelineWorkload, device: DeviceSpec, stages: _Stages, per_unit: int) -> _Inner:
    """The inner loop, as long as the slowest of arithmetic, shared memory and the wait for one warp's fragments."""
    load = _register_load(workload, device)
    rate = _throughput(workload, device) / device.unit_count / device.teus_per_unit
    warp_s = workload.flops_per_register_trip / workload.warps_per_block / rate
    moved_s = load - _seconds(device.layer(SHARED).latency_ns) + _stored_s(workload, device) / workload.register_trips
    ahead = stages.register - 1
    waited = load + warp_s if ahead == 0 else load / ahead

    def step(blocks: int) -> dict[str, float]:
        sharing = max(1.0, workload.warps_per_block * blocks / device.teus_per_unit)
        return {"compute": warp_s * sharing, "shared memory": moved_s * blocks, "fragment latency": waited}

    times = step(per_unit)
    bound = max(times, key=lambda name: times[name])
    return _Inner(
        load_s=load,
        compute_s=times["compute"],
        use_s=times[bound] * workload.register_trips,
        alone_s=max(step(1).values()) * workload.register_trips,
        bound=bound,
    )


def _stored_s(workload: PipelineWorkload, device: DeviceSpec) -> float:
    """Seconds in which a unit's shared memory takes the tiles that one block copies into it in an outer iteration."""
    return workload.bytes_per_shared_trip / (_bytes_per_s(device.layer(SHARED).bandwidth_gb_per_s) / device.unit_count)


def _inner_printed(workload: PipelineWorkload, device: DeviceSpec, stages: _Stages, per_unit: int) -> _Inner:
    """Table 1 to the letter. Util is the share of a unit's rate that one block has: a TEU needs a warp to be busy."""
    warps = workload.warps_per_block * per_unit
    util = min(1.0, warps / device.teus_per_unit) / per_unit
    load = _register_load(workload, device)
    compute = workload.flops_per_register_trip / (_throughput(workload, device) / device.unit_count * util)
    use = pipeline_latency(load, compute, workload.register_trips, stages.register, workload.warps_per_block)
    return _Inner(load_s=load, compute_s=compute, use_s=use, alone_s=use, bound="use")


def _register_load(workload: PipelineWorkload, device: DeviceSpec) -> float:
    """T_reg_load, which the paper describes and Table 1 omits: a round trip, and one block's bytes at a unit's rate."""
    layer = device.layer(SHARED)
    rate = _bytes_per_s(layer.bandwidth_gb_per_s) / device.unit_count
    return _seconds(layer.latency_ns) + workload.shared_bytes_per_register_trip / rate


def _epilogue(workload: PipelineWorkload, device: DeviceSpec, blocks: int) -> float:
    """Epilogue Model; a write's round trip is taken for a read's where it is not known."""
    layer = device.layer(GLOBAL)
    latency = layer.latency_ns if layer.write_latency_ns is None else layer.write_latency_ns
    return _seconds(latency) + workload.output_bytes_per_block * blocks / _bytes_per_s(layer.bandwidth_gb_per_s)


def _throughput(workload: PipelineWorkload, device: DeviceSpec) -> float:
    """FLOP/s of all units; unbounded where the tables have neither the key nor float32."""
    peak = device.emitted_gflops_of(workload.throughput) or device.peak_gflops_of("float32")
    return float("inf") if peak is None else peak * 1e9


def _bytes_per_s(gb_per_s: float | None) -> float:
    return float("inf") if gb_per_s is None else gb_per_s * 1e9


def _seconds(latency_ns: float | None) -> float:
    return (latency_ns or 0.0) * 1e-9
