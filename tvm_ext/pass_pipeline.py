"""The whole way from a Relax module to VM code, as named passes read from top to bottom.

Each function below returns the passes of one phase; `kernel_pipeline` and `lowering_pipeline` put them in order.
`relay.build` runs the two one after the other so that the report can read the kernels in between; the registered
pipeline ``"tvm_ext"`` (`relax_pipeline`) is both in one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tvm
from tvm import relax

from tvm_ext._tvm import (
    PrimFunc,
    cpu_dataflow_lower_passes,
    cpu_finalize_passes,
    cpu_library_dispatch_passes,
    gpu_dataflow_lower_passes,
    gpu_finalize_passes,
    gpu_library_dispatch_passes,
    module_pass,
)
from tvm_ext.autotune.choose import NOTHING_TUNED, TunedTiles, tiles_for_build, why_own_kernel
from tvm_ext.autotune.store import known_rtask_times
from tvm_ext.byoc_cutlass.elements import TEMPLATES_SINCE
from tvm_ext.devices.capabilities import has
from tvm_ext.devices.device_db import as_compiled, chosen_device, device_for_target, is_bare
from tvm_ext.devices.device_facts import with_unit_count
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import OptionError
from tvm_ext.exclusive import EXCLUSIVE
from tvm_ext.options import BuildOptions
from tvm_ext.rammer_runtime.legacy.use_kernels import GivenKernels, UseLegacyKernels
from tvm_ext.rammer_runtime.settle import with_schedules_settled
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.annotate_constants import AnnotateConstants
from tvm_ext.relay_passes.call_merged import CallMerged
from tvm_ext.relay_passes.check_values import CheckValues
from tvm_ext.relay_passes.compile_cutlass import CompileCutlass
from tvm_ext.relay_passes.copy_outputs import CopyConstantOutputs
from tvm_ext.relay_passes.expand_attention import ExpandAttention
from tvm_ext.relay_passes.expand_quantised import ExpandQuantised
from tvm_ext.relay_passes.expand_transposed import ExpandTransposedConvolutions
from tvm_ext.relay_passes.fold_calls import FoldCalls
from tvm_ext.relay_passes.fuse_attention import FuseAttention
from tvm_ext.relay_passes.fuse_cells import FuseCells
from tvm_ext.relay_passes.fuse_operators import FuseOperators
from tvm_ext.relay_passes.fuse_persistent import FusePersistent
from tvm_ext.relay_passes.keep_halves import KeepHalves
from tvm_ext.relay_passes.layout.block_channels import BlockChannels
from tvm_ext.relay_passes.layout.channels_last import ChannelsLast
from tvm_ext.relay_passes.layout.fold_depth import FoldDepth
from tvm_ext.relay_passes.legalize_floats import legalize_operators
from tvm_ext.relay_passes.legalize_selections import LegalizeSelections
from tvm_ext.relay_passes.move_padding import MovePadding
from tvm_ext.relay_passes.narrow_floats import narrow_floats
from tvm_ext.relay_passes.narrow_products import NarrowProducts
from tvm_ext.relay_passes.pack_constants import PackConstants
from tvm_ext.relay_passes.padding.pad_alignment import PadAlignment
from tvm_ext.relay_passes.pair_products import PairProducts
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass
from tvm_ext.relay_passes.roll_steps import RollSteps
from tvm_ext.relay_passes.schedule_wavefronts import ScheduleWavefronts
from tvm_ext.relay_passes.settle_empty_tensors import SettleEmptyTensors
from tvm_ext.relay_passes.settle_packed import SettlePackedProducts
from tvm_ext.relay_passes.split_concatenations import SplitConcatenations
from tvm_ext.relay_passes.tabulate_bytes import TabulateBytes
from tvm_ext.relay_passes.trim_taps import TrimTaps
from tvm_ext.relay_passes.trust_arguments import TrustArguments
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.tir_passes.allocate_in_threads import AllocateInThreads
from tvm_ext.tir_passes.construct_kernels import ConstructKernels
from tvm_ext.tir_passes.flush_denormals import flushing_passes
from tvm_ext.tir_passes.merge_rtasks import MergeRTasks
from tvm_ext.tir_passes.pipelining.route import wishes_of
from tvm_ext.tir_passes.plan.chain import judge_for
from tvm_ext.tir_passes.plan.chosen_tiles import TileChoices
from tvm_ext.tir_passes.plan.cut_padding import cut_padding
from tvm_ext.tir_passes.plan.padded_stores import stores_padded
from tvm_ext.tir_passes.serialise_loops import SerialiseLoops
from tvm_ext.tir_passes.split_launches import SplitLaunches
from tvm_ext.tir_passes.split_rtasks import SplitRTasks
from tvm_ext.toolchains.cuda_check import compiled_use, refuse_bad_machine_code
from tvm_ext.toolchains.cutlass_codegen import CutlassBackend
from tvm_ext.toolchains.tir_pipelines import enable_opencl_math


def graph_passes(device: DeviceSpec | None = None, options: BuildOptions | None = None) -> list[tvm.transform.Pass]:
    """Rewrites of the graph while operators still are operators; without a ``device`` no checks, and nothing int8."""
    options = options or BuildOptions()
    return [
        # Inference forms of batch_norm, dropout, ...: they return tuples, which would hide their consumers from fusion.
        relax.transform.DecomposeOpsForInference(),
        # Before anything is legalised: stock rules divide by an extent of 0, and tilings have nothing to cover.
        SettleEmptyTensors(),
        # What is known becomes a constant before anything looks at it: known indices need no check at run time.
        FoldCalls(),
        # Importers ask for unchecked gathers and divisions; neither may crash the process. GPU kernels raise no errors.
        CheckValues(options.bounds if device is not None and device.kind == "cpu" else "wrap"),
        # A kernel that joins a thousand tensors is a thousand conditions deep.
        SplitConcatenations(),
        # Transposed convolutions by output phase: stock's form multiplies the zeros between input elements.
        ExpandTransposedConvolutions(),
        # Wide dilations over small images: taps that meet nothing but padding are no work.
        TrimTaps(),
        # Products by packed weights: behind what makes constants, before anything looks for products of floats.
        SettlePackedProducts(device, options),
        # One operator to Relax, eleven computations to stock TVM; what fuses attention looks for its products.
        ExpandAttention(),
        # `y = x` bindings left by importers would each break a fusion chain.
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
    ]


def recurrent_passes(device: DeviceSpec, options: BuildOptions) -> list[tvm.transform.Pass]:
    """Recurrent layers as loops, which need no call a step. Nothing for GPUs, and where schedules run the steps."""
    return [RollSteps()] if device.kind == "cpu" and options.enable_rammer is False else []


def narrowing_passes(target: tvm.target.Target, device: DeviceSpec, options: BuildOptions) -> list[tvm.transform.Pass]:
    """Narrow numbers as instructions want them, behind what makes constants: bytes; on CPUs exact floats, rounded."""
    own = partial(own_time_us, target=target, device=device, options=options.updated(precision="float32"))
    floats = [KeepHalves(device, own), *narrow_floats(device, options, own)] if device.kind == "cpu" else []
    return [ExpandQuantised(), NarrowProducts(device), *floats] if options.enable_roller is not False else []


def layout_passes(device: DeviceSpec, options: BuildOptions) -> list[tvm.transform.Pass]:
    """Layouts that Roller's kernels gain by. Nothing for stock TVM's schedules, which are written for NCHW."""
    templates = options.enable_cutlass is True and has(device, TEMPLATES_SINCE)
    if options.enable_roller is False or options.layout in ("NCHW", *(["NHWC"] if device.kind == "cpu" else [])):
        return []
    if device.kind != "cpu":
        # Channels last is what matrix units read; nothing where the device has none for the convolutions' type.
        # Templates read nothing else, of grouped convolutions neither.
        last = ChannelsLast(device, always=options.layout == "NHWC" or templates, grouped=templates)
        return [last, relax.transform.DeadCodeElimination()]
    clean = relax.transform.DeadCodeElimination()
    # 3-D convolutions become 2-D, which then have a layout; chains of bytes become tables.
    blocked = BlockChannels(device, "NCHWc" if options.layout == "NCHWc" else "auto")
    return [FoldDepth(device), clean, blocked, TabulateBytes(device)]


def cutlass_passes(target: tvm.target.Target, device: DeviceSpec, options: BuildOptions) -> list[tvm.transform.Pass]:
    """Products that CUTLASS's templates serve, as calls of compiled kernels; whatever is left is constructed here."""
    if options.enable_cutlass is False:
        return []
    own_time = partial(own_time_us, target=target, device=device, options=replace(options, enable_cutlass=False))
    backend, mode = CutlassBackend.for_build(device, options), options.enable_persistent_fusion
    return [
        # Where all products are templates': by the model of our own kernels it would pay nowhere.
        *([PadAlignment(device)] if options.enable_cutlass is True and has(device, TEMPLATES_SINCE) else []),
        # While products and what follows them still are operators, and their layouts are decided.
        PartitionCutlass(device),
        # Before anything is compiled: two products may be one template's, or one kernel of our own.
        *([PairProducts(device, backend, partial(own_time, most=1), mode)] if mode is not False else []),
        CompileCutlass(device, backend, own_time if options.enable_cutlass == "auto" else None, why_own_kernel),
    ]


def own_time_us(
    mod: tvm.IRModule, *, target: tvm.target.Target, device: DeviceSpec, options: BuildOptions, most: int | None = None
) -> float | None:
    """Predicted microseconds of the kernels of ``mod``; None if one has none, or there are more than ``most``."""
    passes = [*operator_passes(target), *fusion_passes(device, options), *kernel_passes(device, options)]
    kernels = tvm.transform.Sequential(passes)(mod)
    texts = [func.attrs.get(CHOICE) for _, func in kernels.functions_items() if isinstance(func, PrimFunc)]
    times = [from_json(KernelChoice, str(text)).predicted_s if text is not None else None for text in texts]
    if not times or None in times or (most is not None and len(times) > most):
        return None
    return sum(time_s for time_s in times if time_s is not None) * 1e6


def operator_passes(target: tvm.target.Target) -> list[tvm.transform.Pass]:
    """From operators to one PrimFunc per fused operator."""
    # Legalised by stock TVM, but for what it would take for real numbers, and what has kernels of its own on CPUs.
    # Other sorts, scans and sampling have no tensor expression: stock TVM's own kernels.
    ways = (
        [LegalizeSelections(), legalize_operators(), *cpu_library_dispatch_passes(target)]
        if is_cpu(target)
        else [*gpu_library_dispatch_passes(target), legalize_operators()]
    )
    return [
        *ways,
        # One step of a recurrent layer is one function of tensors, called a thousand times; nothing else joins it.
        FuseCells(),
        # FuseOps needs each PrimFunc's pattern (element-wise, broadcast, reduction, ...).
        relax.transform.AnnotateTIROpPattern(),
        # What the passes above made of constants. Stock TVM's FoldConstant would compile a kernel for each.
        FoldCalls(),
        # Before FuseOps, unlike stock: a reshape alone is a free view, but fused into a neighbour its `//` and `%`
        # would make that neighbour's accesses non-affine, which rTiles cannot follow.
        relax.transform.RewriteDataflowReshape(),
        FuseOperators(),
        # Weights folded away above leave dead functions, for which no kernel should be constructed.
        relax.transform.DeadCodeElimination(),
        # An output that is one of the library's constants, or a view of one, is not the library's to hand out.
        CopyConstantOutputs(),
    ]


def attention_passes(device: DeviceSpec, options: BuildOptions) -> list[tvm.transform.Pass]:
    """Attention as one operator, while products and softmax still are operators; it reads transposed operands in place.

    Nothing for stock TVM's schedules and for GPUs.
    """
    if device.kind != "cpu" or options.enable_roller is False or options.enable_persistent_fusion is False:
        return []
    return [FuseAttention(device, options.precision), relax.transform.DeadCodeElimination()]


def fusion_passes(device: DeviceSpec, options: BuildOptions) -> list[tvm.transform.Pass]:
    """Several fused operators become one, whose intermediate values stay close to the core (Bolt, §3.1).

    Behind `operator_passes`: each operator has its epilogue by then, and channels lie in the blocks that kernels will
    read. Nothing for stock TVM's schedules, which would run such an operator piece by piece.
    """
    mode = options.enable_persistent_fusion
    if options.enable_roller is False:
        return []
    return [
        *([FusePersistent(judge_for(device, options), mode)] if mode is not False else []),
        # Behind chains, whose links are padded panel by panel. A GPU's kernels pad what they copy anyway.
        *([MovePadding(cut_padding, stores_padded)] if device.kind == "cpu" else []),
    ]


def kernel_passes(
    device: DeviceSpec, options: BuildOptions, cache: KernelCache | None = None, tuned: TunedTiles = NOTHING_TUNED
) -> list[tvm.transform.Pass]:
    """From one PrimFunc per operator to one scheduled kernel per operator. Without Roller: nothing on a CPU.

    Kernels that ``cache`` has are sealed: only `code_generation.Compiler` makes a library of them.
    """
    flushing = flushing_passes(device, options)
    if device.kind != "cpu":
        # One kernel at a time is emitted, pipelined and shown to the compiler: what that refuses is tried without
        # pipelines, then in other tiles. The pipelines are those of `AutoPipeline` and `InjectPipelines`.
        several, check = options.enable_rammer is not False, options.check_machine_code and device.kind == "cuda"
        accept = (lambda func: refuse_bad_machine_code(func, tvm.target.Target.current())) if check else None
        known = {"tiles": tuned.configurations, "failed": tuned.failed, "wishes": wishes_of(options)}
        construct = ConstructKernels(device, options, alternatives=several, accept=accept, **known)  # type: ignore[arg-type] # each is its own
        # Stock TVM's scans ask for registers outside of their launches, where the host would allocate them for all.
        return [construct, AllocateInThreads()]
    if options.enable_roller is False:
        return flushing
    return [
        *flushing,
        # Construction may repack what is constant at every call, so it has to know before it chooses.
        AnnotateConstants(),
        # The kernel cache's keys hold it, and a kernel that looks at its arguments is another one.
        TrustArguments(),
        *_cpu_construction(device, options, cache, tuned.configurations),
        # The choices ask for packed constants: rewrite them at the call sites, once, at compile time.
        PackConstants(),
        # On one core no kernel starts threads, however it was made.
        *([SerialiseLoops()] if device.unit_count == 1 else []),
    ]


def _cpu_construction(
    device: DeviceSpec, options: BuildOptions, cache: KernelCache | None, tiles: TileChoices
) -> list[tvm.transform.Pass]:
    """The pass that constructs kernels; those of rTasks have bodies, and if all are such, dividing costs no fork."""
    outside, launch_us = device, (device.dispatch_ns or 0.0) / 1e3
    device = replace(device, launch_overhead_us=launch_us) if options.enable_rammer is True else device
    if options.enable_rammer is False:
        return [ConstructKernels(device, options, cache=cache, tiles=tiles, outside=outside)]
    return [ConstructKernels(device, options, tiles=tiles, alternatives=device.unit_count > 1, outside=outside)]


def rammer_passes(device: DeviceSpec, options: BuildOptions) -> list[tvm.transform.Pass]:
    """Kernels as rTasks, and schedules that run those of many operators (Rammer)."""
    if options.enable_rammer is False:
        return []
    # Behind construction, which says how long kernels take, and while calls still say what depends on what.
    if device.kind == "cpu":
        known = partial(known_rtask_times, options)
        return [SplitRTasks(device), ScheduleWavefronts(device, options.enable_rammer, known, options.rammer_policy)]
    # A GPU has no runtime of ours: a schedule becomes one more kernel, which the graph calls as any other.
    schedules = ScheduleWavefronts(device, options.enable_rammer, policy=options.rammer_policy)
    return [SplitLaunches(device), schedules, MergeRTasks(device, compiled_use), CallMerged()]


def is_cpu(target: tvm.target.Target) -> bool:
    return str(target.kind.name) == "llvm"


def kernel_pipeline(
    target: tvm.target.Target,
    device: DeviceSpec,
    options: BuildOptions,
    cache: KernelCache | None = None,
    tuned: TunedTiles = NOTHING_TUNED,
    kernels: GivenKernels | None = None,
) -> tvm.transform.Sequential:
    """Every pass up to scheduled kernels; the result still is a Relax graph of ``call_tir``."""
    given = [UseLegacyKernels(kernels, device)] if kernels else []
    passes = [operator_pipeline(target, device, options), *given, *kernel_passes(device, options, cache, tuned)]
    return tvm.transform.Sequential(passes, name="tvm_ext.kernels")


def operator_pipeline(target: tvm.target.Target, device: DeviceSpec, options: BuildOptions) -> tvm.transform.Sequential:
    """Every pass up to one unscheduled PrimFunc per fused operator, which is what kernels are constructed from."""
    passes = [
        # Before anything changes the importer's form of the steps.
        *recurrent_passes(device, options),
        *graph_passes(device, options),
        *narrowing_passes(target, device, options),
        *layout_passes(device, options),
        *attention_passes(device, options),
        *cutlass_passes(target, device, options),
        *operator_passes(target),
        *fusion_passes(device, options),
    ]
    return tvm.transform.Sequential(passes, name="tvm_ext.operators")


def lowering_pipeline(target: tvm.target.Target) -> tvm.transform.Sequential:
    """From kernels in a graph to what the Relax VM executes: stock TVM's passes in stock TVM's order."""
    cpu = (cpu_dataflow_lower_passes, cpu_finalize_passes)
    dataflow_lower, finalize = cpu if is_cpu(target) else (gpu_dataflow_lower_passes, gpu_finalize_passes)
    # Reshapes are views already, and this pass fails on kernels that are not in the form LegalizeOps gives them.
    passes = [item for item in dataflow_lower(target) if item.info.name != "RewriteDataflowReshape"]
    return tvm.transform.Sequential([*passes, *finalize(target)], name="tvm_ext.lowering")


def relax_pipeline(**settings: Any) -> tvm.transform.Pass:
    """The registered Relax pipeline ``"tvm_ext"``: ``tvm.compile(mod, target, relax_pipeline="tvm_ext")``.

    The target is the one `tvm.compile` was given, taken at its word: ``"llvm"`` there generates code for the plainest
    x86-64 (`relay.build` passes the machine's real features instead). ``settings`` are fields of `BuildOptions`;
    what they leave open, the ``tvm_ext.*`` options of the current PassContext decide.
    """
    BuildOptions.create(**settings)  # a wrong setting is an error here, not deep inside a build

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        options = BuildOptions.current(**settings)
        if options.enable_rammer is True:
            raise OptionError("option 'enable_rammer' is for relay.build.", "build by relay.build, or leave it out")
        code = tvm.target.Target.current()
        plan = plan_build(code or "llvm", replace(options, enable_rammer=False), code=code)
        with EXCLUSIVE, plan.target:
            return plan.lower(plan.construct(mod))

    return module_pass(run, opt_level=0, name="tvm_ext")


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildPlan:
    """What a target and options come to: the device to construct for, the target for code, the two pipelines."""

    device: DeviceSpec
    target: tvm.target.Target
    options: BuildOptions
    tiles: TunedTiles  # what measurements have chosen
    construct: tvm.transform.Pass  # IRModule of operators -> call_tir graph of kernels
    lower: tvm.transform.Pass  # -> what the VM executes


def plan_build(
    target: str | dict[str, Any] | tvm.target.Target,
    options: BuildOptions,
    cache: KernelCache | None = None,
    tiles: TunedTiles | None = None,
    code: tvm.target.Target | None = None,
    kernels: GivenKernels | None = None,
) -> BuildPlan:
    """Resolve ``target``, order the passes, with ``tiles`` or the database's, for machine code of ``code`` where given.

    Raises TargetError for what is not known. ``kernels`` are a user's, by the names of operators.
    """
    if options.device is not None and is_bare(target) and target != "opencl":
        target = options.device  # "cuda" leaves the architecture open, and the device says it
    device, resolved = device_for_target(target)
    device = device if options.device is None else chosen_device(options.device, device)
    device = as_compiled(device, code or resolved)
    options = with_schedules_settled(device, options)
    if device.kind == "opencl":
        enable_opencl_math()
    if device.kind == "cpu" and options.num_threads is not None:
        device = with_unit_count(device, options.num_threads)
    tiles = tiles_for_build(device, options) if tiles is None else tiles
    return BuildPlan(
        device=device,
        target=resolved,
        options=options,
        tiles=tiles,
        construct=kernel_pipeline(resolved, device, options, cache, tiles, kernels),
        lower=tvm.transform.Sequential([*rammer_passes(device, options), lowering_pipeline(resolved)]),
    )
