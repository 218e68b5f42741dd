"""The CUDA source of two products in one kernel: `back_to_back`'s templates with both epilogues (`kernel_text`).

``operands`` are the first epilogue's, then the second's. Example 13's own epilogues are linear combinations; in their
place are structures that compute our expressions on a thread's elements.
"""

from __future__ import annotations

from tvm_ext.records.partition import Order

from . import _cutlass
from .back_to_back import PairConfig
from .elements import ELEMENTS, multiplier
from .epilogue import Epilogue
from .epilogue_function import APPLY, ReadOperand, epilogue_value
from .evt import OWN_FUNCTIONS
from .host import CallForm
from .kernel_text import LAYOUTS, gemm_shape, kernel_symbol, kernel_text

PAIR_CALL = CallForm(
    name="PairCall",
    packing="7q14i",
    declaration="""struct PairCall {
  int64_t m, n0, k0, n1;               // M x K0 by K0 x N0, of these M x N0 by N0 x N1
  int64_t lda, ldb0, ldb1;             // elements from row to row, or from column to column; of matrix products alone
  int32_t n, h, w, c, r, s, p, q;      // of convolutions: N x H x W x C by N0 filters of R x S into N x P x Q
  int32_t pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
  void const *a, *b0, *b1;
  void const* const* operands;
  void* d;
};
""",
)
"""What a launch is told."""

_EPILOGUE_INCLUDES = ("cutlass/epilogue/thread/activation.h", "cutlass/epilogue/thread/scale_type.h")
_PRODUCT_INCLUDES = ("device/b2b_gemm.h", *_EPILOGUE_INCLUDES)
_CONVOLUTION_INCLUDES = (
    "device/b2b_implicit_gemm_convolution.h",
    "kernel/default_b2b_conv2d_fprop_sm75.h",
    "kernel/default_b2b_conv2d_fprop_sm80.h",
    "kernel/default_b2b_conv2d_fprop_smem_accumulator_sm75.h",
    "kernel/default_b2b_conv2d_fprop_smem_accumulator_sm80.h",
    *_EPILOGUE_INCLUDES,
)


def symbol_of(template: str, first: Epilogue, second: Epilogue, layout_b: Order) -> str:
    """The name of the entry point."""
    return kernel_symbol(f"{template}_{'n' if layout_b == 'column' else 't'}", (first, second))


def emit_pair(config: PairConfig, first: Epilogue, second: Epilogue, *, layout_b: Order = "row") -> str:
    """The source of ``config`` with both epilogues; raises as `kernel_text`."""
    arithmetic = multiplier(config.first.arithmetic)
    stride = "0" if any(operand.role == "row" for operand in second.operands) else "call.n1"
    products = f"D0 = {first.expression}, {first.out_dtype}; D = {second.expression}, {second.out_dtype}."
    body = f"""using Element = {ELEMENTS[arithmetic.operand].cpp};
using ElementSum = {ELEMENTS[arithmetic.accumulator].cpp};
using ElementOut = {ELEMENTS[second.out_dtype].cpp};
using LayoutB = {LAYOUTS[layout_b]};
constexpr int AlignmentOut = {config.second.alignment_d};
constexpr int OperandCount = {len(first.operands) + len(second.operands)};
{_tiles(config)}
{_first_output(first)}
{_second_output(second)}
{_pointers(first, second)}
{_convolution(stride, config.iterator) if config.iterator else _products(stride)}"""
    return kernel_text(
        symbol_of(config.name, first, second, layout_b), PAIR_CALL, template=config.name,
        computes=f"{products}\n// Headers: CUTLASS {_cutlass.VERSION}, with its example 13.",
        includes=_CONVOLUTION_INCLUDES if config.iterator else _PRODUCT_INCLUDES, functions=OWN_FUNCTIONS, body=body,
        operator="Pair", fits=_FITS + (_FITS_WINDOW if config.iterator else _FITS_PRODUCT),
    )  # fmt: skip


_FITS = """  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  for (int64_t extent : {call.m, call.n0, call.k0, call.n1})
    if (extent < 1 || most < extent) return false;
  if (Exact ? call.n0 != ThreadblockShape0::kN : call.n0 > ThreadblockShape0::kN) return false;
  if (call.n1 > ThreadblockShape1::kN || call.n1 % AlignmentOut != 0) return false;
"""
_FITS_PRODUCT = """  return call.k0 % AlignmentA == 0 && call.lda % AlignmentA == 0 && call.ldb0 % AlignmentB == 0 &&
         call.ldb1 % AlignmentB == 0;
"""
_FITS_WINDOW = """  int32_t const extents[] = {call.n, call.h, call.w, call.c, call.r, call.s, call.p, call.q,
                             call.stride_h, call.stride_w, call.dilation_h, call.dilation_w};
  for (int32_t extent : extents)
    if (extent < 1) return false;
  return call.pad_h >= 0 && call.pad_w >= 0 && call.m == int64_t(call.n) * call.p * call.q &&
         call.k0 == int64_t(call.r) * call.s * call.c;
"""


def _tiles(config: PairConfig) -> str:
    first, second = config.first, config.second
    assert first.warp is not None
    assert first.instruction is not None
    assert second.warp is not None
    return f"""
using ThreadblockShape0 = {gemm_shape(first.threadblock)};
using ThreadblockShape1 = {gemm_shape(second.threadblock)};
using WarpShape0 = {gemm_shape(first.warp)};
using WarpShape1 = {gemm_shape(second.warp)};
using InstructionShape = {gemm_shape(first.instruction)};
using ArchTag = cutlass::arch::Sm{first.architecture};
using Operator = cutlass::arch::OpMultiplyAdd;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>;
constexpr int Stages = {first.stages};
constexpr int AlignmentA = {first.alignment_a};
constexpr int AlignmentB = {first.alignment_b};
constexpr bool InSharedMemory = {str(config.residence == "shared memory").lower()};
constexpr bool Exact = {str(config.exact).lower()};  // the first product has all columns of its tile
"""


# --- epilogues -------------------------------------------------------------------------------------------------------
_ROWS = ("bias", "scale")
"""What the template calls the rows that it hands to the first epilogue, in the order of our operands."""


def _first_output(epilogue: Epilogue) -> str:
    """Of the first product: sums and, of the same columns, elements of its rows in; elements of the second's A out."""
    row = ELEMENTS[epilogue.operands[0].dtype].cpp if epilogue.operands else "Element"
    scaled = len(epilogue.operands) == len(_ROWS)
    members = f"""  using ElementOutput = Element;
  using ElementAccumulator = ElementSum;
  using ElementCompute = {row};  // what rows are read as
  static int const kCount = InstructionShape::kM * InstructionShape::kN / 32;
  static cutlass::epilogue::thread::ScaleType::Kind const kScale =
      cutlass::epilogue::thread::ScaleType::OnlyAlpha{"PerChannel" if scaled else ""}Scaling;
  using FragmentOutput = cutlass::Array<ElementOutput, kCount>;
  using FragmentAccumulator = cutlass::Array<ElementAccumulator, kCount>;
  using FragmentScaleBias = cutlass::Array<ElementCompute, kCount>;
  using ComputeFragment = FragmentScaleBias;"""
    arguments = """
      FragmentAccumulator const& sums, FragmentScaleBias const& scale, FragmentScaleBias const& bias"""
    return _output("FirstOutput", members, arguments, epilogue, lambda number, _: f"float({_ROWS[number]}[i])")


def _second_output(epilogue: Epilogue) -> str:
    """Of the second product: sums and, at the same places, elements of its one operand in; what is stored out."""
    members = """  using ElementOutput = ElementOut;
  using ElementC = ElementOut;
  using ElementAccumulator = ElementSum;
  using ElementCompute = float;
  using ElementScalar = float;
  static int const kCount = AlignmentOut;
  static cutlass::epilogue::thread::ScaleType::Kind const kScale = cutlass::epilogue::thread::ScaleType::Default;
  using FragmentOutput = cutlass::Array<ElementOutput, kCount>;
  using FragmentSource = FragmentOutput;
  using FragmentAccumulator = cutlass::Array<ElementAccumulator, kCount>;
  using ComputeFragment = cutlass::Array<ElementCompute, kCount>;"""
    without = """  CUTLASS_HOST_DEVICE FragmentOutput operator()(FragmentAccumulator const& sums) const {
    FragmentOutput none;
    none.clear();
    return (*this)(sums, none);
  }
"""
    arguments = "FragmentAccumulator const& sums, FragmentOutput const& source"
    source = bool(epilogue.operands)
    return _output(
        "SecondOutput", members, arguments, epilogue, lambda *_: "float(source[i])", source=source, without=without
    )


def _output(
    name: str,
    members: str,
    arguments: str,
    epilogue: Epilogue,
    read: ReadOperand,
    *,
    source: bool = False,
    without: str = "",
) -> str:
    """The structure ``name``, by which a template applies ``epilogue``; ``without`` does it without a source."""
    return f"""
struct {name} {{
{APPLY}
{members}
  struct Params {{}};

  {name}() = default;
  CUTLASS_HOST_DEVICE explicit {name}(Params const&) {{}}
  CUTLASS_HOST_DEVICE bool is_source_needed() const {{ return {str(source).lower()}; }}
  CUTLASS_HOST_DEVICE void set_k_partition(int, int) {{}}
  CUTLASS_HOST_DEVICE FragmentOutput operator()({arguments}) const {{
    FragmentOutput result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {{
      float const accum = float(sums[i]);
{epilogue_value(epilogue, read, "      ")}
      result[i] = cutlass::NumericConverter<ElementOutput, float>()(value);
    }}
    return result;
  }}
{without}}};
"""


def _pointers(first: Epilogue, second: Epilogue) -> str:
    """Where everything is. The template loads a bias, whatever the expression: without one, so much of B0 as a row."""
    rows = [f"call.operands[{i}]" if i < len(first.operands) else "call.b0" for i in range(len(_ROWS))]
    source = f"call.operands[{len(first.operands)}]" if second.operands else "call.d"
    return f"""
template <class Type> Type* at(void const* address) {{ return static_cast<Type*>(const_cast<void*>(address)); }}

using Row = typename FirstOutput::ElementCompute;
Row* bias_of(PairCall const& call) {{ return at<Row>({rows[0]}); }}
Row* scale_of(PairCall const& call) {{ return at<Row>({rows[1]}); }}
ElementOut* source_of(PairCall const& call) {{ return at<ElementOut>({source}); }}
"""


# --- kernels ---------------------------------------------------------------------------------------------------------
def _products(stride: str) -> str:
    return f"""
using Device = cutlass::gemm::device::B2bGemm<
    Element, cutlass::layout::RowMajor, Element, LayoutB, ElementOut, cutlass::layout::RowMajor, ElementSum,
    cutlass::arch::OpClassTensorOp, ArchTag, ThreadblockShape0, ThreadblockShape1, WarpShape0, WarpShape1,
    InstructionShape, FirstOutput, SecondOutput, Swizzle, Stages, InSharedMemory, AlignmentA, AlignmentB, Operator>;

// Its own check asks of the rows' number what only their width has to be; `fits` asks the rest.
struct Pair : Device {{
  static cutlass::Status can_implement(typename Device::Arguments const&) {{ return cutlass::Status::kSuccess; }}
}};

typename Pair::Arguments make_arguments(PairCall const& call) {{
  int const m = int(call.m), n0 = int(call.n0), k0 = int(call.k0), n1 = int(call.n1);
  typename Pair::Arguments arguments;
  arguments.problem_size_0 = {{m, n0, k0}};
  arguments.problem_size_1 = {{m, n1, n0}};
  arguments.ref_A0 = {{at<Element>(call.a), call.lda}};
  arguments.ref_B0 = {{at<Element>(call.b0), call.ldb0}};
  arguments.ref_Scale0 = {{scale_of(call), 0}};
  arguments.ref_Bias0 = {{bias_of(call), 0}};
  arguments.ref_B1 = {{at<Element>(call.b1), call.ldb1}};
  arguments.ref_C1 = {{source_of(call), {stride}}};
  arguments.ref_D1 = {{at<ElementOut>(call.d), call.n1}};
  return arguments;
}}
"""


def _convolution(stride: str, iterator: str) -> str:
    image = "Layout::packed(second.output_extent())" if stride != "0" else "Layout(typename Layout::Stride(0))"
    return f"""
using Layout = cutlass::layout::TensorNHWC;
using Kernel = typename cutlass::conv::kernel::DefaultB2bConv2dFprop<
    Element, Layout, Element, Layout, Element /* of what lies between */, Layout, ElementSum,
    cutlass::arch::OpClassTensorOp, ArchTag, ThreadblockShape0, ThreadblockShape1, WarpShape0, WarpShape1,
    InstructionShape, FirstOutput, SecondOutput, Swizzle, Stages, Operator,
    cutlass::conv::IteratorAlgorithm::k{iterator.capitalize()}, InSharedMemory>::Kernel;
using Pair = cutlass::conv::device::B2bImplicitGemmConvolution<Kernel>;

typename Pair::Arguments make_arguments(PairCall const& call) {{
  int const n0 = int(call.n0), n1 = int(call.n1);
  auto const mode = cutlass::conv::Mode::kCrossCorrelation;
  cutlass::conv::Conv2dProblemSize const first(
      call.n, call.h, call.w, call.c, n0, call.r, call.s, call.p, call.q, call.pad_h, call.pad_w, call.stride_h,
      call.stride_w, call.dilation_h, call.dilation_w, mode, 1, 1);
  cutlass::conv::Conv2dProblemSize const second(
      call.n, call.p, call.q, n0, n1, 1, 1, call.p, call.q, 0, 0, 1, 1, 1, 1, mode, 1, 1);
  typename Pair::Arguments arguments(first, second);
  arguments.ref_A0 = {{at<Element>(call.a), Layout::packed(first.activation_extent())}};
  arguments.ref_B0 = {{at<Element>(call.b0), Layout::packed(first.filter_extent())}};
  arguments.ref_C0 = {{nullptr, Layout::packed(first.output_extent())}};
  arguments.ref_Scale0 = {{scale_of(call), 0}};
  arguments.ref_Bias0 = {{bias_of(call), 0}};
  arguments.ref_B1 = {{at<Element>(call.b1), Layout::packed(second.filter_extent())}};
  arguments.ref_C1 = {{source_of(call), {image}}};
  arguments.ref_D1 = {{at<ElementOut>(call.d), Layout::packed(second.output_extent())}};
  arguments.split_k_mode = cutlass::conv::SplitKMode::kSerial;
  return arguments;
}}
"""
