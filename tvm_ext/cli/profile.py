"""The command ``tvm-ext profile``: measure CUTLASS's templates for a model on this machine's GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from . import common
from .advise import imported

if TYPE_CHECKING:
    from tvm_ext._tvm import IRModule
    from tvm_ext.byoc_cutlass.profiler import ProfileEstimate, RegionPlan
    from tvm_ext.byoc_cutlass.screening import ScreeningLimits
    from tvm_ext.devices.hal import DeviceSpec
    from tvm_ext.records.measurement import TrialStore
    from tvm_ext.records.partition import CutlassProfile, CutlassRegion
    from tvm_ext.support.kernel_cache import KernelCache


def profile(
    model: common.Model,
    device: common.Gpu = common.DEFAULT_GPU,
    plan: Annotated[bool, typer.Option("--plan", help="Predict the effort, and measure nothing.")] = False,
    templates: Annotated[int, typer.Option(min=1, help="Templates to run for each different product.")] = 12,
    dtype: common.Precision = "float16",
    database: Annotated[str, typer.Option(help="Where measurements are kept: a file, auto or off.")] = "auto",
    shape: common.ShapeOption = None,
    batch: common.Batch = 1,
    as_json: common.AsJson = False,
) -> None:
    """Measure CUTLASS templates for a model's products (Bolt §3.2.2). Exit code 1: nothing could be measured."""
    from tvm_ext.autotune.store import MeasurementStore
    from tvm_ext.byoc_cutlass.family import check_device
    from tvm_ext.byoc_cutlass.screening import ScreeningLimits
    from tvm_ext.devices.device_db import lookup
    from tvm_ext.options import BuildOptions
    from tvm_ext.support.kernel_cache import KernelCache
    from tvm_ext.toolchains.cutlass_samples import profile_on_gpu

    half = common.require_precision(dtype)
    spec, limits = lookup(device), ScreeningLimits(templates=templates)
    check_device(spec)
    options = BuildOptions(database=database, enable_cutlass=True)
    store, cache = MeasurementStore.for_build(options), KernelCache.for_build(options)
    with common.progress_bar(3) as steps:
        steps.begin("importing")
        mod = imported(common.load_model(model, batch), common.parse_shapes(shape), half=half)
        steps.begin("ranking templates")
        plans = plans_of(mod, spec, store)
        expected = estimated(plans, spec, limits, cache)
        steps.begin("profiling")
        done = None if plan else profile_on_gpu(plans, spec, cache, store, limits)
    if as_json:
        typer.echo(json.dumps({"estimate": asdict(expected), "profile": None if done is None else asdict(done)}))
    else:
        _show(expected, done)
    raise typer.Exit(code=int(done is not None and bool(done.note)))


def plans_of(mod: IRModule, device: DeviceSpec, store: TrialStore) -> list[RegionPlan]:
    """What would be profiled of a module with bound parameters: each different product once."""
    from tvm_ext.byoc_cutlass.profiler import plan_region
    from tvm_ext.byoc_cutlass.selection import candidates_of
    from tvm_ext.toolchains.cutlass_samples import sample_versions

    versions = sample_versions()
    return [
        plan_region(kind, candidates_of(kind, device), device, versions, store) for kind in _regions_of(mod, device)
    ]


def _regions_of(mod: IRModule, device: DeviceSpec) -> list[CutlassRegion]:
    from tvm_ext._tvm import Sequential, Target
    from tvm_ext.options import BuildOptions
    from tvm_ext.pass_pipeline import cutlass_passes, graph_passes, layout_passes
    from tvm_ext.records.partition import PARTITION, CutlassPartition
    from tvm_ext.records.serialise import from_json

    options = BuildOptions(enable_cutlass=True, enable_persistent_fusion=False)  # product by product
    cut = cutlass_passes(Target(dict(device.target)), device, options)[:-1]  # without compiling
    done = Sequential([*graph_passes(), *layout_passes(device, options), *cut])(mod)
    partition = from_json(CutlassPartition, str(done.attrs[PARTITION]))
    return list(dict.fromkeys(region.kind for region in partition.taken if region.expression))


def estimated(
    plans: list[RegionPlan], device: DeviceSpec, limits: ScreeningLimits, cache: KernelCache
) -> ProfileEstimate:
    """Counts, and seconds by the model."""
    from tvm_ext.byoc_cutlass.profiler import estimate
    from tvm_ext.toolchains.cutlass_samples import sample_programs

    with sample_programs(cache) as programs:
        return estimate(plans, device, limits, programs)


def _show(expected: ProfileEstimate, done: CutlassProfile | None) -> None:
    typer.echo(
        f"{expected.regions} different products: {expected.launches} launches of {expected.programs} programs, of "
        f"which {expected.to_compile} must be compiled first; {expected.runs} runs, predicted to take "
        f"{expected.device_seconds:.1f} s"
    )
    if done is not None:
        typer.echo(f"{done}")
        for text in done.failed_programs:
            typer.echo(text, err=True)
