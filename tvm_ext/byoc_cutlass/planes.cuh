#include <cutlass/conv/convolution.h>
#include <cutlass/conv/conv2d_problem_size.h>
#include <cutlass/fast_math.h>
#include <cutlass/layout/tensor.h>
#include <cutlass/matrix_shape.h>
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>

namespace tvm_ext {

// Tiles of a convolution's left operand out of activations that lie plane by plane (NCHW), of another type if need be.
//
// A tile's row is a pixel of the result; its columns run over channels, rows and columns of the window, in this order,
// as filters do that lie (filter, channel, row, column). Windows are as wide as whole runs of `Run` columns: the runs of
// one access begin at addresses of their own, what is within one is `dilation_w` elements apart. Worked example: 7x7 of
// 3 channels is given as 7x8 with zeros in the filters, 21 runs of 8 columns; an access of 8 halves is one of them.
template <class Shape_, class Element_, class Source, class ThreadMap_, int Run> class PlanesTileIterator {
 public:
  using Shape = Shape_;
  using Element = Element_;
  using ThreadMap = ThreadMap_;
  using Layout = cutlass::layout::TensorNHWC;  // as templates ask for: no distance of it is used
  using TensorRef = cutlass::TensorRef<Element, Layout>;
  using Index = typename Layout::Index;
  using LongIndex = typename Layout::LongIndex;
  using Problem = cutlass::conv::Conv2dProblemSize;
  using ConvProblemSize = Problem;
  static int const kRows = ThreadMap::Iterations::kStrided, kAccess = ThreadMap::kElementsPerAccess;
  static auto const kIteratorAlgorithm = cutlass::conv::IteratorAlgorithm::kFewChannels;
  static auto const kStrideSupport = cutlass::conv::StrideSupport::kStrided;
  static int const kConvDim = 2, kAccessesPerVector = 1;
  static_assert(ThreadMap::Iterations::kContiguous == 1 && kAccess % Run == 0, "an access is whole runs");
  using AccessType = cutlass::AlignedArray<Element, kAccess>;
  using Fragment = cutlass::Array<Element, kRows * kAccess>;

  struct Params {
    cutlass::FastDivmod by_q, by_p, by_s, by_r;

    CUTLASS_HOST_DEVICE Params() {}
    CUTLASS_HOST_DEVICE Params(Problem const& problem)
        : by_q(problem.Q), by_p(problem.P), by_s(problem.S), by_r(problem.R) {}
  };

  CUTLASS_HOST_DEVICE static Params getParams(Problem const& problem, Layout const&) { return Params(problem); }

  CUTLASS_HOST_DEVICE static cutlass::Status can_implement(Problem const& problem) {
    return problem.S % Run ? cutlass::Status::kErrorInvalidProblem : cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE PlanesTileIterator(Params const& params, Problem const& problem, Element const* data, int thread,
                                         cutlass::MatrixCoord const& offset)
      : params_(params), problem_(problem), data_(reinterpret_cast<Source const*>(data)) {
    auto const own = ThreadMap::initial_offset(thread);
    column_ = offset.column() + own.contiguous();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      int n, p, q;
      params.by_p.operator()(n, p, params.by_q.divmod(q, offset.row() + own.strided() + i * ThreadMap::Delta::kStrided));
      w_[i] = q * problem.stride_w - problem.pad_w;
      h_[i] = p * problem.stride_h - problem.pad_h;
      at_[i] = (n * problem.C * problem.H + h_[i]) * problem.W + w_[i];
      if (n >= problem.N) h_[i] = problem.H;  // no row of the window is within
    }
  }

  CUTLASS_HOST_DEVICE PlanesTileIterator& operator++() {
    column_ += Shape::kColumn;
    return *this;
  }

  CUTLASS_HOST_DEVICE void load(Fragment& tile) {
    tile.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int run = 0; run < kAccess / Run; ++run) {
      int c, r, s;
      params_.by_r.operator()(c, r, params_.by_s.divmod(s, column_ + run * Run));
      bool const exists = c < problem_.C;
      int const down = r * problem_.dilation_h, right = s * problem_.dilation_w;
      int const step = (c * problem_.H + down) * problem_.W + right;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        bool const inside = exists & (unsigned(h_[i] + down) < unsigned(problem_.H));
        int const first = w_[i] + right, width = inside ? problem_.W : 0, at = at_[i] + step;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Run; ++j) {
          int const further = j * problem_.dilation_w;
          if (unsigned(first + further) < unsigned(width)) tile[i * kAccess + run * Run + j] = Element(data_[at + further]);
        }
      }
    }
  }

 private:
  Params const& params_;
  Problem const& problem_;
  Source const* data_;
  int column_;
  int w_[kRows], h_[kRows], at_[kRows];  // of each row's window: its first pixel, and where that lies
};

// Where the elements of a product lie whose rows are the pixels of images, and whose columns are planes of these.
struct PlanesOrder {
  cutlass::FastDivmod by_pixels;
  int columns;

  CUTLASS_HOST_DEVICE int64_t operator()(int row, int column) const {
    int image, pixel;
    by_pixels(image, pixel, row);
    return (int64_t(image) * columns + column) * by_pixels.divisor + pixel;
  }
};

// The visitor that stores a result plane by plane, in place of `VisitorAuxStore`, which stores row by row.
template <class ThreadMap, class Element, cutlass::FloatRoundStyle Round, class StrideMNL> struct PlanesStore {
  struct Arguments {
    Element* data = nullptr;
    int pixels = 1, columns = 1;
  };

  struct Params {
    Element* data;
    PlanesOrder place;
  };

  struct SharedStorage {};

  template <class Shape> static Params to_underlying_arguments(Shape const&, Arguments const& given, void*) {
    return {given.data, {cutlass::FastDivmod(given.pixels), given.columns}};
  }

  template <class Shape> static size_t get_workspace_size(Shape const&, Arguments const&) { return 0; }

  CUTLASS_HOST_DEVICE PlanesStore() {}
  CUTLASS_HOST_DEVICE PlanesStore(Params const& params, SharedStorage const&) : params_(&params) {}

  template <class Values, class Places, class Shape>
  struct Callbacks : cutlass::epilogue::threadblock::EmptyCallbacks {
    Values values;
    Places places;
    Shape shape;
    Params const* params;

    CUTLASS_DEVICE Callbacks(Values const& values, Places const& places, Shape shape, Params const* params)
        : values(values), places(places), shape(shape), params(params) {}

    CUTLASS_DEVICE void begin_step(int) { cute::clear(values); }

    template <class Sum, class Input, int Size>
    CUTLASS_DEVICE auto visit(int, int, int, int fragment, cutlass::Array<Sum, Size> const&,
                              cutlass::Array<Input, Size> const& input) {
      auto fragments = cute::recast<cutlass::Array<Element, Size>>(cute::coalesce(values));
      fragments(fragment) = cutlass::NumericArrayConverter<Element, Input, Size, Round>{}(input);
      return input;
    }

    CUTLASS_DEVICE void end_step(int step) {
      auto const own = places(cute::_, cute::_, cute::_, step);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < cute::size(values); ++i) {
        auto const at = own(i);
        if (cute::elem_less(at, shape)) params->data[params->place(cute::get<0>(at), cute::get<1>(at))] = values(i);
      }
    }
  };

  template <class Shape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord offset, int thread, Shape shape) {
    auto const rows = cute::make_tensor(cute::make_gmem_ptr(params_->data), shape, StrideMNL{});
    auto const own = cute::group_modes<3, 6>(ThreadMap::partition(rows, thread, offset));
    auto const numbers = cute::make_identity_tensor(shape);
    auto const places = cute::group_modes<3, 6>(ThreadMap::partition(numbers, thread, offset));
    auto const values = cute::make_tensor_like(cute::take<0, 3>(own));
    return Callbacks<cute::remove_const_t<decltype(values)>, decltype(places), Shape>(values, places, shape, params_);
  }

 private:
  Params const* params_;
};

}  // namespace tvm_ext
