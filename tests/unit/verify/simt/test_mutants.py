"""The proof of the prover: correct kernels are not accused, and every harmful mutant of them is caught."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from tests.support.pipelining.schedules import stock_three_stages, tensor_core_matmul
from tests.support.simt.good_kernels import GoodKernel, simt_kernels
from tests.support.simt.good_kernels_tensor import tensor_core_kernels
from tests.support.simt.mutate import KINDS, mutants
from tests.unit.verify.simt.judge import SYNCHRONISATION, check, harm_of, interpreted, judge, lowered
from tvm_ext._tvm import structural_equal

EVERY = 23  # of every second kernel's mutants that are not about synchronisation, the everyday run tries each 23rd


@cache
def all_kernels() -> dict[str, GoodKernel]:
    return {kernel.name: kernel for kernel in (*simt_kernels(), *tensor_core_kernels())}


NAMES = tuple(all_kernels())


@pytest.mark.parametrize("name", NAMES)
def test_no_good_kernel_is_accused(name: str) -> None:
    kernel = all_kernels()[name]
    kernels, expected = lowered(kernel), kernel.reference(*kernel.inputs())
    assert interpreted(kernel, kernels, expected) == ((), False)


@pytest.mark.parametrize("name", NAMES)
def test_the_judge_does_not_accuse_good_kernels(name: str) -> None:
    kernel = all_kernels()[name]
    assert harm_of(kernel, lowered(kernel), kernel.reference(*kernel.inputs())) == frozenset()


def test_harmful_mutants_are_caught() -> None:
    judged = [one for kernel in list(all_kernels().values())[::2] for one in judge(kernel, every=EVERY)]
    check(judged)
    harmful = Counter(one.mutant.kind for one in judged if one.harm)
    assert set(harmful) > set(SYNCHRONISATION)
    assert harmful.total() >= 50
    accused = [str(one) for one in judged if not one.harm and (one.findings or one.wrong_values)]
    assert not accused, "mutants that do no harm and are accused:\n" + "\n".join(accused)


@pytest.mark.slow
def test_all_harmful_mutants_are_caught() -> None:
    judged = [one for kernel in all_kernels().values() for one in judge(kernel)]
    check(judged)
    harmful = Counter(one.mutant.kind for one in judged if one.harm)
    assert set(harmful) == set(KINDS), "every kind of mistake does harm somewhere"
    assert harmful.total() >= 800


def test_findings_name_the_kind_of_mistake() -> None:
    kernel = all_kernels()["matmul_shared"]
    found = [one.findings for one in judge(kernel, kinds=("remove_barrier",))]
    assert [set(kinds) for kinds in found] == [{"loop-carried hazard"}, {"read-write race"}]
    pipelined = all_kernels()["matmul_three_stages"]
    for one in judge(pipelined, kinds=("change_wait", "drop_commit")):
        assert ("unlanded copy" in one.findings) == bool(one.harm), str(one)
    for one in judge(kernel, kinds=("diverge_barrier",)):
        assert "barrier divergence" in one.findings


def test_mutants_differ_from_what_they_are_made_of() -> None:
    for kernel in all_kernels().values():
        for part in lowered(kernel):
            text = str(part.function)
            made = list(mutants(part.function))
            assert made
            assert not [m.change for m in made if structural_equal(m.function, part.function)]
            assert str(part.function) == text, "the original is not written to"


def test_there_are_mutants_of_every_kind() -> None:
    counts = Counter(
        mutant.kind
        for kernel in all_kernels().values()
        for part in lowered(kernel)
        for mutant in mutants(part.function)
    )
    assert set(counts) == set(KINDS)
    assert counts.total() > 900


def _stock_tensor_core_matmul() -> GoodKernel:
    """A stock schedule: three stages of cp.async, ldmatrix, mma.m16n8k16; two warps, a tile of 32x32x32, k = 128."""
    function = tensor_core_matmul(
        32, 32, 128, tile=(32, 32, 32), warps=(2, 1), scope="shared", annotate=stock_three_stages
    )
    return GoodKernel(
        name="stock_tensor_core_matmul",
        function=function,
        reference=lambda a, b: a.astype(np.float64) @ b.astype(np.float64),
        async_copy=True,
    )


@pytest.mark.slow
def test_the_stock_tensor_core_pipeline_and_its_mutants() -> None:
    kernel = _stock_tensor_core_matmul()
    kernels, expected = lowered(kernel), kernel.reference(*kernel.inputs())
    assert interpreted(kernel, kernels, expected) == ((), False)
    assert harm_of(kernel, kernels, expected) == frozenset()
    judged = list(judge(kernel, every=3))
    check(judged)
    assert sum(bool(one.harm) for one in judged) >= 30
