"""The CUDA source of one matrix product: a template's configuration with an epilogue (`kernel_text`).

Arguments of a launch are, beside extents and distances, the splits of stream-K forms, swizzle and raster of 3.x.
Operands that are matrices, and D, lie row by row without gaps.
"""

from __future__ import annotations

from tvm_ext.records.partition import CutlassProblem, Order

from .elements import ELEMENTS, multiplier
from .epilogue import Epilogue, fill_result
from .evt import VisitorTree, visitor_tree
from .gemm import GemmConfig
from .host import CallForm
from .kernel_text import (
    LAYOUTS,
    collective_epilogue,
    gemm_shape,
    kernel_symbol,
    kernel_text,
    own_functions,
    product_comment,
    thread_map,
)

_INCLUDES = {
    "2.x": (
        "cutlass/gemm/gemm.h",
        "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h",
        "cutlass/gemm/device/gemm_universal_adapter.h",
        "cutlass/epilogue/threadblock/fusion/visitors.hpp",
        "cutlass/epilogue/thread/activation.h",
    ),
    "3.x": (
        "cute/tensor.hpp",
        "cutlass/gemm/dispatch_policy.hpp",
        "cutlass/gemm/collective/collective_builder.hpp",
        "cutlass/epilogue/collective/collective_builder.hpp",
        "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp",
        "cutlass/epilogue/thread/activation.h",
        "cutlass/gemm/device/gemm_universal_adapter.h",
        "cutlass/gemm/kernel/gemm_universal.hpp",
        "cutlass/gemm/kernel/tile_scheduler.hpp",
        "cutlass/util/packed_stride.hpp",
    ),
}


GEMM_CALL = CallForm(
    name="GemmCall",
    packing="9q4i",
    has_distances=True,
    declaration="""struct GemmCall {
  int64_t m, n, k, batch;             // batch products D = A B of M x N x K
  int64_t lda, ldb;                   // elements from row to row of A and B, or from column to column
  int64_t batch_a, batch_b, batch_d;  // and from product to product
  int32_t split_k, swizzle, raster_along_m, reserved;
  void const *a, *b;
  void const* const* operands;
  int64_t const* operand_batches;
  void* d;
};
""",
)
"""What a launch is told."""


def symbol_of(config: GemmConfig, epilogue: Epilogue, problem: CutlassProblem) -> str:
    """The name of the entry point: of ``problem`` count the orders of its matrices, and whether there are several."""
    layouts = "".join("n" if order == "column" else "t" for order in problem.orders)
    return kernel_symbol(f"{config.name}_{layouts}{'_batched' if problem.batch > 1 else ''}", epilogue)


def emit_gemm(config: GemmConfig, epilogue: Epilogue, problem: CutlassProblem) -> str:
    """The source of ``config`` with ``epilogue`` for problems like this; raises as `kernel_text`."""
    symbol = symbol_of(config, epilogue, problem)
    batched, (layout_a, layout_b) = problem.batch > 1, problem.orders
    arithmetic = multiplier(config.arithmetic)
    tree = visitor_tree(epilogue, arithmetic.accumulator, config.generation, batched=batched)
    operands = len(epilogue.operands)
    if config.generation == "2.x":
        body = _body_2x(config, tree, operands, f"{symbol}_template")
    else:
        body = _body_3x(config, tree, epilogue, layout_a, layout_b)
    declared = f"""using ElementA = {ELEMENTS[arithmetic.operand].cpp};
using ElementB = ElementA;
using ElementOut = {ELEMENTS[epilogue.out_dtype].cpp};
using ElementSum = {ELEMENTS[arithmetic.accumulator].cpp};
using LayoutA = {LAYOUTS[layout_a]};
using LayoutB = {LAYOUTS[layout_b]};
using LayoutOut = cutlass::layout::RowMajor;
constexpr int AlignmentA = {config.alignment_a};
constexpr int AlignmentB = {config.alignment_b};
constexpr int AlignmentOut = {config.alignment_d};

{body}"""
    return kernel_text(
        symbol, GEMM_CALL, template=config.name, computes=product_comment(epilogue),
        includes=_INCLUDES[config.generation], functions=own_functions(epilogue, config.generation), body=declared,
        operator="Gemm", fits=_FITS,
        start=fill_result(epilogue.reduction, "call->m * call->batch" if batched else "call->m", "call->n"),
    )  # fmt: skip


_FITS = """  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t extent : {call.m, call.n, call.k, call.batch})
    if (extent < 1 || most < extent) return false;
  return true;
"""


# --- 2.x -------------------------------------------------------------------------------------------------------------
def _body_2x(config: GemmConfig, tree: VisitorTree, operands: int, space: str) -> str:
    assert config.warp is not None
    assert config.instruction is not None
    arithmetic = multiplier(config.arithmetic)
    splits = "several ? int(call.batch) : call.split_k" if config.split_k > 1 else "int(call.batch)"
    return f"""using ThreadblockShape = {gemm_shape(config.threadblock)};
using WarpShape = {gemm_shape(config.warp)};
using InstructionShape = {gemm_shape(config.instruction)};
using OperatorClass = cutlass::arch::{"OpClassSimt" if config.is_simt else "OpClassTensorOp"};
using ArchTag = cutlass::arch::Sm{config.architecture};
using Operator = cutlass::arch::{arithmetic.operator};
using Swizzle = {_swizzle_2x(config)};
constexpr int Stages = {config.stages};
constexpr int OperandCount = {operands};
{_thread_map(config, space)}
{tree.declarations}

using Gemm = cutlass::gemm::device::GemmUniversalAdapter<typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
    ElementA, LayoutA, cutlass::ComplexTransform::kNone, AlignmentA,
    ElementB, LayoutB, cutlass::ComplexTransform::kNone, AlignmentB,
    ElementOut, LayoutOut, AlignmentOut, ElementSum, float, OperatorClass, ArchTag,
    ThreadblockShape, WarpShape, InstructionShape, {tree.name}, Swizzle, Stages, Operator>::GemmKernel>;

typename Gemm::Arguments make_arguments(GemmCall const& call) {{
  auto* d = static_cast<ElementOut*>(call.d);
  int64_t const ldd = call.n;
  typename {tree.name}::Arguments epilogue{tree.argument};
  bool const several = call.batch > 1;
  return typename Gemm::Arguments(
      several ? cutlass::gemm::GemmUniversalMode::kBatched : cutlass::gemm::GemmUniversalMode::kGemm,
      {{int(call.m), int(call.n), int(call.k)}}, {splits}, epilogue,
      call.a, call.b, nullptr, nullptr, call.batch_a, call.batch_b, 0, call.batch_d, call.lda, call.ldb, 0, 0);
}}
"""


def _swizzle_2x(config: GemmConfig) -> str:
    if config.split_k > 1:
        return "cutlass::gemm::threadblock::ThreadblockSwizzleStreamK"
    return f"cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"


def _thread_map(config: GemmConfig, space: str) -> str:
    """Which thread stores what. The visitors know the matrix units' map alone: the vector units' takes its name."""
    layout = "cutlass::epilogue::threadblock::OutputTileThreadLayout"
    if not config.is_simt:
        return f"using OutputTileThreadMap = {layout}<ThreadblockShape, WarpShape, ElementOut, AlignmentOut, 1>;\n"
    return f"""
struct VectorWarpShape : WarpShape {{
  using Plain = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      ElementA, LayoutA, cutlass::ComplexTransform::kNone, AlignmentA,
      ElementB, LayoutB, cutlass::ComplexTransform::kNone, AlignmentB,
      ElementOut, LayoutOut, ElementSum, OperatorClass, ArchTag, ThreadblockShape, WarpShape, InstructionShape,
      cutlass::epilogue::thread::LinearCombination<ElementOut, AlignmentOut, ElementSum, float>, Swizzle, Stages,
      Operator>::GemmKernel;
  using ThreadMap = typename Plain::Epilogue::OutputTileIterator::ThreadMap;
}};
{thread_map(space, "VectorWarpShape", "VectorWarpShape::ThreadMap")}
using OutputTileThreadMap = {layout}<ThreadblockShape, VectorWarpShape, ElementOut, AlignmentOut, 1>;
"""


# --- 3.x -------------------------------------------------------------------------------------------------------------
_SCHEDULES = {
    "cooperative": ("KernelTmaWarpSpecializedCooperative", "TmaWarpSpecializedCooperative"),
    "pingpong": ("KernelTmaWarpSpecializedPingpong", "TmaWarpSpecialized"),
}


def _body_3x(config: GemmConfig, tree: VisitorTree, epilogue: Epilogue, layout_a: Order, layout_b: Order) -> str:
    main, store = _SCHEDULES[str(config.schedule)]
    scheduler = "StreamKScheduler" if config.split_k > 1 else "PersistentScheduler"
    stored, result = ("ElementOut", "d") if epilogue.reduction is None else ("void", "nullptr")
    return f"""using TileShape = {_cute_shape(config.threadblock)};
using ClusterShape = {_cute_shape((*config.cluster, 1))};
using EpilogueSchedule = cutlass::epilogue::{store};
using Scheduler = cutlass::gemm::{scheduler};
constexpr int OperandCount = {len(epilogue.operands)};
{collective_epilogue(tree, "void, LayoutOut, AlignmentOut", "LayoutOut", config.alignment_d, stored)}
using MainLoop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, LayoutA, AlignmentA, ElementB, LayoutB, AlignmentB,
    ElementSum, TileShape, ClusterShape, cutlass::gemm::collective::StageCount<{config.stages}>,
    cutlass::gemm::{main}>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, MainLoop, Epilogue, Scheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments make_arguments(GemmCall const& call) {{
  auto* d = static_cast<ElementOut*>(call.d);
  int64_t const ldd = call.n;
  int const m = int(call.m), n = int(call.n), k = int(call.k), batch = int(call.batch);
  typename {tree.name}::Arguments epilogue{tree.argument};
  typename Kernel::StrideA stride_a{{}};
  typename Kernel::StrideB stride_b{{}};
  cute::get<{0 if layout_a == "row" else 1}>(stride_a) = call.lda;
  cute::get<2>(stride_a) = call.batch_a;
  cute::get<{0 if layout_b == "column" else 1}>(stride_b) = call.ldb;
  cute::get<2>(stride_b) = call.batch_b;
  typename Gemm::Arguments arguments{{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {{m, n, k, batch}},
      {{static_cast<ElementA const*>(call.a), stride_a, static_cast<ElementB const*>(call.b), stride_b}},
      {{epilogue, nullptr, {{}}, {result},
       cutlass::make_cute_packed_stride(typename Kernel::StrideD{{}}, {{m, n, batch}})}}}};
  arguments.scheduler.max_swizzle_size = call.swizzle;
  using Raster = decltype(arguments.scheduler.raster_order);
  arguments.scheduler.raster_order = call.raster_along_m ? Raster::AlongM : Raster::AlongN;
{"  arguments.scheduler.splits = call.split_k;" if config.split_k > 1 else "  (void)ldd, (void)d;"}
  return arguments;
}}
"""


def _cute_shape(shape: tuple[int, ...]) -> str:
    return f"cute::Shape<{', '.join(f'cute::Int<{extent}>' for extent in shape)}>"
