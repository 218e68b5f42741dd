"""What the micro-benchmarks of a GPU found (`benchmarks/gpu/microbench.cu`), checked, and as a row (Roller §4)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tvm_ext.errors import InputError

from .device_facts import fact, with_facts
from .hal import DeviceSpec, Fact

SCHEMA = 1  # of the file; a change makes older ones unknown
MOST_BYTES = 1 << 20  # a choice: the program writes two kilobytes

LIMITS: Mapping[str, tuple[str, float, float]] = {
    "launch_overhead_us": ("us", 0.1, 1e3),
    "barrier_ns": ("ns", 1.0, 1e5),
    "handoff_ns": ("ns", 10.0, 1e6),
    "layers.L1.bandwidth_gb_per_s": ("GB/s", 100.0, 1e6),
    "layers.L1.latency_ns": ("ns", 1.0, 1e3),
    "layers.L2.cache_bandwidth_gb_per_s": ("GB/s", 10.0, 1e6),
    "layers.L2.cache_latency_ns": ("ns", 10.0, 1e4),
    "layers.L2.bandwidth_gb_per_s": ("GB/s", 1.0, 1e5),
    "layers.L2.latency_ns": ("ns", 10.0, 1e4),
}
"""Figures, their units, and what no GPU is below or beyond."""

INSTRUCTIONS = (
    "float32.fma", "float32.add", "float32.max", "float32.exp", "float32.convert", "float16.fma", "float64.fma",
    "int32.fma", "int32.add", "int8.dot",
)  # fmt: skip
RESULTS_A_CLOCK = 1024
"""Of a unit: no GPU has more of any instruction of its vector units (int8.dot: four products each)."""

PEAKS: Mapping[str, str] = {"float32": "float32.fma", "float16": "float16.fma", "float64": "float64.fma"}
NEAR = 4.0
"""A figure that is further from the row's than this factor is of another device, or nonsense."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMeasurement:
    """``figures`` by the path of the row's field; ``capability`` is CUDA's, ``units`` counts multiprocessors."""

    device: str
    capability: tuple[int, int]
    units: int
    clock_ghz: float
    figures: Mapping[str, float]

    def __post_init__(self) -> None:
        limits = dict(LIMITS) | {f"instruction_gops.{name}": ("Gop/s", 0.0, self._most_gops) for name in INSTRUCTIONS}
        missing = sorted(limits.keys() - self.figures.keys())
        if missing:
            raise ValueError(f"the figure {missing[0]} is missing")
        for name, value in self.figures.items():
            unit, least, most = limits.get(name, ("", 0.0, 0.0))
            if not unit:
                raise ValueError(f"no row has the figure {name}")
            if not (math.isfinite(value) and least < value < most):
                raise ValueError(f"{name} is {value:g} {unit}, which is not between {least:g} and {most:g}")
        memory, cache = (self.figures[f"layers.L2.{name}bandwidth_gb_per_s"] for name in ("", "cache_"))
        if cache < 0.8 * memory:
            raise ValueError(f"the cache's {cache:g} GB/s are less than memory's {memory:g}")

    @property
    def _most_gops(self) -> float:
        return RESULTS_A_CLOCK * self.units * self.clock_ghz


def read_measurement(path: Path) -> GpuMeasurement:
    """What the program wrote; raises InputError where it is not that, or has a value that no GPU can have."""
    remedy = "run the bundle's microbench on the GPU while nothing else does, and keep what it prints"
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise ValueError("it is no plain file of at most 1 MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}, not {SCHEMA}")
        figures = {str(name): _number(name, value) for name, value in content["figures"].items()}
        units, clock = _number("units", content["units"]), _number("clock_ghz", content["clock_ghz"])
        if not (1 <= units <= 4096 and 0.1 < clock < 10.0):
            raise ValueError(f"{units:g} units at {clock:g} GHz are no GPU")
        return GpuMeasurement(
            device=str(content["device"])[:200],
            capability=(int(content["major"]), int(content["minor"])),
            units=int(units),
            clock_ghz=clock,
            figures=figures,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)[:300]
        raise InputError(f"{path} is no measurement of a GPU: {reason}.", remedy) from error


def _number(name: object, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}, which is no number")
    return float(value)


def measured_gpu(spec: DeviceSpec, found: GpuMeasurement) -> DeviceSpec:
    """The row ``spec`` with what was measured; former figures stay as unused facts.

    Peaks of the vector units follow from the rates of multiply-adds. Matrix units are not measured: their peaks stay.
    Raises InputError where another device was measured: of another capability, of another number of units, or with a
    rate that is far from the row's.
    """
    if found.capability != spec.compute_capability or found.units != spec.unit_count:
        raise InputError(
            f"{found.device} has compute capability {found.capability[0]}.{found.capability[1]} and {found.units} "
            f"units; {spec.name} has {spec.compute_capability} and {spec.unit_count}.",
            "name its own row, or write one (docs/add-a-device.md)",
        )
    known = {item.field: item for item in spec.facts if item.used}
    facts = _facts(found)
    for item in facts:
        former = known.get(item.field)
        if former is not None and item.field.startswith(("layers.", "peak_")):
            ratio = float(item.value) / float(former.value)
            if not 1 / NEAR <= ratio <= NEAR:
                raise InputError(
                    f"{item.field} was measured as {item.value:g} {item.unit}, {spec.name} has {former.value:g}.",
                    "measure again while nothing else runs on the GPU, at its usual clock",
                )
    named = fact("row", f"{spec.name} as measured on a {found.device}", "name", "tvm-ext devices --import")
    return with_facts(spec, [*facts, named])


def _facts(found: GpuMeasurement) -> list[Fact]:
    source = f"measured on a {found.device}, best of several runs (benchmarks/gpu/microbench.cu)"
    facts = []
    for name, value in found.figures.items():
        unit = LIMITS[name][0] if name in LIMITS else "Gop/s"
        facts.append(fact(name, value, unit, source))
    for key, instruction in PEAKS.items():
        rate = 2.0 * found.figures[f"instruction_gops.{instruction}"]
        facts.append(fact(f"peak_gflops.{key}", rate, "GFLOP/s", f"twice {instruction}, {source}"))
    return facts
