"""ALCOP's Table 1 as it is printed, and the simpler model that the paper compares with (§5.4).

`tvm_ext.cost.pipeline_model` says where our model differs from the print, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tvm_ext.autotune.cpu_space import CpuTileSpace
from tvm_ext.autotune.gpu_space import MatrixTileSpace
from tvm_ext.cost.pipeline_equations import bytes_per_s, register_load, throughput
from tvm_ext.cost.pipeline_model import PipelineLatency, predict
from tvm_ext.cost.pipeline_workload import Counted, PipelineWorkload
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import GLOBAL, SHARED
from tvm_ext.support.arithmetic import ceil_div
from tvm_ext.support.quantities import Integers, Quantity, larger, largest


@dataclass(frozen=True, kw_only=True, slots=True)
class Bottleneck:
    """The simpler model that the paper compares with (§5.4): the slowest of three resources, each fully used."""

    compute_s: float
    shared_memory_s: float
    memory_s: float

    @property
    def time_s(self) -> float:
        return max(self.compute_s, self.shared_memory_s, self.memory_s)


def pipeline_latency(load_s: float, use_s: float, loops: int, pipe: int, mplx: float) -> float:
    """Table 1's Pipeline Latency Model as it is printed: seconds of ``loops`` iterations that load and use."""
    if load_s <= (pipe * mplx - 1) * use_s:
        return use_s * loops
    return (load_s + use_s) * loops / pipe


def predict_printed(
    workload: PipelineWorkload, device: DeviceSpec, shared_stages: int, register_stages: int
) -> PipelineLatency:
    """`predict` with the main loop of Table 1 to the letter; what a unit holds and what loads take are the same.

    Util is the share of a unit's rate that one block has: a TEU needs a warp to be busy.
    """
    ours = predict(workload, device, shared_stages, register_stages)
    per_unit = ceil_div(ours.blocks_per_batch, device.unit_count)
    warps = workload.warps_per_block * per_unit
    util = min(1.0, warps / device.teus_per_unit) / per_unit
    load = float(register_load(workload, device))
    compute = workload.flops_per_register_trip / (throughput(workload.throughput, device) / device.unit_count * util)
    use = pipeline_latency(load, compute, workload.register_trips, register_stages, workload.warps_per_block)
    main = pipeline_latency(ours.smem_load_s, use, workload.shared_trips, shared_stages, per_unit)
    bound = "use" if main == use * workload.shared_trips else "load"
    threadblock = ours.init_s + main + ours.epilogue_s
    return replace(
        ours,
        compute_s=compute,
        smem_use_s=use,
        iteration_s=main / workload.shared_trips,
        main_loop_s=main,
        threadblock_s=threadblock,
        time_s=threadblock * ours.batches,
        bound=bound if main >= ours.init_s + ours.epilogue_s else "start and end",
    )


def bottleneck_order(space: MatrixTileSpace | CpuTileSpace) -> Integers:
    """Places of a space, best first by the simpler model."""
    if isinstance(space, CpuTileSpace):
        seconds: Quantity = space.predictions.bottleneck_s
    else:
        seconds = largest(*bottleneck_terms(space.predictions.loops, space.device))
    return np.argsort(np.asarray(seconds, dtype=np.float64), kind="stable")


def predict_bottleneck(workload: PipelineWorkload, device: DeviceSpec) -> Bottleneck:
    """The bottleneck-based analysis of §5.4: agnostic of stages, latencies and occupancy."""
    compute, shared_memory, memory = bottleneck_terms(workload, device)
    return Bottleneck(compute_s=float(compute), shared_memory_s=float(shared_memory), memory_s=float(memory))


def bottleneck_terms(counts: Counted, device: DeviceSpec) -> tuple[Quantity, Quantity, Quantity]:
    """Seconds of arithmetic, of shared memory and of memory, each fully used (§5.4's simpler model)."""
    trips = counts.blocks * counts.shared_trips
    inner = trips * counts.register_trips
    batches = counts.blocks / counts.workset_blocks
    loaded = counts.workset_bytes * counts.shared_trips * larger(1.0, batches)
    moved = inner * counts.shared_bytes_per_register_trip + trips * counts.bytes_per_shared_trip
    written = counts.blocks * counts.output_bytes_per_block
    return (
        inner * counts.flops_per_register_trip / throughput(counts.throughput, device),
        moved / bytes_per_s(device.layer(SHARED).bandwidth_gb_per_s),
        (loaded + written) / bytes_per_s(device.layer(GLOBAL).bandwidth_gb_per_s),
    )
