"""What the micro-benchmarks of a CPU found, and which of it overrules the row of the tables."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .device_facts import fact, with_facts
from .hal import DeviceSpec, Fact
from .machine import ROW_BYTES

AGREEMENT = 0.1
"""Two rounds agree where no figure differs by more: a busy neighbour takes a third or a half of one."""
NOISE = 0.2
"""A figure that is no further from the row's than this leaves it: measurements of one quiet machine vary by a tenth."""
STEPS_PER_DECADE = 10
"""Figures that overrule the row are rounded to preferred numbers (ISO 3, R10): 1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5 ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuMeasurement:
    """Measured figures, device-wide unless the name says one core; ``streams_gb_per_s`` holds (layer, GB/s) pairs,
    and (``L3.64``, GB/s) of one core's rows of so many bytes; ``function_cycles`` those of `DeviceSpec`.

    ``spread`` says how far the median run of a round lay from its best; ``disagreement`` how far the two best rounds
    of a figure lay apart, of ``rounds`` in all. Both are fractions.
    """

    clock_ghz: float
    float32_gflops_one_core: float
    float32_gflops: float
    float64_gflops: float
    streams_gb_per_s: tuple[tuple[str, float], ...]
    launch_overhead_us: float
    function_cycles: tuple[tuple[str, float], ...] = ()
    spread: float
    rounds: int = 1
    disagreement: float = 0.0

    def __post_init__(self) -> None:
        rates = [self.clock_ghz, self.float32_gflops_one_core, self.float32_gflops, self.float64_gflops]
        rates += [self.launch_overhead_us, *(rate for _, rate in (*self.streams_gb_per_s, *self.function_cycles))]
        assert all(math.isfinite(rate) and rate > 0 for rate in rates), f"a rate that is not positive: {self}"
        assert self.spread >= 0
        assert self.rounds >= 1
        assert self.disagreement >= 0

    @property
    def agrees(self) -> bool:
        """Whether the figures do not differ between rounds; true of what was measured in one."""
        return self.disagreement <= AGREEMENT


def with_measurement(spec: DeviceSpec, found: CpuMeasurement, where: str) -> DeviceSpec:
    """``spec`` with all figures as they were measured ``where``; those of the tables stay as unused facts."""
    return with_facts(spec, _facts(spec, found, where))


def measured_row(spec: DeviceSpec, found: CpuMeasurement, when: str, kept: DeviceSpec | None = None) -> DeviceSpec:
    """The row of a machine that was measured at ``when``: ``spec`` but for what stands above the noise, rounded.

    Two measurements of a machine that differ by their noise thereby give one row, and kernels are constructed for rows:
    a processor of the tables keeps its row, another the row ``kept`` from its first measurement.
    What else runs only ever slows a benchmark down, so figures of rounds that do not agree count only where they are
    better than what is known: memory measured at 4 GB/s beside a busy neighbour is faster than that.
    """
    facts, known = _facts(spec, found, f"on this machine on {when}"), _used(kept or spec)
    standing = [item for item in facts if _stands_out(item, known.get(item.field), found.agrees)]
    if kept is not None and not standing:
        return kept
    tables, fields = _used(spec), {item.field for item in standing} | {"row"}
    earlier = [
        item
        for path, item in known.items()
        if path not in fields and (path not in tables or item.value != tables[path].value)
    ]
    differ = len(standing) + len(earlier)
    named = fact(
        "row",
        f"{spec.row or spec.name} as measured on {when}",
        "name",
        f"{differ} of {len(facts)} figures differ from it",
    )
    row = with_facts(spec, [*earlier, *map(_rounded, standing), named])
    left = tuple(replace(item, used=False) for item in facts if item not in standing)
    return replace(row, facts=(*row.facts, *left))


def _used(spec: DeviceSpec) -> dict[str, Fact]:
    return {item.field: item for item in spec.facts if item.used}


def _facts(spec: DeviceSpec, found: CpuMeasurement, where: str) -> list[Fact]:
    """The figures as facts of ``spec``.

    FMA pipes follow from the rate of one core: 253 GFLOP/s at 3.95 GHz with 16 lanes = 253 / (3.95 x 16 x 2) = 2.0.
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
    rates = dict(found.streams_gb_per_s)
    for name, rate in found.streams_gb_per_s:
        layer, _, row = name.partition(".")
        if not row:
            facts.append(fact(f"layers.{layer}.bandwidth_gb_per_s", rate, "GB/s", f"{source}: vector loads"))
        elif int(row) < ROW_BYTES[-1]:
            share = min(1.0, rate / rates[f"{layer}.{ROW_BYTES[-1]}"])
            facts.append(
                fact(f"row_shares.{name}", share, "of rows of 4 KiB", f"{source}: rows of {row} bytes, one core")
            )
    for name, cycles in found.function_cycles:
        facts.append(fact(f"function_cycles.{name}", cycles, "cycles of a register", f"{source}: chains of it"))
    return facts


def _stands_out(item: Fact, known: Fact | None, agrees: bool) -> bool:
    """Whether a measured figure is no noise about the known one, and of a busy machine better than it."""
    if known is None and not item.field.startswith("row_shares."):
        return True
    ratio = float(item.value) / float(known.value if known else 1.0)
    better = ratio < 1 if item.field.startswith(("launch_overhead_us", "function_cycles")) else ratio > 1
    return abs(math.log(ratio)) > math.log1p(NOISE) and (agrees or better)


def _rounded(item: Fact) -> Fact:
    """155.5 GB/s as 160, with the figure in its source; a count stays."""
    if isinstance(item.value, int):
        return item
    value = 10 ** (round(math.log10(float(item.value)) * STEPS_PER_DECADE) / STEPS_PER_DECADE)
    return replace(item, value=float(f"{value:.3g}"), source=f"{item.source}: {item.value:.4g}, rounded")
