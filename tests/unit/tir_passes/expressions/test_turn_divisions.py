"""Remainders and quotients of mirrored axes, which stock TVM's FlattenBuffer gets wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from tests.unit.kernels import constructed, from_te, run
from tvm_ext._tvm import Analyzer, Var, structural_equal
from tvm_ext.analysis.computations import substitute
from tvm_ext.devices import device_db
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes import construct_kernels
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.expressions.turn_divisions import turn_divisions
from tvm_ext.verify.threads_as_loops import run_threads_as_loops


def const(value: int, dtype: str = "int64") -> Any:
    return tirx.const(value, dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("constant", [-5, -1, 0, 3, 7, 12])
def test_has_the_same_value_and_no_negative_scale(constant: int, divisor: int, dtype: str) -> None:
    x, y = Var("x", dtype), Var("y", dtype)
    for dividend in (
        const(constant, dtype) - x,
        const(constant, dtype) - x * const(3, dtype) - y,
        x * const(-2, dtype),
    ):
        for divide in (tirx.floormod, tirx.floordiv):
            before = (
                tirx.FloorMod(dividend, const(divisor, dtype))
                if divide is tirx.floormod
                else tirx.FloorDiv(dividend, const(divisor, dtype))
            )
            after = turn_divisions(before)
            assert not structural_equal(before, after)
            for value in range(9):
                at = [(x, const(value, dtype)), (y, const(2, dtype))]
                numbers = [int(Analyzer().simplify(substitute(item, at))) for item in (before, after)]
                assert numbers[0] == numbers[1], (before, after, value)


def test_leaves_others_alone() -> None:
    x, y = Var("x", "int64"), Var("y", "int64")
    for dividend in (x, x + const(3), x * const(4) - y, const(9) + y - x):
        for node in (
            tirx.FloorMod(dividend, const(4)),
            tirx.FloorDiv(dividend, const(4)),
            tirx.FloorMod(const(3) - x, y),
        ):
            if "3 - x" not in str(node) or node.b.same_as(y):
                assert structural_equal(turn_divisions(node), node)


def backwards_over_tiles(dtype: str) -> Any:
    """``y[i, j] = x[i, (11 - j) % 4] + x[i, (11 - j) // 4]`` over three tiles of 4."""
    x = te.placeholder((6, 4), name="x")

    def element(i: Any, j: Any) -> Any:
        mirrored = const(11, str(j.ty.dtype)) - j
        four = const(4, str(j.ty.dtype))
        return x[i, tirx.FloorMod(mirrored, four)] + x[i, tirx.FloorDiv(mirrored, four)]

    return from_te(x, te.compute((const(6, dtype), const(12, dtype)), element, "y"))


def expected(x: Any) -> Any:
    mirrored = 11 - np.arange(12)
    return x[:, mirrored % 4] + x[:, mirrored // 4]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_kernels_of_a_backward_slice(dtype: str, rng: np.random.Generator) -> None:
    func, x = backwards_over_tiles(dtype), rng.standard_normal((6, 4), dtype="float32")
    kernel, choice = constructed(func)
    np.testing.assert_array_equal(run(kernel, choice, [x], (6, 12), "float32"), expected(x))
    for row in ("nvidia-a100", "amd-mi50"):
        device = device_db.lookup(row)
        kernel = construct_kernel(func, "operator", device, BuildOptions())
        np.testing.assert_array_equal(run_threads_as_loops(kernel, [x])[0], expected(x))


def test_what_no_emitter_takes_is_turned_as_well(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise IllegalRewrite("a test")

    monkeypatch.setattr(construct_kernels, "_assembled", refuse)
    func, x = backwards_over_tiles("int64"), rng.standard_normal((6, 4), dtype="float32")
    device, target = device_db.device_for_target("llvm")
    kernel = construct_kernel(func, "operator", device, BuildOptions())
    library = tvm.compile(kernel.with_attr("global_symbol", "main"), target=target)
    output = tvm.runtime.tensor(np.zeros((6, 12), "float32"))
    library(tvm.runtime.tensor(x), output)
    np.testing.assert_array_equal(output.numpy(), expected(x))
