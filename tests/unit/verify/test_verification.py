"""`tvm_ext.verify.verify`: what it compares, what it says, and that a wrong kernel fails."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.simt import good_kernels
from tests.unit.float_expressions import EXPRESSIONS, assert_same, function_of, operands
from tests.unit.verify.simt.small_kernels import DEVICE, function, numbers, tensors
from tvm_ext._tvm import Schedule, te, tirx
from tvm_ext.devices.device_db import lookup
from tvm_ext.errors import InputError, TargetError
from tvm_ext.ir.build_ir import index, load, store
from tvm_ext.ir.simt_ir import launch
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.verify import verify
from tvm_ext.verify.cpu_reference import cpu_reference
from tvm_ext.verify.verification import random_array, to_json


def scaled(factor: float = 2.0) -> Any:
    a, b = tensors("A", "B", size=256)
    i = lambda block, t: block * index(64) + t  # noqa: E731
    value = lambda at: load(a, [at]) * tirx.const(factor, "float32")  # noqa: E731
    return function([a, b], launch(4, 64, lambda block, t: store(b, value(i(block, t)), [i(block, t)])))


def operator() -> Any:
    """Row sums, not scheduled."""
    x = te.placeholder((32, 64), "float32", "X")
    k = te.reduce_axis((0, 64), "k")
    return te.create_prim_func([x, te.compute((32,), lambda i: te.sum(x[i, k], axis=k), "S")])


def scheduled() -> Any:
    schedule = Schedule(operator())
    i, k = schedule.get_loops("S")
    schedule.bind(i, "blockIdx.x")
    _, inner = schedule.split(k, [None, 32])
    schedule.bind(inner, "threadIdx.x")
    return schedule.mod


def test_threads_as_loops_are_the_default_reference() -> None:
    result = verify(scaled(), DEVICE)
    assert result.ok and not result.no_reference
    (error,) = result.errors
    assert (error.name, error.tolerance) == ("B", 1e-4) and error.error < 1e-6


def test_inputs_and_references_of_the_callers_own() -> None:
    result = verify(scaled(3.0), DEVICE, inputs={"A": numbers(256)}, reference=lambda x: {"B": x["A"] * 3})
    assert result.ok and np.array_equal(result.outputs["B"], numbers(256) * 3)


def test_wrong_values_are_no_pass() -> None:
    result = verify(scaled(3.0), lookup(DEVICE), reference=lambda x: {"B": x["A"] * 2})
    assert not result.ok and not result.findings
    assert result.errors[0].error == pytest.approx(0.5, rel=0.1)
    assert verify(scaled(3.0), DEVICE, reference=lambda x: {"B": x["A"] * 2}, rtol=0.9).ok


def test_an_operator_on_the_cpu_is_a_reference() -> None:
    result = verify(scheduled(), DEVICE, reference=cpu_reference(operator()))
    assert result.ok and len(result.errors) == 1, result


def test_parameters_of_one_name_are_two_tensors() -> None:
    """As in x * x, which stock TVM makes an operator of two parameters, both called x."""
    a, b = (te.placeholder((64,), "float32", "x") for _ in range(2))
    product = te.create_prim_func([a, b, te.compute((64,), lambda i: a[i] * b[i], "y")])
    kernel = construct_kernel(product, "multiply", lookup(DEVICE), BuildOptions())
    result = verify(kernel, DEVICE, reference=cpu_reference(product))
    assert result.ok and len(result.errors) == 1, result


def test_some_blocks_only() -> None:
    result = verify(scaled(), DEVICE, blocks=[0, 3])
    assert result.ok and np.isnan(result.outputs["B"][64:192]).all() and not np.isnan(result.outputs["B"][:64]).any()


def test_no_reference_is_said() -> None:
    softmax = next(k for k in good_kernels.simt_kernels() if k.name == "softmax")
    result = verify(softmax.function, DEVICE, seed=3)
    assert result.ok
    assert bool(result.errors) != bool(result.no_reference)


def test_seeds_make_inputs() -> None:
    first, again, other = (verify(scaled(), DEVICE, seed=seed).outputs["B"] for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "bool"])
def test_random_inputs_of_every_type(dtype: str) -> None:
    array = random_array((3, 5), dtype, np.random.default_rng(0))
    assert array.shape == (3, 5) and str(array.dtype) == dtype and len(np.unique(array.astype(np.float64))) > 1


def test_it_prints() -> None:
    result = verify(scaled(3.0), DEVICE, reference=lambda x: {"B": x["A"] * 2})
    text = str(result)
    assert "NOT ok" in text and "B: error" in text and "bank conflicts: 0" in text
    console = Console(file=StringIO(), width=200)
    console.print(result)
    assert isinstance(console.file, StringIO)
    assert "global load" in console.file.getvalue() and "100%" in console.file.getvalue()
    data = json.loads(to_json(result))
    assert data["ok"] is False and data["sector_efficiency_of_loads"] == 1.0 and len(data["accesses"]) == 2


def test_wrong_arguments() -> None:
    with pytest.raises(InputError, match="no parameter 'C'"):
        verify(scaled(), DEVICE, inputs={"C": numbers(256)})
    with pytest.raises(InputError, match="no kernel writes 'A'"):
        verify(scaled(), DEVICE, reference=lambda x: {"A": x["A"]})
    with pytest.raises(TargetError, match="nvidia-a10000"):
        verify(scaled(), "nvidia-a10000")


def test_the_reference_of_half_precision_is_not_in_half_precision() -> None:
    """The sum of 4096 ones is 4096; summed in float16 it would stop at 2048, where the next number is 2050."""
    x = te.placeholder((2, 4096), "float16", "X")
    k = te.reduce_axis((0, 4096), "k")
    long_sums = te.create_prim_func([x, te.compute((2,), lambda i: te.sum(x[i, k], axis=k), "S")])
    assert cpu_reference(long_sums)({"X": np.ones((2, 4096), np.float16)})["S"].tolist() == [4096.0, 4096.0]


@pytest.mark.parametrize("name", [*(name for name in EXPRESSIONS if name.startswith(("max", "min"))), "x + C - C"])
def test_floats_are_no_reals_in_the_reference(name: str) -> None:
    """Stock TVM's max(NaN, y) is y, and (x + C) - C is x."""
    expression, reference = EXPRESSIONS[name]
    x, y = operands("float32")
    found = cpu_reference(function_of(expression, "float32", len(x)))({"x": x, "y": y})["z"]
    with np.errstate(all="ignore"):
        assert_same(name, found, np.asarray(reference(x, y)).astype("float32"))


def test_a_kernel_of_the_callers_own_keeps_the_number_beside_a_nan() -> None:
    """CUDA's max has the number where one operand is NaN, on either side; its threads as loops have it too."""
    a, b, c = tensors("A", "B", "C", size=64)
    body = launch(1, 64, lambda _, t: store(c, tirx.Max(load(a, [t]), load(b, [t])), [t]))
    first, second = numbers(64), numbers(64)[::-1].copy()
    first[::3] = second[1::3] = np.nan
    result = verify(function([a, b, c], body), DEVICE, inputs={"A": first, "B": second})
    assert result.ok and result.errors, str(result)
    assert np.array_equal(result.outputs["C"], np.fmax(first, second))


@pytest.mark.parametrize(("stored", "tolerance"), [("float16", 1e-2), ("float32", 1e-4)])
def test_the_tolerance_is_that_of_what_was_computed_in(stored: str, tolerance: float) -> None:
    """Sums of products of halves, kept as ``stored`` and cast to float32 at the end; halves that are read are exact."""
    x, y = (te.placeholder((32, 32), "float16", name) for name in "XY")
    k = te.reduce_axis((0, 32), "k")
    wide = lambda value: value if stored == "float16" else value.astype("float32")  # noqa: E731
    padded = te.compute((32, 33), lambda i, j: tirx.if_then_else(j < 32, x[i, j], tirx.const(0, "float16")), "padded")
    total = te.compute((32, 32), lambda i, j: te.sum(wide(padded[i, k]) * wide(y[k, j]), axis=k), "total")
    func = te.create_prim_func([x, y, te.compute((32, 32), lambda i, j: total[i, j].astype("float32"), "S")])
    kernel = construct_kernel(func, "product", lookup(DEVICE), BuildOptions())
    result = verify(kernel, DEVICE, reference=cpu_reference(func))
    assert result.ok and [error.tolerance for error in result.errors] == [tolerance]
    assert (result.errors[0].error > 1e-4) == (stored == "float16")
