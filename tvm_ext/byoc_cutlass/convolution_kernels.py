"""C++ of our own that convolutions are made with: CUTLASS's iterators and main loops, and a visitor tree behind them.

CUTLASS 4.2 has visitor trees for 2.x matrix products and for collectives alone. What its convolution kernels are made
of (tiles, iterators, the loop) is public, though, and so is the epilogue that runs a tree: `IMPLICIT` is the kernel
that joins them, `DIRECT` the stores of the depthwise template, which apply an epilogue's function
(`epilogue_function`).
"""

from __future__ import annotations

IMPLICIT = r"""
namespace tvm_ext {

// A convolution of CUTLASS's (its tiles, main loop and iterators) with a visitor tree behind it. The slices that
// channels are split into add up their sums in order, in the workspace; the last one has the tree visit them.
template <class Plain, class Epilogue_> struct ConvolutionWithVisitor {
  using Mma = typename Plain::Mma;
  using Epilogue = Epilogue_;
  using Callbacks = typename Epilogue::FusionCallbacks;
  using Swizzle = typename Plain::ThreadblockSwizzle;
  using Tile = typename Mma::Shape;
  using Sums = typename Mma::FragmentC;
  using Problem = cutlass::conv::Conv2dProblemSize;
  static int const kThreadCount = Plain::kThreadCount;
  static bool const kGrouped = Plain::kGroupMode != cutlass::conv::GroupMode::kNone;
  static bool const kSplits = !kGrouped && (Plain::kIteratorAlgorithm == cutlass::conv::IteratorAlgorithm::kAnalytic ||
                                            Plain::kIteratorAlgorithm == cutlass::conv::IteratorAlgorithm::kOptimized);

  struct Arguments {
    Problem problem;
    typename Plain::TensorRefA a;
    typename Plain::TensorRefB b;
    typename Callbacks::Arguments epilogue;
  };

  static cutlass::gemm::GemmCoord tiles(Problem const& problem) {
    auto product = cutlass::conv::implicit_gemm_problem_size(cutlass::conv::Operator::kFprop, problem);
    return Swizzle::get_tiled_shape(product, {Tile::kM, Tile::kN, Tile::kK}, problem.split_k_slices);
  }

  // Of the counters, one for each tile of the result: the slices' sums follow them.
  static size_t counters_bytes(cutlass::gemm::GemmCoord const& grid) {
    return (size_t(grid.m()) * grid.n() * sizeof(int) + 127) / 128 * 128;
  }

  static size_t workspace_bytes(Problem const& problem) {
    if (problem.split_k_slices <= 1) return 0;
    auto grid = tiles(problem);
    return counters_bytes(grid) + size_t(grid.m()) * grid.n() * kThreadCount * sizeof(Sums);
  }

  struct Params {
    Problem problem;
    cutlass::gemm::GemmCoord grid;
    int swizzle_log_tile, steps, steps_per_channel;
    typename Mma::IteratorA::Params params_a;
    typename Mma::IteratorA::Element const* a;
    typename Mma::IteratorB::Params params_b;
    typename Mma::IteratorB::Element const* b;
    typename Callbacks::Params epilogue;
    int* counters;
    Sums* sums;

    Params() = default;

    Params(Arguments const& arguments, void* workspace)
        : problem(arguments.problem),
          grid(tiles(problem)),
          swizzle_log_tile(Swizzle().get_log_tile(grid)),
          steps(cutlass::conv::implicit_gemm_k_iterations(cutlass::conv::Operator::kFprop, Tile::kK, problem,
                                                          Plain::kIteratorAlgorithm, Plain::kGroupMode, Tile::kN)),
          steps_per_channel(cutlass::conv::implicit_gemm_k_iterations_per_channel(
              cutlass::conv::Operator::kFprop, problem, Plain::kIteratorAlgorithm)),
          params_a(Mma::IteratorA::getParams(problem, arguments.a.layout())),
          a(arguments.a.data()),
          params_b(problem, arguments.b.layout()),
          b(arguments.b.data()),
          epilogue(Callbacks::to_underlying_arguments(
              cutlass::conv::implicit_gemm_problem_size(cutlass::conv::Operator::kFprop, problem), arguments.epilogue,
              nullptr)),
          counters(static_cast<int*>(workspace)),
          sums(reinterpret_cast<Sums*>(static_cast<char*>(workspace) + counters_bytes(grid))) {}
  };

  union SharedStorage {
    typename Mma::SharedStorage main_loop;
    typename Epilogue::SharedStorage epilogue;
  };

  CUTLASS_DEVICE void operator()(Params const& params, SharedStorage& shared) {
    auto const tile = Swizzle().get_tile_offset(params.swizzle_log_tile);
    if (params.grid.m() <= tile.m() || params.grid.n() <= tile.n()) return;
    int const thread = threadIdx.x, warp = cutlass::canonical_warp_idx_sync(), lane = threadIdx.x % 32;
    Sums sums;
    sums.clear();
    {
      typename Mma::IteratorA a(params.params_a, params.problem, params.a, thread,
                                {tile.m() * Tile::kM, tile.k() * Tile::kK + first_channel(params.problem, tile.n())});
      typename Mma::IteratorB b(params.params_b, params.problem, params.b, thread,
                                {tile.k() * Tile::kK, tile.n() * Tile::kN});
      Mma multiply(shared.main_loop, thread, warp, lane);
      multiply(params.steps, sums, a, b, sums, params.steps_per_channel);
    }
    if (kSplits && params.grid.k() > 1 && !is_last_slice(params, tile, sums, thread)) return;
    Epilogue epilogue(params.epilogue, shared.epilogue, thread, warp, lane);
    auto const product =
        cutlass::conv::implicit_gemm_problem_size(cutlass::conv::Operator::kFprop, params.problem);
    epilogue(sums, {tile.m(), tile.n(), 0}, cute::make_shape(product.m(), product.n(), 1), thread);
  }

  // The first channel that a tile of filters reads: its group's.
  CUTLASS_DEVICE static int first_channel(Problem const& problem, int tile_n) {
    if (!kGrouped) return 0;
    return tile_n * Tile::kN / (problem.K / problem.groups) * (problem.C / problem.groups);
  }

  // Adds what the slices before this one have left; false where it leaves the sum to the next one.
  CUTLASS_DEVICE static bool is_last_slice(Params const& params, cutlass::gemm::GemmCoord const& tile, Sums& sums,
                                           int thread) {
    using Striped = cutlass::BlockStriped<kThreadCount, Sums, typename Sums::Element>;
    int64_t const number = tile.m() + int64_t(tile.n()) * params.grid.m();
    Sums* const left = params.sums + number * kThreadCount;
    cutlass::Semaphore turn(params.counters + number, thread);
    turn.fetch();
    turn.wait(tile.k());
    if (tile.k() > 0) Striped::load_add(sums, left, thread);
    bool const last = tile.k() + 1 == params.grid.k();
    if (!last) {
      Striped::store(left, sums, thread);
      turn.release(tile.k() + 1);
    }
    return last;
  }
};

// Launches such a convolution: the interface of CUTLASS's own device-wide operators.
template <class Plain, class Kernel> class ConvolutionLaunch {
 public:
  using Arguments = typename Kernel::Arguments;

  static cutlass::Status can_implement(Arguments const& arguments) {
    if (arguments.problem.split_k_slices > 1 && !Kernel::kSplits) return cutlass::Status::kErrorInvalidProblem;
    return cutlass::conv::device::ImplicitGemmConvolution<Plain>::can_implement(
        typename Plain::Arguments(arguments.problem));
  }

  static size_t get_workspace_size(Arguments const& arguments) { return Kernel::workspace_bytes(arguments.problem); }

  cutlass::Status initialize(Arguments const& arguments, void* workspace, cudaStream_t stream) {
    params_ = typename Kernel::Params(arguments, workspace);
    if (arguments.problem.split_k_slices > 1 &&
        cudaMemsetAsync(workspace, 0, Kernel::counters_bytes(params_.grid), stream) != cudaSuccess)
      return cutlass::Status::kErrorInternal;
    int const shared = int(sizeof(typename Kernel::SharedStorage));
    auto const largest = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (shared >= (48 << 10) && cudaFuncSetAttribute(cutlass::Kernel<Kernel>, largest, shared) != cudaSuccess)
      return cutlass::Status::kErrorInternal;
    return cutlass::Status::kSuccess;
  }

  cutlass::Status run(cudaStream_t stream) {
    dim3 const grid = typename Kernel::Swizzle().get_grid_shape(params_.grid);
    int const shared = int(sizeof(typename Kernel::SharedStorage));
    cutlass::Kernel<Kernel><<<grid, dim3(Kernel::kThreadCount), shared, stream>>>(params_);
    return cudaGetLastError() == cudaSuccess ? cutlass::Status::kSuccess : cutlass::Status::kErrorInternal;
  }

 private:
  typename Kernel::Params params_;
};

}  // namespace tvm_ext
"""

DIRECT = r"""
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
"""
