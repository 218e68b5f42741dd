"""What a build did: per operator the path taken, why, and its predicted and measured time; per pass the time spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tvm_ext.devices.hal import DeviceSpec, MemoryLayer
from tvm_ext.records import serialise
from tvm_ext.records.build_profile import CacheUse, CodeTimes, DeviceCode, Phase
from tvm_ext.records.choice import KernelChoice
from tvm_ext.records.memory import MemoryUse
from tvm_ext.records.nodes import CallSite
from tvm_ext.records.padding import CHANNELS_LAST, LayoutRecord
from tvm_ext.records.partition import CutlassBuild
from tvm_ext.records.persistent import PersistentRecord
from tvm_ext.records.precision import PrecisionRecord
from tvm_ext.records.rammer import MeasuredRun, RammerRecord
from tvm_ext.records.tuned import TileUse, TuningRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorReport:
    """One kernel of the built model. Times are of one call, in seconds; ``calls`` counts its call sites.

    ``name`` is the operator's, as `tvm-ext explain` knows it; ``function`` the kernel's in the library, which differs
    where weights were repacked for it.
    """

    name: str
    function: str
    choice: KernelChoice
    calls: int
    measured_s: float | None = None
    fastest_s: float | None = None  # of the measured runs, and the slowest: how far they are apart tells noise
    slowest_s: float | None = None

    @property
    def time_s(self) -> float | None:
        """Of one call: measured where it was, otherwise predicted."""
        return self.measured_s if self.measured_s is not None else self.predicted_s

    @property
    def predicted_s(self) -> float | None:
        return self.choice.predicted_s

    @property
    def bound(self) -> str:
        """The resource that binds by the performance model's word; empty where there is no prediction."""
        return self.choice.program.prediction.bound if self.choice.program else ""

    @property
    def total_s(self) -> float | None:
        """`time_s` over all calls."""
        return None if self.time_s is None else self.time_s * self.calls

    @property
    def intensity(self) -> float | None:
        """Arithmetic intensity in FLOP per byte of compulsory traffic; None where one of them is zero."""
        return self.choice.flops / self.choice.bytes if self.choice.flops and self.choice.bytes else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """One limit of the device's roofline: ``value`` in GFLOP/s (kind "compute") or GB/s (kind "memory")."""

    name: str
    kind: str
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedCall:
    """A call of a measured run, in seconds from the run's start; ``site`` is its place in `BuildRecord.sites`."""

    site: int
    start_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTime:
    name: str
    seconds: float


AnyRecord = TypeVar("AnyRecord", bound="BuildRecord")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildRecord:
    """What one build did. ``import_s`` is None for a module that did not come through `from_onnx`."""

    model: str
    device: str
    device_description: str
    target: str
    created: str  # ISO 8601, UTC
    options: tuple[tuple[str, str], ...]
    versions: tuple[tuple[str, str], ...]
    ceilings: tuple[Ceiling, ...]
    operators: tuple[OperatorReport, ...]
    passes: tuple[PassTime, ...]
    import_s: float | None
    build_s: float
    constant_bytes: int  # of the parameters as the kernels read them
    code_generation_s: float  # the part of build_s after the last graph pass: TensorIR passes, LLVM, linking
    run_s: float | None = None  # one run of the whole model, measured
    memory: tuple[tuple[str, MemoryUse], ...] = ()  # by contender, ours first, where that was measured
    sites: tuple[CallSite, ...] = ()  # calls of kernels in program order, with the model's nodes
    timeline: tuple[TimedCall, ...] = ()  # of the measured run whose time is the median
    phases: tuple[Phase, ...] = ()  # of the build and, first, the import, in their order
    code: CodeTimes = field(default_factory=CodeTimes)
    kernel_cache: CacheUse = field(default_factory=CacheUse)
    layout: LayoutRecord | None = None  # None where channel-blocked layouts were not considered
    persistent: PersistentRecord | None = None  # None where no operators were considered for one persistent kernel
    cutlass: CutlassBuild | None = None  # None where templates were not asked for
    rammer: RammerRecord | None = None  # None where no schedules of rTasks were asked for
    precision: PrecisionRecord | None = None  # None where all of it is in the model's types
    notes: tuple[str, ...] = ()  # what limits have changed about the graph; an operator's are in its reason
    tiles: TileUse = field(default_factory=TileUse)  # which were chosen by measurement
    tuning: TuningRecord | None = None  # None where the build was not asked to tune
    row: DeviceSpec | None = None  # what kernels were constructed for; a build with it as `device` makes the same
    device_code: DeviceCode | None = None  # of GPU kernels, as last exported; None for a CPU

    def bound_of(self, operator: OperatorReport) -> str:
        """What binds ``operator``, a memory layer by its full name: "L4 DRAM" rather than "L4"."""
        memories = (ceiling.name for ceiling in self.ceilings if ceiling.kind == "memory")
        return next((name for name in memories if operator.bound and name.split()[0] == operator.bound), operator.bound)

    def sites_of(self, operator: OperatorReport) -> list[CallSite]:
        """The calls of an operator's kernel."""
        return [site for site in self.sites if site.function == operator.function]

    def title_of(self, operator: OperatorReport) -> str:
        """The nodes of the operator's first call and how many more calls there are; its own name without nodes."""
        sites = [site for site in self.sites_of(operator) if site.nodes]
        if not sites:
            return operator.name
        return sites[0].title + (f" and {len(sites) - 1} more" if len(sites) > 1 else "")

    def peak_share(self, operator: OperatorReport) -> float | None:
        """FLOP/s over the device's peak for the type of the first operand, else float32's; None where not known."""
        dtype = next((site.dtype for site in self.sites_of(operator)), "float32")
        peaks = {ceiling.name: ceiling.value for ceiling in self.ceilings if ceiling.kind == "compute"}
        peak = peaks.get(dtype, peaks.get("float32"))
        return operator.choice.flops / operator.time_s / 1e9 / peak if peak and operator.time_s else None

    def bandwidth_share(self, operator: OperatorReport) -> float | None:
        """Compulsory bytes/s over the bandwidth of the slowest memory; above 1 where operands come from caches."""
        memory = min((item.value for item in self.ceilings if item.kind == "memory"), default=None)
        return operator.choice.bytes / operator.time_s / 1e9 / memory if memory and operator.time_s else None

    def layout_summary(self) -> str:
        """How many operators work in blocks of channels, in a few words; empty where none could."""
        if self.layout is None or not self.layout.chains:
            return ""
        candidates = sum(len(chain.operators) for chain in self.layout.chains)
        transforms = self.layout.transform_count
        name = "NHWC" if self.layout.block == CHANNELS_LAST else f"NCHW{self.layout.block}c"
        return (
            f"{self.layout.blocked_count} of {candidates} operators in {name} "
            f"with {transforms} transform{'' if transforms == 1 else 's'}"
        )

    def persistent_summary(self) -> str:
        """How many candidates became one persistent kernel, in a few words; empty where there was none."""
        if self.persistent is None or not self.persistent.regions:
            return ""
        regions = self.persistent.regions
        return f"{sum(region.fused for region in regions)} of {len(regions)} chains in one kernel each"

    def rammer_summary(self) -> str:
        """How many operators schedules run, in a few words; empty where that was not asked for."""
        if self.rammer is None:
            return ""
        scheduled = self.rammer.scheduled
        count = sum(len(region.operators) for region in scheduled)
        return f"{count} operators of rTasks in {len(scheduled)} schedule{'' if len(scheduled) == 1 else 's'}"

    def cutlass_summary(self) -> str:
        """How many products are kernels of templates, in a few words; empty where there was none."""
        if self.cutlass is None:
            return ""
        made, declined = sum(kernel.products for kernel in self.cutlass.kernels), len(self.cutlass.declined)
        return f"{made} of {made + declined} products by CUTLASS" if made + declined else ""

    def device_code_summary(self) -> str:
        """Whether GPU kernels are source or machine code, and for what, in a sentence; empty for a CPU."""
        code = self.device_code
        if code is None:
            return ""
        if not code.architectures:
            return f"GPU kernels: {code.language} source" + (f" ({code.note})" if code.note else "")
        by = f" by {code.compiler}" if code.compiler else ""
        size = f", {code.size_bytes / 1e6:.2f} MB" if code.size_bytes else ""
        made = f" in {code.seconds:.1f} s" if code.seconds else ""
        spilled = f", {len(code.spills)} kernels spill registers" if code.spills else ""
        return f"GPU kernels: machine code for {', '.join(code.architectures)}{by}{size}{made}{spilled}"

    def cache_summary(self) -> str:
        """What the kernel cache did, in a few words."""
        use = self.kernel_cache
        shared = f", {use.duplicates} equal to another" if use.duplicates else ""
        if use.folder is None:
            return f"kernel cache off{shared}"
        return f"kernel cache: {use.hits} found, {use.misses} made{shared}"

    def path_counts(self) -> dict[str, int]:
        """Number of kernels per path (`choice.Path`)."""
        return dict(Counter(operator.choice.path for operator in self.operators))

    def operator(self, name: str) -> OperatorReport:
        """The operator called ``name``; raises KeyError where there is none."""
        for operator in self.operators:
            if operator.name == name:
                return operator
        raise KeyError(name)

    def with_measurements(
        self: AnyRecord,
        seconds: Mapping[str, float],
        run_s: float | None,
        schedules: Mapping[str, MeasuredRun] | None = None,
        spread: Mapping[str, tuple[float, float]] | None = None,
        timeline: Sequence[TimedCall] = (),
    ) -> AnyRecord:
        """A copy with measured seconds per call by kernel function, of one run of the whole model, and of schedules.

        ``spread`` is the fastest and the slowest run by kernel function, ``timeline`` the calls of one run.

        Of a kernel that runs in a schedule the time is what `RegionRecord.measured_seconds` says.
        """
        regions = self.rammer.regions if self.rammer is not None else ()
        regions = tuple(
            replace(region, measured=(schedules or {}).get(region.symbol, region.measured)) for region in regions
        )
        inside = {
            name: value for region in regions if region.measured for name, value in region.measured_seconds().items()
        }
        times = {**inside, **seconds}
        none = (None, None)

        def measured(operator: OperatorReport) -> OperatorReport:
            fastest, slowest = (spread or {}).get(operator.function, none)
            time_s = times.get(operator.function, operator.measured_s)
            return replace(operator, measured_s=time_s, fastest_s=fastest, slowest_s=slowest)

        return replace(
            self,
            operators=tuple(map(measured, self.operators)),
            run_s=run_s,
            timeline=tuple(timeline),
            rammer=self.rammer and replace(self.rammer, regions=regions),
        )

    def to_json(self) -> str:
        """One line of JSON; `from_json` gives back an equal report."""
        return serialise.to_json(self)

    @classmethod
    def from_json(cls: type[AnyRecord], text: str) -> AnyRecord:
        """Raises ValueError where ``text`` is not a report."""
        return serialise.from_json(cls, text)


def ceilings_of(device: DeviceSpec) -> tuple[Ceiling, ...]:
    """The roofline's limits that the device tables know: peak per dtype, bandwidth per memory layer."""
    peaks = [Ceiling(name=dtype, kind="compute", value=gflops) for dtype, gflops in device.peak_gflops]
    layers = [
        Ceiling(name=_layer_title(layer), kind="memory", value=layer.bandwidth_gb_per_s)
        for layer in device.layers
        if layer.bandwidth_gb_per_s is not None
    ]
    return (*peaks, *layers)


def _layer_title(layer: MemoryLayer) -> str:
    named_already = layer.description.startswith(layer.name)
    return layer.description if named_already else f"{layer.name} {layer.description}"
