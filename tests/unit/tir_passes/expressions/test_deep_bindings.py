"""What a function of many steps binds becomes stores: nothing is left to look through, and the values are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T  # noqa: N812 - as everywhere

from tvm_ext._tvm import BufferStore, TensorLoad, structural_map, structural_walk, tirx
from tvm_ext.ir.float_ir import bound
from tvm_ext.tir_passes.expressions import deep_bindings
from tvm_ext.tir_passes.expressions.deep_bindings import MOST_COPIES, MOST_GUARDED_COPIES, store_deep_bindings
from tvm_ext.tir_passes.expressions.vector_math import expand_math

LANES = 16


@T.prim_func(s_tir=True)
def erf_of_sums(x: T.Buffer((LANES,)), y: T.Buffer((LANES,)), z: T.Buffer((LANES,))):
    for lane in T.vectorized(LANES):
        z[lane] = T.erf(x[lane] + y[lane]) * x[lane]


@T.prim_func(s_tir=True)
def tanh_of_one(x: T.Buffer((1,)), z: T.Buffer((1,))):
    z[0] = T.tanh(x[0])


@T.prim_func(s_tir=True)
def exp_of_one(x: T.Buffer((1,)), z: T.Buffer((1,))):
    z[0] = T.exp(x[0])


@T.prim_func(s_tir=True)
def erf_where_it_is_there(x: T.Buffer((4,)), z: T.Buffer((LANES,))):
    for lane in T.vectorized(LANES):
        z[lane] = T.if_then_else(lane < 4, T.erf(x[lane]), T.float32(0))


@T.prim_func(s_tir=True)
def one_where_it_is_there(x: T.Buffer((4,)), z: T.Buffer((LANES,))):
    for place in range(LANES):
        z[place] = T.if_then_else(place < 4, x[place], T.float32(7))


def copies_in(body: object) -> int:
    counts = [0]
    structural_walk(body, (BufferStore, lambda item: counts.append(deep_bindings._most_copies(item.value))))
    return max(counts)


def bindings_in(body: object) -> int:
    found: list[bool] = []
    structural_walk(body, (tirx.Let, lambda _: found.append(True)))
    return len(found)


@pytest.mark.parametrize("func", [erf_of_sums, tanh_of_one])
def test_deep_steps_become_stores(func: tirx.PrimFunc) -> None:
    expanded = expand_math(func.body)
    assert copies_in(expanded) > MOST_COPIES
    assert bindings_in(store_deep_bindings(expanded)) == 0


def test_few_steps_stay() -> None:
    expanded = expand_math(exp_of_one.body)
    assert 0 < copies_in(expanded) <= MOST_COPIES
    assert store_deep_bindings(expanded).same_as(expanded)


def test_what_a_condition_guards_stays() -> None:
    expanded = expand_math(erf_where_it_is_there.body)
    assert store_deep_bindings(expanded).same_as(expanded)


def test_what_would_take_minutes_becomes_stores_behind_its_condition() -> None:
    """Ten steps, one around the other, as of quantised operators: a copy for each way through them."""

    def stepped(value: Any) -> Any:
        less = tirx.const(0.75, "float32")
        for _ in range(10):
            value = bound(value * less, lambda t: tirx.Select(t < tirx.const(0.5, "float32"), t, t * less))
        return value

    deep = structural_map(one_where_it_is_there.body, (TensorLoad, stepped))
    assert copies_in(deep) > MOST_GUARDED_COPIES
    body = store_deep_bindings(deep)
    assert bindings_in(body) == 0
    named = one_where_it_is_there.with_body(body).with_attr("global_symbol", "main")
    x, out = np.array([-1, 0, 3, 200], "float32"), tvm.runtime.tensor(np.zeros(LANES, "float32"))
    tvm.compile(tvm.IRModule({"main": named}), target="llvm")["main"](tvm.runtime.tensor(x), out)
    for _ in range(10):
        x = x * np.float32(0.75)
        x = np.where(x < 0.5, x, x * np.float32(0.75))
    np.testing.assert_allclose(out.numpy(), [*x, *[7.0] * (LANES - 4)], rtol=1e-6)


@pytest.mark.parametrize("func", [erf_of_sums, tanh_of_one])
def test_values_are_the_same(func: tirx.PrimFunc) -> None:
    expanded = expand_math(func.body)
    rng = np.random.default_rng(0)
    sizes = [int(param.ty.shape[0]) for param in func.params]
    inputs = [rng.standard_normal(size).astype("float32") for size in sizes[:-1]]
    outputs = []
    for body in (expanded, store_deep_bindings(expanded)):
        named = func.with_body(body).with_attr("global_symbol", "main")
        out = tvm.runtime.tensor(np.zeros(sizes[-1], "float32"))
        tvm.compile(tvm.IRModule({"main": named}), target="llvm")["main"](*map(tvm.runtime.tensor, inputs), out)
        outputs.append(out.numpy())
    np.testing.assert_array_equal(*outputs)
