"""Reads a build's kernels and clocks into a `BuildReport`."""

from __future__ import annotations

import datetime
import math
import platform
from collections import Counter

import numpy as np
import tvm
from tvm import tirx

from tvm_ext._environment import installed_version
from tvm_ext._tvm import Constant, PrimFunc, nodes_in
from tvm_ext.frontend import IMPORT_SECONDS, MODEL_NAME
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import BuildPlan
from tvm_ext.records import serialise
from tvm_ext.records.build_profile import CONSTRUCTING, GENERATING, CacheUse, CodeTimes, DeviceCode, Phase, Stopwatch
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.padding import LAYOUT, LayoutRecord
from tvm_ext.records.partition import CUTLASS, CutlassBuild
from tvm_ext.records.persistent import PERSISTENT, PersistentRecord
from tvm_ext.records.precision import precision_record
from tvm_ext.records.rammer import RAMMER, RammerRecord
from tvm_ext.records.tuned import TileUse, TuningRecord
from tvm_ext.relay_passes.node_names import call_sites, imported_nodes
from tvm_ext.reports.record import OperatorReport, PassTime, ceilings_of
from tvm_ext.reports.report import BuildReport
from tvm_ext.runtime.cuda_runtime import cuda_is_loaded
from tvm_ext.support.limits import notes_of
from tvm_ext.support.pass_clock import PassClock
from tvm_ext.tir_passes.plan.chosen_tiles import CHOSEN

_KERNEL_PASSES = {"tvm_ext.ConstructKernels": "kernel construction", "tvm_ext.PackConstants": "packing constants"}
_DISTRIBUTIONS = ("tvm_ext", "apache-tvm", "apache-tvm-ffi", "numpy", "onnx")


def record(
    mod: tvm.IRModule,
    kernels: tvm.IRModule,
    plan: BuildPlan,
    options: BuildOptions,
    clock: PassClock,
    watch: Stopwatch,
    code: CodeTimes,
    cache: CacheUse,
    tuning: TuningRecord | None = None,
) -> BuildReport:
    """The report of a build that turned ``mod`` into ``kernels`` (a graph of ``call_tir``) in the time of ``watch``."""
    attributes = dict(mod.attrs) if mod.attrs else {}
    passes = tuple(PassTime(name=name, seconds=seconds) for name, seconds in clock.seconds.items())
    import_s = attributes.get(IMPORT_SECONDS)
    import_s = None if import_s is None else float(import_s)
    return BuildReport(
        model=str(attributes.get(MODEL_NAME, "main")),
        device=plan.device.name,
        device_description=plan.device.description,
        row=plan.device,
        target=str(plan.target),
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        options=tuple((name, str(getattr(options, name))) for name in BuildOptions.names()),
        versions=versions(),
        ceilings=ceilings_of(plan.device),
        operators=operators(kernels, plan, options),
        sites=call_sites(kernels, imported_nodes(mod)),
        passes=passes,
        import_s=import_s,
        build_s=watch.seconds,
        constant_bytes=constant_bytes(kernels),
        notes=tuple(notes_of(kernels)),
        code_generation_s=sum(phase.seconds for phase in watch.phases if phase.name == GENERATING),
        phases=phases_of(watch, clock, import_s),
        code=code,
        kernel_cache=cache,
        layout=serialise.record_of(kernels, LAYOUT, LayoutRecord),
        persistent=serialise.record_of(kernels, PERSISTENT, PersistentRecord),
        precision=precision_record(kernels),
        rammer=serialise.record_of(kernels, RAMMER, RammerRecord),
        cutlass=serialise.record_of(kernels, CUTLASS, CutlassBuild),
        tiles=tile_use(kernels, plan),
        tuning=tuning,
        device_code=device_code(plan),
    )


def tile_use(kernels: tvm.IRModule, plan: BuildPlan) -> TileUse:
    """The reasons of the tiles that kernels have by measurement."""
    functions = (func for _, func in kernels.functions_items() if isinstance(func, PrimFunc) and func.attrs)
    texts = [str(func.attrs[CHOICE]) for func in functions if CHOICE in func.attrs]
    notes = [note for text in texts for note in serialise.from_json(KernelChoice, text).notes]
    why = {configuration: plan.tiles.reasons[key] for key, configuration in plan.tiles.configurations.items()}
    chosen = (note.removeprefix(CHOSEN) for note in notes if note.startswith(CHOSEN))
    return TileUse(reasons=tuple(why[item] for item in chosen if item in why), notes=plan.tiles.notes)


def device_code(plan: BuildPlan) -> DeviceCode | None:
    """What TVM makes of GPU kernels at a build: machine code for AMD, and for CUDA only where there is a driver."""
    architecture = str(plan.target.attrs.get("arch" if plan.device.kind == "cuda" else "mcpu", ""))
    if plan.device.kind == "rocm":
        return DeviceCode(language="LLVM", architectures=(architecture,), compiler="TVM's LLVM")
    if plan.device.kind == "opencl":
        return DeviceCode(language="OpenCL C", note="the receiver's driver compiles it")
    if plan.device.kind != "cuda":
        return None
    if cuda_is_loaded():
        return DeviceCode(language="CUDA C++", architectures=(architecture,), compiler="TVM, for this machine's driver")
    return DeviceCode(language="CUDA C++", note="export_library makes machine code of it")


def phases_of(watch: Stopwatch, clock: PassClock, import_s: float | None) -> tuple[Phase, ...]:
    """Import and the phases of ``watch``, with the passes that make kernels set apart from the graph's.

    Worked example: construction took 2.0 s, of it ConstructKernels 1.2 s and PackConstants 0.3 s: "graph passes" get
    the other 0.5 s. Where the clock did not run (the user's own instruments did), nothing is set apart.
    """
    first = [] if import_s is None else [Phase(name="import", seconds=import_s)]
    totals: dict[str, float] = {}
    for phase in watch.phases:  # a build of several variants, or one that was done twice, has each of them repeatedly
        totals[phase.name] = totals.get(phase.name, 0.0) + phase.seconds
    phases = [Phase(name=name, seconds=seconds) for name, seconds in totals.items()]
    return (*first, *(part for phase in phases for part in _apart(phase, clock)))


def _apart(phase: Phase, clock: PassClock) -> list[Phase]:
    if phase.name != CONSTRUCTING or not clock.seconds:
        return [phase]
    ran = {name: title for name, title in _KERNEL_PASSES.items() if name in clock.seconds}
    parts = [Phase(name=title, seconds=clock.seconds[name]) for name, title in ran.items()]
    rest = max(0.0, phase.seconds - sum(part.seconds for part in parts))
    return [Phase(name="graph passes", seconds=rest), *parts]


def versions() -> tuple[tuple[str, str], ...]:
    """Name and version of what a build depends on; what is not installed is left out."""
    known = ((name, installed_version(name)) for name in _DISTRIBUTIONS)
    return (("python", platform.python_version()), *((name, version) for name, version in known if version is not None))


def operators(kernels: tvm.IRModule, plan: BuildPlan, options: BuildOptions) -> tuple[OperatorReport, ...]:
    """One entry per PrimFunc, in the order of their first call."""
    calls = call_counts(kernels)
    functions = {gvar.name_hint: func for gvar, func in kernels.functions_items() if isinstance(func, tirx.PrimFunc)}
    order = {name: position for position, name in enumerate(calls)}
    choices = {
        name: choice_of(name, functions[name], plan, options)
        for name in sorted(functions, key=lambda name: order.get(name, len(order)))
    }
    shared = Counter(choice.operator for choice in choices.values())
    return tuple(
        OperatorReport(
            name=choice.operator if shared[choice.operator] == 1 else function,
            function=function,
            choice=choice,
            calls=calls[function],
        )
        for function, choice in choices.items()
    )


def call_counts(mod: tvm.IRModule) -> Counter[str]:
    """How often each PrimFunc is called, counting call sites, in program order."""
    named = [call.args[0] for call in nodes_in(mod, tvm.ir.Call) if call.args]
    return Counter(str(callee.name_hint) for callee in named if isinstance(callee, tvm.ir.GlobalVar))


def constant_bytes(mod: tvm.IRModule) -> int:
    """Size of all constants of the graph, each counted once."""
    values = [constant.value for constant in dict.fromkeys(nodes_in(mod, Constant))]
    return sum(math.prod(value.shape) * np.dtype(str(value.dtype)).itemsize for value in values)


def choice_of(name: str, function: PrimFunc, plan: BuildPlan, options: BuildOptions) -> KernelChoice:
    """The KernelChoice recorded at construction; where none was, stock TVM's kernel is used as it is, and why."""
    known = serialise.record_of(function, CHOICE, KernelChoice)
    if known is not None:
        return known
    if options.enable_roller is False:
        reason = "enable_roller=False: stock TVM's kernel"
    else:
        reason = "made after kernel construction by a stock pass"
    return KernelChoice(operator=name, path="stock", notes=(reason,), device=plan.device.name)
