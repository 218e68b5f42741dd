"""Layout changes in a network's first and last convolution: which regions, and the indices of what reads and stores."""

from __future__ import annotations

import ctypes
import random
import re
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import decided, op
from tests.unit.byoc_cutlass.host_library import address, host_library
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.host import own_header
from tvm_ext.byoc_cutlass.layout_changes import whole_runs

pytest.importorskip("cutlass_library", reason="the extra `cutlass` is not installed")

LAYOUTS = {"data_layout": "NHWC", "kernel_layout": "OHWI"}


def network(dtype: str = "float16", *, between: Any = lambda value: value, padded: float | None = None) -> Any:
    """An image in NCHW through two convolutions back to NCHW."""
    (x,) = inputs_of((1, 3, 64, 64), dtype=dtype)
    value = between(op.permute_dims(x if dtype == "float16" else op.astype(x, "float16"), [0, 2, 3, 1]))
    channels = 3 if padded is None else 8
    if padded is not None:
        value = op.nn.pad(value, [0, 0, 0, 0, 0, 0, 0, 5], pad_value=padded)
    first, last = (relax.const(np.ones(shape, "float16")) for shape in ((32, 3, 3, channels), (16, 1, 1, 32)))
    value = op.nn.relu(op.nn.conv2d(value, first, padding=1, **LAYOUTS))
    return module_of([x], op.permute_dims(op.nn.conv2d(value, last, **LAYOUTS), [0, 3, 1, 2]))


def windows(mod: Any, device: str = "nvidia-a100") -> list[tuple[str, bool]]:
    found = [region.problem.window for region in decided(mod, device).taken]
    return [(window.planes_of, window.stores_planes) for window in found if window is not None]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("device", ["nvidia-a100", "nvidia-t4", "nvidia-h200"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_first_region_reads_the_image_and_the_last_stores_it(dtype: str, device: str) -> None:
    assert windows(network(dtype), device) == [(dtype, False), ("", True)]


def test_channels_padded_by_zeros_are_read_through_and_others_are_not() -> None:
    assert windows(network(padded=0.0))[0] == ("float16", False)
    assert windows(network(padded=1.0))[0] == ("", False)


def test_what_is_computed_between_keeps_the_transposition() -> None:
    assert windows(network(between=op.exp))[0] == ("", False)


def test_windows_are_as_wide_as_whole_runs() -> None:
    assert [whole_runs(columns) for columns in (1, 3, 4, 7, 8)] == [1, 4, 4, 8, 8]
    assert all(columns <= whole_runs(columns) < columns + 8 for columns in range(1, 40))


MUTANTS = {
    "": "",
    "- problem.pad_w": "+ problem.pad_w",
    "* problem.stride_h": "* problem.stride_w",
    "c * problem_.H": "c * problem_.W",
    "r * problem_.dilation_h": "r * problem_.dilation_w",
    "if (n >= problem.N) h_[i] = problem.H;": "",
    "exists & (": "(",
    "by_s(problem.S)": "by_s(problem.R)",
    "inside ? problem_.W": "inside ? problem_.H",
    "column_ += Shape::kColumn": "column_ += Shape::kRow",
    "n * problem.C": "n * problem.K",
}
"""Changes of the iterator's text, each of which some problem must show."""
RUNS = (1, 4, 8)
"""Elements of a load; mutants are compiled for one."""

HOST = """
template <template <class, class, class, class, int> class Iterator, int Run>
void tiles(int const* e, float const* data, float* out) {
  using Map = cutlass::transform::PitchLinearWarpRakedThreadMap<
      cutlass::PitchLinearShape<32, 64>, 64, cutlass::PitchLinearShape<4, 8>, 8>;
  using Tiles = Iterator<cutlass::MatrixShape<64, 32>, float, float, Map, Run>;
  cutlass::conv::Conv2dProblemSize problem(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7], e[8], e[9], e[10], e[11],
      e[12], e[13], e[14], cutlass::conv::Mode::kCrossCorrelation, 1, 1);
  typename Tiles::Params params(problem);
  int const rows = e[15], depth = e[16];
  for (int row = 0; row < rows; row += 64)
    for (int thread = 0; thread < 64; ++thread) {
      Tiles tiles(params, problem, data, thread, {row, 0});
      auto const first = Map::initial_offset(thread);
      for (int column = 0; column < depth; column += 32, ++tiles) {
        typename Tiles::Fragment loaded;
        tiles.load(loaded);
        for (int i = 0; i < Map::Iterations::kStrided; ++i)
          for (int j = 0; j < 8; ++j)
            out[(row + first.strided() + i * Map::Delta::kStrided) * depth + column + first.contiguous() + j] =
                loaded[i * 8 + j];
      }
    }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The iterator, and each mutant of it, for the host; `PlanesOrder` beside it."""
    header = own_header("planes")
    # Without the visitor, whose headers take nvcc longest.
    header = (
        re.sub(r"#include <cutlass/epilogue.*\n", "", header.split("// The visitor that stores")[0]) + "}\n#endif\n"
    )
    included = ("cutlass/cutlass.h", "cutlass/aligned_buffer.h", "cutlass/transform/pitch_linear_thread_map.h")
    text = "".join(f"#include <{name}>\n" for name in included)
    for number, (old, new) in enumerate(MUTANTS.items()):
        assert old in header, old
        space = f"mutant{number}"
        own = header.replace(old, new) if old else header
        text += own.replace("TVM_EXT_PLANES", space.upper()).replace("namespace tvm_ext", f"namespace {space}")
    text += HOST
    for number in range(len(MUTANTS)):
        for run in RUNS if number == 0 else RUNS[1:2]:
            text += f"""extern "C" void tiles{number}_{run}(int const* e, float const* data, float* out) {{
  tiles<mutant{number}::PlanesTileIterator, {run}>(e, data, out);
}}
"""
    text += """extern "C" int64_t place(int pixels, int columns, int row, int column) {
  return mutant0::PlanesOrder{cutlass::FastDivmod(pixels), columns}(row, column);
}
"""
    made = host_library(text, tmp_path_factory.mktemp("planes"))
    made.place.restype = ctypes.c_int64
    return made


def random_extents(rng: random.Random, run: int) -> list[int]:
    """n h w c k r s p q, pads, strides, dilation: of a window as wide as whole runs."""
    n, c, k, r, s = rng.randint(1, 3), rng.randint(1, 4), 5, rng.randint(1, 5), run * rng.randint(1, 2)
    h, w = rng.randint(5, 19), rng.randint(5, 19)
    pads, strides, dilation = ([rng.randint(low, 3) for _ in range(2)] for low in (0, 1, 1))
    p = max(1, (h + 2 * pads[0] - (r - 1) * dilation[0] - 1) // strides[0] + 1)
    q = max(1, (w + 2 * pads[1] - (s - 1) * dilation[1] - 1) // strides[1] + 1)
    return [n, h, w, c, k, r, s, p, q, *pads, *strides, *dilation]


def im2col(image: np.ndarray, e: list[int]) -> np.ndarray:
    """(n p q) by (c r s) of an NCHW image."""
    n, h, w, c, _, r, s, p, q, top, left, down, right, high, wide = e
    below = max(0, (p - 1) * down + (r - 1) * high + 1 - top - h)
    behind = max(0, (q - 1) * right + (s - 1) * wide + 1 - left - w)
    padded = np.pad(image, [(0, 0), (0, 0), (top, below), (left, behind)])
    rows, columns = (
        np.arange(p)[:, None] * down + np.arange(r) * high,
        np.arange(q)[:, None] * right + np.arange(s) * wide,
    )
    taken = padded[:, :, rows[:, :, None, None], columns[None, None]]  # n c p r q s
    return taken.transpose(0, 2, 4, 1, 3, 5).reshape(n * p * q, c * r * s)


def loaded(library: ctypes.CDLL, number: int, run: int, image: np.ndarray, e: list[int]) -> np.ndarray:
    """What the tiles hold, beyond the last row and column too. Around the image are numbers that it does not have."""
    rows, depth = -(-e[0] * e[7] * e[8] // 64) * 64, (-(-e[3] * e[5] * e[6] // 32) + 1) * 32
    around = np.full(3 * 65536, -1.0, "float32")
    around[65536 : 65536 + image.size] = image.ravel()
    out = np.full((rows, depth), np.nan, "float32")
    extents = (ctypes.c_int * 17)(*e, rows, depth)
    getattr(library, f"tiles{number}_{run}")(
        extents, ctypes.c_void_p(address(around) + 4 * 65536), ctypes.c_void_p(address(out))
    )
    return out


def is_right(library: ctypes.CDLL, number: int, run: int, e: list[int]) -> bool:
    n, h, w, c = e[:4]
    image = np.arange(1, n * c * h * w + 1, dtype="float32").reshape(n, c, h, w)
    wanted = im2col(image, e)
    got = loaded(library, number, run, image, e)
    whole = np.zeros_like(got)
    whole[: wanted.shape[0], : wanted.shape[1]] = wanted
    return bool((got == whole).all())


@needs_nvcc
def test_tiles_of_planes_are_numpy_s_and_every_mutant_is_caught(library: ctypes.CDLL) -> None:
    rng = random.Random(5)
    problems = [(run, random_extents(rng, run)) for run in RUNS for _ in range(12)]
    assert all(is_right(library, 0, run, e) for run, e in problems)
    for number, change in enumerate(MUTANTS):
        assert number == 0 or not all(is_right(library, number, run, e) for run, e in problems if run == RUNS[1]), (
            change
        )


@needs_nvcc
def test_results_lie_plane_by_plane(library: ctypes.CDLL) -> None:
    images, pixels, columns = 3, 35, 6
    places = [
        library.place(pixels, columns, row, column) for row in range(images * pixels) for column in range(columns)
    ]
    wanted = np.arange(images * columns * pixels).reshape(images, columns, pixels).transpose(0, 2, 1)
    assert places == wanted.ravel().tolist()
