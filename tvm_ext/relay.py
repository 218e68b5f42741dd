"""Relay's face over Relax: import a model, build it, run it.

>>> from tvm import relay                                  # or: from tvm_ext import relay
>>> mod, params = relay.frontend.from_onnx("model.onnx", shape={"input": (1, 3, 224, 224)})
>>> lib = relay.build(mod, target="llvm", params=params)
>>> module = relay.GraphModule(lib["default"](tvm.cpu()))
>>> module.run(input=data)
>>> module.get_output(0).numpy()
>>> print(lib.report)                                      # what was done to each operator, and why
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import tvm
from tvm import relax

from tvm_ext import frontend, recorder
from tvm_ext._tvm import PrimFunc
from tvm_ext.autotune.choose import tuned_tiles
from tvm_ext.autotune.store import MeasurementStore
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.device_db import cpu_needs
from tvm_ext.errors import InputError, OptionError
from tvm_ext.exclusive import EXCLUSIVE
from tvm_ext.frontend import as_module, bind_params, prepare
from tvm_ext.options import BuildOptions, usable_core_count
from tvm_ext.pass_pipeline import BuildPlan, kernel_passes, operator_pipeline, plan_build, rammer_passes
from tvm_ext.rammer_runtime.legacy.use_kernels import GivenKernels, LegacyKernel
from tvm_ext.records.build_profile import (
    BINDING,
    CONSTRUCTING,
    GENERATING,
    LOWERING,
    PROVING,
    TUNING,
    VERIFYING,
    Stopwatch,
)
from tvm_ext.records.precision import KEPT
from tvm_ext.records.rammer import RAMMER, RammerRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.records.tuned import TuneLike, TuningRecord, TuningRequest
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.relay_passes.batching.dimensions import Requested, Sizes, declared_shapes, settle, shapes_at
from tvm_ext.relay_passes.batching.prove import ModelAt
from tvm_ext.relay_passes.name_kernels import NameKernels, merged
from tvm_ext.relay_passes.onnx.clean import as_identifier
from tvm_ext.relay_passes.onnx.load import load_onnx
from tvm_ext.relay_passes.pack_constants import called_as
from tvm_ext.relay_passes.recurrent.overlap_layers import overlapped
from tvm_ext.relay_passes.wavefronts.policies import require_policy
from tvm_ext.runtime import graph_module
from tvm_ext.runtime import graph_module as graph_executor
from tvm_ext.runtime.cuda_source import own_cuda_compiler
from tvm_ext.runtime.graph_module import GraphModule, TensorSpec
from tvm_ext.runtime.library import Library, Signature
from tvm_ext.runtime.open_library import OpenLibrary, OpenModule, load
from tvm_ext.runtime.open_signature import OpenSignature, Variant
from tvm_ext.runtime.signature import input_specs, output_specs
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.support.pass_clock import PassClock, timed_context
from tvm_ext.support.shared_constants import ConstantStore, shared, sharing
from tvm_ext.tir_passes.construct_kernels import kernel_context
from tvm_ext.toolchains.code_generation import Compiler, GeneratedCode, UnusableCodeError, can_link, generate_whole
from tvm_ext.toolchains.rocm_toolchain import enable_rocm

__all__ = [
    "GraphModule", "LegacyKernel", "Library", "OpenLibrary", "OpenModule", "TensorSpec", "bind_params", "build",
    "build_open", "frontend", "graph_executor", "graph_module", "load", "operators", "prepare",
]  # fmt: skip


def build(
    mod: tvm.IRModule | relax.Function,
    target: str | dict[str, Any] | tvm.target.Target = "llvm",
    params: Mapping[str, Any] | None = None,
    *,
    enable_roller: bool | Literal["auto"] | None = None,
    enable_persistent_fusion: bool | Literal["auto"] | None = None,
    enable_cutlass: bool | Literal["auto"] | None = None,
    enable_rammer: bool | Literal["auto"] | None = None,
    options: BuildOptions | None = None,
    progress: Callable[[str], None] | None = None,
    verify: bool = False,
    tune: TuneLike | TuningRequest | None = None,
    samples: Mapping[str, Any] | None = None,
    kernels: GivenKernels | None = None,
    **settings: Any,
) -> Library:
    """Compile a Relax module with kernels that Roller constructs.

    Parameters
    ----------
    mod
        A module whose ``main`` is the model (or that function); never modified.
    target
        Anything stock TVM accepts, or a device of our tables (``tvm-ext devices``). ``"llvm"`` is this machine's CPU
        with all its features. A GPU need not be present: ``"cuda"``, ``"rocm"`` and ``"opencl"`` alone mean the devices
        of `device_db.DEFAULT_ROWS`, or the one that option ``device`` names.
    params
        Values (NumPy or TVM) for parameters of ``main`` by name; they become constants of the library.
    enable_roller
        Whether kernels are constructed: True, False (stock TVM's) or ``"auto"``; None leaves it to ``options``.
    enable_persistent_fusion
        Whether chains of products and attention become one kernel each: True, False or ``"auto"``; None as above.
    enable_cutlass
        Whether matrix products become kernels of CUTLASS's templates, on CUDA devices: True, False or ``"auto"``; None
        as above. They are compiled by nvcc: minutes the first time.
    enable_rammer
        Whether one schedule runs the rTasks of many operators on all cores, on CPUs, or in one kernel, on CUDA
        devices: True, False or ``"auto"``; None as above.
    options
        All options as one record. Left out: the ``tvm_ext.*`` options of the current PassContext.
    progress
        Is told the name of each pass as it begins.
    verify
        For GPUs: interpret every distinct kernel as it goes to code generation (`verify.build_check`), and refuse the
        build where one is wrong. It takes some seconds of one core for each kernel.
    tune
        For this machine's CPU: search for faster tiles first, for so many trials (``200``) or so long (``"5min"``, a
        timedelta), and keep what was measured in the database, which later builds consult. A `TuningRequest` says more.
    samples
        Inputs by name to measure the error of ``precision_bound`` on; None: seeded random ones.
    kernels
        On GPUs: kernels of your own by the names of operators that `operators` lists, each a `LegacyKernel` (CUDA text
        with its launch) or a scheduled TensorIR function. Schedules of rTasks run them as any other.
    settings
        Single fields of `BuildOptions`, which win over ``options``.

    Raises
    ------
    InputError
        for parameters that do not fit, or an open input dimension, but of a CPU's recurrent steps, naming both; for
        ``kernels`` that do not fit their operator or the device.
    TargetError, OptionError
        for an unknown target or option, with the nearest known ones.
    UnsupportedEnvironmentError
        with ``enable_cutlass=True`` where the package, the compiler or a linker is missing; with ``tune`` where
        kernels for the target cannot be timed.
    VerificationError
        with ``verify``, for a kernel that is wrong, naming operator, shapes and finding.
    """
    switches = {
        "enable_roller": enable_roller,
        "enable_persistent_fusion": enable_persistent_fusion,
        "enable_cutlass": enable_cutlass,
        "enable_rammer": enable_rammer,
    }
    settings |= {name: value for name, value in switches.items() if value is not None}
    chosen = options.updated(**settings) if options is not None else BuildOptions.current(**settings)
    require_policy(chosen.rammer_policy)
    mod = as_module(mod)
    if chosen.measures_precision and KEPT not in (mod.attrs or {}):
        from tvm_ext.verify.precision_bound import within_bound

        again = partial(build, target=target, params=params, progress=progress, tune=tune, kernels=kernels)
        return within_bound(mod, chosen, again, samples)
    cache = KernelCache.for_build(chosen)
    plan = plan_build(target, chosen, cache, kernels=kernels)
    if verify and plan.device.kind == "cpu":
        raise InputError(
            f"verify=True interprets GPU kernels, and the target is {plan.device.name}.",
            "on a CPU the library itself runs: compare its outputs with ONNX Runtime's or another build's",
        )
    watch, clock = Stopwatch(), PassClock(on_start=progress)
    request = TuningRequest.of(tune, clock.on_start)
    mod = prepare(mod, params or {}, may_loop=plan.device.kind == "cpu")
    watch.split(BINDING)
    tuning = None
    if request is not None:
        if kernels:
            raise InputError("kernels= are for GPUs, and tune is for CPUs.", "leave one of them out")
        plan, tuning = _tuned(mod, target, plan, cache, request)
        watch.split(TUNING)
    if plan.options.enable_rammer is not False:
        mod, _ = overlapped(mod, partial(_schedules_us, plan=plan))
    kernels, code = _code_of({"main": mod}, plan, cache, clock, watch, verify=verify)
    report = recorder.record(mod, kernels["main"], plan, chosen, clock, watch, code.times, cache.use(), tuning)
    signature = Signature(inputs=input_specs(mod), outputs=output_specs(mod), report=report, cpu=cpu_needs(plan.target))
    return Library(code.executable, signature, code=code)


def operators(
    mod: tvm.IRModule | relax.Function,
    target: str | dict[str, Any] | tvm.target.Target,
    params: Mapping[str, Any] | None = None,
    *,
    options: BuildOptions | None = None,
    **settings: Any,
) -> dict[str, PrimFunc]:
    """The fused operators that `build` would make kernels for, by name, as unscheduled TensorIR functions.

    Their parameters are the tensors that ``kernels`` of `build` have to take. Arguments and errors as of `build`.
    """
    chosen = options.updated(**settings) if options is not None else BuildOptions.current(**settings)
    plan = plan_build(target, chosen)
    prepared = prepare(mod, params or {}, may_loop=plan.device.kind == "cpu")
    with EXCLUSIVE, plan.target:
        found = operator_pipeline(plan.target, plan.device, plan.options)(prepared)
    return {gv.name_hint: func for gv, func in found.functions_items() if isinstance(func, PrimFunc)}


def build_open(
    model: Any | str | os.PathLike[str] | bytes,
    sizes: Mapping[str, Requested],
    target: str | dict[str, Any] | tvm.target.Target = "llvm",
    *,
    shape: Mapping[str, Sequence[int | str | None]] | None = None,
    options: BuildOptions | None = None,
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> OpenLibrary:
    """Compile an ONNX model for a CPU into one library whose named dimensions stay open: variants for some sizes.

    A range is built in powers of two if a proof finds that elements do not meet. Sizes between run in parts, as 8 + 4 +
    1, or padded, as 15 by 16: by the least predicted time.

    Parameters
    ----------
    model
        As of `from_onnx`: each variant is imported at its own shapes.
    sizes
        Dimension name -> ``(1, 32)``, a tuple: every size from 1 to 32; or ``[16, 64, 128]``, a list: these sizes. An
        open dimension without a name is called ``INPUT_dimAXIS``.
    shape
        As of `from_onnx`, for dimensions that do not stay open.
    target, options, progress, settings
        As of `build`. Schedules of rTasks (``enable_rammer``) are not for several variants.

    Raises
    ------
    InputError
        for an unknown dimension, and for a range that can neither be divided nor built size by size, naming the
        operator that mixes its elements.
    Others as `from_onnx` and `build`.
    """
    chosen = options.updated(**settings) if options is not None else BuildOptions.current(**settings)
    cache = KernelCache.for_build(chosen)
    plan = plan_build(target, chosen, cache)
    if plan.device.kind != "cpu" or chosen.enable_rammer is not False:
        raise OptionError("open dimensions are for CPUs, without schedules of rTasks.", "build one shape")
    model = load_onnx(model)
    declared = declared_shapes(model, shape or {})

    def at(values: Sizes) -> tuple[tvm.IRModule, dict[str, tvm.runtime.Tensor]]:
        mod, params = frontend.from_onnx(model, shape=shapes_at(declared, values))
        return mod, {key: shared(value) for key, value in params.items()}  # weights are held once

    watch, clock = Stopwatch(), PassClock(on_start=progress)
    dimensions = settle(declared, sizes, lambda values, name: ModelAt.of(values[name], *at(values)))
    watch.split(PROVING)
    modules = {
        "_".join(f"{as_identifier(key)}_{size}" for key, size in values.items()): values
        for values in dimensions.variants()
    }
    with sharing(ConstantStore()):
        mods = {name: prepare(*at(values)) for name, values in modules.items()}
        watch.split(BINDING)
        kernels, code = _code_of(mods, plan, cache, clock, watch)
    cpu, variants = cpu_needs(plan.target), []
    for name, values in modules.items():
        mod = mods[name]
        report = recorder.record(mod, kernels[name], plan, chosen, clock, watch, code.times, cache.use())
        signature = Signature(inputs=input_specs(mod), outputs=output_specs(mod), report=report, cpu=cpu)
        variants.append(Variant(name=name, sizes=tuple(values.values()), signature=signature))
    return OpenLibrary(code.executable, OpenSignature.of(dimensions.dimensions, variants), code=code)


def _tuned(
    mod: tvm.IRModule,
    target: str | dict[str, Any] | tvm.target.Target,
    plan: BuildPlan,
    cache: KernelCache,
    request: TuningRequest,
) -> tuple[BuildPlan, TuningRecord]:
    """Tune the kernels of ``mod``, then plan the build anew with what was found."""
    from tvm_ext.tuning.model import tune_model  # brings XGBoost, which takes as long to import as some models to build

    store = MeasurementStore.for_build(plan.options)
    try:
        with EXCLUSIVE, plan.target:
            passes = [operator_pipeline(plan.target, plan.device, plan.options), AnnotateConstants()]
            operators = tvm.transform.Sequential(passes)(mod)
        calls = recorder.call_counts(operators)
        record = tune_model(operators, calls, plan.device, plan.target, plan.options, store, request)
        return plan_build(target, plan.options, cache, tuned_tiles(store, plan.device)), record
    finally:
        store.close()


def _schedules_us(mod: tvm.IRModule, plan: BuildPlan) -> float:
    """The simulated time of the schedules of a build of ``mod``; of what none is made for, one operator after another.

    The passes are those of the build, up to the one that makes schedules.
    """
    with EXCLUSIVE, plan.target:
        made = tvm.transform.Sequential([plan.construct, *rammer_passes(plan.device, plan.options)[:2]])(mod)
    record = from_json(RammerRecord, str(made.attrs[RAMMER]))
    return sum(region.predicted_us if region.symbol else region.sequential_us for region in record.regions)


def _compiles_by_kernel(mod: tvm.IRModule, plan: BuildPlan) -> bool:
    """Whether kernels can become object files that are linked and loaded here; the cache holds nothing else."""
    here = not cpu_needs(plan.target).unmet_by(read_cpu_info())
    foreign = mod.attrs is not None and "external_mods" in mod.attrs
    return plan.device.kind == "cpu" and here and not foreign and can_link()


def _code_of(
    mods: Mapping[str, tvm.IRModule],
    plan: BuildPlan,
    cache: KernelCache,
    clock: PassClock,
    watch: Stopwatch,
    *,
    verify: bool = False,
) -> tuple[dict[str, tvm.IRModule], GeneratedCode]:
    """`_compile`, a second time without the cache where kernels cannot be linked one by one."""
    if not all(_compiles_by_kernel(mod, plan) for mod in mods.values()):
        cache.switch_off()
    try:
        kernels, code = _compile(mods, plan, cache, clock, watch, verify=verify)
    except UnusableCodeError as error:
        cache.note("unusable", f"{error}; the kernels are compiled as one module, and not kept")
        cache.switch_off()
        kernels, code = _compile(mods, plan, cache, clock, watch, whole=True)
    if code.times.compiled:
        cache.trim()
    return kernels, code


def _compile(
    mods: Mapping[str, tvm.IRModule],
    plan: BuildPlan,
    cache: KernelCache,
    clock: PassClock,
    watch: Stopwatch,
    *,
    whole: bool = False,
    verify: bool = False,
) -> tuple[dict[str, tvm.IRModule], GeneratedCode]:
    """The kernels of each of ``mods`` (variants of a model by name, or ``main``) in their graph, and the code of all.

    ``whole``: all kernels in one LLVM module.
    """
    if plan.device.kind == "rocm":
        enable_rocm()
    watched = bool(tvm.transform.PassContext.current().instruments)  # by somebody who wants to see all passes
    by_kernel = not whole and all(_compiles_by_kernel(mod, plan) for mod in mods.values())
    kernels, lowered = {}, {}
    with plan.target, timed_context(clock), Compiler(plan.target, 1 if watched else usable_core_count()) as compiler:
        cache.on_construction = (lambda *made: compiler.start(*called_as(*made))) if by_kernel else None
        for name, mod in mods.items():
            construct = plan.construct if name == "main" else _constructing_variant(plan, cache, name)
            with EXCLUSIVE:
                constructed = construct(mod)
                watch.split(CONSTRUCTING)
                lowered[name] = plan.lower(constructed)
                kernels[name] = with_rammer_record(constructed, lowered[name])
                watch.split(LOWERING)
            if verify:
                _refuse_wrong_kernels(mod, lowered[name], plan, clock)
                watch.split(VERIFYING)
        together = merged(lowered)
        if by_kernel:
            code = compiler.generate(together, cache, kernel_context(plan.device, plan.options), clock.on_start)
        else:
            with own_cuda_compiler():
                code = generate_whole(together, plan.target)
        watch.split(GENERATING)
    return kernels, code


def _constructing_variant(plan: BuildPlan, cache: KernelCache, name: str) -> tvm.transform.Pass:
    """``plan.construct`` with the names of kernels for variant ``name``."""
    operators = operator_pipeline(plan.target, plan.device, plan.options)
    kernels = kernel_passes(plan.device, plan.options, cache, plan.tiles)
    return tvm.transform.Sequential([operators, NameKernels(name), *kernels], name="tvm_ext.kernels")


def with_rammer_record(kernels: tvm.IRModule, lowered: tvm.IRModule) -> tvm.IRModule:
    """``kernels`` with what their lowering says of schedules, for the report."""
    text = lowered.attrs.get(RAMMER) if lowered.attrs else None
    return kernels if text is None else kernels.with_attr(RAMMER, text)


def _refuse_wrong_kernels(mod: tvm.IRModule, lowered: tvm.IRModule, plan: BuildPlan, clock: PassClock) -> None:
    """Interpret the kernels that code will be generated of; raises VerificationError."""
    from tvm_ext.verify.build_check import check_module, refuse_wrong

    with EXCLUSIVE:
        operators = operator_pipeline(plan.target, plan.device, plan.options)(mod)
    refuse_wrong(check_module(lowered, operators, plan.device, plan.target, progress=clock.on_start))
