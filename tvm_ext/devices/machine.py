"""A device as models of time ask it: which layer holds so many bytes, at which rate, and what starting a kernel takes.

The numbers are the row's (`hal.DeviceSpec`). Rates that it does not have are infinite, starts free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from tvm_ext.errors import TargetError
from tvm_ext.records.rprogram import LayerCost, Prediction
from tvm_ext.support.quantities import chosen

from .hal import DeviceSpec, MemoryLayer

CACHE_SHARE = 0.75
"""Share of a CPU's L2 or L3 that a tile may fill: addressed physically, they have sets that scattered pages overfill.

Measured on one CPU (Cascade Lake): loads from 1 MiB of L2 fall from 220 to 170 GB/s between 0.5 and 0.75 of it, to 150
at 0.95, 110 beyond it. L1 keeps its rate to the last line.
"""

FIRST_PHYSICAL_LEVEL = 2
"""L1 is addressed virtually: its sets are those of the program's own addresses."""

UNKNOWN_CACHE_RATE = 2.0
"""Times global memory's bandwidth, where a row does not say its cache's: assumed, for CUTLASS's templates."""

ROW_BYTES = (64, 128, 256, 4096)
"""Rows whose rates are measured; what is between two counts as the longer one, the longest is the whole rate."""

FUNCTIONS: Mapping[str, tuple[int, int]] = {
    "exp": (16, 0),
    "divide": (8, 1),
    "sqrt": (8, 1),
    "sigmoid": (10, 2),
    "tanh": (15, 2),
    "erf": (24, 1),
    "log": (26, 0),
}
"""Instructions of a function of one float32, and how often it needs an exp or a reciprocal beside them.

Counted in the PTX of CUDA 13's library, division and root by their order; exp as `vector_math` writes it for CPUs.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a model means by "held": in the highest layer, from level ``first`` on, into which the bytes fit.

    ``shared``: of those layers that all units share. ``divided``: of a shared layer one unit's part counts. ``whole``:
    all of a capacity counts, and not `CACHE_SHARE` of it.
    """

    first: int
    shared: bool = False
    divided: bool = False
    whole: bool = False


WARM = Holding(first=2, whole=True)
"""Tensors that the kernel before has written or read: no core's L1 has them.

Measured on a Zen 4 with 1 MiB of L2, element-wise kernels over 785 to 985 KiB that two cores have just written: one
core takes 12 to 15 us, both together in most runs 17 to 21. By `CACHE_SHARE` both would be started.
"""

OF_ONE_UNIT = Holding(first=1, divided=True)
"""What a unit reads again and again: its tiles, and the weights of a recurrent cell from step to step."""

BETWEEN_CORES = Holding(first=2, shared=True)
"""What other cores write or read: tensors between kernels of a chain, and what a core's own caches do not keep."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What ``spec`` answers where a model asks for time or room."""

    spec: DeviceSpec

    @property
    def launch_us(self) -> float:
        """Microseconds of starting one parallel region or kernel."""
        return self.spec.launch_overhead_us or 0.0

    @property
    def launch_s(self) -> float:
        return self.launch_us * 1e-6

    @property
    def fork_s(self) -> float:
        """Seconds of starting a parallel region; one core starts none."""
        return self.launch_s if self.spec.unit_count > 1 else 0.0

    @property
    def hz(self) -> float:
        """Nominal cycles per second; raises TargetError where the table has none: no model of cycles can do without."""
        if self.spec.clock_ghz is None:
            raise TargetError(
                f"the device table of {self.spec.name} has no clock, by which the time of its kernels is predicted.",
                "give its row the fact 'clock_ghz' (docs/add-a-device.md)",
            )
        return self.spec.clock_ghz * 1e9

    @property
    def vector_hz(self) -> float:
        """A CPU's cycles per second under full vector load: from the measured peak where there is one, else nominal."""
        spec, peak = self.spec, self.spec.peak_gflops_of("float32")
        if peak and spec.fma_pipes:
            return peak * 1e9 / (spec.unit_count * spec.teu_lanes * 2 * spec.fma_pipes)
        return (spec.clock_ghz or 0.0) * 1e9

    def results_per_s(self, dtype: str, kind: str = "fma") -> float:
        """Results per second of one ``kind`` of vector instruction ("fma", "add", "max"), of all units; 0.0: unknown.

        What the row measured (`instruction_gops`), else the rate of multiply-adds, of which a peak counts two each.
        """
        rate = dict(self.spec.instruction_gops).get(f"{dtype}.{kind}") or (self.spec.peak_gflops_of(dtype) or 0.0) / 2
        return rate * 1e9

    def instructions(self, kind: str) -> float:
        """Multiply-adds of float32 in whose time a unit has one result of ``kind``: an instruction, or of `FUNCTIONS`.

        By the row where it says (a CPU's cycles, a GPU's rate), else counted. Worked example, exp: 64 / 16 = 4 on an
        A100; 8 cycles of a Zen 5, which starts two multiply-adds in each, are 16.
        """
        if cycles := dict(self.spec.function_cycles).get(kind):
            return cycles * self.spec.fma_rate
        if rate := dict(self.spec.instruction_gops).get(f"float32.{kind}"):
            return self.results_per_s("float32") / (rate * 1e9)
        plain, special = FUNCTIONS.get(kind, (1, 0))
        return plain + (special * self.instructions("exp") if special else 0)

    def rate(self, layer: MemoryLayer | str) -> float:
        """Bytes per second that all units together load from ``layer``."""
        rate = (self.spec.layer(layer) if isinstance(layer, str) else layer).bandwidth_gb_per_s
        return rate * 1e9 if rate else inf

    def row_share(self, layer: MemoryLayer, row_bytes: Any) -> Any:
        """Share of the `rate` at which rows so long come that lie far apart (paper §3.3); 1.0 where nobody measured.

        Lengths may be an array.
        """
        shares = dict(self.spec.row_shares)
        share: Any = 1.0
        for size in reversed(ROW_BYTES):
            share = chosen(row_bytes <= size, shares.get(f"{layer.name}.{size}", 1.0), share)
        return share

    @property
    def l2_rate(self) -> float:
        """`rate` of the second cache; infinite where there is none."""
        return self.rate(self.spec.layers[2]) if len(self.spec.layers) > 2 else inf

    @property
    def cache_rate(self) -> float:
        """`rate` of reads that hit a GPU's cache; its memory's where the table does not say."""
        rate = self.spec.layer("L2").cache_bandwidth_gb_per_s
        return rate * 1e9 if rate else self.rate("L2")

    def held_rate(self, size_bytes: float, rule: Holding) -> float:
        """`rate` of the layer that holds so many bytes."""
        return self.rate(self.holder(size_bytes, rule))

    def bytes_per_cycle(self, rate: float) -> float:
        """What one unit loads in a cycle of a ``rate`` of all units."""
        return rate / self.spec.unit_count / self.hz

    def holder(self, size_bytes: float, rule: Holding) -> MemoryLayer:
        """The layer that holds so many bytes by ``rule``; the lowest where no other does."""
        for level, layer in enumerate(self.spec.layers):
            if level < rule.first or (rule.shared and layer.scope != "device"):
                continue
            if layer.bandwidth_gb_per_s and size_bytes <= self.room_bytes(level, rule):
                return layer
        return self.spec.lowest_layer

    def room_bytes(self, level: int, rule: Holding) -> float:
        """What of a layer's capacity counts by ``rule``."""
        layer = self.spec.layers[level]
        if layer.capacity_bytes is None:
            return inf
        own = layer.capacity_bytes / (self.spec.unit_count if rule.divided and layer.scope == "device" else 1)
        keeps_all = rule.whole or self.spec.kind != "cpu" or level < FIRST_PHYSICAL_LEVEL
        return own if keeps_all else own * CACHE_SHARE

    @property
    def own_cache(self) -> MemoryLayer | None:
        """The last cache that a core has to itself; None where there is none."""
        own = [layer for layer in self.spec.layers[1:] if layer.scope == "unit"]
        return own[-1] if own else None

    @property
    def own_bytes(self) -> float:
        """What may stay in one core's own last cache."""
        own = self.own_cache
        return 0.0 if own is None else (own.capacity_bytes or 0) * CACHE_SHARE

    def bind(
        self, compute_s: float, costs: Sequence[LayerCost], *, launches: int = 1, together_s: float | None = None
    ) -> Prediction:
        """The slowest of computing and of the loads, or ``together_s`` where they take longer, behind the launches."""
        launch_s = self.launch_s * launches
        times = {"compute": compute_s, **{cost.layer: cost.time_s for cost in costs}}
        slowest = max(times, key=lambda name: times[name])
        return Prediction(
            time_s=(times[slowest] if together_s is None else together_s) + launch_s,
            compute_s=compute_s,
            layers=tuple(costs),
            bound="launch" if launch_s > times[slowest] else slowest,
        )
