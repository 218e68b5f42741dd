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

from tvm_ext.devices.hal import DeviceSpec, MemoryLayer
from tvm_ext.support.arithmetic import ceil_div

from .followed_rows import UNFOLLOWED_COST
from .perf_model import CACHE_SHARE, FIRST_PHYSICAL_LEVEL, MEMORY_OVERLAP, REPORTED_UNITS_PER_G
from .register_tiles import overlapped

WRITE_TRAFFIC = 2
"""Bytes moved for each one written beyond L2: a line that is stored to is read first, and written back later."""

# What passes between L2 and the layers beyond adds to the arithmetic instead of hiding behind it. Measured on one core
# of a shared Xeon: 16384 x 256 -> 64 -> 16 runs 1.18 times as fast as one kernel. By addition the gain should be 1.11,
# hidden as loads from L2 are 1.02.

LEAST_GAIN = 1.03
"""Apart over fused, from which on the prediction of a gain is believed."""

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


def separate_s(stages: Sequence[Stage], device: DeviceSpec) -> float:
    """Seconds of stages that run one after the other over whole tensors, on all units."""
    return sum(stage_s(stage, device, 1) + _launch_s(device) for stage in stages)


def fused_s(
    stages: Sequence[Stage], weights_bytes: float, panel_bytes: float, panels: int, device: DeviceSpec
) -> float:
    """Seconds of ``panels`` panels, divided among the units; ``stages`` are of one panel on one unit."""
    rounds = ceil_div(panels, device.unit_count)
    one = sum(stage_s(stage, device, device.unit_count) for stage in stages)
    reloads = reload_s(weights_bytes, panel_bytes, panels, device)
    return rounds * one + reloads + _launch_s(device)


def reload_s(weights_bytes: float, panel_bytes: float, panels: int, device: DeviceSpec) -> float:
    """Seconds of loading the weights again for each panel; 0 where they stay in L2 beside it."""
    if weights_bytes + panel_bytes <= l2_bytes(device):
        return 0.0
    rounds = ceil_div(panels, device.unit_count)
    return rounds * weights_bytes / _rate(_home(weights_bytes, device), device.unit_count)


def _launch_s(device: DeviceSpec) -> float:
    """Seconds of starting a parallel region; one core starts none."""
    return (device.launch_overhead_us or 0.0) * 1e-6 if device.unit_count > 1 else 0.0


def l2_bytes(device: DeviceSpec) -> float:
    """What may stay in one core's own last cache."""
    own = _own_cache(device)
    return 0.0 if own is None else (own.capacity_bytes or 0) * CACHE_SHARE


def stage_s(stage: Stage, device: DeviceSpec, share: int) -> float:
    """Seconds of a stage that has 1 / ``share`` of the device's bandwidths.

    What one core alone keeps in its L2 costs what the stage's tiles load from there, with or without a chain.
    """
    near = l2_bytes(device) if device.unit_count == 1 else 0.0
    far_s = sum(
        item.traffic_bytes / _rate(_home(item.whole_bytes, device), share)
        for item in stage.moved
        if item.whole_bytes > near
    )
    kept_s = stage.kept_bytes / _rate(_own_cache(device) or device.lowest_layer, share)
    return overlapped([stage.compute_s, stage.near_s + kept_s], MEMORY_OVERLAP) + far_s


def _home(size_bytes: float, device: DeviceSpec) -> MemoryLayer:
    """The highest layer below the cores' own caches that holds so many bytes."""
    shared = [layer for layer in device.layers[FIRST_PHYSICAL_LEVEL:] if layer.scope == "device"]
    for layer in shared:
        if layer.capacity_bytes is not None and size_bytes <= layer.capacity_bytes * CACHE_SHARE:
            return layer
    return device.lowest_layer


def _own_cache(device: DeviceSpec) -> MemoryLayer | None:
    """The last cache that a core has to itself; None where there is none."""
    own = [layer for layer in device.layers[1:] if layer.scope == "unit"]
    return own[-1] if own else None


def _rate(layer: MemoryLayer, share: int) -> float:
    """Bytes a second of 1 / ``share`` of the layer's bandwidth; where it is not known, it does not bind."""
    rate = layer.bandwidth_gb_per_s
    return float("inf") if rate is None else rate * REPORTED_UNITS_PER_G / share
