"""What the micro-benchmarks of a CPU found, and how it overrules the arithmetic of the tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .device_facts import fact, with_facts
from .hal import DeviceSpec, Fact

AGREEMENT = 0.1
"""Two rounds agree where no figure differs by more: a busy neighbour takes a third or a half of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuMeasurement:
    """Measured figures, device-wide unless the name says one core; ``streams_gb_per_s`` holds (layer, GB/s) pairs.

    ``spread`` says how far the median run of a round lay from its best; ``disagreement`` how far the two best rounds
    of a figure lay apart, of ``rounds`` in all. Both are fractions.
    """

    clock_ghz: float
    float32_gflops_one_core: float
    float32_gflops: float
    float64_gflops: float
    streams_gb_per_s: tuple[tuple[str, float], ...]
    launch_overhead_us: float
    spread: float
    rounds: int = 1
    disagreement: float = 0.0

    def __post_init__(self) -> None:
        rates = [self.clock_ghz, self.float32_gflops_one_core, self.float32_gflops, self.float64_gflops]
        rates += [self.launch_overhead_us, *(rate for _, rate in self.streams_gb_per_s)]
        assert all(math.isfinite(rate) and rate > 0 for rate in rates), f"a rate that is not positive: {self}"
        assert self.spread >= 0
        assert self.rounds >= 1
        assert self.disagreement >= 0

    @property
    def agrees(self) -> bool:
        """Whether the figures do not differ between rounds; true of what was measured in one."""
        return self.disagreement <= AGREEMENT


def with_measurement(spec: DeviceSpec, found: CpuMeasurement, where: str) -> DeviceSpec:
    """``spec`` with the figures measured ``where``; the arithmetic ones stay as unused facts.

    FMA pipes follow from the rate of one core: 253 GFLOP/s at 3.95 GHz with 16 lanes = 253 / (3.95 x 16 x 2) = 2.0.
    What else runs only ever slows a benchmark down. So figures of rounds that do not agree count only where they are
    better than the arithmetic ones: memory measured at 4 GB/s beside a busy neighbour is faster than that.
    """
    source = f"measured {where}, best of many runs (the median up to {found.spread:.0%} slower)"
    pipes = found.float32_gflops_one_core / (found.clock_ghz * spec.teu_lanes * 2)
    facts: list[Fact] = [
        fact("clock_ghz", found.clock_ghz, "GHz", f"{source}: chain of dependent integer operations"),
        fact("fma_pipes", max(1, round(pipes)), "per cycle", f"{source}: {pipes:.2f} = one core's FMA rate per clock"),
        fact("launch_overhead_us", found.launch_overhead_us, "us", f"{source}: empty parallel region"),
        fact("peak_gflops.float32", found.float32_gflops, "GFLOP/s", f"{source}: independent FMA chains"),
        fact("peak_gflops.float64", found.float64_gflops, "GFLOP/s", f"{source}: independent FMA chains"),
    ]
    for key, ratio in (("float16", 1.0), ("bfloat16", 1.0), ("int32", 0.5), ("int8", 0.5)):
        derived = f"{ratio:g} x float32, {source}"
        facts.append(fact(f"peak_gflops.{key}", found.float32_gflops * ratio, "GFLOP/s", derived))
    for layer, rate in found.streams_gb_per_s:
        facts.append(fact(f"layers.{layer}.bandwidth_gb_per_s", rate, "GB/s", f"{source}: vector loads"))
    known = {item.field: float(item.value) for item in spec.facts if item.used and item.field in _fields(facts)}
    return with_facts(spec, [item for item in facts if found.agrees or _is_better(item, known)])


def _fields(facts: Sequence[Fact]) -> set[str]:
    return {item.field for item in facts}


def _is_better(item: Fact, known: Mapping[str, float]) -> bool:
    """Whether a measured figure is better than the known one: a higher rate, a shorter time."""
    if item.field not in known:
        return True
    value = float(item.value)
    return value < known[item.field] if item.field == "launch_overhead_us" else value > known[item.field]
