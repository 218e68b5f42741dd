"""What a chain in one kernel gains on a CPU: intermediate values that stay in a core's L1 and L2 (Bolt, §3.1.1).

A chain runs as stages, one for each group of computations: apart, each goes over whole tensors and on all cores; in one
kernel, over one panel after the other, each panel on one core. What differs is

* traffic: an intermediate tensor is written to and read from the layer that holds all of it, or stays in L2;
* recomputation: rows that windows of two panels share are padded twice (`tir_passes/plan/panel.py` allows no more);
* reuse: weights that do not stay in L2 beside a panel are loaded again for each;
* parallelism: panels are divided among cores in rounds, of which the last may be nearly empty;
* launches: one instead of one for each stage.

Worked example, 16384 x 256 -> 64 -> 16 on two cores: the 4.2 MB between the products stay in L3 and move at 47 GB/s.
Written, their lines read before, and read again they are 12.6 MB: 0.27 ms of 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import BETWEEN_CORES, Machine
from tvm_ext.support.arithmetic import ceil_div

from .followed_rows import UNFOLLOWED_COST
from .perf_model import MEMORY_OVERLAP
from .register_tiles import overlapped

WRITE_TRAFFIC = 2
"""Bytes moved for each one written beyond L2: a line that is stored to is read first, and written back later."""

# What passes between L2 and the layers beyond adds to the arithmetic instead of hiding behind it. Measured on one core
# of a shared Xeon: 16384 x 256 -> 64 -> 16 runs 1.18 times as fast as one kernel. By addition the gain should be 1.11,
# hidden as loads from L2 are 1.02.

LEAST_GAIN = 1.06
"""Apart over fused, from which on the prediction of a gain is believed. On two cores of an Ice Lake chains of 1x1
convolutions with 1.07 to 1.10 gained 1.25, and a 3x3 of stride 2 with 1.05, whose weights fill L2, lost 0.7."""

PANEL_SHARE = 0.5
"""Share of L2 that a panel's inputs, intermediate values and results may fill: weights pass through the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """``part_bytes`` of a tensor of ``whole_bytes`` that pass between a stage and the layer that holds the tensor.

    ``followed``: as fast as that layer is, see `followed_rows.py`.
    """

    part_bytes: float
    whole_bytes: float
    written: bool = False
    followed: bool = True

    @property
    def traffic_bytes(self) -> float:
        """What the layer is as busy with as with so many bytes that are read one after the other."""
        return self.part_bytes * (WRITE_TRAFFIC if self.written else 1) * (1 if self.followed else UNFOLLOWED_COST)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One group of computations, over whole tensors or over a panel.

    ``compute_s`` and ``near_s``, what its tiles load from L2, are of all units where it runs on all of them.
    ``kept_bytes`` are read and written within L2.
    """

    compute_s: float
    near_s: float
    moved: tuple[Moved, ...]
    kept_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Panels:
    """All panels of a chain: how many there are, what each keeps in L2, and the weights that all of them read."""

    weights_bytes: float
    panel_bytes: float
    count: int


class ChainClock:
    """What a chain's stages take on ``device``, apart and in one kernel."""

    def __init__(self, device: DeviceSpec) -> None:
        self.unit_count, self.machine = device.unit_count, Machine(device)

    def separate_s(self, stages: Sequence[Stage]) -> float:
        """Seconds of stages that run one after the other over whole tensors, on all units."""
        return sum(self.stage_s(stage) + self.machine.fork_s for stage in stages)

    def fused_s(self, stages: Sequence[Stage], panels: Panels) -> float:
        """Seconds of ``panels``, divided among the units; ``stages`` are of one panel on one unit."""
        one = sum(self.stage_s(stage, self.unit_count) for stage in stages)
        return ceil_div(panels.count, self.unit_count) * one + self.reload_s(panels) + self.machine.fork_s

    def reload_s(self, panels: Panels) -> float:
        """Seconds of loading the weights again for each panel; 0 where they stay in L2 beside it."""
        machine, weights = self.machine, panels.weights_bytes
        if weights + panels.panel_bytes <= machine.own_bytes:
            return 0.0
        rate = machine.held_rate(weights, BETWEEN_CORES)
        return ceil_div(panels.count, self.unit_count) * weights / (rate / self.unit_count)

    def stage_s(self, stage: Stage, share: int = 1) -> float:
        """Seconds of a stage that has 1 / ``share`` of the device's bandwidths.

        What one core alone keeps in its L2 costs what the stage's tiles load from there, with or without a chain.
        """
        machine = self.machine
        near = machine.own_bytes if self.unit_count == 1 else 0.0
        far_s = sum(
            item.traffic_bytes / (machine.held_rate(item.whole_bytes, BETWEEN_CORES) / share)
            for item in stage.moved
            if item.whole_bytes > near
        )
        kept_s = stage.kept_bytes / (machine.rate(machine.own_cache or machine.spec.lowest_layer) / share)
        return overlapped([stage.compute_s, stage.near_s + kept_s], MEMORY_OVERLAP) + far_s
