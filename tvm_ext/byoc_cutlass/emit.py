"""The CUDA source of one matrix product: a template's configuration with an epilogue, and the C functions to call it.

The text is the kernel that a model links to; nothing of the package's own host code is in it. Each text has two entry
points::

    int64_t NAME_workspace_bytes(int64_t m, int64_t n, int64_t k, GemmTuning const* tuning);
    int32_t NAME(int64_t m, int64_t n, int64_t k, void const* a, void const* b, void const* const* operands, void* d,
                 GemmTuning const* tuning, void* workspace, int64_t workspace_bytes, cudaStream_t stream);

with ``struct GemmTuning { int32_t split_k, swizzle, raster_along_m; };``. Extents are arguments of every launch, and so
is what the tuning says, as far as the template leaves it open: the splits of stream-K forms, swizzle and raster of 3.x.
``operands`` are in the epilogue's order, matrices and D row by row without gaps. Answers are ``cutlass::Status`` (0
is success); -1 bytes say that the problem is refused, and too small a workspace is refused before anything runs.
"""

from __future__ import annotations

import hashlib

from tvm_ext.records.partition import Order

from . import _cutlass
from .elements import ELEMENTS, Shape3, multiplier
from .epilogue import Epilogue
from .evt import OWN_FUNCTIONS, visitor_tree
from .gemm import GemmConfig

_LAYOUTS: dict[Order, str] = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}

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


def symbol_of(config: GemmConfig, epilogue: Epilogue, layout_a: Order, layout_b: Order) -> str:
    """The name of the entry point: the template's, the layouts', and a digest of the epilogue."""
    digest = hashlib.sha256(repr(epilogue).encode()).hexdigest()[:12]
    layouts = "".join("n" if layout == "column" else "t" for layout in (layout_a, layout_b))
    return f"tvm_ext_{config.name}_{layouts}_{digest}"


def emit_gemm(config: GemmConfig, epilogue: Epilogue, *, layout_a: Order = "row", layout_b: Order = "row") -> str:
    """The source of ``config`` with ``epilogue``.

    Raises UnsupportedEnvironmentError where the package is absent or of another version.
    """
    symbol = symbol_of(config, epilogue, layout_a, layout_b)
    space = f"{symbol}_template"
    body = _body_2x(config, epilogue, space) if config.generation == "2.x" else _body_3x(config, epilogue)
    includes = "\n".join(f"#include <{name}>" for name in _INCLUDES[config.generation])
    arithmetic = multiplier(config.arithmetic)
    return f"""// {config.name}
// D = {epilogue.expression}, {epilogue.out_dtype}. Headers: CUTLASS {_cutlass.VERSION}.
#include <cstdint>
#include <limits>
#include <cutlass/cutlass.h>
{includes}
{OWN_FUNCTIONS}
struct GemmTuning {{ int32_t split_k, swizzle, raster_along_m; }};

namespace {symbol}_template {{

using ElementA = {ELEMENTS[arithmetic.operand].cpp};
using ElementB = ElementA;
using ElementOut = {ELEMENTS[epilogue.out_dtype].cpp};
using ElementSum = {ELEMENTS[arithmetic.accumulator].cpp};
using LayoutA = {_LAYOUTS[layout_a]};
using LayoutB = {_LAYOUTS[layout_b]};
using LayoutOut = cutlass::layout::RowMajor;
constexpr int AlignmentA = {config.alignment_a};
constexpr int AlignmentB = {config.alignment_b};
constexpr int AlignmentOut = {config.alignment_d};

{body}
}}  // namespace {symbol}_template
{_entry_points(symbol)}"""


def _entry_points(symbol: str) -> str:
    return f"""
namespace {symbol}_template {{

bool fits(int64_t m, int64_t n, int64_t k) {{
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  return 0 < m && m <= most && 0 < n && n <= most && 0 < k && k <= most;
}}

}}  // namespace {symbol}_template

extern "C" int64_t {symbol}_workspace_bytes(int64_t m, int64_t n, int64_t k, GemmTuning const* tuning) {{
  using namespace {symbol}_template;
  if (!fits(m, n, k)) return -1;
  void const* none[OperandCount + 1] = {{}};
  auto arguments = make_arguments(int(m), int(n), int(k), nullptr, nullptr, none, nullptr, *tuning);
  return static_cast<int64_t>(Gemm::get_workspace_size(arguments));
}}

extern "C" int32_t {symbol}(int64_t m, int64_t n, int64_t k, void const* a, void const* b, void const* const* operands,
                            void* d, GemmTuning const* tuning, void* workspace, int64_t workspace_bytes,
                            cudaStream_t stream) {{
  using namespace {symbol}_template;
  if (!fits(m, n, k)) return static_cast<int32_t>(cutlass::Status::kErrorInvalidProblem);
  auto arguments = make_arguments(int(m), int(n), int(k), a, b, operands, d, *tuning);
  cutlass::Status status = Gemm::can_implement(arguments);
  if (status != cutlass::Status::kSuccess) return static_cast<int32_t>(status);
  if (static_cast<int64_t>(Gemm::get_workspace_size(arguments)) > workspace_bytes)
    return static_cast<int32_t>(cutlass::Status::kErrorWorkspaceNull);
  Gemm gemm;
  status = gemm.initialize(arguments, workspace, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return static_cast<int32_t>(status);
}}
"""


# --- 2.x -------------------------------------------------------------------------------------------------------------
def _body_2x(config: GemmConfig, epilogue: Epilogue, space: str) -> str:
    assert config.warp is not None
    assert config.instruction is not None
    arithmetic = multiplier(config.arithmetic)
    tree = visitor_tree(epilogue, arithmetic.accumulator, "2.x")
    return f"""using ThreadblockShape = {_gemm_shape(config.threadblock)};
using WarpShape = {_gemm_shape(config.warp)};
using InstructionShape = {_gemm_shape(config.instruction)};
using OperatorClass = cutlass::arch::{"OpClassSimt" if config.is_simt else "OpClassTensorOp"};
using ArchTag = cutlass::arch::Sm{config.architecture};
using Operator = cutlass::arch::{arithmetic.operator};
using Swizzle = {_swizzle_2x(config)};
constexpr int Stages = {config.stages};
constexpr int OperandCount = {len(epilogue.operands)};
{_thread_map(config, space)}
{tree.declarations}

using Gemm = cutlass::gemm::device::GemmUniversalAdapter<typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
    ElementA, LayoutA, cutlass::ComplexTransform::kNone, AlignmentA,
    ElementB, LayoutB, cutlass::ComplexTransform::kNone, AlignmentB,
    ElementOut, LayoutOut, AlignmentOut, ElementSum, float, OperatorClass, ArchTag,
    ThreadblockShape, WarpShape, InstructionShape, {tree.name}, Swizzle, Stages, Operator>::GemmKernel>;

typename Gemm::Arguments make_arguments(int m, int n, int k, void const* a, void const* b, void const* const* operands,
                                        void* out, GemmTuning const& tuning) {{
  auto* d = static_cast<ElementOut*>(out);
  int64_t const ldd = n;
  typename {tree.name}::Arguments epilogue{tree.argument};
  return typename Gemm::Arguments(
      cutlass::gemm::GemmUniversalMode::kGemm, {{m, n, k}}, {"tuning.split_k" if config.split_k > 1 else "1"}, epilogue,
      a, b, nullptr, nullptr, int64_t(m) * k, int64_t(n) * k, 0, 0,
      LayoutA::packed({{m, k}}).stride(0), LayoutB::packed({{k, n}}).stride(0), 0, 0);
}}
"""


def _swizzle_2x(config: GemmConfig) -> str:
    if config.split_k > 1:
        return "cutlass::gemm::threadblock::ThreadblockSwizzleStreamK"
    return f"cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{config.swizzle}>"


def _thread_map(config: GemmConfig, space: str) -> str:
    """Which thread stores what. The visitors know the matrix units' map alone: the vector units' takes its name.

    The visitors' layout is made of the default map for tensor operations. A warp shape of our own, another type of the
    same extents, has a specialisation of that default: the map that the vector units' epilogue has.
    """
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

}}
template <class ThreadblockShape, int PartitionsK, class Element, int ElementsPerAccess>
struct cutlass::epilogue::threadblock::DefaultThreadMapTensorOp<
    ThreadblockShape, {space}::VectorWarpShape, PartitionsK, Element, ElementsPerAccess> {{
  using Type = typename {space}::VectorWarpShape::ThreadMap;
}};
namespace {space} {{

using OutputTileThreadMap = {layout}<ThreadblockShape, VectorWarpShape, ElementOut, AlignmentOut, 1>;
"""


def _gemm_shape(shape: Shape3) -> str:
    return f"cutlass::gemm::GemmShape<{', '.join(map(str, shape))}>"


# --- 3.x -------------------------------------------------------------------------------------------------------------
_SCHEDULES = {
    "cooperative": ("KernelTmaWarpSpecializedCooperative", "TmaWarpSpecializedCooperative"),
    "pingpong": ("KernelTmaWarpSpecializedPingpong", "TmaWarpSpecialized"),
}


def _body_3x(config: GemmConfig, epilogue: Epilogue) -> str:
    tree = visitor_tree(epilogue, multiplier(config.arithmetic).accumulator, "3.x")
    main, store = _SCHEDULES[str(config.schedule)]
    scheduler = "StreamKScheduler" if config.split_k > 1 else "PersistentScheduler"
    return f"""using TileShape = {_cute_shape(config.threadblock)};
using ClusterShape = {_cute_shape((*config.cluster, 1))};
using EpilogueSchedule = cutlass::epilogue::{store};
using Scheduler = cutlass::gemm::{scheduler};
constexpr int OperandCount = {len(epilogue.operands)};

using EpilogueDescriptor = cutlass::epilogue::collective::detail::EpilogueDescriptor<
    TileShape, cutlass::epilogue::collective::EpilogueTileAuto, ElementOut, ElementOut, EpilogueSchedule>;

{tree.declarations}

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, ElementSum, float, void, LayoutOut, AlignmentOut,
    ElementOut, LayoutOut, AlignmentOut, EpilogueSchedule, {tree.name}>::CollectiveOp;

using MainLoop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ElementA, LayoutA, AlignmentA, ElementB, LayoutB, AlignmentB,
    ElementSum, TileShape, ClusterShape, cutlass::gemm::collective::StageCount<{config.stages}>,
    cutlass::gemm::{main}>::CollectiveOp;

using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, MainLoop, Epilogue, Scheduler>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

typename Gemm::Arguments make_arguments(int m, int n, int k, void const* a, void const* b, void const* const* operands,
                                        void* out, GemmTuning const& tuning) {{
  int64_t const ldd = n;
  typename {tree.name}::Arguments epilogue{tree.argument};
  typename Gemm::Arguments arguments{{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {{m, n, k, 1}},
      {{static_cast<ElementA const*>(a), cutlass::make_cute_packed_stride(typename Kernel::StrideA{{}}, {{m, k, 1}}),
       static_cast<ElementB const*>(b), cutlass::make_cute_packed_stride(typename Kernel::StrideB{{}}, {{n, k, 1}})}},
      {{epilogue, nullptr, {{}}, static_cast<ElementOut*>(out),
       cutlass::make_cute_packed_stride(typename Kernel::StrideD{{}}, {{m, n, 1}})}}}};
  arguments.scheduler.max_swizzle_size = tuning.swizzle;
  using Raster = decltype(arguments.scheduler.raster_order);
  arguments.scheduler.raster_order = tuning.raster_along_m ? Raster::AlongM : Raster::AlongN;
{"  arguments.scheduler.splits = tuning.split_k;" if config.split_k > 1 else "  (void)ldd;"}
  return arguments;
}}
"""


def _cute_shape(shape: tuple[int, ...]) -> str:
    return f"cute::Shape<{', '.join(f'cute::Int<{extent}>' for extent in shape)}>"
