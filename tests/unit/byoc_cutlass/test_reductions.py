"""Epilogues that leave a vector: sums and maxima over all rows or all columns, from the graph to the kernel's text."""

from __future__ import annotations

import ast
import ctypes
import itertools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm import relax

from tests.support.random_templates.products import architecture_of, device_of, epilogue_of
from tests.support.small_modules import inputs_of, module_of
from tests.unit.byoc_cutlass.graphs import decided, op
from tests.unit.byoc_cutlass.host_library import host_library
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.depthwise import DepthwiseFamily
from tvm_ext.byoc_cutlass.emit import emit_gemm
from tvm_ext.byoc_cutlass.epilogue import ATOMIC_MAXIMUM, REDUCTIONS, Epilogue, exchange_bytes
from tvm_ext.byoc_cutlass.evt import visitor_tree
from tvm_ext.byoc_cutlass.gemm import packed_problem
from tvm_ext.byoc_cutlass.pairs import PairFamily
from tvm_ext.byoc_cutlass.products import _COLLECTIVE_WIDTHS, ProductFamily
from tvm_ext.byoc_cutlass.profiler import buffers_of
from tvm_ext.byoc_cutlass.selection import candidates_of, family_of
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.records.partition import CutlassProblem, CutlassRegion
from tvm_ext.toolchains.cutlass_toolchain import compile_gemm

needs_package = pytest.mark.skipif(find_spec("cutlass_library") is None, reason="the extra `cutlass` is not installed")

SHAPE = (4096, 512, 256)  # M, N, K
STEPS: dict[str, Callable[[Any], Any]] = {
    "sum_rows": lambda x: op.sum(x, [0]),
    "sum_columns": lambda x: op.sum(x, [1], keepdims=True),
    "max_rows": lambda x: op.max(x, [0], keepdims=True),
    "max_columns": lambda x: op.max(x, [1]),
}


def region_of(name: str, batch: int = 1) -> CutlassRegion:
    """relu(x w + bias), reduced: of a batch over its own axes."""
    m, n, k = SHAPE
    lead = (batch,) if batch > 1 else ()
    x, w, b = inputs_of((*lead, m, k), (*lead, k, n), (n,), dtype="float16")
    value = op.nn.relu(op.astype(op.add(op.matmul(x, w), b), "float32"))
    batched = {"sum_rows": lambda x: op.sum(x, [0, 1]), "max_columns": lambda x: op.max(x, [2])}
    value = (batched if batch > 1 else STEPS)[name](value)
    (region,) = decided(module_of([x, w, b], value)).taken
    return region


@pytest.mark.parametrize("name", STEPS)
def test_a_reduction_is_the_last_call_of_the_expression(name: str) -> None:
    region = region_of(name)
    assert region.expression == f"{name}(relu((accum + operand2)))"
    assert (region.pattern.split("_")[-2:], region.out_dtype) == (name.split("_"), "float32")
    epilogue = Epilogue.of(region)
    assert epilogue.reduction == REDUCTIONS[name]
    assert ast.unparse(epilogue.tree()) == "relu(accum + operand2)"


@pytest.mark.parametrize("name", STEPS)
def test_an_expression_is_what_the_region_computes(name: str) -> None:
    """Against float64, by the functions of NumPy that its calls are."""
    rng = np.random.default_rng(3)
    product, bias = rng.standard_normal((24, 16)), rng.standard_normal(16)
    axis = 0 if name.endswith("rows") else 1
    calls = {name: lambda x: getattr(x, name[:3])(axis=axis), "relu": lambda x: np.maximum(x, 0)}
    names = {"accum": product, "operand2": bias, **calls}
    found = eval(region_of(name).expression, {"__builtins__": {}}, names)  # noqa: S307 - what we wrote ourselves
    assert np.array_equal(found, getattr(np.maximum(product + bias, 0), name[:3])(axis=axis))


@needs_package
@pytest.mark.parametrize("name", STEPS)
def test_the_tree_ends_in_the_reduction_and_stores_nothing_else(name: str) -> None:
    epilogue = epilogue_of(f"{name}(relu(accum + row))", "float32")
    tree = visitor_tree(epilogue, "float32", "2.x")
    assert f"Visitor{'Row' if name.endswith('rows') else 'Col'}Reduction" in tree.declarations
    assert "AuxStore" not in tree.declarations
    assert tree.argument.endswith(f"{{d, {REDUCTIONS[name].identity}}}}}")
    extremes = "cutlass::maximum_with_nan_propagation, ::tvm_ext::AtomicMaximum"
    assert (extremes if name.startswith("max") else "cutlass::plus, cutlass::atomic_add") in tree.declarations


@needs_package
def test_of_a_batch_each_product_has_its_columns_and_all_have_the_same_rows() -> None:
    columns, rows = region_of("max_columns", batch=3), region_of("sum_rows", batch=3)
    assert [item.problem.batch for item in (columns, rows)] == [3, 3]
    each = visitor_tree(Epilogue.of(columns), "float32", "2.x", batched=True)
    assert "cute::Stride<cute::Int<1>, cute::Int<0>, int>" in each.declarations
    assert each.argument.endswith("{{}, {}, int(call.m)}}}")
    assert "int(call.m)" not in visitor_tree(Epilogue.of(rows), "float32", "2.x", batched=True).argument


@needs_package
@pytest.mark.parametrize(
    ("name", "filled"),
    [("sum_rows", "0x00, sizeof(float) * (call->n)"), ("max_columns", "0xff, sizeof(float) * (call->m)")],
)
def test_the_result_is_filled_before_the_kernel_starts(name: str, filled: str) -> None:
    epilogue = epilogue_of(f"{name}(accum)", "float32")
    (best,) = ProductFamily(gemm(), device_of((8, 0)), epilogue).propose(1)
    text = emit_gemm(best.config, epilogue, gemm())
    assert f"cudaMemsetAsync(call->d, {filled}" in text
    assert text.index("cudaMemsetAsync") < text.index("gemm.run(")
    assert ("struct AtomicMaximum" in text) == name.startswith("max")
    assert "cudaMemsetAsync" not in emit_gemm(best.config, epilogue_of("accum", "float32"), gemm())
    assert "(call->m * call->batch)" not in text
    batched = emit_gemm(best.config, epilogue, replace(gemm(), batch=3))
    assert ("(call->m * call->batch)" in batched) == name.endswith("columns")


@needs_package
@pytest.mark.parametrize("name", STEPS)
def test_a_collective_stores_the_vector_and_no_matrix(name: str) -> None:
    """The reduction is the tree's last visitor; D has no element and no address; the result is filled by us alone."""
    epilogue = epilogue_of(f"{name}(relu(accum + row) * matrix)", "float32")
    family = ProductFamily(gemm(), device_of((9, 0)), epilogue)
    config = next(item.config for item in family.propose() if item.config.generation == "3.x")
    text = family.source(config)
    visitor = f"Sm90{'Row' if name.endswith('rows') else 'Col'}Reduction"
    assert f"using Reduced = ::tvm_ext::StoredAlone<cutlass::epilogue::fusion::{visitor}<" in text
    assert f"    void, LayoutOut, {config.alignment_d}, EpilogueSchedule, EVTReduced>" in text
    assert f"{{d, {REDUCTIONS[name].identity}}}}};" in text
    assert "{epilogue, nullptr, {}, nullptr,\n" in text
    assert text.index("fill_workspace<float>") < text.index("cudaMemsetAsync(call->d") < text.index("gemm.run(")
    assert ("struct AtomicMaximum {" in text) == name.startswith("max")
    plain = epilogue_of("relu(accum + row) * matrix", "float32")
    assert "StoredAlone" not in emit_gemm(config, plain, gemm())


def test_lanes_divide_the_columns_that_they_add_up() -> None:
    """CUTLASS's exchange between lanes, on numbers: right for the widths taken, wrong for those refused."""

    def added(columns: int) -> bool:
        pairs, values = columns // 8, np.arange(8 * (columns // 8), dtype="int64").reshape(8, -1) ** 2
        share = pairs // 8
        if share == 0:
            return True  # every lane adds up all pairs
        lanes, m = values.copy(), pairs // share // 2
        while m > 0:
            before = lanes.copy()
            for lane, r, v in itertools.product(range(8), range(m), range(share)):
                kept, sent = (r, r + m) if not lane & m else (r + m, r)
                other = lane ^ m
                if other > 7:
                    return False
                # Each half keeps the pairs of its own half of the data, and gets those of the other half of the lanes.
                lanes[lane, r * share + v] = before[lane, kept * share + v] + before[other, kept * share + v]
                assert {kept, sent} == {r, r + m}
            m //= 2
        got = {lane * share + v: lanes[lane, v] for lane in range(8) for v in range(share)}
        return len(got) == pairs and all(got[pair] == values[:, pair].sum() for pair in range(pairs))

    family = ProductFamily(gemm(), device_of((9, 0)), epilogue_of("sum_rows(accum)", "float32"))
    taken = {config.threadblock[1] for config in family.legal() if config.generation == "3.x"}
    assert taken and all(map(added, taken))
    refused = set(_COLLECTIVE_WIDTHS) - taken
    assert refused and not any(map(added, refused))


def test_a_vector_may_be_of_any_length_where_a_matrix_is_stored_in_bulk() -> None:
    """Of 1001 columns rows of D, 4004 bytes, are no multiples of 16; a vector is written by element."""
    problem = packed_problem(m=4096, n=1001, k=512, arithmetic="float16", out_dtype="float32", layout_b="column")
    vector, matrix = (
        ProductFamily(problem, device_of((9, 0)), epilogue_of(expression, "float32"))
        for expression in ("max_columns(accum)", "accum")
    )
    assert "3.x" in {config.generation for config in vector.legal()}
    assert {config.generation for config in matrix.legal()} == {"2.x"}


def gemm() -> CutlassProblem:
    m, n, k = SHAPE
    return packed_problem(m=m, n=n, k=k, arithmetic="float16", out_dtype="float32")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_templates_of_whole_tiles_alone_are_proposed(capability: tuple[int, int]) -> None:
    device, epilogue = device_of(capability), epilogue_of("sum_rows(accum)", "float32")
    deep = packed_problem(m=64, n=64, k=65536, arithmetic="float16", out_dtype="float32")
    for problem in (gemm(), deep):
        family = ProductFamily(problem, device, epilogue)
        found = [item.config for item in family.propose()]
        assert found
        generations = {"2.x", "3.x"} if capability == (9, 0) else {"2.x"}
        assert {config.generation for config in found} == generations
        assert {config.split_k for config in found} == {1}
    config = found[0]
    assert "whole ones" in str(family.why_illegal(config.with_split(4)))
    plain = epilogue_of("accum", "float32")
    filled, alone = (ProductFamily(deep, device, item).predict(config).time_us for item in (epilogue, plain))
    assert filled > alone
    assert exchange_bytes(epilogue.reduction, 128, 256, 4) == 8 * 128 * 4


def test_a_region_has_candidates_and_a_result_of_the_vector_s_size() -> None:
    region = region_of("sum_columns")
    assert candidates_of(region, lookup("nvidia-a100"), 2)
    assert buffers_of(region)[-1] == ("float32", SHAPE[0] * 4)
    assert ProductFamily(gemm(), lookup("nvidia-a100"), Epilogue.of(region)).why_none() is None


def test_a_convolution_s_pixels_are_its_rows() -> None:
    """A global sum over images and pixels behind a convolution; not behind a depthwise one."""
    x, w = inputs_of((2, 56, 56, 64), (64, 3, 3, 64), dtype="float16")
    (region,) = decided(module_of([x, w], summed(x, w, 1))).taken
    assert region.expression == "sum_rows(accum)"
    assert candidates_of(region, lookup("nvidia-a100"), 1)
    configs = list(family_of(region, lookup("nvidia-h100")).legal())  # rows that are windows, no collective adds up
    assert configs and not any(config.iterator == "bulk" for config in configs)
    x, w = inputs_of((2, 56, 56, 64), (64, 3, 3, 1), dtype="float16")
    (region,) = decided(module_of([x, w], summed(x, w, 64))).taken
    family = DepthwiseFamily(region.problem, lookup("nvidia-a100"), Epilogue.of(region))
    assert "adds up no rows" in str(family.why_none())
    with pytest.raises(IllegalRewrite, match="adds up no rows"):
        candidates_of(region, lookup("nvidia-a100"))


def summed(x: relax.Var, w: relax.Var, groups: int) -> Any:
    made = op.nn.conv2d(x, w, padding=1, groups=groups, data_layout="NHWC", kernel_layout="OHWI")
    return op.sum(op.astype(made, "float32"), [0, 1, 2])


def test_a_pair_of_products_reduces_nothing() -> None:
    problem = packed_problem(m=4096, n=64, k=64, arithmetic="float16", out_dtype="float16")
    plain, device = epilogue_of("accum", "float16"), lookup("nvidia-a100")
    reduced, stored = (
        PairFamily(problem, device, plain, then=problem, second=epilogue_of(expression, "float32"))
        for expression in ("sum_rows(accum)", "accum")
    )
    assert "no rows or columns are added up" in str(reduced.why_none())
    assert stored.why_none() is None


@pytest.mark.parametrize(
    ("expression", "dtype", "reason"),
    [
        ("sum_rows(accum)", "float16", "reduced to float16"),
        ("relu(sum_rows(accum))", "float32", "no function sum_rows"),
        ("sum_rows(accum, 2)", "float32", "no function sum_rows"),
        ("max_columns(max_rows(accum))", "float32", "no function max_rows"),
    ],
)
def test_a_reduction_is_around_everything_and_in_float32(expression: str, dtype: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Epilogue(expression=expression, out_dtype=dtype)


MAXIMUM_OF = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#define CUTLASS_DEVICE
static int __float_as_int(float x) { int bits; memcpy(&bits, &x, 4); return bits; }
static void atomicMax(int* to, int bits) { *to = std::max(*to, bits); }
static void atomicMin(unsigned* to, unsigned bits) { *to = std::min(*to, bits); }
%s
int main(int count, char** given) {
  float found;
  memset(&found, 0xff, 4);
  for (int i = 1; i < count; ++i) tvm_ext::AtomicMaximum<float>()(&found, strtof(given[i], nullptr));
  printf("%%g", found);
}
"""


def test_the_maximum_in_memory_is_that_of_any_numbers_in_any_order(tmp_path: Path) -> None:
    """The text itself, on the CPU: signs, zeros, infinities, and NaNs of both signs, which stay."""
    source, program = tmp_path / "maximum.cc", tmp_path / "maximum"
    source.write_text(MAXIMUM_OF % ATOMIC_MAXIMUM)
    subprocess.run(["g++", "-w", str(source), "-o", str(program)], check=True, timeout=60)
    cases = {
        ("1", "3", "2"): "3", ("-1", "-3", "-2"): "-1", ("-5", "0", "-2"): "0", ("2", "-7"): "2", ("-inf",): "-inf",
        ("-1e-40", "-1"): "-9.99995e-41", ("inf", "3"): "inf", ("1", "nan", "2"): "nan", ("-nan", "-1", "5"): "nan",
        ("nan", "inf"): "nan", ("-2", "-nan"): "nan",
    }  # fmt: skip
    for given, wanted in cases.items():
        done = subprocess.run([program, *given], capture_output=True, text=True, check=True, timeout=10)
        assert done.stdout == wanted, given


@needs_package
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("arithmetic", ["float16", "float32"])
def test_reductions_compile(name: str, arithmetic: str, capability: tuple[int, int]) -> None:
    """By the tracer's visitors, on matrix units and on vector units, whose maps differ; on sm_90a collectives."""
    m, n, k = SHAPE
    problem = packed_problem(m=m, n=n, k=k, arithmetic=arithmetic, out_dtype="float32")
    epilogue = epilogue_of(f"{name}(relu(accum + row) * matrix)", "float32")
    (best,) = ProductFamily(problem, device_of(capability), epilogue).propose(1)
    assert best.config.generation == ("3.x" if (arithmetic, capability) == ("float16", (9, 0)) else "2.x")
    done = compile_gemm(emit_gemm(best.config, epilogue, problem), architecture_of(capability), time_limit_s=500)
    assert done.image.startswith(b"\x7fELF")
    assert not any(use.spill_store_bytes for use in done.uses)


DESCRIBED = """
extern "C" int32_t described(GemmCall const* call, int64_t* out) {{
  using namespace {space};
  auto const arguments = make_arguments(*call);
  auto const& reduced = arguments.epilogue.thread.op_1;
  *out++ = reinterpret_cast<int64_t>(reduced.ptr_{vector});
  *out++ = reduced.reduction_identity < 0;
  *out++ = cute::get<2>(reduced.d{Vector});
  *out++ = reinterpret_cast<int64_t>(arguments.epilogue.ptr_D);
  *out++ = reinterpret_cast<int64_t>(arguments.mainloop.ptr_A);
  *out++ = reinterpret_cast<int64_t>(arguments.mainloop.ptr_B);
  *out++ = cute::get<0>(arguments.mainloop.dA);
  *out++ = cute::get<2>(arguments.mainloop.dA);
  return int32_t(Gemm::can_implement(arguments));
}}
"""


class GemmCall(ctypes.Structure):
    """`emit.GEMM_CALL`, of C."""

    _fields_ = [
        *((f"number{i}", ctypes.c_int64) for i in range(9)),
        *((f"tuning{i}", ctypes.c_int32) for i in range(4)),
        *((name, ctypes.c_void_p) for name in ("a", "b", "operands", "operand_batches", "d")),
    ]


@needs_package
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch", "distance"), [("sum_rows", 1, 0), ("max_columns", 3, SHAPE[0])])
def test_a_collective_is_told_where_its_vector_lies(name: str, batch: int, distance: int, tmp_path: Path) -> None:
    """On the CPU, from the template's own structure; it asks for no workspace."""
    m, n, k = SHAPE
    problem = packed_problem(m=m, n=n, k=k, arithmetic="float16", out_dtype="float32", batch=batch)
    epilogue = epilogue_of(f"{name}(relu(accum))", "float32")
    family = ProductFamily(problem, device_of((9, 0)), epilogue)
    config = next(item.config for item in family.propose() if item.config.generation == "3.x")
    symbol, vector = family.symbol(config), "row" if name.endswith("rows") else "col"
    described = DESCRIBED.format(space=f"{symbol}_template", vector=vector, Vector=vector.capitalize())
    library = host_library(family.source(config) + described, tmp_path)
    places = {"a": 16 << 20, "b": 32 << 20, "d": 48 << 20}
    none, zeros = (ctypes.c_void_p * 1)(), (ctypes.c_int64 * 1)()
    call = GemmCall(*family.numbers(config), **places)
    call.operands, call.operand_batches = ctypes.addressof(none), ctypes.addressof(zeros)
    found = (ctypes.c_int64 * 8)()
    assert library.described(ctypes.byref(call), found) == 0
    batch_a = m * k if batch > 1 else 0
    assert list(found) == [48 << 20, name.startswith("max"), distance, 0, 16 << 20, 32 << 20, k, batch_a]
    ask = getattr(library, f"{symbol}_workspace_bytes")
    ask.restype = ctypes.c_int64
    assert ask(ctypes.byref(call)) >= 0
    call.number0 = 0
    assert ask(ctypes.byref(call)) == -1


@needs_package
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", ["sum_rows", "max_columns"])
def test_convolutions_with_reductions_compile(name: str) -> None:
    axes = [0, 1, 2] if name == "sum_rows" else [3]
    x, w = inputs_of((2, 56, 56, 64), (64, 3, 3, 64), dtype="float16")
    made = op.astype(op.nn.conv2d(x, w, padding=1, data_layout="NHWC", kernel_layout="OHWI"), "float32")
    (region,) = decided(module_of([x, w], getattr(op, name[:3])(made, axes))).taken
    (best,) = candidates_of(region, lookup("nvidia-a100"), 1)
    assert compile_gemm(best.source(), best.architecture, time_limit_s=500).image.startswith(b"\x7fELF")
