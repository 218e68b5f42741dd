"""Chains of products as one GPU kernel: their numbers in the interpreter and in OpenCL, their structure, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te, topi

from tests.support import opencl_cpu
from tests.support.pipelining.check import cuda_source
from tests.support.product_chains import (
    EPILOGUES,
    Layer,
    Products,
    chain,
    convolution_chain,
    function_of,
    group_of,
    inputs_of,
    kernel_of,
    reference_of,
)
from tests.unit.compilers import needs_nvcc
from tests.unit.kernels import relative_error
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.toolchains.cuda_toolchain import compile_cuda
from tvm_ext.verify import simt, verify
from tvm_ext.verify.cpu_reference import cpu_reference

AMPERE, HOPPER, VOLTA, TURING, AMD = "nvidia-a100", "nvidia-h200", "nvidia-v100", "nvidia-t4", "amd-mi50"
MI210, MI300X = "amd-mi210", "amd-mi300x"
ROUNDING = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-6}
"""Relative errors by norm: of the values between the products and of the result, each rounded once."""


def check(case: Products, device: str, residence: str | None = None) -> Any:
    """Emit, lower, interpret, compare; returns the interpreter's counters."""
    func = function_of(case)
    made, _ = kernel_of(func, device, lambda tile: residence in (None, tile.residence))
    inputs = inputs_of(func)
    report = simt.run(simt.lower(made, device), inputs, device=device)
    assert report.ok, [str(finding) for finding in report.findings][:3]
    output = list(func.params)[-1].name
    assert report.written[output].all()
    assert relative_error(report.outputs[output], reference_of(case, inputs)) <= ROUNDING[case.dtype]
    return report.counters


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("residence", ["registers", "shared memory"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matrix_units_keep_values_in_registers_or_in_shared_memory(residence: str, dtype: str) -> None:
    counters = check(chain(96, 64, 48, 32, dtype=dtype), AMPERE, residence)
    assert counters.bank_conflicts == 0
    assert counters.mma_count > 0


@pytest.mark.sampled
@pytest.mark.parametrize("residence", ["registers", "shared memory"])
@pytest.mark.parametrize("sizes", [(37, 21, 45), (16, 16, 16), (8, 100, 3, 17)], ids=str)
def test_matrix_units_and_sizes_that_no_fragment_divides(residence: str, sizes: tuple[int, ...]) -> None:
    check(chain(45, *sizes), AMPERE, residence)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("device", [VOLTA, TURING])
@pytest.mark.parametrize("sizes", [(64, 48, 32), (37, 21, 45), (8, 100, 3, 17)], ids=str)
def test_wmma_keeps_values_in_shared_memory(device: str, sizes: tuple[int, ...]) -> None:
    counters = check(chain(45, *sizes), device)
    assert counters.mma_count > 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("device", [MI210, MI300X])
@pytest.mark.parametrize("epilogue", ["bias_relu", "residual"])
@pytest.mark.parametrize("sizes", [(64, 48, 32), (37, 21, 45)], ids=str)
def test_mfma_keeps_values_in_shared_memory(device: str, epilogue: str, sizes: tuple[int, ...]) -> None:
    counters = check(chain(45, *sizes, epilogue=epilogue), device, "shared memory")
    assert counters.mma_count > 0


@pytest.mark.sampled
@pytest.mark.parametrize("device", [VOLTA, AMD])
@pytest.mark.parametrize("sizes", [(16, 32, 16), (37, 21, 45), (5, 1, 4)], ids=str)
def test_vector_units(device: str, sizes: tuple[int, ...]) -> None:
    counters = check(chain(70, *sizes, dtype="float32"), device)
    assert counters.bank_conflicts == 0


def test_halves_on_vector_units_are_computed_in_floats() -> None:
    check(chain(70, 5, 1, 4), AMPERE)


@pytest.mark.sampled
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_epilogues(epilogue: str, dtype: str) -> None:
    check(chain(40, 24, 20, 12, epilogue=epilogue, dtype=dtype), AMPERE)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_transposed_factors(dtype: str) -> None:
    layers = (Layer(columns=32, transposed=True), Layer(columns=24, transposed=True))
    check(Products(rows=48, depth=40, layers=layers, dtype=dtype, transposed_input=True), AMPERE)


def test_products_that_are_rounded_before_their_epilogue() -> None:
    check(chain(48, 32, 32, 16, wide=False), AMPERE)


@pytest.mark.parametrize("residence", ["registers", "shared memory"])
def test_factors_that_are_staged_in_steps(residence: str) -> None:
    case = chain(32, 32, 96, 32)
    func = function_of(case)
    made, _ = kernel_of(func, AMPERE, lambda tile: tile.residence == residence and tile.products[1].steps == 3)
    report = simt.run(simt.lower(made, AMPERE), inputs_of(func), device=AMPERE)
    assert report.ok, [str(finding) for finding in report.findings][:3]
    output = list(func.params)[-1].name
    assert relative_error(report.outputs[output], reference_of(case, inputs_of(func))) <= ROUNDING["float16"]
    assert report.counters.bank_conflicts == 0


@pytest.mark.sampled
@pytest.mark.parametrize(("device", "dtype"), [(AMPERE, "float16"), (VOLTA, "float32")])
@pytest.mark.parametrize(("size", "stride"), [(9, 2), (6, 1)])
def test_convolutions_and_1x1_ones(device: str, dtype: str, size: int, stride: int) -> None:
    func = convolution_chain(2, size, (16, 24, 32, 8), stride=stride, dtype=dtype)
    made, _ = kernel_of(func, device)
    done = verify(made, device, inputs=inputs_of(func), reference=cpu_reference(func))
    assert done.ok, str(done)


def test_a_first_convolution_of_three_channels() -> None:
    func = convolution_chain(1, 8, (3, 48, 48))
    done = verify(kernel_of(func, AMPERE)[0], AMPERE, inputs=inputs_of(func), reference=cpu_reference(func))
    assert done.ok, str(done)


def test_the_pass_makes_one_launch_with_loads_ahead() -> None:
    func = function_of(chain(64, 128, 64, 32))
    made = construct_kernel(func, "chain", device_db.lookup(AMPERE), BuildOptions(enable_persistent_fusion=True))
    choice = from_json(KernelChoice, str(made.attrs[CHOICE]))
    assert [plan.launches for plan in choice.gpu] == [1]
    assert "product0 + product1 in one kernel on matrix units" in choice.reason
    assert "A_shared in" in choice.reason and "stages" in choice.reason
    done = verify(made, AMPERE, inputs=inputs_of(func), reference=cpu_reference(func))
    assert done.ok, str(done)


def _launches(made: Any) -> int:
    return sum(plan.launches for plan in from_json(KernelChoice, str(made.attrs[CHOICE])).gpu)


def test_products_have_a_kernel_each_where_that_is_asked_for_or_the_compiler_refuses_the_chain() -> None:
    func, device = function_of(chain(64, 128, 64, 32)), device_db.lookup(AMPERE)
    apart = construct_kernel(func, "chain", device, BuildOptions(enable_persistent_fusion=False))
    assert _launches(apart) == 2

    def accept(body: Any) -> None:
        if str(body).count("blockIdx.x") < str(apart).count("blockIdx.x"):
            raise IllegalRewrite("spills")

    refused = construct_kernel(func, "chain", device, BuildOptions(enable_persistent_fusion=True), accept=accept)
    assert _launches(refused) == 2
    assert "spills" in from_json(KernelChoice, str(refused.attrs[CHOICE])).reason


@pytest.mark.sampled(every=2)
@pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=f"{opencl_cpu.why_not()}")
@pytest.mark.parametrize("sizes", [(16, 32, 16), (37, 21, 45), (5, 1, 4), (12, 8, 8, 8)], ids=str)
def test_opencl_on_the_cpu(sizes: tuple[int, ...]) -> None:
    case = chain(70, *sizes, dtype="float32")
    func = function_of(case)
    made, _ = kernel_of(func, AMD)
    inputs = inputs_of(func)
    (result,) = opencl_cpu.run_opencl(made, list(inputs.values()))
    assert relative_error(result, reference_of(case, inputs)) <= ROUNDING["float32"]


# ---- random chains --------------------------------------------------------------------------------------------------

LAYERS = st.builds(Layer, columns=st.integers(1, 72), epilogue=st.sampled_from(EPILOGUES), transposed=st.booleans())
CASES = st.builds(
    Products,
    rows=st.integers(1, 150),
    depth=st.integers(1, 100),
    layers=st.lists(LAYERS, min_size=2, max_size=4).map(tuple),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    wide=st.booleans(),
    transposed_input=st.booleans(),
)


def _check_random(case: Products, data: st.DataObject) -> None:
    """A random chain in any of its tiles: right, or refused with a reason."""
    func = function_of(case)
    devices = {"float32": [AMPERE, VOLTA, AMD], "float16": [AMPERE, VOLTA, TURING], "bfloat16": [AMPERE]}
    device = data.draw(st.sampled_from(devices[case.dtype]))
    group = group_of(func, device)
    if isinstance(group, list):  # without a word where a product of extents 1 is no product to begin with
        assert all("apart" in reason for reason in group)
        return
    rank = data.draw(st.integers(0, len(group.ranked) - 1))
    made, _ = kernel_of(func, device, lambda tile: tile == group.ranked[rank][0])
    inputs = inputs_of(func)
    report = simt.run(simt.lower(made, device), inputs, device=device)
    assert report.ok, [str(finding) for finding in report.findings][:3]
    output = list(func.params)[-1].name
    assert report.written[output].all()
    rounding = ROUNDING[case.dtype] * len(case.layers)
    assert relative_error(report.outputs[output], reference_of(case, inputs)) <= rounding


@given(case=CASES, data=st.data())
@settings(max_examples=6, deadline=None)
def test_random_chains(case: Products, data: st.DataObject) -> None:
    _check_random(case, data)


@pytest.mark.slow
@given(case=CASES, data=st.data())
@settings(max_examples=400, deadline=None)
def test_many_random_chains(case: Products, data: st.DataObject) -> None:
    _check_random(case, data)


# ---- what is no chain -----------------------------------------------------------------------------------------------


def _reason(func: Any, device: str = AMPERE, *, always: bool = True) -> str:
    reasons = group_of(func, device, always=always)
    assert isinstance(reasons, list)
    return "; ".join(reasons)


def test_columns_that_do_not_stay_in_a_threadblock() -> None:
    assert "columns do not stay in a threadblock" in _reason(function_of(chain(64, 64, 3072, 768)))


def test_a_chain_that_arithmetic_binds_is_left_apart() -> None:
    func = function_of(chain(4096, 1024, 128, 128, dtype="float32"))
    assert "bound by arithmetic" in _reason(func, always=False)
    assert not isinstance(group_of(func, AMPERE), list)  # legal all the same


def test_a_value_that_others_read_is_stored() -> None:
    x, w0, w1 = (te.placeholder((32, 32), "float16", name) for name in ("X", "W0", "W1"))
    first, second = topi.matmul(x, w0), None
    second = topi.matmul(first, w1)
    both = te.compute((32, 32), lambda i, j: first(i, j) + second(i, j), "both")
    assert isinstance(group_of(te.create_prim_func([x, w0, w1, both]), AMPERE), list)
    assert isinstance(group_of(te.create_prim_func([x, w0, w1, first, second]), AMPERE), list)


def test_a_product_that_reads_rows_around_its_own() -> None:
    x = te.placeholder((1, 8, 8, 16), "float16", "X")
    w0, w1 = (te.placeholder((3, 3, 16, 16), "float16", name) for name in ("W0", "W1"))
    first = topi.nn.conv2d_nhwc(x, w0, 1, 0, 1)
    second = topi.nn.conv2d_nhwc(first, w1, 1, 0, 1)
    assert "apart" in _reason(te.create_prim_func([x, w0, w1, second]))


def test_a_function_that_one_element_alone_is_read_of() -> None:
    """It is computed where it is read: the second product multiplies a function of what the first one makes."""
    layers = (Layer(columns=1, epilogue="tanh"), Layer(columns=1, epilogue=""))
    case = Products(rows=2, depth=1, layers=layers, dtype="bfloat16", wide=False)
    func = function_of(case)
    assert "product1 multiplies something else" in _reason(func)
    made = construct_kernel(
        func, "chain", device_db.lookup(AMPERE), BuildOptions(enable_persistent_fusion=True)
    ).with_attr("global_symbol", "main")
    inputs = inputs_of(func)
    result = simt.run(simt.lower(made, AMPERE), inputs, device=AMPERE)
    assert result.ok and relative_error(result.outputs["product1"], reference_of(case, inputs)) <= ROUNDING["bfloat16"]


def test_a_value_that_is_the_second_factor_of_the_next_product() -> None:
    """W1 . (X . W0) is the chain of the transposed products, (W0' . X') . W1', whose results lie across memory."""
    x, w0, w1 = (
        te.placeholder(shape, "float16", name) for shape, name in (((24, 40), "X"), ((40, 56), "W0"), ((16, 24), "W1"))
    )
    func = te.create_prim_func([x, w0, w1, topi.matmul(w1, topi.matmul(x, w0))])
    inputs = inputs_of(func)
    done = verify(kernel_of(func, AMPERE)[0], AMPERE, inputs=inputs, reference=cpu_reference(func))
    assert done.ok, str(done)
    assert "one by one" in _reason(func, always=False)


def test_types_that_chains_are_not_of() -> None:
    assert "chains are of" in _reason(function_of(chain(32, 32, 32, 32, dtype="float64", wide=False, epilogue="")))


# ---- compilers ------------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize(
    ("device", "architecture", "case"),
    [
        (AMPERE, "sm_80", chain(16384, 256, 64, 16)),
        pytest.param(AMPERE, "sm_80", chain(128320, 96, 32, 96, epilogue="bias_gelu"), marks=pytest.mark.slow),
        pytest.param(AMPERE, "sm_80", chain(4096, 64, 64, 64, 64, dtype="bfloat16"), marks=pytest.mark.slow),
        pytest.param(HOPPER, "sm_90a", chain(32768, 576, 128, 64), marks=pytest.mark.slow),
        pytest.param(TURING, "sm_75", chain(16384, 256, 64, 16), marks=pytest.mark.slow),
        pytest.param(VOLTA, "sm_75", chain(8192, 16, 16, 16, dtype="float32"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_nothing_spills(device: str, architecture: str, case: Products) -> None:
    options = BuildOptions(enable_persistent_fusion=True)
    made = construct_kernel(function_of(case), "chain", device_db.lookup(device), options)
    choice = from_json(KernelChoice, str(made.attrs[CHOICE]))
    assert "in one kernel" in choice.reason
    (use,) = compile_cuda(cuda_source(made, architecture), [architecture]).uses
    assert use.spill_store_bytes == use.spill_load_bytes == use.stack_bytes == 0
