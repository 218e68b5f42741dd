"""Kinds are asked in order, and one that joins from outside is asked first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te

from tests.unit.kernels import cpu, run, unscheduled_operator
from tests.unit.tir_passes.kinds.diagonal_sum import DiagonalPart, DiagonalSums
from tvm_ext.errors import IllegalRewrite
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel, kernel_context
from tvm_ext.tir_passes.kinds import registry
from tvm_ext.tir_passes.kinds.kernel_kind import KernelKind, KernelPart
from tvm_ext.tir_passes.plan.context import KernelContext, UnscheduledOperator
from tvm_ext.tir_passes.plan.form import Form
from tvm_ext.tuning.kernels import tunable_part

OPTIONS = BuildOptions(database="off")


def trace(size: int = 37) -> Any:
    matrix = te.placeholder((size, size), "float32", "matrix")
    k = te.reduce_axis((0, size), "k")
    total = te.compute((1,), lambda _: te.sum(matrix[k, k], axis=k), name="trace")
    return te.create_prim_func([matrix, total])


@pytest.fixture
def with_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KINDS", list(registry.KINDS))
    registry.register_kind(DiagonalSums())


def made(func: Any, tiles: dict[str, str] | None = None) -> tuple[Any, KernelChoice]:
    kernel = construct_kernel(func, "trace", cpu(), OPTIONS, tiles or {})
    return kernel, from_json(KernelChoice, str(kernel.attrs[CHOICE]))


@pytest.mark.usefixtures("with_diagonals")
@pytest.mark.parametrize("size", [1, 3, 37, 64])
def test_a_kind_from_outside_computes_what_it_recognises(size: int) -> None:
    kernel, choice = made(trace(size))
    assert "along its diagonal" in choice.reason
    matrix = np.random.default_rng(size).standard_normal((size, size)).astype("float32")
    found = run(kernel, choice, [matrix], (1,), "float32")
    assert found == pytest.approx(np.trace(matrix.astype("float64")), rel=1e-5)


@pytest.mark.usefixtures("with_diagonals")
def test_a_kind_from_outside_is_tuned_and_takes_what_was_chosen() -> None:
    part = tunable_part(trace(), "trace", cpu(), OPTIONS)
    assert len(part.space) == 4
    other = part.space[len(part.space) - 1].configuration
    kernel, choice = made(trace(), {part.workload.key: other})
    assert f"tile chosen by measurement: {other}" in choice.reason
    assert str(kernel.body) != str(made(trace())[0].body)
    assert "a chosen tile is left out" in made(trace(), {part.workload.key: '{"partial":3}'})[1].reason


def test_without_it_rows_take_the_operator() -> None:
    assert "row by row" in made(trace())[1].reason


def test_the_kernel_cache_knows_kinds_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_context(cpu(), OPTIONS)
    monkeypatch.setattr(registry, "KINDS", [DiagonalSums(), *registry.KINDS])
    assert kernel_context(cpu(), OPTIONS) != before


class Whole(KernelKind):
    """Takes every function for its own; its kernels are refused."""

    name = "everything"

    def of_function(self, operator: UnscheduledOperator) -> RefusedPart:
        return RefusedPart(operator.as_read)


class RefusedPart(KernelPart[DiagonalPart]):
    def __init__(self, context: KernelContext) -> None:
        self.context = context

    def forms(self, chosen: DiagonalPart | None = None) -> list[Form]:
        raise IllegalRewrite(f"not today, {chosen}")


class Forgetful(KernelKind):
    """Has kernels of rows, of which the first writes nothing."""

    name = "forgotten rows"

    def of_group(self, group: Any, context: KernelContext) -> Any:
        return Nothing(context) if group.computations[0] is context.operator.computations[0] else None


class Nothing(RefusedPart):
    def forms(self, chosen: DiagonalPart | None = None) -> list[Form]:
        return [Form(path="rows", statements=(), program=None, notes=())]


def test_what_is_read_and_not_written_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM would end such a build by saying that the buffer is used before its definition."""
    monkeypatch.setattr(registry, "KINDS", [Forgetful(), *registry.KINDS])
    matrix = te.placeholder((64, 64), "float32", "matrix")
    k, n = te.reduce_axis((0, 64), "k"), te.reduce_axis((0, 64), "n")
    sums = te.compute((64,), lambda i: te.sum(te.exp(matrix[i, k]), axis=k), name="sums")
    total = te.compute((64,), lambda i: te.sum(sums[n] * matrix[n, i], axis=n), name="total")
    choice = made(te.create_prim_func([matrix, total]))[1]
    assert choice.path == "fallback"
    assert "sums is read, and no kernel of trace writes it" in choice.reason


def test_where_the_whole_has_no_kernel_its_groups_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KINDS", [Whole(), *registry.KINDS])
    choice = made(trace())[1]
    assert choice.notes[0] == "no kernel of everything: not today, None"
    assert "row by row" in choice.reason
    divisions = list(registry.divisions(unscheduled_operator(trace(), "trace")))
    assert [division.kind for division in divisions] == ["everything", ""]
