"""The CUDA source of two products in one kernel of sm_90a: example 88's with our expressions in its softmax's place.

Rows of A are its queries, rows of B0 its keys, B1 its values: D = g(f(A B0) B1). Columns of the first product pass by
in tiles, so that there may be any number of them; two warp groups multiply by wgmma what bulk copies bring, and what
lies between stays in their registers. Both expressions change sums there, and read their operands from global memory.
"""

from __future__ import annotations

from tvm_ext.records.partition import EpilogueOperand, Order

from . import _cutlass
from .elements import ELEMENTS, Shape3, multiplier
from .emit_attention import GIVEN, HOPPER_INCLUDES
from .emit_back_to_back import PAIR_CALL
from .epilogue import Epilogue
from .epilogue_function import APPLY, epilogue_value
from .evt import OWN_FUNCTIONS
from .host import once
from .kernel_text import kernel_text

_INCLUDES = (*HOPPER_INCLUDES, "cutlass/epilogue/thread/activation.h")
_BETWEEN = once(
    "BETWEEN",
    """
namespace tvm_ext {
// In place of a mask: what Function makes of each sum of the first product.
template <class Function> struct Between : cutlass::fmha::collective::DefaultFusion {};

// The distance of the rows of a B0 that lies row by row. What the example calls its keys' layout is also that of the
// factor in registers, which wgmma takes along its depth alone.
struct Across {
  using Factor = cute::tuple<cute::_1, int, cute::tuple<int, int>>;
  using InRegisters = cute::tuple<int, cute::_1, cute::tuple<int, int>>;
  int distance;
  CUTLASS_HOST_DEVICE operator Factor() const { return {cute::_1{}, distance, {0, 0}}; }
  CUTLASS_HOST_DEVICE operator InRegisters() const { return {distance, cute::_1{}, {0, 0}}; }
};
}  // namespace tvm_ext

namespace cutlass::detail {
template <> struct TagToStrideA<tvm_ext::Across> { using type = tvm_ext::Across::InRegisters; };
template <> struct TagToStrideB<tvm_ext::Across> { using type = tvm_ext::Across::Factor; };
}  // namespace cutlass::detail

namespace cutlass::fmha::collective {
// In place of the softmax, which asks for the largest and the sum of a row: nothing is kept from tile to tile.
template <class Sum, class Function, class Params> struct CollectiveSoftmax<Sum, tvm_ext::Between<Function>, Params> {
  Params const& params;
  CUTLASS_DEVICE CollectiveSoftmax(Params const& params) : params(params) {}

  template <class Sums, class Tiled> CUTLASS_DEVICE int init(Sums const&, Tiled const&) { return 0; }
  template <class Sums, class Tiled, class Places, class Problem>
  CUTLASS_DEVICE void step(Sums& sums, Tiled const&, Places const& places, int&, Problem const&) {
    change(sums, places);
  }
  template <bool Masked = true, class Sums, class Tiled, class Places, class Behind, class Second, class Problem>
  CUTLASS_DEVICE void step(
      Sums& sums, Tiled const&, Places const& places, int&, Behind&, Second const&, Problem const&) {
    change(sums, places);
  }
  template <class Sums, class Tiled> CUTLASS_DEVICE auto tail(int&, Sums&, Tiled const&) {
    return make_tensor<float>(Int<1>{});
  }

 private:
  template <class Sums, class Places> CUTLASS_DEVICE void change(Sums& sums, Places const& places) {
    using With = tvm_ext::ParamsWith<std::decay_t<Params>, typename Function::Given>;
    Function::change(static_cast<With const&>(params).given, sums, places);
  }
};
}  // namespace cutlass::fmha::collective
""",
)
_BEGIN = {
    "row": " + begin.column", "matrix": " + begin.row * given.columns + begin.column", "column": " + begin.row",
    "scalar": "",
}  # fmt: skip
"""By its role, where an operand begins for a thread."""
_READ = {
    "row": "tvm_ext::pair_of_columns(from_{n} + columns, inside)",
    "matrix": "tvm_ext::pair_of_columns(from_{n} + int64_t(rows) * given.columns + columns, inside)",
    "column": "inside ? float(from_{n}[rows]) : 0.f",
    "scalar": "float(*from_{n})",
}  # fmt: skip
"""And the operand at a pair of columns, or what both have in common."""


def emit_streamed_pair(
    symbol: str, template: str, tile: Shape3, first: Epilogue, second: Epilogue, dtype: str, layout_b: Order
) -> str:
    """The source of ``symbol``; ``tile``: rows of a threadblock, columns of a step, the most of A and of D.

    Second factors lie along their depth (``layout_b`` "column") or row by row. Raises as `kernel_text`.
    """
    rows, columns, most = tile
    out = ELEMENTS[second.out_dtype]
    keys, values = ("Along", "Across") if layout_b == "column" else ("tvm_ext::Across", "Along")
    ldb0, ldb1 = (
        ("{int(call.ldb0), cute::_1{}, {0, 0}}", "{cute::_1{}, int(call.ldb1), {0, 0}}")
        if layout_b == "column"
        else ("{int(call.ldb0)}", "{int(call.ldb1), cute::_1{}, {0, 0}}")
    )
    body = f"""using Element = {ELEMENTS[multiplier(dtype).operand].cpp};
using ElementOut = {out.cpp};
constexpr int AlignmentOut = {128 // out.bits};
constexpr int OperandCount = {len(first.operands) + len(second.operands)};
constexpr int Most = {most};
using Along = cute::tuple<int, cute::_1, cute::tuple<int, int>>;
using Across = cute::tuple<cute::_1, int, cute::tuple<int, int>>;

{_function("First", first, 0)}
{_function("Second", second, len(first.operands))}
using Plain = cutlass::fmha::collective::FmhaMainloopTmaWarpSpecialized<
    Element, float, float, cute::Shape<cute::Int<{rows}>, cute::Int<{columns}>, cute::Int<{most}>>, Along, {keys},
    {values}, tvm_ext::Between<First>>;
{_KERNEL.replace("@ldb0@", ldb0).replace("@ldb1@", ldb1)}"""
    products = f"D0 = {first.expression}, {first.out_dtype}; D = {second.expression}, {second.out_dtype}."
    return kernel_text(
        symbol, PAIR_CALL, template=template,
        computes=f"{products}\n// Headers: CUTLASS {_cutlass.VERSION}, with its example 88.",
        includes=_INCLUDES, functions=OWN_FUNCTIONS + GIVEN + _BETWEEN, body=body, operator="Pair",
        fits=_FITS,
    )  # fmt: skip


def _function(name: str, epilogue: Epilogue, before: int) -> str:
    """A structure that changes sums in registers; its operands come behind so many ``before`` them."""
    types = [ELEMENTS[operand.dtype].cpp for operand in epilogue.operands]
    members = "".join(f"    {cpp} const* operand_{n};\n" for n, cpp in enumerate(types))
    given = "".join(f", static_cast<{cpp} const*>(call.operands[{before + n}])" for n, cpp in enumerate(types))
    roles = [operand.role for operand in epilogue.operands]
    begin = "".join(f"    auto const* from_{n} = given.operand_{n}{_BEGIN[role]};\n" for n, role in enumerate(roles))
    read = "".join(f"      auto const read_{n} = {_READ[role].format(n=n)};\n" for n, role in enumerate(roles))
    inside = "int(begin.column) + columns < given.columns"
    if {"column", "matrix"} & set(roles):
        inside += " && int(begin.row) + rows < given.rows"

    def element(number: int, operand: EpilogueOperand) -> str:
        return f"read_{number}{'[j]' if operand.role in ('row', 'matrix') else ''}"

    return f"""struct {name} {{
{APPLY}
  struct Given {{
    int rows, columns;
{members}  }};
  static Given given_by(PairCall const& call, int64_t columns) {{
    return {{int(call.m), int(columns){given}}};
  }}

  // A thread's sums lie in pairs of neighbouring columns. Beyond the matrix's columns they become zeros.
  template <class Sums, class Places>
  CUTLASS_HOST_DEVICE static void change(Given const& given, Sums& sums, Places const& places) {{
    tvm_ext::Begin const begin(places);
{begin}    tvm_ext::each_pair(places, [&](int i, int rows, int columns) {{
      bool const inside = {inside};
{read}      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2; ++j) {{
        float const accum = sums(i + j);
{epilogue_value(epilogue, element, "        ")}
        sums(i + j) = inside ? value : 0.f;
      }}
    }});
  }}
}};
"""


_FITS = """  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t extent : {call.m, call.n0, call.k0, call.n1})
    if (extent < 1 || most < extent) return false;
  for (int64_t distance : {call.lda, call.ldb0, call.ldb1})
    if (distance < 1 || most < distance || distance % 8 != 0) return false;
  return call.k0 <= Most && call.n1 <= Most && call.n0 % 8 == 0 && call.n1 % AlignmentOut == 0;
"""
_KERNEL = """using MainLoop = tvm_ext::MainLoopWith<Plain, First::Given>;

// One warp group's rows of D, as the example's own epilogue stores them.
struct Behind {
  using Example = cutlass::fmha::collective::FmhaFwdEpilogue<ElementOut, float, typename MainLoop::TileShapePV>;
  using Collective = typename Example::CollectiveEpilogueTMA;
  using TensorStorage = typename Collective::TensorStorage;
  using PipelineStorage = typename Collective::PipelineStorage;
  using LoadPipeline = typename Collective::LoadPipeline;
  static constexpr int TmaTransactionBytes = Collective::TmaTransactionBytes;
  struct Arguments {};
  struct Params {
    typename Collective::Params collective;
    Second::Given given;
  };

  template <class Tile, class Place, class Result, class Tiled, class Problem>
  CUTLASS_DEVICE void operator()(
      Tile const& tile, Place const& place, Result const& result, Tiled const& tiled, Problem const&,
      Params const& params, LoadPipeline loads, TensorStorage& storage) {
    int const thread = int(threadIdx.x) % cutlass::NumThreadsPerWarpGroup;
    auto sums = cute::get<0>(result);
    auto places = tiled.get_thread_slice(thread).partition_C(cute::make_identity_tensor(cute::take<0, 2>(tile)));
    places.data() = places.data() + cute::E<0>{} * (int(cute::get<0>(place)) * cute::get<0>(tile));
    Second::change(params.given, sums, places);
    using Stores = typename Collective::StorePipeline;
    typename Stores::Params always;
    always.always_wait = true;
    Stores stores(always);
    Collective collective(params.collective, storage);
    typename Collective::LoadPipelineState loaded;
    cutlass::PipelineState stored = cutlass::make_producer_start_state<Stores>();
    auto const extents =
        cute::make_shape(params.given.rows, params.given.columns, cute::Underscore{}, cute::make_shape(1, 1));
    auto const at = cute::make_coord(cute::get<0>(place), cute::_0{}, cute::Underscore{}, cute::get<2>(place));
    auto [loaded_next, stored_next] =
        collective.store(loads, loaded, stores, stored, extents, tile, at, sums, tiled, thread, storage);
    collective.store_tail(loads, loaded_next, stores, stored_next);
  }
};

using Kernel = cutlass::fmha::kernel::FmhaKernelTmaWarpSpecialized<
    MainLoop, Behind, cutlass::fmha::kernel::IndividualTileScheduler>;

PairCall const& make_arguments(PairCall const& call) { return call; }

typename Plain::Arguments factors_of(PairCall const& call) {
  return {static_cast<Element const*>(call.a), {int(call.lda), cute::_1{}, {0, 0}},
          static_cast<Element const*>(call.b0), @ldb0@,
          static_cast<Element const*>(call.b1), @ldb1@};
}

typename Behind::Collective::Arguments stored_of(PairCall const& call) {
  return {{}, nullptr, {}, static_cast<ElementOut*>(call.d), {int(call.n1), cute::_1{}, {0, 0}}};
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
    p.mainloop = MainLoop::to_underlying_arguments(p.problem_size, factors, nullptr);
    auto const second = typename Kernel::ProblemShape{1, 1, m, n0, n1};
    p.mainloop.tma_load_v = Plain::to_underlying_arguments(second, factors, nullptr).tma_load_v;
    p.mainloop.given = First::given_by(call, call.n0);
    p.epilogue.given = Second::given_by(call, call.n1);
    p.epilogue.collective = Behind::Collective::to_underlying_arguments(
        cute::make_shape(m, n1, 1, cute::make_shape(1, 1)), stored_of(call), nullptr);
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
