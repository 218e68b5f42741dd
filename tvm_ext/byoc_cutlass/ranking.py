"""How long a configuration takes: a model of waves, whole tiles, bytes and occupancy, from the device's row alone.

The largest of five times, as they overlap: multiplying, reading shared memory, reading tiles through L2, moving each
matrix once from and to global memory, and what the board's power lets matrix units do. The first two are multiplied by
what whole waves of whole tiles cost; on top come the first loads' latency in each wave, what each tile stores, the sums
of split K, and the launch. A step waits for its loads where the stages ahead of it do not cover memory's latency.
"""

from __future__ import annotations

from functools import cached_property

from tvm_ext.cost.epilogue_traffic import beside, instructions_us
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import UNKNOWN_CACHE_RATE, Machine
from tvm_ext.devices.occupancy import GLOBAL, SHARED, blocks_per_unit
from tvm_ext.errors import TargetError
from tvm_ext.support.arithmetic import ceil_div

from .family import PredictedTime
from .gemm import GemmConfig
from .legality import WARP_GROUP_WARPS, ProductRules

BUSY_WARPS = 8
"""Warps of a unit that keep its matrix units busy: two on each scheduler (the vendor's guidance, Bolt §3.2.2)."""


class ProductClock(ProductRules):
    """The time that templates of matrix products take."""

    def predict(self, config: GemmConfig, *, issue_us: float = 0.0) -> PredictedTime:
        """Predicted time of one launch; raises TargetError where the device's table has no peak for the arithmetic.

        For convolutions ``issue_us``, which a unit's vector units need to find what one step of a threadblock loads.
        """
        problem, device = self.problem, self.device
        resident = blocks_per_unit(self.use(config), device)
        m, n, k = config.threadblock
        blocks = config.tiles(problem) * config.split_k
        steps = ceil_div(ceil_div(problem.depth, k), config.split_k)
        waves = ceil_div(blocks, device.unit_count * resident)
        last = blocks - (waves - 1) * device.unit_count * resident
        held = (waves - 1) * resident + ceil_div(last, device.unit_count)  # blocks that the busiest unit works through
        step_us = max(self._tile_step_us(config, resident), issue_us)
        workers = resident + (1 if config.schedule == "pingpong" else 0)
        change_us = device.unit_count * instructions_us(m * n * self._instructions, device)
        tile_us = beside(steps * step_us, change_us, workers) + self._store_us(config, workers)
        units_us = held * tile_us + waves * latency_us(device)
        copied = m / config.cluster[1] + n / config.cluster[0]  # one copy of a tile for a cluster's row or column
        traffic = blocks * steps * copied * k * self.multiplier.bits / 8
        l2_us = traffic / (l2_gb_per_s(device) * 1e3)
        moved_us = self.moved_bytes(config.split_k) / (global_gb_per_s(device) * 1e3)
        busy_us = max(units_us, l2_us, moved_us)
        power_us = device.least_multiplying_s(2.0 * blocks * steps * m * n * k, self.known_peak) * 1e6
        launches = 1 if self.epilogue.reduction is None else 2  # before it, the result is filled
        launch_us = launches * Machine(device).launch_us
        return PredictedTime(time_us=max(busy_us, power_us) + launch_us, full_clock_us=busy_us + launch_us)

    def _tile_step_us(self, config: GemmConfig, resident: int) -> float:
        """One step along K of one threadblock, where ``resident`` share a unit and keep it as busy as they can."""
        m, n, k = config.threadblock
        peak = self.device.peak_gflops_of if config.generation == "3.x" else self.device.emitted_gflops_of
        gflops = peak(self.known_peak)  # of all units, by the instructions that the template has
        assert gflops is not None
        warps = resident * (config.warps if config.generation == "2.x" else config.groups * WARP_GROUP_WARPS)
        busy = min(1.0, warps / BUSY_WARPS)
        multiply_us = 2 * m * n * k / (gflops / self.device.unit_count * busy * 1e3)
        arrival_us = latency_us(self.device) / ((config.stages - 1) * resident)
        return max(multiply_us, self._shared_us(config), arrival_us)

    def _store_us(self, config: GemmConfig, workers: int) -> float:
        """Writing a tile's result, as far as none of the ``workers`` multiplies another tile of the unit meanwhile."""
        stored = self.epilogue.stored_elements(*config.threadblock[:2]) * self.out.bits / 8
        return stored / (l2_gb_per_s(self.device) / self.device.unit_count * 1e3) / workers

    @cached_property
    def _instructions(self) -> float:
        return self.epilogue.instructions(self.device)

    @cached_property
    def known_peak(self) -> str:
        """The key of the device's peak for the problem's arithmetic; raises TargetError where its table has none."""
        known = self.multiplier.peak
        for key in known:
            if self.device.peak_gflops_of(key):
                return key
        raise TargetError(
            f"the device table of {self.device.name} does not say how fast it multiplies {self.problem.arithmetic}.",
            f"give its row peak_gflops of {known[0]}",
        )

    def _shared_us(self, config: GemmConfig) -> float:
        """Reading the operands of a step from shared memory: each warp reads its own rows and columns."""
        bandwidth = self.device.layer(SHARED).bandwidth_gb_per_s
        if bandwidth is None:
            return 0.0
        m, n, k = config.threadblock
        by_groups = m + m // 64 * n  # a warp group's instruction reads B once for its 64 rows
        read = k * (by_groups if config.warp is None else config.warps * (config.warp[0] + config.warp[1]))
        return read * self.multiplier.bits / 8 / (bandwidth / self.device.unit_count * 1e3)


def latency_us(device: DeviceSpec) -> float:
    return (device.layer(GLOBAL).latency_ns or 0.0) / 1e3


def global_gb_per_s(device: DeviceSpec) -> float:
    bandwidth = device.layer(GLOBAL).bandwidth_gb_per_s
    if bandwidth is None:
        remedy = f"give its row layers.{GLOBAL}.bandwidth_gb_per_s"
        raise TargetError(f"the device table of {device.name} does not say its memory's bandwidth.", remedy)
    return bandwidth


def l2_gb_per_s(device: DeviceSpec) -> float:
    return device.layer(GLOBAL).cache_bandwidth_gb_per_s or UNKNOWN_CACHE_RATE * global_gb_per_s(device)
