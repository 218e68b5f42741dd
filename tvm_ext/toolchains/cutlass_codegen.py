"""The external code generator ``relax.ext.tvm_ext.cutlass``: composite functions in, a module to link to out.

Stock RunCodegen calls it for functions that `PartitionCutlass` has cut out, with the device's name as option
``device``; without one, the current target's device is meant. What it gives back holds every kernel, so that an
exported library needs neither CUTLASS nor a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from tvm_ext._tvm import Module, RelaxFunction, Target, load_static_library
from tvm_ext.autotune.choose import by_measurements
from tvm_ext.autotune.store import MeasurementStore
from tvm_ext.byoc_cutlass import _cutlass
from tvm_ext.byoc_cutlass.host import HostFunction
from tvm_ext.byoc_cutlass.profiler import plan_region
from tvm_ext.byoc_cutlass.selection import Candidate, architecture_of, candidates_of, share_templates
from tvm_ext.devices.device_db import device_for_target, lookup
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import CompileError, IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import TrialStore
from tvm_ext.records.partition import REGION, CutlassKernel, CutlassProfile, CutlassRegion
from tvm_ext.records.serialise import from_json
from tvm_ext.support.files import temporary_folder
from tvm_ext.support.kernel_cache import KernelCache

from .cuda_toolchain import check_architectures, find_nvcc
from .cutlass_samples import profile_on_gpu, sample_versions
from .cutlass_toolchain import CompiledRegion, TemplateCompiler, link_objects

_backend: ContextVar[CutlassBackend | None] = ContextVar("tvm_ext_cutlass_backend", default=None)


def run_codegen(functions: Sequence[RelaxFunction], options: Mapping[str, Any], _constants: Any) -> list[Module]:
    """What RunCodegen asks for: a module with a host function for each of ``functions``.

    Raises CompileError where a function has no template that compiles, and as `TemplateCompiler.compile_regions`.
    """
    backend = _backend.get() or CutlassBackend(_device_of(options))
    regions = {str(func.attrs["global_symbol"]): _region_of(func) for func in functions}
    compiled, why_not = backend.compile(regions)
    if why_not:
        name, reason = next(iter(why_not.items()))
        raise CompileError(f"{name}: no CUTLASS kernel: {reason}", "leave it to other kernels (InlineComposites)")
    counts = {str(func.attrs["global_symbol"]): len(func.params) + 1 for func in functions}
    return [_module({name: compiled[name] for name in regions}, counts, architecture_of(backend.device))]


def _region_of(func: RelaxFunction) -> CutlassRegion:
    inner = func.body.blocks[0].bindings[0].value
    return from_json(CutlassRegion, str(inner.attrs[REGION]))


class CutlassBackend:
    """What `relay_passes/compile_cutlass.py` asks of compilers, for one ``device``: templates compiled once a build."""

    def __init__(
        self,
        device: DeviceSpec,
        cache: KernelCache | None = None,
        *,
        store: TrialStore | None = None,
        measure: bool = False,
    ) -> None:
        """``store`` has measurements to choose by; with ``measure`` what it does not know is measured first."""
        self.device, self.store, self.measure = device, store, measure
        self.profile: CutlassProfile | None = None
        self.known: dict[CutlassRegion, tuple[Candidate, ...] | str] = {}
        self.shared: dict[CutlassRegion, tuple[Candidate, ...]] = {}  # to be tried in this order
        self.compiler = TemplateCompiler(
            cache=KernelCache.for_build(BuildOptions.current()) if cache is None else cache
        )

    @classmethod
    def for_build(cls, device: DeviceSpec, options: BuildOptions) -> CutlassBackend:
        """As ``options`` ask for."""
        mode = options.profile_cutlass
        store = MeasurementStore.for_build(options) if mode is not False else None
        return cls(device, KernelCache.for_build(options), store=store, measure=mode is True)

    def require(self) -> None:
        """Raise UnsupportedEnvironmentError unless the package is there in its version, and a compiler."""
        _cutlass.require()
        check_architectures((architecture_of(self.device),), find_nvcc())

    def predict(self, region: CutlassRegion) -> float:
        """Microseconds of the region's first candidate; raises IllegalRewrite where it has none."""
        found = self._candidates(region)
        if isinstance(found, str):
            raise IllegalRewrite(found, "")
        return found[0].time_us

    def compile(self, regions: Mapping[str, CutlassRegion]) -> tuple[dict[str, CompiledRegion], dict[str, str]]:
        """Kernels by name, and why a region has none."""
        found = {name: self._candidates(region) for name, region in regions.items()}
        why_not = {name: item for name, item in found.items() if isinstance(item, str)}
        kinds = {name: region.kind for name, region in regions.items() if name not in why_not}
        new = {kind: found[name] for name, kind in kinds.items() if kind not in self.shared}
        usable = {kind: item for kind, item in new.items() if not isinstance(item, str)}
        self.shared |= share_templates(self._by_measurements(usable))
        candidates = {name: self.shared[kind] for name, kind in kinds.items()}
        compiled, failed = self.compiler.compile_regions(candidates)
        if self.compiler.cache is not None:
            self.compiler.cache.trim()
        return compiled, why_not | {name: error.problem for name, error in failed.items()}

    def _by_measurements(
        self, found: Mapping[CutlassRegion, tuple[Candidate, ...]]
    ) -> dict[CutlassRegion, tuple[Candidate, ...]]:
        """Candidates by region, best first by what is measured, which is done now where it is asked for."""
        store = self.store
        if store is None or not found:
            return dict(found)
        versions = sample_versions()
        plans = {
            kind: plan_region(kind, candidates, self.device, versions, store) for kind, candidates in found.items()
        }
        if self.measure:
            cache = self.compiler.cache or KernelCache(None)
            self.profile = profile_on_gpu([*plans.values()], self.device, cache, store)
        return {kind: by_measurements(found[kind], store.verdicts(plan.workload)) for kind, plan in plans.items()}

    def _candidates(self, region: CutlassRegion) -> tuple[Candidate, ...] | str:
        """Or why there are none; a network's layers repeat a few regions, each of which is looked at once."""
        kind = region.kind
        if kind not in self.known:
            try:
                self.known[kind] = candidates_of(region, self.device)
            except IllegalRewrite as refusal:
                self.known[kind] = refusal.problem
        return self.known[kind]

    def kernels(self, regions: Mapping[str, CutlassRegion]) -> tuple[dict[str, CutlassKernel], dict[str, str]]:
        """`compile` as records."""
        compiled, why_not = self.compile(regions)
        return {name: _record(name, regions[name], item) for name, item in compiled.items()}, why_not

    def run(self, action: Any) -> Any:
        """``action()``, within which `run_codegen` finds what was compiled already."""
        token = _backend.set(self)
        try:
            return action()
        finally:
            _backend.reset(token)


def _record(name: str, region: CutlassRegion, item: CompiledRegion) -> CutlassKernel:
    return CutlassKernel(
        function=name,
        value=region.value,
        pattern=region.pattern,
        template=item.candidate.name,
        predicted_us=item.candidate.time_us,
        products=1 if region.then is None else 2,
        refused=item.refused,
        seconds=item.kernel.seconds,
        cached=item.kernel.cached,
        measured_us=item.candidate.measured_us,
    )


def _module(compiled: Mapping[str, CompiledRegion], counts: Mapping[str, int], architecture: str) -> Module:
    functions = [
        HostFunction(name=name, tensor_count=counts[name], call=item.candidate.call) for name, item in compiled.items()
    ]
    joined = link_objects(functions, [item.kernel.image for item in compiled.values()], architecture)
    with temporary_folder("cutlass") as folder:
        path = folder / "cutlass.o"
        path.write_bytes(joined)
        return load_static_library(str(path), list(compiled))


def _device_of(options: Mapping[str, Any]) -> DeviceSpec:
    name = options.get("device")
    return lookup(str(name)) if name is not None else device_for_target(Target.current() or "cuda")[0]
