"""Mistakes in a pipeline's synchronisation and in its versions are caught, and the pipelines themselves not accused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest

from tests.support.pipelining.check import Pipelined, Wanted, pipelined
from tests.support.pipelining.hard import hard_kernels
from tests.support.pipelining.kernels import A100, DEPTH, T4, TILE, PipeliningKernel, product_reference
from tests.support.pipelining.products import Product, matmul
from tests.support.pipelining.schedules import tensor_core_matmul
from tests.support.pipelining.simt import simt_kernels
from tests.support.simt.mutate_pipelines import KINDS, pipeline_mutants
from tests.unit.tir_passes.pipelining.pipeline_judge import Judge, Judged
from tvm_ext.devices.device_db import lookup
from tvm_ext.tir_passes.pipelining.injection import lowered, with_primitives

SYNCHRONISATION = ("drop", "weaken", "move")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A kernel, the device and stages; the everyday run tries each ``every``-th of its mutants."""

    kernel: str
    device: str
    shared: int
    registers: int
    every: int = 1

    def __str__(self) -> str:
        return f"{self.kernel}-{self.device}-{self.shared}x{self.registers}"

    @property
    def wanted(self) -> Wanted:
        return Wanted(shared_stages=self.shared, register_stages=self.registers)


def _small(a: Any, b: Any) -> Product:
    return Product(a=a, b=b, fragment_depth=8)


@cache
def kernels() -> dict[str, PipeliningKernel]:
    own = (
        PipeliningKernel(
            name="small_matmul", make=partial(matmul, TILE, TILE, 4 * DEPTH, _small), reference=product_reference
        ),
        PipeliningKernel(
            name="small_tensor_core_matmul", reference=product_reference,
            make=partial(tensor_core_matmul, 32, 32, 128, tile=(32, 32, 32), warps=(1, 1), scope="shared"),
        ),
    )  # fmt: skip
    return {kernel.name: kernel for kernel in (*simt_kernels(), *hard_kernels(), *own)}


EVERYDAY = (
    Case(kernel="sum_of_rows_in_order", device=A100, shared=2, registers=1, every=3),
    Case(kernel="sum_of_rows", device=A100, shared=4, registers=1, every=5),
    Case(kernel="running_sums", device=A100, shared=3, registers=1, every=2),
    Case(kernel="running_sums", device=T4, shared=2, registers=1),
    Case(kernel="loop_from_two", device=T4, shared=2, registers=1),
    Case(kernel="small_matmul", device=A100, shared=3, registers=2, every=5),
    Case(kernel="small_matmul", device=T4, shared=2, registers=2, every=4),
)
MORE = (
    Case(kernel="small_matmul", device=A100, shared=4, registers=1),
    Case(kernel="small_matmul", device=A100, shared=2, registers=2),
    Case(kernel="matmul_zero_filled", device=A100, shared=3, registers=2),
    Case(kernel="two_products", device=A100, shared=3, registers=2),
    Case(kernel="two_products", device=T4, shared=2, registers=2),
    Case(kernel="persistent_short_tiles", device=A100, shared=2, registers=1),
    Case(kernel="matmul_triangular", device=A100, shared=3, registers=2),
    Case(kernel="matmul_stages_by_hand", device=A100, shared=4, registers=2),
    Case(kernel="convolution_of_rows", device=A100, shared=3, registers=1),
    Case(kernel="small_tensor_core_matmul", device=A100, shared=3, registers=2),
    Case(kernel="small_tensor_core_matmul", device=A100, shared=4, registers=1),
)
CASES = [*EVERYDAY, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)]


@cache
def _item(case: Case) -> Pipelined:
    item = pipelined(kernels()[case.kernel], case.device, case.wanted)
    assert item.plan.buffers, item.plan
    return item


def judged(case: Case, *, every: int = 1) -> list[Judged]:
    """Mutants of the instructions, and those of the primitives before they become instructions."""
    item = _item(case)
    judge = Judge(item)
    found = judge.judge(m for number, m in enumerate(pipeline_mutants(item.function)) if number % every == 0)
    staged, lowering = with_primitives(item.kernel.make(), item.plan, lookup(case.device))
    primitives = (
        mutant for number, mutant in enumerate(pipeline_mutants(staged))
        if number % every == 0 and mutant.kind in SYNCHRONISATION
    )  # fmt: skip
    return [*found, *judge.judge(primitives, lambda function: lowered(function, lowering))]


def demand(found: Sequence[Judged]) -> Counter[str]:
    """Every harmful mutant is caught, and a race not only by its values; counts of harmful ones by kind."""
    missed = [str(one) for one in found if one.harm and not one.caught]
    assert not missed, "harmful mutants that nothing shows:\n" + "\n".join(missed)
    silent = [str(one) for one in found if one.harm - {"values"} and not one.findings]
    assert not silent, "harmful mutants without a finding:\n" + "\n".join(silent)
    accused = [str(one) for one in found if not one.harm and one.caught]
    assert not accused, "mutants that do no harm and are accused:\n" + "\n".join(accused)
    return Counter(one.mutant.kind for one in found if one.harm)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_pipeline_is_accused(case: Case) -> None:
    judge = Judge(_item(case))
    made = judge.lower(_item(case).function)
    assert judge.interpret(made) == ((), False)
    assert judge.harm(made) == frozenset()


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", EVERYDAY, ids=str)
def test_harmful_mutants_are_caught(case: Case) -> None:
    harmful = demand(judged(case, every=case.every))
    assert harmful.total() >= 4, harmful


@pytest.mark.slow
@pytest.mark.parametrize("case", [*EVERYDAY, *MORE], ids=str)
def test_all_harmful_mutants_are_caught(case: Case) -> None:
    harmful = demand(judged(case))
    assert harmful["drop"] and harmful["move"], harmful
    if case.device == A100:
        assert harmful["weaken"], harmful


def test_there_are_mutants_of_every_kind() -> None:
    item = _item(Case(kernel="small_matmul", device=A100, shared=3, registers=2))
    counts = Counter(mutant.kind for mutant in pipeline_mutants(item.function))
    assert set(counts) == set(KINDS)
    assert counts.total() >= 25


def test_what_findings_say_of_a_missing_wait_and_of_a_missing_barrier() -> None:
    item = _item(Case(kernel="sum_of_rows", device=A100, shared=3, registers=1))
    judge = Judge(item)
    drops = [mutant for mutant in pipeline_mutants(item.function) if mutant.kind == "drop"]
    kinds = {mutant.change: judge.judge(iter([mutant]))[0].findings for mutant in drops}
    assert "unlanded copy" in kinds["no cp_async_wait_group"]
    assert {"read-write race", "loop-carried hazard"} & set(kinds["no tvm_storage_sync"])
    assert "unlanded copy" in kinds["no cp_async_commit_group"]
