"""The CUDA source of two products in one kernel of sm_90a: example 88's with our expressions in its softmax's place.

Rows of A are its queries, rows of B0 its keys, B1 its values: D = f(A B0) B1. Columns of the first product pass by in
tiles, so that there may be any number of them; two warp groups multiply by wgmma what bulk copies bring, and what lies
between stays in their registers.
"""

from __future__ import annotations

from . import _cutlass
from .elements import ELEMENTS, Shape3, multiplier
from .emit_back_to_back import PAIR_CALL
from .epilogue import Epilogue
from .epilogue_function import APPLY, epilogue_value
from .evt import OWN_FUNCTIONS, visitor_tree
from .host import once
from .kernel_text import collective_epilogue, kernel_text

_INCLUDES = (
    "cute/tensor.hpp",
    "cutlass/cluster_launch.hpp",
    "cutlass/device_kernel.h",
    "cutlass/epilogue/collective/collective_builder.hpp",
    "cutlass/epilogue/fusion/sm90_visitor_tma_warpspecialized.hpp",
    "cutlass/epilogue/thread/activation.h",
    "cutlass/gemm/collective/collective_builder.hpp",
    "88_hopper_fmha/device/device_universal.hpp",
    "88_hopper_fmha/collective/fmha_fusion.hpp",
    "88_hopper_fmha/kernel/fmha_kernel_builder.hpp",
)
_BETWEEN = once(
    "BETWEEN",
    """
namespace tvm_ext {
// In place of a mask: what Function makes of each sum of the first product.
template <class Function> struct Between : cutlass::fmha::collective::DefaultFusion {};
}  // namespace tvm_ext

namespace cutlass::fmha::collective {
// In place of the softmax, which asks for the largest and the sum of a row: nothing is kept from tile to tile.
template <class Sum, class Function, class Params> struct CollectiveSoftmax<Sum, tvm_ext::Between<Function>, Params> {
  Params const& params;
  CUTLASS_DEVICE CollectiveSoftmax(Params const& params) : params(params) {}

  template <class Sums, class Tiled> CUTLASS_DEVICE int init(Sums const&, Tiled const&) { return 0; }
  template <class Sums, class Tiled, class Places, class Problem>
  CUTLASS_DEVICE void step(Sums& sums, Tiled const&, Places const& places, int&, Problem const&) {
    Function::change(params, sums, places);
  }
  template <bool Masked = true, class Sums, class Tiled, class Places, class Behind, class Second, class Problem>
  CUTLASS_DEVICE void step(
      Sums& sums, Tiled const&, Places const& places, int&, Behind&, Second const&, Problem const&) {
    Function::change(params, sums, places);
  }
  template <class Sums, class Tiled> CUTLASS_DEVICE auto tail(int&, Sums&, Tiled const&) {
    return make_tensor<float>(Int<1>{});
  }
};
}  // namespace cutlass::fmha::collective
""",
)


def emit_streamed_pair(symbol: str, template: str, tile: Shape3, first: Epilogue, second: Epilogue, dtype: str) -> str:
    """The source of ``symbol``; ``tile``: rows of a threadblock, columns of a step, the most of A and of D.

    Second factors lie along their depth (layout "column"). Raises as `kernel_text`.
    """
    rows, columns, most = tile
    tree = visitor_tree(second, "float32", "3.x")
    out = ELEMENTS[second.out_dtype]
    pointers = "".join(
        f"    {ELEMENTS[row.dtype].cpp} const* row_{number};\n" for number, row in enumerate(first.operands)
    )
    given = "".join(
        f"    p.mainloop.row_{number} = static_cast<{ELEMENTS[row.dtype].cpp} const*>(call.operands[{number}]);\n"
        for number, row in enumerate(first.operands)
    )
    value = epilogue_value(first, lambda n, _: f"inside ? float(given.row_{n}[column]) : 0.f", "      ")
    epilogue = collective_epilogue(tree, "void, LayoutOut, AlignmentOut", "LayoutOut", 128 // out.bits)
    body = f"""using Element = {ELEMENTS[multiplier(dtype).operand].cpp};
using ElementSum = float;
using ElementOut = {out.cpp};
using LayoutOut = cutlass::layout::RowMajor;
constexpr int AlignmentOut = {128 // out.bits};
constexpr int OperandCount = {len(first.operands) + len(second.operands)};
constexpr int Most = {most};
using Along = cute::tuple<int, cute::_1, cute::tuple<int, int>>;
using Across = cute::tuple<cute::_1, int, cute::tuple<int, int>>;

struct Function;
using Plain = cutlass::fmha::collective::FmhaMainloopTmaWarpSpecialized<
    Element, float, float, cute::Shape<cute::Int<{rows}>, cute::Int<{columns}>, cute::Int<{most}>>, Along, Along,
    Across, tvm_ext::Between<Function>>;
struct MainLoop : Plain {{
  struct Params : Plain::Params {{
    int columns;
{pointers}  }};
}};

struct Function {{
{APPLY}
  template <class Params, class Sums, class Places>
  CUTLASS_DEVICE static void change(Params const& params, Sums& sums, Places const& places) {{
    auto const& given = static_cast<typename MainLoop::Params const&>(params);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(sums); ++i) {{
      int const column = cute::get<1>(places(i));
      bool const inside = column < given.columns;
      float const accum = sums(i);
{value}
      sums(i) = inside ? value : 0.f;
    }}
  }}
}};

namespace behind {{
using TileShape = typename MainLoop::TileShapePV;
using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
{epilogue}
struct Call {{
  void const* const* operands;
}};
typename {tree.name}::Arguments arguments_of(Call const& call) {{
  return {tree.argument};
}}
}}  // namespace behind
{_KERNEL.replace("@given@", given).replace("@first@", str(len(first.operands)))}"""
    products = f"D0 = {first.expression}, {first.out_dtype}; D = {second.expression}, {second.out_dtype}."
    return kernel_text(
        symbol, PAIR_CALL, template=template,
        computes=f"{products}\n// Headers: CUTLASS {_cutlass.VERSION}, with its example 88.",
        includes=_INCLUDES, functions=OWN_FUNCTIONS + _BETWEEN, body=body, operator="Pair", fits=_FITS,
    )  # fmt: skip


_FITS = """  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t extent : {call.m, call.n0, call.k0, call.n1})
    if (extent < 1 || most < extent) return false;
  for (int64_t distance : {call.lda, call.ldb0, call.ldb1})
    if (distance < 1 || most < distance || distance % 8 != 0) return false;
  return call.k0 <= Most && call.n1 <= Most && call.n1 % AlignmentOut == 0;
"""
_KERNEL = """
// One warp group's rows of D, as the example's own epilogue stores them.
struct Behind {
  using Collective = behind::Epilogue;
  using TensorStorage = typename Collective::TensorStorage;
  using PipelineStorage = typename Collective::PipelineStorage;
  using LoadPipeline = typename Collective::LoadPipeline;
  static constexpr int TmaTransactionBytes = Collective::TmaTransactionBytes;
  struct Arguments {};
  struct Params {
    typename Collective::Params collective;
    int columns;
  };

  template <class Tile, class Place, class Result, class Tiled, class Problem>
  CUTLASS_DEVICE void operator()(
      Tile const& tile, Place const& place, Result const& result, Tiled const& tiled, Problem const& problem,
      Params const& params, LoadPipeline loads, TensorStorage& storage) {
    using Stores = typename Collective::StorePipeline;
    typename Stores::Params always;
    always.always_wait = true;
    Stores stores(always);
    Collective collective(params.collective, storage);
    typename Collective::LoadPipelineState loaded;
    cutlass::PipelineState stored = cutlass::make_producer_start_state<Stores>();
    auto const extents = cute::make_shape(cute::get<2>(problem), params.columns, cute::Underscore{}, 1);
    auto [loaded_next, stored_next] = collective.store(
        loads, loaded, stores, stored, extents, tile,
        cute::make_coord(cute::get<0>(place), cute::_0{}, cute::Underscore{}, 0), cute::get<0>(result), tiled,
        int(threadIdx.x) % cutlass::NumThreadsPerWarpGroup, storage);
    collective.store_tail(loads, loaded_next, stores, stored_next);
  }
};

using Kernel = cutlass::fmha::kernel::FmhaKernelTmaWarpSpecialized<
    MainLoop, Behind, cutlass::fmha::kernel::IndividualTileScheduler>;

PairCall const& make_arguments(PairCall const& call) { return call; }

typename Plain::Arguments factors_of(PairCall const& call) {
  return {static_cast<Element const*>(call.a), {int(call.lda), cute::_1{}, {0, 0}},
          static_cast<Element const*>(call.b0), {int(call.ldb0), cute::_1{}, {0, 0}},
          static_cast<Element const*>(call.b1), {cute::_1{}, int(call.ldb1), {0, 0}}};
}

typename behind::Epilogue::Arguments stored_of(PairCall const& call) {
  return {behind::arguments_of({call.operands + @first@}), nullptr, {}, static_cast<ElementOut*>(call.d),
          {call.n1, cute::_1{}, int64_t(0)}};
}

class Pair {
 public:
  static int64_t get_workspace_size(PairCall const&) { return 0; }
  static cutlass::Status can_implement(PairCall const&) { return cutlass::Status::kSuccess; }
  static typename Kernel::Params params_of(PairCall const& call) {
    int const m = int(call.m), n0 = int(call.n0), k0 = int(call.k0), n1 = int(call.n1);
    typename Kernel::Params p{};
    p.problem_size = {1, 1, m, n0, k0};
    auto const factors = factors_of(call);
    static_cast<typename Plain::Params&>(p.mainloop) = Plain::to_underlying_arguments(p.problem_size, factors, nullptr);
    auto const second = typename Kernel::ProblemShape{1, 1, m, n0, n1};
    p.mainloop.tma_load_v = Plain::to_underlying_arguments(second, factors, nullptr).tma_load_v;
    p.mainloop.columns = n0;
@given@    p.epilogue.columns = n1;
    p.epilogue.collective =
        behind::Epilogue::to_underlying_arguments(cute::make_shape(m, n1, n0, 1), stored_of(call), nullptr);
    p.tile_scheduler = cutlass::fmha::kernel::IndividualTileScheduler::to_underlying_arguments(
        p.problem_size, cutlass::KernelHardwareInfo{}, typename Kernel::ClusterShape{}, typename Kernel::TileShape{});
    return p;
  }
  cutlass::Status initialize(PairCall const& call, void*, cudaStream_t) {
    params_ = params_of(call);
    auto const raised = cudaFuncSetAttribute(
        cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
    return raised == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
  }
  cutlass::Status run(cudaStream_t stream) { return cutlass::device::Universal<Kernel>::run(params_, stream); }

 private:
  typename Kernel::Params params_;
};
"""
