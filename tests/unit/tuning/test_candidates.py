"""Candidates drawn from every kind of space compute what the operator does: random operators, chains and attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te, topi

from tests.support.attentions import drawn
from tests.support.random_operators.check import constants
from tests.support.random_operators.draw import SLOTS, draw_case
from tests.support.random_operators.relax_module import module_of
from tests.support.tuned_candidates import CheckedKernel, check_candidates, check_function, plan_for
from tests.unit.chain_modules import Conv, conv_chain, gemm_chain, random_conv_chain, random_gemm_chain
from tvm_ext.analysis.tile_workload import ATTENTION, CHAINS, JOINT, ROWS, TILES, WINDOWS
from tvm_ext.records.attention import ATTENTION as ATTRIBUTE
from tvm_ext.records.serialise import to_json
from tvm_ext.relay_passes.attention.definition import attention

SLOT_OF = {kind: number for number, (kind, _) in reversed(list(enumerate(SLOTS)))}
EVERYDAY = {"conv2d_depthwise": 1, "max_pool": 2, "pool_image": 1, "conv2d": 2}


def of_operator(seed: int, index: int, count: int) -> list[CheckedKernel]:
    case = draw_case(seed, index)
    return check_candidates(module_of(case), constants(case), plan_for(case.num_threads), count=count, seed=index)


def right(found: list[CheckedKernel]) -> set[str]:
    """The kinds of the kernels."""
    assert not [problem for item in found for problem in item.problems]
    assert all(item.checked for item in found)
    return {item.kind for item in found}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("kind", EVERYDAY)
def test_candidates_of_random_operators_are_right(kind: str) -> None:
    right(of_operator(EVERYDAY[kind], SLOT_OF[kind], 3))


def test_candidates_of_a_chain_are_right() -> None:
    chain, plan = gemm_chain(70, (17, 24, 17), ("bias relu", "none")), plan_for(2, enable_persistent_fusion=True)
    assert right(check_candidates(chain.mod, {}, plan, count=3)) == {CHAINS}


def product_of(left: Any, right: Any, name: str) -> Any:
    k = te.reduce_axis((0, left.shape[1]), f"k_{name}")
    return te.compute((left.shape[0], right.shape[1]), lambda i, j: te.sum(left[i, k] * right[k, j], k), name)


def two_products(rows: int, columns: int, depths: tuple[int, int]) -> Any:
    """``a @ b + x @ y`` as one operator."""
    shapes = [shape for depth in depths for shape in ((rows, depth), (depth, columns))]
    a, b, x, y = (te.placeholder(shape, "float32", f"t{number}") for number, shape in enumerate(shapes))
    one, other = product_of(a, b, "one"), product_of(x, y, "other")
    total = te.compute((rows, columns), lambda i, j: one[i, j] + other[i, j], "total")
    return te.create_prim_func([a, b, x, y, total])


def test_candidates_of_two_products_in_one_kernel_are_right() -> None:
    found = check_function(two_products(9, 20, (8, 5)), "products", plan_for(2), count=2)
    assert found is not None
    assert right([found]) == {JOINT}


def test_candidates_of_rows_are_right() -> None:
    x = te.placeholder((37, 203), "float32", "x")
    found = check_function(te.create_prim_func([x, topi.nn.softmax(x)]), "softmax", plan_for(2), count=5)
    assert found is not None
    assert right([found]) == {ROWS}


def check_attention(seed: int, count: int) -> None:
    work = drawn(np.random.default_rng(seed))
    tensors = [te.placeholder((item.size,), item.dtype, f"x{place}") for place, item in enumerate(work.operands[:-1])]
    func = te.create_prim_func([*tensors, attention(*tensors, work=work)]).with_attr(ATTRIBUTE, to_json(work))
    found = check_function(func, "attention", plan_for(1 + seed % 2), count=count, seed=seed)
    assert found is not None
    assert right([found]) == {ATTENTION}


def test_candidates_of_an_attention_are_right() -> None:
    check_attention(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 60))
def test_candidates_of_many_random_attentions_are_right(seed: int) -> None:
    check_attention(seed, 5)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_candidates_of_a_chain_of_convolutions_are_right(threads: int) -> None:
    chain = conv_chain((1, 8, 23, 19), Conv(filters=24, kernel=3, stride=2, padding=1), Conv(filters=16))
    plan = plan_for(threads, enable_persistent_fusion=True)
    assert right(check_candidates(chain.mod, {}, plan, count=4)) == {CHAINS}


@pytest.mark.slow
@pytest.mark.parametrize("index", range(400))
def test_candidates_of_many_random_operators_are_right(index: int) -> None:
    assert right(of_operator(7, index, 5)) <= {TILES, WINDOWS, CHAINS, ATTENTION, ROWS, JOINT}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_candidates_of_many_random_chains_are_right(seed: int) -> None:
    plan = plan_for(1 + seed % 2, enable_persistent_fusion=True)
    for chain in (random_gemm_chain(seed), random_conv_chain(seed)):
        right(check_candidates(chain.mod, {}, plan, count=5, seed=seed))
