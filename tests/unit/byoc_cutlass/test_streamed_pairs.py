"""Two products by sm_90a's wgmma in one kernel: which, how fast by the model, and what a launch is told.

No GPU runs the kernel here: nvcc compiles it. Its host functions run on the CPU, and so does what changes the sums in
registers, thread by thread where wgmma puts them.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.support.random_templates.convolutions import convolution_of
from tests.support.random_templates.products import device_of, epilogue_of
from tests.unit.byoc_cutlass.host_library import BY_THREADS, address, host_library
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.back_to_back import StreamedPairConfig
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.gemm import packed_problem
from tvm_ext.byoc_cutlass.pairs import PairFamily
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.partition import EpilogueOperand, Order
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

needs_package = pytest.mark.skipif(find_spec("cutlass_library") is None, reason="the extra `cutlass` is not installed")
H100 = lookup("nvidia-h100")
SCALED = Epilogue(
    expression="(accum + bias) * scale + residual",
    operands=(
        EpilogueOperand(name="bias", role="row", dtype="float16"),
        EpilogueOperand(name="scale", role="row", dtype="float32"),
        EpilogueOperand(name="residual", role="matrix", dtype="float16"),
    ),
    out_dtype="float16",
)
RELU, BIAS = epilogue_of("relu(accum + row)", "float16"), epilogue_of("accum + row", "float16")


def pair(
    m: int = 65536, k0: int = 128, n0: int = 512, n1: int = 128, *, order: Order = "column", second: str = "accum + row"
) -> PairFamily:
    first, then = (
        packed_problem(m=m, n=n, k=k, arithmetic="float16", out_dtype="float16", layout_b=order)
        for n, k in ((n0, k0), (n1, n0))
    )
    return PairFamily(first, H100, RELU, then=then, second=epilogue_of(second, "float16"))


def streamed(family: PairFamily) -> list[StreamedPairConfig]:
    return [config for config in family.legal() if isinstance(config, StreamedPairConfig)]


def test_wide_values_between_pass_by_in_tiles() -> None:
    """512 columns between, 128 at both ends: no other template holds these, and apart memory bounds both products."""
    family = pair()
    (best, *_) = family.propose()
    assert best.config == StreamedPairConfig(arithmetic="float16", tile=(128, 128, 128))
    assert all(isinstance(item.config, StreamedPairConfig) for item in family.propose())
    apart = sum(
        ProductFamily(problem, H100, epilogue).propose(1)[0].time_us
        for problem, epilogue in ((family.problem, RELU), (family.then, BIAS))
    )
    assert best.time_us < 0.5 * apart


@pytest.mark.parametrize("order", ["row", "column"])
def test_weights_as_graphs_store_them_are_no_slower(order: Order) -> None:
    """Row by row, as ONNX's MatMul has them; sm_80's templates hold no 512 columns and copy no faster."""
    assert pair(order=order).propose(1)[0].time_us == pair().propose(1)[0].time_us
    narrow = pair(k0=256, n0=256, n1=256, order=order).propose()
    assert isinstance(narrow[0].config, StreamedPairConfig)
    assert narrow[0].time_us < min(item.time_us for item in narrow if not isinstance(item.config, StreamedPairConfig))


def test_a_block_with_a_scale_and_a_residual_of_1x1_convolutions_is_a_pair() -> None:
    """As ConvNeXt's: 96 channels to 384 and back in NHWC, times a row, and the block's own input is added."""
    head, tail = (convolution_of(channels=c, filters=k, window=(1, 1)) for c, k in ((96, 384), (384, 96)))
    family = PairFamily(head, H100, epilogue_of("gelu(accum + row)", "float16"), then=tail, second=SCALED)
    assert [config.tile[2] for config in streamed(family)] == [128, 256]
    assert len(family.propose()) == 2  # example 13's take one tensor behind
    older = PairFamily(head, device_of((8, 0)), family.first, then=tail, second=SCALED)
    assert "at most one tensor" in str(older.why_none())
    wide = convolution_of(channels=96, filters=384)
    refused = PairFamily(wide, H100, family.first, then=tail, second=SCALED)
    assert "at most one tensor; example 88 multiplies matrices" in str(refused.why_none())


def test_a_function_that_takes_many_instructions_is_counted() -> None:
    """In one kernel and apart: a GELU of 512 columns takes vector units longer than both products take matrix units."""
    families = [replace_first(text) for text in ("relu(accum)", "gelu(accum)")]
    relu, gelu = (family.propose(1)[0].time_us for family in families)
    apart = [ProductFamily(item.problem, H100, item.first).propose(1)[0].time_us for item in families]
    assert gelu > 2 * relu and apart[1] > 1.5 * apart[0]


def replace_first(expression: str) -> PairFamily:
    family = pair()
    first = epilogue_of(expression, "float16")
    return PairFamily(family.problem, H100, first, then=family.then, second=BIAS)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        (pair(k0=512), "512 and 128, the depth"),
        (pair(n0=500, order="row"), "multiples of 16 bytes"),
        (pair(n1=36), "multiples of 16 bytes"),
    ],
)
def test_what_example_88_cannot_read_is_refused(family: PairFamily, why: str) -> None:
    reasons = [family.why_illegal(config) for config in family.candidates() if isinstance(config, StreamedPairConfig)]
    assert len(reasons) == 4
    assert all(why in str(reason) or "are more than" in str(reason) for reason in reasons)
    assert any(why in str(reason) for reason in reasons)


def test_older_devices_have_none() -> None:
    family = pair(n0=128)
    older = PairFamily(family.problem, device_of((8, 0)), RELU, then=family.then, second=BIAS)
    assert streamed(family) and not streamed(older)


@needs_package
def test_the_text_has_both_expressions() -> None:
    family = pair()
    text = family.source(streamed(family)[0])
    assert "cutlass::fmha::kernel::FmhaKernelTmaWarpSpecialized<" in text
    assert text.count("tvm_ext::pair_of_columns(from_0 + columns, inside)") == 2
    assert "static_cast<cutlass::half_t const*>(call.operands[1])" in text
    assert text.count("{") == text.count("}")


DESCRIBED = """
template <class Tiled> struct Majors;
template <template <cute::GMMA::Major, cute::GMMA::Major, cute::GMMA::ScaleIn, cute::GMMA::ScaleIn> class Instruction,
          cute::GMMA::Major A, cute::GMMA::Major B, cute::GMMA::ScaleIn C, cute::GMMA::ScaleIn D, class... Rest>
struct Majors<cute::TiledMMA<cute::MMA_Atom<Instruction<A, B, C, D>>, Rest...>> {{
  static constexpr bool a_transposed = A == cute::GMMA::Major::MN, b_transposed = B == cute::GMMA::Major::MN;
}};

extern "C" void described(PairCall const* call, int64_t* out) {{
  using namespace {space};
  auto const factors = factors_of(*call);
  for (void const* at : {{(void const*)factors.ptr_Q, (void const*)factors.ptr_K, (void const*)factors.ptr_V}})
    *out++ = reinterpret_cast<int64_t>(at);
  *out++ = cute::get<0>(factors.dQ);
  // Columns and depth of B0; columns and depth of B1.
  cutlass::detail::TagToStrideB_t<decltype(factors.dK)> const keys = factors.dK;
  for (int64_t distance : {{int64_t(cute::get<0>(keys)), int64_t(cute::get<1>(keys)),
                           int64_t(cute::get<1>(factors.dV)), int64_t(cute::get<0>(factors.dV))}})
    *out++ = distance;
  auto const stored = stored_of(*call);
  *out++ = reinterpret_cast<int64_t>(stored.ptr_D);
  *out++ = cute::get<0>(stored.dD);
  *out++ = Majors<MainLoop::TiledMmaQK>::a_transposed;
  *out++ = Majors<MainLoop::TiledMmaQK>::b_transposed;
  *out++ = Majors<MainLoop::TiledMmaPV>::a_transposed;
  *out++ = Majors<MainLoop::TiledMmaPV>::b_transposed;
}}

extern "C" void changed(PairCall const* call, int second, int block, int step, float* tile) {{
  using namespace {space};
  if (second) {{
    by_threads<MainLoop::TiledMmaPV, MainLoop::TileShapePV>(block, step, tile, [&](auto& sums, auto const& places) {{
      Second::change(Second::given_by(*call, call->n1), sums, places);
    }});
  }} else {{
    by_threads<MainLoop::TiledMmaQK, MainLoop::TileShapeQK>(block, step, tile, [&](auto& sums, auto const& places) {{
      First::change(First::given_by(*call, call->n0), sums, places);
    }});
  }}
}}
"""


class PairCall(ctypes.Structure):
    """`emit_back_to_back.PAIR_CALL`, of C."""

    _fields_ = [
        *((f"number{i}", ctypes.c_int64) for i in range(7)),
        *((f"window{i}", ctypes.c_int32) for i in range(14)),
        *((name, ctypes.c_void_p) for name in ("a", "b0", "b1", "operands", "d")),
    ]


@needs_package
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("order", "told"), [("column", (96, 1, 376, 1)), ("row", (1, 376, 1, 64))])
def test_a_launch_is_told_where_everything_lies(order: Order, told: tuple[int, ...], tmp_path: Path) -> None:
    """And what both functions make of the sums of a threadblock that reaches beyond all edges."""
    m, n0, n1 = 1000, 376, 64
    shown = pair(m=m, k0=96, n0=n0, n1=n1, order=order)
    first = epilogue_of("relu(accum + row) * column", "float16")
    family = PairFamily(shown.problem, H100, first, then=shown.then, second=SCALED)
    config = next(config for config in streamed(family) if config.tile[2] == 128)
    symbol = family.symbol(config)
    library = host_library(family.source(config) + BY_THREADS + DESCRIBED.format(space=f"{symbol}_template"), tmp_path)
    rng = np.random.default_rng(7)
    row0, bias = (rng.normal(size=n).astype("float16") for n in (n0, n1))
    column, scale = (rng.normal(size=n).astype("float32") for n in (m, n1))
    residual = rng.normal(size=(m, n1)).astype("float16")
    operands = (ctypes.c_void_p * 5)(*map(address, (row0, column, bias, scale, residual)))
    a, b0, b1, d = (place << 20 for place in range(16, 20))
    call = PairCall(*family.numbers(config), a, b0, b1, ctypes.addressof(operands), d)
    found = (ctypes.c_int64 * 14)()
    library.described(ctypes.byref(call), found)
    assert list(found) == [a, b0, b1, 96, *told, d, n1, 0, order == "row", 0, order == "row"]

    rows, columns, most = config.tile
    block, step = m // rows, n0 // columns  # the last
    for second, width, begins in ((0, columns, step * columns), (1, most, 0)):
        sums = rng.normal(size=(rows, width)).astype("float32")
        made = sums.copy()
        library.changed(ctypes.byref(call), second, block, 0 if second else step, ctypes.c_void_p(address(made)))
        inside = (slice(block * rows, m), slice(begins, min(begins + width, n1 if second else n0)))
        height, wide = m - block * rows, inside[1].stop - begins
        accum = sums[:height, :wide]
        if second:
            expected = (accum + bias[inside[1]]) * scale[inside[1]] + residual[inside]
        else:
            expected = np.maximum(accum + row0[inside[1]], 0) * column[inside[0], None]
        np.testing.assert_allclose(made[:height, :wide], expected, rtol=1e-5, atol=1e-6)
        made[:height, :wide] = 0
        assert not made.any()

    ask = getattr(library, f"{symbol}_workspace_bytes")
    ask.restype = ctypes.c_int64
    assert ask(ctypes.byref(call)) == 0
    for name, wrong in (("number0", 0), ("number1", 375), ("number2", 1024), ("number3", 60), ("number4", 97)):
        refused = PairCall.from_buffer_copy(call)
        setattr(refused, name, wrong)
        assert ask(ctypes.byref(refused)) == -1, name


@needs_package
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("order", "most"), [("row", 32), ("row", 64), ("row", 128), ("row", 256), ("column", 128)])
def test_the_kernel_compiles_without_spills(order: Order, most: int) -> None:
    """With a bias, a scale and a residual."""
    shown = pair(k0=most, n1=most, order=order)
    family = PairFamily(shown.problem, H100, RELU, then=shown.then, second=SCALED)
    config = next(config for config in streamed(family) if config.tile[2] == most)
    (use,) = compile_gemm(family.source(config), "sm_90a", time_limit_s=580, output="fatbin").uses
    assert not use.spills
