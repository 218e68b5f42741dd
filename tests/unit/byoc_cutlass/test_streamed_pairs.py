"""Two products by sm_90a's wgmma in one kernel: which, how fast by the model, and what a launch is told.

No GPU runs the kernel here: nvcc compiles it, and its host functions run on the CPU.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.random_templates.products import device_of, epilogue_of
from tests.unit.byoc_cutlass.host_library import host_library
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.back_to_back import StreamedPairConfig
from tvm_ext.byoc_cutlass.gemm import packed_problem
from tvm_ext.byoc_cutlass.pairs import PairFamily
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.partition import Order
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

needs_package = pytest.mark.skipif(find_spec("cutlass_library") is None, reason="the extra `cutlass` is not installed")
H100 = lookup("nvidia-h100")
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


def test_a_function_that_takes_many_instructions_is_counted() -> None:
    relu, gelu = (replace_first(text).propose(1)[0].time_us for text in ("relu(accum)", "gelu(accum)"))
    assert gelu > 2 * relu


def replace_first(expression: str) -> PairFamily:
    family = pair()
    first = epilogue_of(expression, "float16")
    return PairFamily(family.problem, H100, first, then=family.then, second=BIAS)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        (pair(order="row"), "along their depth"),
        (pair(k0=512), "512 and 128, the depth"),
        (pair(second="accum + matrix"), "nothing but a row"),
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
    assert "inside ? float(given.row_0[column]) : 0.f" in text
    assert "p.mainloop.row_0 = static_cast<cutlass::half_t const*>(call.operands[0]);" in text
    assert "behind::arguments_of({call.operands + 1})" in text
    assert text.count("{") == text.count("}")


DESCRIBED = """
extern "C" void described(PairCall const* call, int64_t* out) {{
  using namespace {space};
  auto const factors = factors_of(*call);
  for (void const* at : {{(void const*)factors.ptr_Q, (void const*)factors.ptr_K, (void const*)factors.ptr_V}})
    *out++ = reinterpret_cast<int64_t>(at);
  *out++ = cute::get<0>(factors.dQ);
  *out++ = cute::get<0>(factors.dK);
  *out++ = cute::get<1>(factors.dV);
  auto const stored = stored_of(*call);
  *out++ = reinterpret_cast<int64_t>(stored.ptr_D);
  *out++ = cute::get<0>(stored.dD);
  *out++ = reinterpret_cast<int64_t>(stored.thread.op_1.ptr_row);
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
def test_a_launch_is_told_where_everything_lies(tmp_path: Path) -> None:
    family = pair(m=1000, k0=96, n0=384, n1=64)
    config = streamed(family)[0]
    symbol = family.symbol(config)
    library = host_library(family.source(config) + DESCRIBED.format(space=f"{symbol}_template"), tmp_path)
    a, b0, b1, d, row0, row1 = (place << 20 for place in range(16, 22))
    rows = (ctypes.c_void_p * 2)(row0, row1)
    call = PairCall(*family.numbers(config), a, b0, b1, ctypes.addressof(rows), d)
    found = (ctypes.c_int64 * 9)()
    library.described(ctypes.byref(call), found)
    assert list(found) == [a, b0, b1, 96, 96, 384, d, 64, row1]
    ask = getattr(library, f"{symbol}_workspace_bytes")
    ask.restype = ctypes.c_int64
    assert ask(ctypes.byref(call)) == 0
    for name, wrong in (("number0", 0), ("number2", 1024), ("number3", 60), ("number4", 97)):
        refused = PairCall.from_buffer_copy(call)
        setattr(refused, name, wrong)
        assert ask(ctypes.byref(refused)) == -1, name


@needs_package
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("most", [32, 64, 128, 256])
def test_the_kernel_compiles_without_spills(most: int) -> None:
    family = pair(k0=most, n1=most)
    config = next(config for config in streamed(family) if config.tile[2] == most)
    (use,) = compile_gemm(family.source(config), "sm_90a", time_limit_s=580, output="fatbin").uses
    assert not use.spills
