"""ALCOP's analytical model: how long a kernel takes whose loads run ahead of their use (paper §4, Table 1).

A threadblock loads tiles into shared memory (the outer loop) and from there into registers (the inner loop), and
computes. Blocks that all units run at a time are a threadblock-batch; the kernel is its batches one after another, a
block is start (T_init), main loop and epilogue. What Table 1 leaves open, or what cannot be as it is printed, is
decided here; `benchmarks/alcop/printed.py` follows the print.

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
from tvm_ext.support.arithmetic import ceil_div

from .pipeline_equations import (
    InnerLoop,
    MemoryLoad,
    epilogue_s,
    inner_loop,
    iteration_terms,
    kernel_s,
    main_loop_s,
    memory_load,
)
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


def predict(
    workload: PipelineWorkload,
    device: DeviceSpec,
    shared_stages: int,
    register_stages: int,
    *,
    asynchronous: bool = True,
) -> PipelineLatency:
    """Predicted latency with so many versions of shared tiles and of register fragments (1: not pipelined).

    Without ``asynchronous`` copies, loads run ahead in registers. A latency that the tables do not know counts as 0, an
    unknown bandwidth of the cache as its memory's. The launch is not counted.

    Raises IllegalRewrite where shared memory of a block, registers of a thread or of a unit are exceeded, with the
    numbers.
    """
    assert shared_stages >= 1 and register_stages >= 1
    size = shared_bytes(workload, shared_stages)
    count = registers(workload, device, shared_stages, register_stages, not asynchronous)
    resident = blocks_per_unit(workload, device, size, count)
    stages = shared_stages, register_stages
    full, rest = divmod(workload.blocks, resident * device.unit_count)
    first = _batch(workload, device, stages, resident * device.unit_count if full else rest)
    last = _batch(workload, device, stages, rest) if full and rest else None
    return PipelineLatency(
        shared_stages=shared_stages,
        register_stages=register_stages,
        shared_bytes=size,
        registers=count,
        blocks_per_unit=first.per_unit,
        blocks_per_batch=first.blocks,
        batches=full + bool(rest),
        llc_load_s=float(first.memory.llc_load_s),
        dram_load_s=float(first.memory.dram_load_s),
        smem_load_s=float(first.memory.load_s),
        reg_load_s=float(first.inner.load_s),
        compute_s=float(first.inner.steps_s["compute"]),
        smem_use_s=float(first.inner.use_s),
        iteration_s=first.iteration_s,
        init_s=first.init_s,
        main_loop_s=first.main_loop_s,
        epilogue_s=first.epilogue_s,
        threadblock_s=first.total_s,
        time_s=float(kernel_s(full, rest, first.total_s, last.total_s if last else 0.0)),
        bound=first.bound,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    blocks: int
    per_unit: int
    memory: MemoryLoad
    inner: InnerLoop
    iteration_s: float
    init_s: float
    main_loop_s: float
    epilogue_s: float
    bound: str

    @property
    def total_s(self) -> float:
        """T_threadblk = T_init + T_main_loop + T_epilogue."""
        return self.init_s + self.main_loop_s + self.epilogue_s


def _batch(workload: PipelineWorkload, device: DeviceSpec, stages: tuple[int, int], blocks: int) -> _Batch:
    """Threadblock Latency Model for a batch of ``blocks``, which the units share evenly."""
    per_unit = ceil_div(blocks, device.unit_count)
    memory = memory_load(workload, device, blocks)
    inner = inner_loop(workload, device, stages[1], per_unit)
    iteration, bound = _iteration(workload, stages, memory, inner)
    main = float(main_loop_s(workload, iteration, inner))
    init = float(memory.load_s + inner.load_s)
    epilogue = float(epilogue_s(workload, device, blocks))
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


def _iteration(
    workload: PipelineWorkload, stages: tuple[int, int], memory: MemoryLoad, inner: InnerLoop
) -> tuple[float, str]:
    """Seconds of one outer iteration in the steady state, and what it waits for."""
    steps = inner.steps_s
    within = max(steps, key=lambda name: float(steps[name]))
    times = {within: inner.use_s, **iteration_terms(workload, *stages, memory, inner)}
    bound = max(times, key=lambda name: float(times[name]))
    return float(times[bound]), bound
