"""The CUDA source of one convolution: a template's configuration with an epilogue (`kernel_text`).

Activations and result are NHWC without gaps, filters KRSC (Relax's OHWI), with the channels of one group. Operands of
the epilogue have one row for each pixel.
"""

from __future__ import annotations

from collections.abc import Iterable

from .convolution import ConvolutionConfig, DepthwiseConfig
from .elements import ELEMENTS, multiplier
from .epilogue import Epilogue, fill_result
from .evt import OWN_FUNCTIONS, visitor_tree
from .gemm import ACCESS_BITS
from .host import CallForm, own_header
from .kernel_text import (
    collective_epilogue,
    gemm_shape,
    kernel_symbol,
    kernel_text,
    own_functions,
    product_comment,
    thread_map,
)

CONVOLUTION_CALL = CallForm(
    name="ConvolutionCall",
    packing="20i",
    declaration="""struct ConvolutionCall {
  int32_t n, h, w, c, k, r, s, p, q;  // N x H x W x C by K filters of R x S into N x P x Q x K
  int32_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, groups;  // pads above and on the left
  int32_t split_k, swizzle, raster_along_m, reserved;
  void const *a, *b;
  void const* const* operands;
  void* d;
};
""",
)
"""What a launch is told. ``split_k`` is how many slices the channels are cut into; of depthwise templates, how many
threadblocks share the pixels."""

EPILOGUE_INCLUDES = (
    "cutlass/epilogue/threadblock/epilogue_with_visitor_callbacks.h",
    "cutlass/epilogue/threadblock/fusion/visitors.hpp",
    "cutlass/epilogue/thread/activation.h",
    "cutlass/epilogue/thread/linear_combination.h",
)
_INCLUDES = {
    "2.x": (
        "cutlass/block_striped.h",
        "cutlass/semaphore.h",
        "cutlass/conv/kernel/default_conv2d_fprop.h",
        "cutlass/conv/kernel/default_conv2d_group_fprop.h",
        "cutlass/conv/device/implicit_gemm_convolution.h",
        *EPILOGUE_INCLUDES,
    ),
    "3.x": (
        "cutlass/kernel_hardware_info.h",
        "cute/tensor.hpp",
        "cutlass/conv/convnd_problem_shape.hpp",
        "cutlass/conv/collective/collective_builder.hpp",
        "cutlass/conv/kernel/conv_universal.hpp",
        "cutlass/conv/device/conv_universal_adapter.hpp",
        "cutlass/epilogue/collective/collective_builder.hpp",
        "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp",
        "cutlass/epilogue/thread/activation.h",
        "cutlass/util/packed_stride.hpp",
    ),
}
_JOINED = own_header("implicit")
_PLANES = own_header("planes")
"""What reads and stores NCHW."""
"""The kernel that joins what CUTLASS's convolutions are made of (tiles, iterators, the loop) to a visitor tree: CUTLASS
4.2 has these trees for 2.x matrix products and for collectives alone."""
_ALGORITHMS = {
    "optimized": "kOptimized",
    "analytic": "kAnalytic",
    "few_channels": "kFewChannels",
    "fixed_channels": "kFixedChannels",
    "planes": "kFewChannels",
}


def emit_convolution(config: ConvolutionConfig, epilogue: Epilogue) -> str:
    """The source of ``config``, which is no matrix product's, with ``epilogue``; raises as `kernel_text`."""
    assert config.iterator != "plain"
    if config.iterator == "bulk":
        body, functions, fits = _bulk(config, epilogue), OWN_FUNCTIONS, _FITS_BULK
    else:
        planes = _PLANES if config.planes is not None or config.stores_planes else ""
        body, functions, fits = _implicit(config, epilogue), own_functions(epilogue) + _JOINED + planes, FITS
    tfloat32 = config.arithmetic == "tfloat32" and config.iterator != "bulk"  # matrix products' templates know without
    return convolution_text(
        config, epilogue, includes=_INCLUDES[config.tile.generation], functions=functions, body=body, fits=fits,
        operand="cutlass::tfloat32_t" if tfloat32 else None,
    )  # fmt: skip


def convolution_text(
    config: ConvolutionConfig | DepthwiseConfig,
    epilogue: Epilogue,
    *,
    includes: Iterable[str],
    functions: str,
    body: str,
    fits: str,
    operand: str | None = None,
) -> str:
    """`kernel_text` of any template of convolutions; ``operand`` is the C++ type of what is multiplied."""
    kind = multiplier(config.arithmetic)
    declared = f"""using ElementA = {operand or ELEMENTS[kind.operand].cpp};
using ElementB = ElementA;
using ElementOut = {ELEMENTS[epilogue.out_dtype].cpp};
using ElementSum = {ELEMENTS[kind.accumulator].cpp};
using Layout = cutlass::layout::TensorNHWC;
using Operator = cutlass::arch::{kind.operator};
constexpr int OperandCount = {len(epilogue.operands)};

{body}"""
    return kernel_text(
        kernel_symbol(config.name, epilogue), CONVOLUTION_CALL, template=config.name,
        computes=product_comment(epilogue), includes=includes, functions=functions, body=declared,
        operator="Convolution", fits=fits,
        start=fill_result(epilogue.reduction, "int64_t(call->n) * call->p * call->q", "int64_t(call->k)"),
    )  # fmt: skip


FITS = """  for (int32_t extent : {call.n, call.h, call.w, call.c, call.k, call.r, call.s, call.p, call.q, call.groups,
                         call.stride_h, call.stride_w, call.dilation_h, call.dilation_w, call.split_k})
    if (extent < 1) return false;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  return call.pad_h >= 0 && call.pad_w >= 0 && call.c % call.groups == 0 && call.k % call.groups == 0 &&
         int64_t(call.n) * call.p * call.q <= most && int64_t(call.r) * call.s * call.c <= most;
"""
_FITS_BULK = FITS.replace(
    "  constexpr",
    """  if (!is_counted(call.h, call.p, call.r, call.pad_h, call.stride_h, call.dilation_h) ||
      !is_counted(call.w, call.q, call.s, call.pad_w, call.stride_w, call.dilation_w))
    return false;
  constexpr""",
)

PROBLEM = """cutlass::conv::Conv2dProblemSize problem_of(ConvolutionCall const& call) {
  return cutlass::conv::Conv2dProblemSize(
      call.n, call.h, call.w, call.c, call.k, call.r, call.s, call.p, call.q, call.pad_h, call.pad_w, call.stride_h,
      call.stride_w, call.dilation_h, call.dilation_w, cutlass::conv::Mode::kCrossCorrelation, call.split_k,
      call.groups);
}
"""


# --- 2.x, implicit products ------------------------------------------------------------------------------------------
def _implicit(config: ConvolutionConfig, epilogue: Epilogue) -> str:
    tile = config.tile
    assert tile.warp is not None
    assert tile.instruction is not None
    arithmetic = multiplier(tile.arithmetic)
    tree = visitor_tree(epilogue, arithmetic.accumulator, "2.x", planes=config.stores_planes)
    alignments = (tile.alignment_a, tile.alignment_b) if config.planes is None else (1, 1)
    space = f"{kernel_symbol(config.name, epilogue)}_template"
    grouped = config.grouping != "none"
    mode = f"cutlass::conv::GroupMode::k{config.grouping.capitalize()}Group, " if grouped else ""
    return f"""using ThreadblockShape = {gemm_shape(tile.threadblock)};
using WarpShape = {gemm_shape(tile.warp)};
using InstructionShape = {gemm_shape(tile.instruction)};
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{tile.swizzle}>;
constexpr int AlignmentOut = {tile.alignment_d};

using Template = cutlass::conv::kernel::DefaultConv2d{"Group" if grouped else ""}Fprop<
    ElementA, Layout, ElementB, Layout, ElementOut, Layout, ElementSum,
    cutlass::arch::{"OpClassSimt" if tile.is_simt else "OpClassTensorOp"}, cutlass::arch::Sm{tile.architecture},
    ThreadblockShape, WarpShape, InstructionShape,
    cutlass::epilogue::thread::LinearCombination<ElementOut, AlignmentOut, ElementSum, float>, Swizzle, {tile.stages},
    Operator, {mode}cutlass::conv::IteratorAlgorithm::{_ALGORITHMS[config.iterator]},
    cutlass::conv::StrideSupport::kStrided, {alignments[0]}, {alignments[1]}>;
using Plain = typename Template::Kernel;
{_main_loop(config)}

// A warp shape of our own has a thread map of our own: that of the template's epilogue, which visitors follow.
struct PlainWarpShape : WarpShape {{}};
{thread_map(space, "PlainWarpShape", "Plain::Epilogue::OutputTileIterator::ThreadMap")}
using OutputTileThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<
    ThreadblockShape, PlainWarpShape, ElementOut, AlignmentOut, 1>;

{tree.declarations}

using Kernel = tvm_ext::ConvolutionWithVisitor<
    Plain, cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Plain::Epilogue, {tree.name}, 1>,
    MainLoop>;
using Convolution = tvm_ext::ConvolutionLaunch<Plain, Kernel>;

{PROBLEM}
typename Convolution::Arguments make_arguments(ConvolutionCall const& call) {{
  auto const problem = problem_of(call);
  auto* d = static_cast<ElementOut*>(call.d);
  int64_t const ldd = call.k;
  typename {tree.name}::Arguments epilogue{tree.argument};
  auto* a = const_cast<ElementA*>(static_cast<ElementA const*>(call.a));
  auto* b = const_cast<ElementB*>(static_cast<ElementB const*>(call.b));
  return {{problem, {{a, Layout::packed(problem.activation_extent())}}, {{b, Layout::packed(problem.filter_extent())}},
          epilogue}};
}}
"""


def _main_loop(config: ConvolutionConfig) -> str:
    """C++ of the main loop: the template's own, or with an iterator that reads planes. Filters lie depth by depth."""
    if config.planes is None:
        return "using MainLoop = typename Plain::Mma;"
    return f"""using MainLoop = cutlass::conv::threadblock::ImplicitGemmPipelined<
    ThreadblockShape,
    tvm_ext::PlanesTileIterator<
        cutlass::MatrixShape<ThreadblockShape::kM, ThreadblockShape::kK>, ElementA, {ELEMENTS[config.planes.dtype].cpp},
        typename Template::ThreadMapA, {config.planes.run}>,
    typename Template::SmemIteratorA,
    cutlass::conv::threadblock::TileIterator<
        cutlass::conv::threadblock::Conv2dFpropFilterTileAccessIteratorFewChannels<
            cutlass::MatrixShape<ThreadblockShape::kK, ThreadblockShape::kN>, ElementB, Layout,
            typename Template::ThreadMapB, cutlass::AlignedArray<ElementB, {config.tile.alignment_b}>>>,
    typename Template::SmemIteratorB, ElementOut, Layout, typename Template::MmaPolicy>;"""


# --- 3.x -------------------------------------------------------------------------------------------------------------
def source_of(epilogue: Epilogue) -> int | None:
    """The operand that a collective loads as its tensor C, whose rows are windows: the whole matrix; None without one.

    Visitors load matrices row by row alone.
    """
    matrices = [i for i, operand in enumerate(epilogue.operands) if operand.role == "matrix"]
    return matrices[0] if matrices else None


def _bulk(config: ConvolutionConfig, epilogue: Epilogue) -> str:
    tile = config.tile
    m, n, k = tile.threadblock
    source = source_of(epilogue)
    tree = visitor_tree(epilogue, multiplier(tile.arithmetic).accumulator, "3.x", source=source)
    element_c, alignment_c, pointer_c = "void", tile.alignment_d, "nullptr"
    if source is not None:
        loaded = ELEMENTS[epilogue.operands[source].dtype]
        element_c, alignment_c = loaded.cpp, ACCESS_BITS // loaded.bits
        pointer_c = f"static_cast<{element_c} const*>(call.operands[{source}])"
    stride_c = "{}" if source is None else "stride_d"
    return f"""using TileShape = cute::Shape<cute::Int<{m}>, cute::Int<{n}>, cute::Shape<cute::Int<{k}>>>;
using ClusterShape = cute::Shape<cute::Int<{tile.cluster[0]}>, cute::Int<{tile.cluster[1]}>, cute::Int<1>>;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
{collective_epilogue(tree, f"{element_c}, Layout, {alignment_c}", "Layout", tile.alignment_d)}
using MainLoop = typename cutlass::conv::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cutlass::conv::Operator::kFprop,
    ElementA, Layout, {tile.alignment_a}, ElementB, Layout, {tile.alignment_b},
    ElementSum, TileShape, ClusterShape, cutlass::conv::collective::StageCount<{tile.stages}>,
    cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;

using Problem = cutlass::conv::ConvProblemShape<cutlass::conv::Operator::kFprop, 2>;
using Kernel = cutlass::conv::kernel::ConvUniversal<Problem, MainLoop, Epilogue>;
using Convolution = cutlass::conv::device::ConvUniversalAdapter<Kernel>;

// What is padded below or on the right: never less than nothing, where strides leave out the last rows.
int padded_behind(int extent, int result, int window, int before, int stride, int dilation) {{
  int const behind = (result - 1) * stride + (window - 1) * dilation + 1 - extent - before;
  return behind > 0 ? behind : 0;
}}

// Whether the template, which counts the results itself, counts as many as there is room for.
bool is_counted(int extent, int result, int window, int before, int stride, int dilation) {{
  int const behind = padded_behind(extent, result, window, before, stride, dilation);
  int const steps = extent + before + behind - (window - 1) * dilation - 1;
  return steps >= 0 && steps / stride + 1 == result;
}}

typename Convolution::Arguments make_arguments(ConvolutionCall const& call) {{
  int64_t const ldd = call.k;
  typename {tree.name}::Arguments epilogue{tree.argument};
  (void)ldd;
  int const below = padded_behind(call.h, call.p, call.r, call.pad_h, call.stride_h, call.dilation_h);
  int const right = padded_behind(call.w, call.q, call.s, call.pad_w, call.stride_w, call.dilation_w);
  Problem problem(cutlass::conv::Mode::kCrossCorrelation, {{call.n, call.h, call.w, call.c}},
                  {{call.k, call.r, call.s, call.c}}, {{call.pad_h, call.pad_w}}, {{below, right}},
                  {{call.stride_h, call.stride_w}}, {{call.dilation_h, call.dilation_w}}, call.groups);
  typename Kernel::StrideD stride_d{{}};
  cute::get<0, 0>(stride_d) = problem.stride_C[2];
  cute::get<0, 1>(stride_d) = problem.stride_C[1];
  cute::get<0, 2>(stride_d) = problem.stride_C[0];
  return {{problem,
          {{static_cast<ElementA const*>(call.a), static_cast<ElementB const*>(call.b)}},
          {{epilogue, {pointer_c}, {stride_c}, static_cast<ElementOut*>(call.d), stride_d}}}};
}}
"""
