"""The equations of ALCOP's Table 1 (paper §4), for one kernel or, with arrays for numbers, for thousands at once.

`pipeline_model.py` says where they differ from the print and why; it has one kernel's answer with its bound, and
`gpu_columns.py` ranks whole spaces of tiles and stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import GLOBAL, SHARED
from tvm_ext.support.quantities import Quantity, chosen, larger, largest, smaller

from .pipeline_workload import Counted, workset_of


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLoad:
    """Loading the tiles of one batch for one iteration: T_LLC_load, T_DRAM_load, and the part that is bandwidth."""

    llc_load_s: Quantity
    dram_load_s: Quantity
    llc_bytes_s: Quantity
    dram_bytes_s: Quantity

    @property
    def load_s(self) -> Quantity:
        """T_smem_load = MAX(T_LLC_load, T_DRAM_load)."""
        return larger(self.llc_load_s, self.dram_load_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class InnerLoop:
    """The inner loop of one outer iteration: T_reg_load and, by what may bind, a step of it in all blocks of a unit.

    ``use_s`` is T_smem_use, ``alone_s`` the same of one block that has its unit for itself.
    """

    load_s: Quantity
    steps_s: dict[str, Quantity]
    use_s: Quantity
    alone_s: Quantity


def memory_load(counts: Counted, device: DeviceSpec, blocks: Quantity) -> MemoryLoad:
    """Memory Latency Model: a barrier, a round trip, and the batch's bytes at the bandwidth that its blocks share."""
    layer = device.layer(GLOBAL)
    memory_rate = bytes_per_s(layer.bandwidth_gb_per_s)
    cache_rate = bytes_per_s(layer.cache_bandwidth_gb_per_s or layer.bandwidth_gb_per_s)
    freed = seconds(device.barrier_ns)  # of the slot that is loaded anew
    llc = counts.bytes_per_shared_trip * blocks / cache_rate
    dram = workset_of(counts, blocks) / memory_rate
    return MemoryLoad(
        llc_load_s=freed + seconds(layer.cache_latency_ns) + llc,
        dram_load_s=freed + seconds(layer.latency_ns) + dram,
        llc_bytes_s=llc,
        dram_bytes_s=dram,
    )


def iteration_terms(
    counts: Counted, shared_stages: Quantity, register_stages: Quantity, memory: MemoryLoad, inner: InnerLoop
) -> dict[str, Quantity]:
    """What one outer iteration takes in the steady state beside its use, in seconds: the longest binds."""
    ahead = smaller(register_stages - 1, counts.register_trips) / counts.register_trips
    several = (memory.load_s + inner.alone_s * ahead) / larger(1, shared_stages - 1)
    waited = chosen(shared_stages == 1, memory.load_s + inner.alone_s, several)
    return {"L2 cache": memory.llc_bytes_s, "memory": memory.dram_bytes_s, "load latency": waited}


def inner_loop(counts: Counted, device: DeviceSpec, register_stages: Quantity, per_unit: Quantity) -> InnerLoop:
    """The inner loop, as long as the slowest of arithmetic, shared memory and the wait for one warp's fragments."""
    load = register_load(counts, device)
    rate = throughput(counts.throughput, device) / device.unit_count / device.teus_per_unit
    warp_s = counts.flops_per_register_trip / counts.warps_per_block / rate
    moved_s = load - seconds(device.layer(SHARED).latency_ns) + _stored_s(counts, device) / counts.register_trips
    ahead = register_stages - 1
    waited = chosen(ahead == 0, load + warp_s, load / larger(1, ahead))

    def step(blocks: Quantity) -> dict[str, Quantity]:
        sharing = larger(1.0, counts.warps_per_block * blocks / device.teus_per_unit)
        return {"compute": warp_s * sharing, "shared memory": moved_s * blocks, "fragment latency": waited}

    steps = step(per_unit)
    return InnerLoop(
        load_s=load,
        steps_s=steps,
        use_s=largest(*steps.values()) * counts.register_trips,
        alone_s=largest(*step(1).values()) * counts.register_trips,
    )


def register_load(counts: Counted, device: DeviceSpec) -> Quantity:
    """T_reg_load, which the paper describes and Table 1 omits: a round trip, and one block's bytes at a unit's rate."""
    layer = device.layer(SHARED)
    rate = bytes_per_s(layer.bandwidth_gb_per_s) / device.unit_count
    return seconds(layer.latency_ns) + counts.shared_bytes_per_register_trip / rate


def epilogue_s(counts: Counted, device: DeviceSpec, blocks: Quantity) -> Quantity:
    """Epilogue Model; a write's round trip is taken for a read's where it is not known."""
    layer = device.layer(GLOBAL)
    latency = layer.latency_ns if layer.write_latency_ns is None else layer.write_latency_ns
    return seconds(latency) + counts.output_bytes_per_block * blocks / bytes_per_s(layer.bandwidth_gb_per_s)


def main_loop_s(counts: Counted, iteration_s: Quantity, inner: InnerLoop) -> Quantity:
    """T_main_loop: the last iteration waits for nothing."""
    return (counts.shared_trips - 1) * iteration_s + inner.use_s


def kernel_s(full: Quantity, rest: Quantity, first_s: Quantity, last_s: Quantity) -> Quantity:
    """T_kernel of ``full`` batches and ``rest`` blocks behind them, which are a batch of their own kind."""
    return first_s * larger(full, 1) + chosen((full > 0) & (rest > 0), last_s, 0.0)


def throughput(key: str, device: DeviceSpec) -> float:
    """FLOP/s of all units; unbounded where the tables have neither the key nor float32."""
    peak = device.emitted_gflops_of(key) or device.peak_gflops_of("float32")
    return float("inf") if peak is None else peak * 1e9


def bytes_per_s(gb_per_s: float | None) -> float:
    return float("inf") if gb_per_s is None else gb_per_s * 1e9


def seconds(latency_ns: float | None) -> float:
    return (latency_ns or 0.0) * 1e-9


def _stored_s(counts: Counted, device: DeviceSpec) -> Quantity:
    """Seconds in which a unit's shared memory takes the tiles that one block copies into it in an outer iteration."""
    return counts.bytes_per_shared_trip / (bytes_per_s(device.layer(SHARED).bandwidth_gb_per_s) / device.unit_count)
