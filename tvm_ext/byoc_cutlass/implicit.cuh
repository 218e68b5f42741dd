namespace tvm_ext {

// A convolution of CUTLASS's (its tiles, main loop and iterators) with a visitor tree behind it. The slices that
// channels are split into add up their sums in order, in the workspace; the last one has the tree visit them.
// `Mma_` is a main loop with iterators of ours, in place of the template's.
template <class Plain, class Epilogue_, class Mma_ = typename Plain::Mma> struct ConvolutionWithVisitor {
  using Mma = Mma_;
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
