"""The CUDA source of one attention: example 41's or 88's kernel with our entry points (`kernel_text`)."""

from __future__ import annotations

from . import _cutlass
from .elements import Shape3
from .host import CallForm
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
HOPPER_HEADER = "88_hopper_fmha/kernel/fmha_kernel_builder.hpp"
_HOPPER_INCLUDES = (
    "cmath", "cstring", "cute/tensor.hpp", "cutlass/cluster_launch.hpp", "cutlass/device_kernel.h",
    "cutlass/gemm/collective/collective_builder.hpp", "88_hopper_fmha/device/device_universal.hpp",
    "88_hopper_fmha/collective/fmha_fusion.hpp", HOPPER_HEADER,
)  # fmt: skip


def emit_attention(symbol: str, template: str, *, architecture: int, tile: Shape3, wide: bool, biased: bool) -> str:
    """The source of ``symbol``; ``tile`` is queries and keys of a threadblock, and the most features.

    Of ``architecture`` 90 example 88's, which has bulk copies (``wide``) and no mask (``biased``).
    """
    queries, keys, most = tile
    if architecture >= 90:
        assert wide and not biased
        return kernel_text(
            symbol, ATTENTION_CALL, template=template,
            computes=f"D = softmax(scale Q K^T) V. Headers: CUTLASS {_cutlass.VERSION}, with its example 88.",
            includes=_HOPPER_INCLUDES, functions="", body=_HOPPER.format(queries=queries, keys=keys, most=most),
            operator="Attention", fits=_FITS_HOPPER,
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

_HOPPER = """using Element = cutlass::half_t;
constexpr int OperandCount = 0;
using Strides = cute::tuple<int, cute::_1, cute::tuple<int, int>>;  // from row to row; batch to batch, head to head
using TileShape = cute::Shape<cute::Int<{queries}>, cute::Int<{keys}>, cute::Int<{most}>>;
using Kernel = typename cutlass::fmha::kernel::FmhaBuilder<
    Element, float, float, TileShape, Strides, Strides, Strides, cutlass::fmha::collective::ResidualFusion,
    cutlass::gemm::KernelTmaWarpSpecializedCooperative>::Kernel;

struct Arguments {{
  typename Kernel::Arguments kernel;
  float scale;
}};

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
  std::memcpy(&arguments.scale, &call.scale_bits, sizeof(arguments.scale));
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
    params_.mainloop.scale_softmax = arguments.scale;
    params_.mainloop.scale_softmax_log2 = float(arguments.scale * M_LOG2E);
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
