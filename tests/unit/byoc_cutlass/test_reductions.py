"""Epilogues that leave a vector: sums and maxima over all rows or all columns, from the graph to the kernel's text."""

from __future__ import annotations

import ast
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
from tests.unit.compilers import needs_nvcc
from tvm_ext.byoc_cutlass.depthwise import DepthwiseFamily
from tvm_ext.byoc_cutlass.emit import emit_gemm
from tvm_ext.byoc_cutlass.epilogue import ATOMIC_MAXIMUM, REDUCTIONS, Epilogue, exchange_bytes
from tvm_ext.byoc_cutlass.evt import visitor_tree
from tvm_ext.byoc_cutlass.gemm import packed_problem
from tvm_ext.byoc_cutlass.pairs import PairFamily
from tvm_ext.byoc_cutlass.products import ProductFamily
from tvm_ext.byoc_cutlass.profiler import buffers_of
from tvm_ext.byoc_cutlass.selection import candidates_of
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
        assert {(config.generation, config.split_k) for config in found} == {("2.x", 1)}
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
    """By the tracer's visitors, on matrix units and on vector units, whose thread maps differ."""
    m, n, k = SHAPE
    problem = packed_problem(m=m, n=n, k=k, arithmetic=arithmetic, out_dtype="float32")
    epilogue = epilogue_of(f"{name}(relu(accum + row) * matrix)", "float32")
    (best,) = ProductFamily(problem, device_of(capability), epilogue).propose(1)
    done = compile_gemm(emit_gemm(best.config, epilogue, problem), architecture_of(capability), time_limit_s=500)
    assert done.image.startswith(b"\x7fELF")


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
