"""Regions cut out for CUTLASS become kernels where a template compiles and pays; the others are operators again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from tvm_ext._tvm import IRModule, PassContext, RelaxFunction, module_pass, relax
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, UnsupportedEnvironmentError
from tvm_ext.records.partition import (
    CODEGEN,
    CUTLASS,
    PARTITION,
    CutlassBuild,
    CutlassKernel,
    CutlassPartition,
    CutlassProfile,
    CutlassRegion,
)
from tvm_ext.records.serialise import from_json, to_json

from .composites import OwnTime, Predictor, inlined, is_composite, region_of, twin_of

WhyOwn = Callable[[float, float], str]
"""Of a kernel of our own and a template, in microseconds: why the product is left to ours, empty where it is not."""


class TemplateBackend(Predictor, Protocol):
    """What compiles regions; `toolchains/cutlass_codegen.py` has it. ``profile`` is what was measured for it."""

    profile: CutlassProfile | None

    def require(self) -> None:
        """Raise UnsupportedEnvironmentError where something that it needs is missing."""

    def kernels(self, regions: Mapping[str, CutlassRegion]) -> tuple[dict[str, CutlassKernel], dict[str, str]]:
        """Compiled kernels by function, and why a function has none."""

    def run(self, action: Callable[[], Any]) -> Any:
        """``action()``, in which stock RunCodegen finds the compiled kernels."""


@module_pass(opt_level=0, name="tvm_ext.CompileCutlass")
class CompileCutlass:
    """Give the regions of `PartitionCutlass` their kernels: calls of host functions of an external module.

    With ``own_time`` and ``why_own`` only those that the latter does not leave to kernels of our own ("auto"); a
    machine without the package or its compiler then keeps its own kernels and says so. Without them every region with a
    template. What has no kernel, and why, is in the module's attribute ``tvm_ext.cutlass``, a `CutlassBuild`.
    """

    def __init__(
        self,
        device: DeviceSpec,
        backend: TemplateBackend,
        own_time: OwnTime | None = None,
        why_own: WhyOwn = lambda _own_us, _template_us: "",
    ) -> None:
        self.device, self.backend, self.own_time, self.why_own = device, backend, own_time, why_own

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        partition = from_json(CutlassPartition, str(mod.attrs[PARTITION]))
        functions = {gv.name_hint: func for gv, func in mod.functions_items() if is_composite(func)}
        regions = {name: region_of(func) for name, func in functions.items()}
        kernels, why_not = self._kernels(functions, regions)
        order = {region.value: position for position, region in enumerate(partition.taken)}
        declined = [regions[name].left(reason) for name, reason in why_not.items()]
        record = CutlassBuild(
            device=self.device.name,
            kernels=tuple(sorted(kernels.values(), key=lambda kernel: order[kernel.value])),
            declined=(*partition.refused, *declined),
            profile=self.backend.profile,
            others=partition.others,
        )
        mod = inlined(mod, frozenset(why_not))
        if kernels:
            generate = relax.transform.RunCodegen({CODEGEN: {}})
            mod = self.backend.run(lambda: generate(mod))
        return mod.with_attr(CUTLASS, to_json(record))

    def _kernels(
        self, functions: Mapping[str, RelaxFunction], regions: Mapping[str, CutlassRegion]
    ) -> tuple[dict[str, CutlassKernel], dict[str, str]]:
        if not regions:
            return {}, {}
        try:
            self.backend.require()
            own, why_not = self._paying(functions, regions)
            paying = {name: region for name, region in regions.items() if name not in why_not}
            kernels, failed = self.backend.kernels(paying) if paying else ({}, {})
        except UnsupportedEnvironmentError as error:
            if self.own_time is None:
                raise
            return {}, dict.fromkeys(regions, f"{error.problem} To use templates, {error.remedy}")
        return {name: replace(kernel, own_us=own.get(name)) for name, kernel in kernels.items()}, why_not | failed

    def _paying(
        self, functions: Mapping[str, RelaxFunction], regions: Mapping[str, CutlassRegion]
    ) -> tuple[dict[str, float], dict[str, str]]:
        """What our own kernels would take, by function, and why a region is left to them."""
        known: dict[CutlassRegion, float | None] = {}
        own: dict[str, float] = {}
        why_not = {}
        for name, region in regions.items():
            try:
                predicted = self.backend.predict(region)
            except IllegalRewrite as refusal:
                why_not[name] = refusal.problem
                continue
            if self.own_time is None:
                continue
            if region.kind not in known:
                known[region.kind] = self.own_time(twin_of(functions[name]))
            time_us = known[region.kind]
            if time_us is None:
                continue
            own[name] = time_us
            if reason := self.why_own(time_us, predicted):
                why_not[name] = reason
        return own, why_not
