"""The source of a convolution: what it says, that each kind compiles, and what its host code makes of a call.

No kernel runs here. The arguments that the emitted host code builds go to CUTLASS's own convolution on the CPU, whose
sums are compared with NumPy's: problem, layouts and strides of filters (KRSC) and activations (NHWC).
"""

from __future__ import annotations

import ctypes
import dataclasses
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.random_templates.convolutions import AnyConfig, convolution_family, convolution_of
from tests.support.random_templates.products import EXPRESSIONS, architecture_of, device_of, epilogue_of
from tests.unit.byoc_cutlass.host_library import ConvolutionCall, address, convolved, host_library
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.convolution import DepthwiseConfig
from tvm_ext.byoc_cutlass.convolutions import ConvolutionFamily
from tvm_ext.byoc_cutlass.depthwise import emit_depthwise
from tvm_ext.byoc_cutlass.emit_convolution import CONVOLUTION_CALL, emit_convolution
from tvm_ext.byoc_cutlass.epilogue import Epilogue
from tvm_ext.byoc_cutlass.epilogue_function import epilogue_function
from tvm_ext.byoc_cutlass.evt import OWN_FUNCTIONS
from tvm_ext.byoc_cutlass.family import TemplateFamily
from tvm_ext.byoc_cutlass.kernel_text import kernel_symbol
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.records.partition import CutlassProblem
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

pytest.importorskip("cutlass_library", reason="the extra `cutlass` is not installed")

EPILOGUE = epilogue_of("relu(accum + row)", "float16")
KINDS: dict[str, tuple[tuple[int, int], CutlassProblem, str]] = {
    "windows": ((8, 0), convolution_of(stride=2), "conv2d_optimized_float16_sm80"),
    "windows of sm_75": ((7, 5), convolution_of(stride=2), "conv2d_optimized_float16_sm75"),
    "windows, vector units": ((8, 0), convolution_of(dtype="float32"), "conv2d_optimized_float32"),
    "bulk windows": ((9, 0), convolution_of(), "conv2d_bulk"),
    "large filters": ((8, 0), convolution_of(window=(33, 1)), "conv2d_analytic"),
    "three channels": ((8, 0), convolution_of(channels=3), "conv2d_few_channels_float16_sm75"),
    "four channels": ((8, 0), convolution_of(channels=4), "conv2d_fixed_channels"),
    "a group for each tile": ((8, 0), convolution_of(channels=128, filters=128, groups=2), "conv2d_optimized_single"),
    "groups in a tile": ((8, 0), convolution_of(groups=8), "conv2d_analytic_multiple"),
    "depthwise": ((8, 0), convolution_of(groups=64), "depthwise_float16"),
}
"""What is wanted of each kind of template: a capability, a problem, and how the template's name begins."""


def template(kind: str) -> tuple[tuple[int, int], CutlassProblem, AnyConfig]:
    """The best template of ``kind``."""
    capability, problem, beginning = KINDS[kind]
    epilogue = epilogue_of(EPILOGUE.expression, problem.dtypes[2])
    family: TemplateFamily[Any] = convolution_family(problem, device_of(capability), epilogue)
    found = family.propose(10**6)
    return capability, problem, next(item.config for item in found if item.config.name.startswith(beginning))


def source_of(config: AnyConfig, epilogue: Epilogue) -> tuple[str, str]:
    """Its text and the name of its entry point."""
    if isinstance(config, DepthwiseConfig):
        return emit_depthwise(config, epilogue), kernel_symbol(config.name, epilogue)
    return emit_convolution(config, epilogue), kernel_symbol(config.name, epilogue)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_template_whose_text_has_both_entry_points(kind: str) -> None:
    _, problem, config = template(kind)
    epilogue = epilogue_of(EPILOGUE.expression, problem.dtypes[2])
    text, symbol = source_of(config, epilogue)
    assert f'extern "C" int32_t {symbol}(ConvolutionCall const* call, void* workspace' in text
    assert f'extern "C" int64_t {symbol}_workspace_bytes(ConvolutionCall const* call)' in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_one_position_has_the_kernels_of_matrix_products(capability: tuple[int, int]) -> None:
    """Others in the model may share them: the text is the product's, of 2.x and of 3.x templates."""
    device, problem = device_of(capability), convolution_of(window=(1, 1))
    family, product = (ConvolutionFamily(problem, device, EPILOGUE), ProductFamily(problem, device, EPILOGUE))
    generation = "3.x" if capability == (9, 0) else "2.x"
    plain = [item.config for item in family.propose(10**6) if item.config.iterator == "plain"]
    config = next(item for item in plain if item.tile.generation == generation)
    assert family.source(config) == product.source(config.tile)
    assert f'extern "C" int32_t {product.symbol(config.tile)}(GemmCall const* call' in family.source(config)


RESIDUAL = epilogue_of("relu(accum + row) + matrix", "float16")


def test_a_collective_loads_a_residual_itself() -> None:
    """Its rows are windows, which visitors of whole matrices do not know: the matrix is the template's tensor C."""
    _, _, config = template("bulk windows")
    text, _ = source_of(config, RESIDUAL)
    assert "Sm90AuxLoad" not in text and text.count("Sm90SrcFetch<cutlass::half_t>") == 1
    assert "static_cast<cutlass::half_t const*>(call.operands[1]), stride_d, " in text
    assert "ElementSum, float, cutlass::half_t, Layout, 8," in text
    wide = epilogue_of("(accum + row) * matrix", "float16")
    wide = dataclasses.replace(
        wide, operands=tuple(dataclasses.replace(item, dtype="float32") for item in wide.operands)
    )
    assert "ElementSum, float, float, Layout, 4," in source_of(config, wide)[0]
    assert "ElementSum, float, void, Layout, 8," in source_of(config, EPILOGUE)[0]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("expression", ["relu(accum + row) + matrix", "gelu(accum + row) * matrix + matrix"])
def test_a_residual_of_a_collective_compiles(expression: str) -> None:
    _, _, config = template("bulk windows")
    done = compile_gemm(source_of(config, epilogue_of(expression, "float16"))[0], "sm_90a", time_limit_s=580)
    assert not any(use.spill_store_bytes for use in done.uses)


def test_a_call_in_python_is_a_call_in_c() -> None:
    """Members of the structure that the tests fill, against the text."""
    words = CONVOLUTION_CALL.declaration.replace(",", " ").replace(";", " ").replace("*", " ").split()
    places = [words.index(name) for name, _ in ConvolutionCall._fields_]
    assert places == sorted(places)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_compiles(kind: str) -> None:
    capability, problem, config = template(kind)
    text, _ = source_of(config, epilogue_of("gelu(accum + row)", problem.dtypes[2]))
    done = compile_gemm(text, architecture_of(capability), time_limit_s=580)
    assert done.image.startswith(b"\x7fELF")
    assert not any(use.spill_store_bytes for use in done.uses)


REFERENCE = """
#include <cutlass/util/reference/host/convolution.h>

extern "C" int32_t reference(ConvolutionCall const* call, float* sums) {{
  using namespace {space};
  auto arguments = make_arguments(*call);
  cutlass::Status const status = Convolution::can_implement(arguments);
  if (status != cutlass::Status::kSuccess) return int32_t(status);
  auto const& problem = arguments.problem;
  cutlass::TensorRef<ElementA, Layout> a{a}, b{b};
  cutlass::TensorRef<float, Layout> d{{sums, Layout::packed(problem.output_extent())}};
  cutlass::reference::host::Conv2dFprop<ElementA, Layout, ElementA, Layout, float, Layout, float, float>(
      problem, a, b, d, d, 1.f, 0.f);
  return 0;
}}
"""
REFS = ("(arguments.a)", "(arguments.b)")
POINTERS = (
    "(const_cast<ElementA*>(arguments.a), Layout::packed(problem.activation_extent()))",
    "(const_cast<ElementA*>(arguments.b), Layout::packed(problem.filter_extent()))",
)
WINDOWS = {
    "padded": {"h": 9, "w": 7, "p": 9, "q": 7, "pad_h": 1, "pad_w": 1},
    "strided, padded on the left": {"h": 10, "w": 8, "p": 5, "q": 4, "pad_w": 1, "stride_h": 2, "stride_w": 2},
    "dilated": {"h": 12, "w": 11, "p": 8, "q": 9, "dilation_h": 2},
    "cropped by its strides": {"h": 10, "w": 10, "p": 3, "q": 3, "stride_h": 3, "stride_w": 3},
}  # fmt: skip


def call_of(problem: CutlassProblem, window: dict[str, int]) -> ConvolutionCall:
    assert problem.window is not None
    r, s = problem.window.filter_extents
    rest = {"stride_h": 1, "stride_w": 1, "dilation_h": 1, "dilation_w": 1, "split_k": 1, "swizzle": 1}
    sizes = {"n": 2, "c": problem.window.input_extents[3], "k": problem.columns, "r": r, "s": s}
    return ConvolutionCall(**{**rest, **sizes, "groups": problem.window.groups, **window})


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["groups in a tile", "depthwise", "windows"])
def test_arguments_are_those_of_the_convolution(kind: str, tmp_path: Path) -> None:
    _, problem, config = template(kind)
    if isinstance(config, DepthwiseConfig):
        config = dataclasses.replace(config, strides=None, dilation=None)  # arguments, too
    text, symbol = source_of(config, EPILOGUE)
    a, b = POINTERS if isinstance(config, DepthwiseConfig) else REFS
    library = host_library(text + REFERENCE.format(space=f"{symbol}_template", a=a, b=b), tmp_path)
    rng = np.random.default_rng(0)
    for name, window in WINDOWS.items():
        call = call_of(problem, window)
        x = rng.standard_normal((call.n, call.h, call.w, call.c)).astype("float16")
        w = rng.standard_normal((call.k, call.r, call.s, call.c // call.groups)).astype("float16")
        operands = (ctypes.c_void_p * 2)(0, 0)
        call.a, call.b, call.operands = address(x), address(w), ctypes.addressof(operands)
        sums = np.full((call.n, call.p, call.q, call.k), np.nan, "float32")
        assert library.reference(ctypes.byref(call), ctypes.c_void_p(address(sums))) == 0, name
        np.testing.assert_allclose(sums, convolved(x, w, call), rtol=1e-4, atol=1e-4, err_msg=name)
    check_workspace_and_refusals(library, symbol, problem, config)


BULK = """
extern "C" void described(ConvolutionCall const* call, int64_t* out) {{
  using namespace {space};
  auto const arguments = make_arguments(*call);
  auto const& problem = arguments.problem_shape;
  for (int i = 0; i < 4; ++i) *out++ = problem.shape_C[i];
  for (int i = 0; i < 4; ++i) *out++ = problem.stride_A[i];
  for (int i = 0; i < 4; ++i) *out++ = problem.stride_B[i];
  for (int i = 0; i < 2; ++i) *out++ = problem.upper_padding[i];
  *out++ = cute::get<0, 0>(arguments.epilogue.dD);
  *out++ = cute::get<0, 1>(arguments.epilogue.dD);
  *out++ = cute::get<0, 2>(arguments.epilogue.dD);
  *out++ = cute::get<0, 0>(arguments.epilogue.dC);
  *out++ = cute::get<0, 1>(arguments.epilogue.dC);
  *out++ = cute::get<0, 2>(arguments.epilogue.dC);
}}
"""


@needs_nvcc
@pytest.mark.slow
def test_a_collective_counts_the_results_that_there_is_room_for(tmp_path: Path) -> None:
    _, problem, config = template("bulk windows")
    text, symbol = source_of(config, RESIDUAL)
    library = host_library(text + BULK.format(space=f"{symbol}_template"), tmp_path, "sm_90a")
    ask = getattr(library, f"{symbol}_workspace_bytes")
    ask.restype = ctypes.c_int64
    operands = (ctypes.c_void_p * 2)(0, 0)
    for name, window in WINDOWS.items():
        call = call_of(problem, window)
        call.operands = ctypes.addressof(operands)
        found = (ctypes.c_int64 * 20)()
        library.described(ctypes.byref(call), found)
        activations, filters = (
            (call.h * call.w * call.c, call.w * call.c, call.c, 1),
            (call.r * call.s * call.c, call.s * call.c, call.c, 1),
        )
        assert tuple(found[:4]) == (call.n, call.p, call.q, call.k), name
        assert (tuple(found[4:8]), tuple(found[8:12])) == (activations, filters), name
        assert min(found[12:14]) >= 0
        assert tuple(found[14:17]) == (call.k, call.q * call.k, call.p * call.q * call.k), name
        assert tuple(found[17:]) == tuple(found[14:17]), name
        assert ask(ctypes.byref(call)) >= 0, name
        call.p -= 1  # less room than the template would fill
        assert ask(ctypes.byref(call)) == -1 or call.pad_h or call.stride_h > 1, name


def check_workspace_and_refusals(library: ctypes.CDLL, symbol: str, problem: CutlassProblem, config: AnyConfig) -> None:
    """What is refused is refused before anything is launched: none of these calls reaches a device."""
    ask, run = getattr(library, f"{symbol}_workspace_bytes"), getattr(library, symbol)
    ask.restype = ctypes.c_int64
    operands = (ctypes.c_void_p * 2)(0, 0)
    call = call_of(problem, WINDOWS["padded"])
    call.operands = ctypes.addressof(operands)
    if isinstance(config, DepthwiseConfig):
        assert ask(ctypes.byref(call)) == 3 * 3 * problem.columns * 2  # the filters in another order
    else:
        assert ask(ctypes.byref(call)) == 0
    if problem.window is not None and problem.window.groups == 1:
        call.split_k = 2
        tiles = -(-call.n * call.p * call.q // config.tile.threadblock[0]) * -(-call.k // config.tile.threadblock[1])  # type: ignore[union-attr]
        sums = tiles * config.tile.threadblock[0] * config.tile.threadblock[1] * 4  # type: ignore[union-attr]
        assert ask(ctypes.byref(call)) == sums + -(-4 * tiles // 128) * 128
        assert run(ctypes.byref(call), None, ctypes.c_int64(0), None) != 0  # the workspace is too small
    for change in ({"stride_h": 0}, {"pad_w": -1}, {"n": 0}, {"n": 2**30}, {"split_k": 0}):
        assert ask(ctypes.byref(call_of(problem, WINDOWS["padded"] | change))) == -1, change
    odd = call_of(problem, WINDOWS["padded"])
    odd.operands = call.operands
    odd.c, odd.k = odd.c + odd.groups, odd.k + odd.groups  # channels that are no whole accesses
    assert run(ctypes.byref(odd), None, ctypes.c_int64(2**40), None) != 0


@needs_nvcc
def test_epilogues_as_functions_compute_what_they_say(tmp_path: Path) -> None:
    """Every function and role, on the CPU: what depthwise templates do to their sums."""
    headers = ("cutlass/cutlass.h", "cutlass/numeric_conversion.h", "cutlass/epilogue/thread/activation.h")
    parts = [*(f"#include <{header}>\n" for header in headers), OWN_FUNCTIONS]
    for number, expression in enumerate(EXPRESSIONS):
        epilogue = epilogue_of(expression, "float16")
        casts = ", ".join(
            f"static_cast<{'cutlass::half_t' if item.dtype == 'float16' else 'float'} const*>(operands[{i}])"
            for i, item in enumerate(epilogue.operands)
        )
        parts.append(f"""
namespace n{number} {{ {epilogue_function(epilogue, "float32")} }}
extern "C" float apply{number}(float sum, int64_t row, int column, int columns, void const* const* operands) {{
  return n{number}::EpilogueFunction{{nullptr, {casts}}}(sum, row, column, columns);
}}
""")
    library = host_library("".join(parts), tmp_path)
    rng = np.random.default_rng(0)
    rows, columns = 3, 5
    shapes = {"row": (columns,), "column": (rows,), "matrix": (rows, columns), "scalar": (1,)}
    for number, expression in enumerate(EXPRESSIONS):
        epilogue = epilogue_of(expression, "float16")
        tensors = {item.name: rng.standard_normal(shapes[item.role]).astype(item.dtype) for item in epilogue.operands}
        sums = rng.standard_normal((rows, columns)).astype("float32") * 3
        operands = (ctypes.c_void_p * 5)(*(address(item) for item in tensors.values()))
        function = getattr(library, f"apply{number}")
        function.restype = ctypes.c_float
        found = [
            [function(ctypes.c_float(sums[r, c]), ctypes.c_int64(r), c, columns, operands) for c in range(columns)]
            for r in range(rows)
        ]
        wanted = evaluated(expression, {"accum": sums} | tensors)
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3, err_msg=expression)


def evaluated(expression: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """In float64, each name as it lies over rows and columns."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    names = {name: value.astype("float64") for name, value in tensors.items()}
    if "column" in names:
        names["column"] = names["column"][:, None]
    functions = {
        "relu": lambda x: np.maximum(x, 0), "gelu": lambda x: x / 2 * (1 + np.vectorize(erf)(x / np.sqrt(2))),
        "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "silu": lambda x: x * sigmoid(x), "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
        "softplus": lambda x: np.log1p(np.exp(x)), "sigmoid": sigmoid, "tanh": np.tanh, "exp": np.exp,
        "maximum": np.maximum, "minimum": np.minimum, "cast": lambda x, dtype: x.astype(dtype).astype("float64"),
    }  # fmt: skip
    return np.asarray(eval(expression, {"__builtins__": {}}, functions | names))  # noqa: S307 - texts of these tests


def test_legal_templates_have_names_of_their_own() -> None:
    """What is compiled in is in the name, and nothing else."""
    for _, problem, _ in KINDS.values():
        family = convolution_family(problem, device_of((9, 0)), epilogue_of("accum", problem.dtypes[2]))
        texts = {config.name: source_of(config, EPILOGUE)[0] for config in list(family.legal())[::97]}
        assert len(set(texts.values())) == len(texts)
