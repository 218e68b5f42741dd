namespace tvm_ext {

// Stores the sums of a depthwise tile as an epilogue's function makes them. In place of CUTLASS's own iterator over the
// result, whose elements it has as sums: that of a pixel and a channel is known here alone.
template <class Plain, class ThreadMap_, class Tile, class Function> struct ApplyingTileIterator {
  using ThreadMap = ThreadMap_;
  using Element = typename Function::Sum;
  using Layout = cutlass::layout::RowMajor;
  using TensorRef = cutlass::TensorRef<Element, Layout>;
  using ConstTensorRef = typename TensorRef::ConstTensorRef;
  static int const kElementsPerAccess = ThreadMap::kElementsPerAccess;
  using Fragment = cutlass::Array<Element, ThreadMap::Iterations::kCount * kElementsPerAccess>;
  using Output = cutlass::AlignedArray<typename Function::Output, kElementsPerAccess>;

  struct Params : cutlass::epilogue::threadblock::PredicatedTileIteratorDirect2dConvParams {
    using Base = cutlass::epilogue::threadblock::PredicatedTileIteratorDirect2dConvParams;
    Function function;
    CUTLASS_HOST_DEVICE Params() {}
    CUTLASS_HOST_DEVICE Params(Layout const& layout, cutlass::conv::Conv2dProblemSize const& problem)
        : Base(layout.stride(0), problem, {Tile::kH, Tile::kW}) {}
  };

  Params const& params;
  int columns, first_row, first_column, tile, n, p, q;

  CUTLASS_DEVICE ApplyingTileIterator(Params const& params, Element*, cutlass::MatrixCoord extent, int thread,
                                      cutlass::MatrixCoord offset)
      : params(params), columns(extent.column()), tile(offset.row()) {
    auto const start = ThreadMap::initial_offset(thread);
    first_row = start.strided();
    first_column = offset.column() + start.contiguous();
    set_tile_index(0);
  }

  CUTLASS_DEVICE void set_tile_index(int index) {
    int residual;
    params.pq_divmod(n, residual, tile + index);
    params.q_divmod(p, q, residual);
    p *= Tile::kH;
    q *= Tile::kW;
  }

  CUTLASS_DEVICE void load(Fragment&) const {}

  CUTLASS_DEVICE void store(Fragment const& sums) const {
    CUTLASS_PRAGMA_UNROLL
    for (int s = 0; s < ThreadMap::Iterations::kStrided; ++s) {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < ThreadMap::Iterations::kContiguous; ++c) {
        int const row = first_row + s * ThreadMap::Delta::kStrided;
        int const column = first_column + c * ThreadMap::Delta::kContiguous;
        int const at_p = p + row / Tile::kW, at_q = q + row % Tile::kW;
        if (n >= params.N || at_p >= params.P || at_q >= params.Q || row >= ThreadMap::Shape::kStrided ||
            column >= columns)
          continue;
        int64_t const pixel = (int64_t(n) * params.P + at_p) * params.Q + at_q;
        Output result;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kElementsPerAccess; ++i) {
          Element const sum = sums[(s * ThreadMap::Iterations::kContiguous + c) * kElementsPerAccess + i];
          result[i] = params.function(sum, pixel, column + i, columns);
        }
        *reinterpret_cast<Output*>(params.function.d + pixel * columns + column) = result;
      }
    }
  }
};

// What CUTLASS's epilogue does to sums before they are stored: nothing.
template <class Element, int Count> struct UnchangedSums {
  using ElementOutput = Element;
  using ElementAccumulator = Element;
  using ElementCompute = Element;
  static int const kCount = Count;
  struct Params {};
  using Values = cutlass::Array<Element, Count>;
  CUTLASS_HOST_DEVICE UnchangedSums(Params const&) {}
  CUTLASS_HOST_DEVICE bool is_source_needed() const { return false; }
  CUTLASS_HOST_DEVICE Values operator()(Values const& values) const { return values; }
  CUTLASS_HOST_DEVICE Values operator()(Values const& values, Values const&) const { return values; }
};

// CUTLASS's depthwise kernel, `Default`, with that iterator in place of its own.
template <class Default, class Tile, class Swizzle, cutlass::conv::IteratorAlgorithm Algorithm, class Function>
struct DepthwiseWithFunction {
  using OldMma = typename Default::Mma;
  using Old = typename Default::Epilogue;
  using Stores = ApplyingTileIterator<Old, typename Old::OutputTileIterator::ThreadMap, Tile, Function>;
  using Epilogue = cutlass::epilogue::threadblock::EpilogueDepthwise<
      typename Old::Shape, typename Old::ThreadOutputShape, Tile, typename Old::WarpMmaOperator, Stores,
      typename Old::AccumulatorFragmentIterator, typename Old::WarpTileIterator, typename Old::SharedLoadIterator,
      typename Old::OutputOp, typename Old::Padding>;
  using Mma = cutlass::conv::threadblock::DepthwiseFpropDirectConvMultipleStage<
      typename OldMma::Shape, typename Default::IteratorA, typename Default::SmemIteratorA, Default::CacheOpA,
      typename Default::IteratorB, typename Default::SmemIteratorB, Default::CacheOpB, typename Default::MmaPolicy,
      OldMma::Detail::kStages, Epilogue, Algorithm>;
  using Kernel = cutlass::conv::kernel::DirectConvolution<
      Mma, Epilogue, Swizzle, cutlass::conv::Operator::kFprop, cutlass::conv::Conv2dProblemSize,
      cutlass::conv::GroupMode::kDepthwise, Tile>;
};

// Launches it, behind the kernel that puts the filters' channels beside one another, in the workspace.
template <class Kernel, class Plain, class Function> class DepthwiseLaunch {
 public:
  struct Arguments {
    cutlass::conv::Conv2dProblemSize problem;
    typename Kernel::ElementA const* a;
    typename Kernel::ElementB const* b;
    Function function;
  };

  static cutlass::Status can_implement(Arguments const& arguments) {
    auto const& problem = arguments.problem;
    if (problem.K != problem.groups || problem.C != problem.groups)
      return cutlass::Status::kErrorInvalidProblem;
    auto const size = int64_t(1) << 31;
    if (problem.activation_size() * int64_t(sizeof(typename Kernel::ElementA)) >= size ||
        problem.output_size() * int64_t(sizeof(typename Function::Output)) >= size)
      return cutlass::Status::kErrorInvalidProblem;
    return cutlass::conv::device::DirectConvolution<Plain>::can_implement(typename Plain::Arguments(problem));
  }

  static size_t get_workspace_size(Arguments const& arguments) {
    return size_t(arguments.problem.filter_size()) * sizeof(typename Kernel::ElementB);
  }

  cutlass::Status initialize(Arguments const& arguments, void* workspace, cudaStream_t) {
    using Packed = cutlass::layout::TensorNHWC;
    auto const& problem = arguments.problem;
    typename Kernel::Arguments plain(problem);
    plain.ref_A = {const_cast<typename Kernel::ElementA*>(arguments.a), Packed::packed(problem.activation_extent())};
    plain.ref_B = {const_cast<typename Kernel::ElementB*>(arguments.b), Packed::packed(problem.filter_extent())};
    plain.ref_reordered_B = {static_cast<typename Kernel::ElementB*>(workspace), plain.ref_B.layout()};
    plain.ref_C = {nullptr, Packed::packed(problem.output_extent())};
    plain.ref_D = plain.ref_C;
    params_ = typename Kernel::Params(plain);
    params_.iterator_D.function = arguments.function;
    int const shared = params_.get_smem_size();
    return cudaFuncSetAttribute(cutlass::Kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) ==
                   cudaSuccess
               ? cutlass::Status::kSuccess
               : cutlass::Status::kErrorInternal;
  }

  cutlass::Status run(cudaStream_t stream) {
    using Reorder = typename Kernel::ReorderKernel;
    cutlass::Kernel<Reorder><<<Reorder::get_grid_shape(params_), Reorder::get_block_shape(), 0, stream>>>(params_);
    dim3 const grid = typename Kernel::ThreadblockSwizzle().get_grid_shape(params_.grid_tiled_shape);
    cutlass::Kernel<Kernel><<<grid, dim3(Kernel::kThreadCount), params_.get_smem_size(), stream>>>(params_);
    return cudaGetLastError() == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
  }

 private:
  typename Kernel::Params params_;
};

}  // namespace tvm_ext

// Products of halves are exact in float, and so the sums of depthwise convolutions are those of float.
template <> struct cutlass::conv::thread::ElementwiseInnerProduct<
    cutlass::gemm::GemmShape<2, 2, 1>, 1, cutlass::half_t, cutlass::half_t, float, cutlass::arch::OpMultiplyAdd> {
  using Shape = cutlass::gemm::GemmShape<2, 2, 1>;
  using Operator = cutlass::arch::OpMultiplyAdd;
  using ElementC = float;
  CUTLASS_HOST_DEVICE void operator()(cutlass::Array<float, 2>& d, cutlass::Array<cutlass::half_t, 2> const& a,
                                      cutlass::Array<cutlass::half_t, 2> const& b,
                                      cutlass::Array<float, 2> const& c) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) { d[i] = fmaf(float(a[i]), float(b[i]), c[i]); }
  }
};
