"""The CUDA source of one attention: example 41's or 88's kernel with our entry points (`kernel_text`)."""

from __future__ import annotations

from . import _cutlass
from .elements import Shape3
from .host import CallForm, once
from .kernel_text import kernel_text

ATTENTION_CALL = CallForm(
    name="AttentionCall",
    packing="16q8i",
    declaration="""struct AttentionCall {
  int64_t q_offset, q_row, q_head, q_batch;  // elements: where it begins, from row to row, head to head, batch to batch
  int64_t k_offset, k_row, k_head, k_batch;
  int64_t v_offset, v_row, v_head, v_batch;
  int64_t bias_offset, bias_row, bias_head, bias_batch;
  int32_t batches, heads, queries, keys, features, value_features;
  int32_t out_row, scale_bits;  // a float32's
  void const *q, *k, *v;
  void const* const* operands;
  void* d;
};
""",
)
"""What a launch is told."""

HEADER = "41_fused_multi_head_attention/kernel_forward.h"
HOPPER_INCLUDES = (
    "cmath", "cstring", "cute/tensor.hpp", "cutlass/cluster_launch.hpp", "cutlass/device_kernel.h",
    "cutlass/gemm/collective/collective_builder.hpp", "88_hopper_fmha/device/device_universal.hpp",
    "88_hopper_fmha/collective/fmha_fusion.hpp", "88_hopper_fmha/kernel/fmha_kernel_builder.hpp",
)  # fmt: skip
GIVEN = once(
    "GIVEN",
    """
namespace tvm_ext {
// Parameters of the example's main loop with what a function of ours reads behind them.
template <class Params, class Given> struct ParamsWith : Params {
  Given given;
};

template <class Plain, class Given> struct MainLoopWith : Plain {
  using Params = ParamsWith<typename Plain::Params, Given>;
  template <class Problem, class Arguments>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments, void* workspace) {
    return {Plain::to_underlying_arguments(problem, arguments, workspace), {}};
  }
};

// Where a thread's first sum lies. The compiler is not to know more: from bits that are zero it would conclude that
// each further address needs registers of its own.
struct Begin {
  int64_t row, column;
  template <class Places>
  CUTLASS_HOST_DEVICE explicit Begin(Places const& places)
      : row(cute::get<0>(places(0))), column(cute::get<1>(places(0))) {
#if defined(__CUDA_ARCH__)
    asm("" : "+l"(row), "+l"(column));
#endif
  }
};

// Calls ``visit`` with every second of a thread's sums, and how many rows and columns behind the first it lies.
template <class Places, class Visit> CUTLASS_HOST_DEVICE void each_pair(Places const& places, Visit const& visit) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < int(cute::size(places)); i += 2) {
    auto const behind = places.layout()(i);
    visit(i, int(cute::get<0>(behind)), int(cute::get<1>(behind)));
  }
}

// Two neighbouring columns, the first of them even; zeros outside.
template <class Element>
CUTLASS_HOST_DEVICE cutlass::AlignedArray<Element, 2> pair_of_columns(Element const* from, bool inside) {
  cutlass::AlignedArray<Element, 2> pair;
  pair.clear();
  if (inside) pair = *reinterpret_cast<cutlass::AlignedArray<Element, 2> const*>(from);
  return pair;
}
}  // namespace tvm_ext
""",
)
"""How example 88's warp groups read for the sums in their registers, where those of two columns lie together."""
_MASKED = once(
    "MASKED",
    """
namespace tvm_ext {
// Scales scores and adds a tensor to them.
struct Masked : cutlass::fmha::collective::ResidualFusion {
  struct Given {
    cutlass::half_t const* mask;
    int64_t row, head, batch;  // elements from one to the next
    int queries, keys;
    float scale;
  };

  template <class Scores, class Places>
  CUTLASS_HOST_DEVICE static void change(
      Given const& given, int64_t batch, int64_t head, Scores& scores, Places const& places) {
    Begin const begin(places);
    auto const* mask =
        given.mask + batch * given.batch + head * given.head + begin.row * given.row + begin.column;
    each_pair(places, [&](int i, int rows, int columns) {
      bool const inside = int(begin.row) + rows < given.queries && int(begin.column) + columns < given.keys;
      auto const added = pair_of_columns(mask + rows * given.row + columns, inside);
      scores(i) = scores(i) * given.scale + float(added[0]);
      scores(i + 1) = scores(i + 1) * given.scale + float(added[1]);
    });
  }
};
}  // namespace tvm_ext

namespace cutlass::fmha::collective {
// The softmax of scores that are changed before; a block has one batch and head (IndividualTileScheduler).
template <class Sum, class Params>
struct CollectiveSoftmax<Sum, tvm_ext::Masked, Params> : CollectiveSoftmax<Sum, ResidualFusion, Params> {
  using Base = CollectiveSoftmax<Sum, ResidualFusion, Params>;
  using Base::Base;

  template <class Scores, class Tiled, class Places, class State, class Problem>
  CUTLASS_DEVICE void step(
      Scores& scores, Tiled const& tiled, Places const& places, State& state, Problem const& problem) {
    change(scores, places);
    Base::step(scores, tiled, places, state, problem);
  }
  template <bool Last = true, class Scores, class Tiled, class Places, class State, class Sums, class Second,
            class Problem>
  CUTLASS_DEVICE void step(
      Scores& scores, Tiled const& tiled, Places const& places, State& state, Sums& sums, Second const& second,
      Problem const& problem) {
    change(scores, places);
    Base::template step<Last>(scores, tiled, places, state, sums, second, problem);
  }

 private:
  template <class Scores, class Places> CUTLASS_DEVICE void change(Scores& scores, Places const& places) {
    using With = tvm_ext::ParamsWith<std::decay_t<Params>, tvm_ext::Masked::Given>;
    auto const& given = static_cast<With const&>(this->params).given;
    tvm_ext::Masked::change(given, blockIdx.y, blockIdx.z, scores, places);
  }
};
}  // namespace cutlass::fmha::collective
""",
)
HOPPER_TILES = ((128, 64, 32), (128, 64, 64), (128, 128, 128), (128, 64, 256))
"""Queries, keys and the most features: what example 88 compiles of its cooperative kernel; zeros fill features up."""


def emit_attention(symbol: str, template: str, *, architecture: int, tile: Shape3, wide: bool, biased: bool) -> str:
    """The source of ``symbol``; ``tile`` is queries and keys of a threadblock, and the most features.

    Of ``architecture`` 90 example 88's, which has bulk copies (``wide``); its mask (``biased``) is ours.
    """
    queries, keys, most = tile
    if architecture >= 90:
        assert wide
        places = {"queries": queries, "keys": keys, "most": most, "count": int(biased)}
        body = _HOPPER.format(**places, **(_WITH_MASK if biased else _WITHOUT_MASK))
        mask, functions = (" + mask", GIVEN + _MASKED) if biased else ("", "")
        return kernel_text(
            symbol, ATTENTION_CALL, template=template,
            computes=f"D = softmax(scale Q K^T{mask}) V. Headers: CUTLASS {_cutlass.VERSION}, with its example 88.",
            includes=HOPPER_INCLUDES, functions=functions, body=body, operator="Attention",
            fits=_FITS_HOPPER,
        )  # fmt: skip
    body = f"""using Element = cutlass::half_t;
constexpr int OperandCount = {int(biased)};
constexpr bool Wide = {str(wide).lower()}, Biased = {str(biased).lower()};
using Kernel = AttentionKernel<
    Element, cutlass::arch::Sm{architecture}, Wide, {queries}, {keys}, {most}, false, Biased>;
{_OPERATOR}"""
    return kernel_text(
        symbol, ATTENTION_CALL, template=template,
        computes=f"D = softmax(scale Q K^T + mask) V. Headers: CUTLASS {_cutlass.VERSION}, with its example 41.",
        includes=("cstring", HEADER), functions="", body=body, operator="Attention", fits=_FITS,
    )  # fmt: skip


_FITS = """  int32_t const extents[] = {call.batches, call.heads,    call.queries,
                             call.keys,    call.features, call.value_features};
  for (int32_t extent : extents)
    if (extent < 1) return false;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t distance : {call.q_row, call.k_row, call.v_row, call.bias_row, call.q_head, call.k_head, call.v_head})
    if (distance < 0 || most < distance) return false;
  return call.features <= Kernel::kMaxK && call.value_features <= Kernel::kMaxK;
"""
_FITS_HOPPER = """\
  int32_t const extents[] = {call.batches, call.heads, call.queries, call.keys, call.features, call.out_row};
  for (int32_t extent : extents)
    if (extent < 1) return false;
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t distance : {call.q_row, call.k_row, call.v_row, call.q_head, call.k_head, call.v_head, call.q_batch,
                           call.k_batch, call.v_batch, int64_t(call.queries) * call.out_row,
                           int64_t(call.batches) * call.heads * call.queries})
    if (distance < 0 || most < distance) return false;
  return call.features == call.value_features;
"""

_OPERATOR = """
typename Kernel::Params make_arguments(AttentionCall const& call) {
  typename Kernel::Params p;
  auto at = [](void const* base, int64_t offset) {
    return base == nullptr ? nullptr : const_cast<Element*>(static_cast<Element const*>(base) + offset);
  };
  p.query_ptr = at(call.q, call.q_offset);
  p.key_ptr = at(call.k, call.k_offset);
  p.value_ptr = at(call.v, call.v_offset);
  if (OperandCount > 0) p.attn_bias_ptr = at(call.operands[0], call.bias_offset);
  p.output_ptr = static_cast<Element*>(call.d);
  std::memcpy(&p.scale, &call.scale_bits, sizeof(p.scale));
  p.head_dim = call.features;
  p.head_dim_value = call.value_features;
  p.num_queries = call.queries;
  p.num_keys = call.keys;
  p.num_heads = call.heads;
  p.num_batches = call.batches;
  p.q_strideM = int32_t(call.q_row);
  p.k_strideM = int32_t(call.k_row);
  p.v_strideM = int32_t(call.v_row);
  p.bias_strideM = int32_t(call.bias_row);
  p.o_strideM = call.out_row;
  p.q_strideH = int32_t(call.q_head);
  p.k_strideH = int32_t(call.k_head);
  p.v_strideH = int32_t(call.v_head);
  p.bias_strideH = call.bias_head;
  p.q_strideB = call.q_batch;
  p.k_strideB = call.k_batch;
  p.v_strideB = call.v_batch;
  p.bias_strideB = call.bias_batch;
  return p;
}

class Attention {
 public:
  static int64_t get_workspace_size(typename Kernel::Params const& p) {
    if (!Kernel::kNeedsOutputAccumulatorBuffer) return 0;
    return int64_t(p.num_batches) * p.num_queries * p.num_heads * p.head_dim_value * int64_t(sizeof(float));
  }
  static cutlass::Status can_implement(typename Kernel::Params const& p) {
    return Kernel::check_supported(p) ? cutlass::Status::kSuccess : cutlass::Status::kErrorMisalignedOperand;
  }
  cutlass::Status initialize(typename Kernel::Params const& p, void* workspace, cudaStream_t) {
    params_ = p;
    if (Kernel::kNeedsOutputAccumulatorBuffer) params_.output_accum_ptr = static_cast<float*>(workspace);
    if (Bytes <= 48 * 1024) return cutlass::Status::kSuccess;
    auto const raised = cudaFuncSetAttribute(
        attention_kernel_batched_impl<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Bytes);
    return raised == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
  }
  cutlass::Status run(cudaStream_t stream) {
    attention_kernel_batched_impl<Kernel>
        <<<params_.getBlocksGrid(), params_.getThreadsGrid(), Bytes, stream>>>(params_);
    return cudaGetLastError() == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
  }

 private:
  static constexpr int Bytes = sizeof(typename Kernel::SharedStorage);
  typename Kernel::Params params_;
};
"""

_WITHOUT_MASK = {
    "kernel": """using Kernel = typename cutlass::fmha::kernel::FmhaBuilder<
    Element, float, float, TileShape, Strides, Strides, Strides, cutlass::fmha::collective::ResidualFusion,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::Kernel;""",
    "member": "",
    "given": "",
    "told": """    params_.mainloop.scale_softmax = arguments.scale;
    params_.mainloop.scale_softmax_log2 = float(arguments.scale * M_LOG2E);""",
}
_WITH_MASK = {
    "kernel": """using MainLoop = tvm_ext::MainLoopWith<
    cutlass::fmha::collective::FmhaMainloopTmaWarpSpecialized<
        Element, float, float, TileShape, Strides, Strides, Strides, tvm_ext::Masked>,
    tvm_ext::Masked::Given>;
using Kernel = cutlass::fmha::kernel::FmhaKernelTmaWarpSpecialized<
    MainLoop, cutlass::fmha::collective::FmhaFwdEpilogue<Element, float, typename MainLoop::TileShapePV>,
    cutlass::fmha::kernel::IndividualTileScheduler>;""",
    "member": "  tvm_ext::Masked::Given mask;\n",
    "given": """
  arguments.mask = {at(call.operands[0], call.bias_offset), call.bias_row, call.bias_head, call.bias_batch,
                    queries, call.keys, arguments.scale};""",
    "told": """    params_.mainloop.given = arguments.mask;
    params_.mainloop.scale_softmax = 1.f;
    params_.mainloop.scale_softmax_log2 = float(M_LOG2E);""",
}
_HOPPER = """using Element = cutlass::half_t;
constexpr int OperandCount = {count};
using Strides = cute::tuple<int, cute::_1, cute::tuple<int, int>>;  // from row to row; batch to batch, head to head
using TileShape = cute::Shape<cute::Int<{queries}>, cute::Int<{keys}>, cute::Int<{most}>>;
{kernel}

struct Arguments {{
  typename Kernel::Arguments kernel;
  float scale;
{member}}};

Arguments make_arguments(AttentionCall const& call) {{
  auto at = [](void const* base, int64_t offset) {{
    return base == nullptr ? nullptr : static_cast<Element const*>(base) + offset;
  }};
  auto strides = [](int64_t row, int64_t head, int64_t batch) {{
    return Strides{{int(row), cute::_1{{}}, {{int(batch), int(head)}}}};
  }};
  int const queries = call.queries, heads = call.heads;
  Arguments arguments{{
      {{{{call.batches, heads, queries, call.keys, call.features}},
        {{at(call.q, call.q_offset), strides(call.q_row, call.q_head, call.q_batch),
          at(call.k, call.k_offset), strides(call.k_row, call.k_head, call.k_batch),
          at(call.v, call.v_offset), strides(call.v_row, call.v_head, call.v_batch)}},
        {{static_cast<Element*>(call.d),
          strides(call.out_row, heads > 1 ? call.features : 0, int64_t(queries) * call.out_row),
          nullptr, {{cute::_1{{}}, {{heads * queries, queries}}}}}},
        {{}}}},
      0.f}};
  std::memcpy(&arguments.scale, &call.scale_bits, sizeof(arguments.scale));{given}
  return arguments;
}}

// The template's own launch, with a scale of the caller's; logarithms of the sums go to the workspace.
class Attention {{
 public:
  static int64_t get_workspace_size(Arguments const& arguments) {{
    auto const& extents = arguments.kernel.problem_size;
    return int64_t(cute::get<0>(extents)) * cute::get<1>(extents) * cute::get<2>(extents) * int64_t(sizeof(float));
  }}
  static cutlass::Status can_implement(Arguments const& arguments) {{
    return Universal::can_implement(arguments.kernel);
  }}
  cutlass::Status initialize(Arguments const& arguments, void* workspace, cudaStream_t) {{
    auto given = arguments.kernel;
    given.epilogue.ptr_LSE = static_cast<float*>(workspace);
    params_ = Kernel::to_underlying_arguments(given, nullptr);
{told}
    auto const raised = cudaFuncSetAttribute(
        cutlass::device_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
    return raised == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
  }}
  cutlass::Status run(cudaStream_t stream) {{ return Universal::run(params_, stream); }}

 private:
  using Universal = cutlass::device::Universal<Kernel>;
  typename Kernel::Params params_;
}};
"""
