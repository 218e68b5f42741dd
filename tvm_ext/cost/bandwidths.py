"""Bandwidths of a GPU's memory layers in bytes per second, of all units together, as models of time take them."""

from __future__ import annotations

from math import inf

from tvm_ext.devices.hal import DeviceSpec

UNKNOWN_CACHE_RATE = 2.0
"""Times global memory's bandwidth, where a row does not say its cache's: assumed, for CUTLASS's templates."""


def bandwidth(device: DeviceSpec, layer: str) -> float:
    """Of the layer of this name; unbounded where the table does not say."""
    rate = device.layer(layer).bandwidth_gb_per_s
    return inf if rate is None else rate * 1e9


def cache_bandwidth(device: DeviceSpec) -> float:
    """Of reads that hit the device's cache; its memory's where the table does not say."""
    rate = device.layer("L2").cache_bandwidth_gb_per_s
    return bandwidth(device, "L2") if rate is None else rate * 1e9
