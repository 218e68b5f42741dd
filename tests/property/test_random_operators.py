"""Random operators through the front door against float64 NumPy, and how they are drawn (docs/testing.md)."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from typer.testing import CliRunner

from tests.support.random_cases import WrongResultError, document
from tests.support.random_operators import check as checking
from tests.support.random_operators import reference
from tests.support.random_operators.__main__ import FAMILY, app
from tests.support.random_operators.check import attempt, compare, path_problem
from tests.support.random_operators.draw import KINDS, SLOTS, draw_case
from tests.support.random_operators.record import CaseInput, OperatorCase
from tests.support.random_operators.relax_module import module_of
from tvm_ext._tvm import module_pass, tensor
from tvm_ext.records.serialise import from_json, to_json

EVERYDAY = [index for index, (kind, _) in enumerate(SLOTS) if kind not in {known for known, _ in SLOTS[:index]}]
ALL = 2000


@pytest.mark.parametrize("index", EVERYDAY)
def test_agrees_with_numpy(index: int) -> None:
    case = draw_case(0, index)
    result = attempt(case)
    assert result.passed, f"{case}\n{result.outcome}: {result.problem}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_two_thousand_agree_with_numpy() -> None:
    results = list(FAMILY.results(draw_case(0, index) for index in range(ALL)))
    assert len(results) == ALL
    assert all(result.passed for result in results), document(results, lambda index: draw_case(0, index))


def test_the_everyday_cases_hold_every_kind() -> None:
    assert {draw_case(0, index).kind for index in EVERYDAY} == set(KINDS)


# --- how cases are drawn -------------------------------------------------------------------------------------------
cases = st.builds(draw_case, st.integers(0, 2**31), st.integers(0, 5000))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_a_case_is_data(case: OperatorCase) -> None:
    assert from_json(OperatorCase, to_json(case)) == case
    assert draw_case(case.seed, case.index) == case
    first, second, other = case.data(0), case.data(0), case.data(1)
    for a, b, c, item in zip(first, second, other, case.inputs, strict=True):
        assert a.shape == item.shape
        assert str(a.dtype) == item.dtype
        np.testing.assert_array_equal(a, b)
        if item.constant:
            np.testing.assert_array_equal(a, c)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_reference_and_relax_agree_on_shapes(case: OperatorCase) -> None:
    """Relax infers shapes by its own rules; the reference is finite, so that a NaN is always ours."""
    expected = reference.evaluate(case, case.data(0))
    ty = module_of(case)["main"].ret_ty
    fields = list(ty.fields) if isinstance(ty, relax.TupleType) else [ty]
    assert [tuple(int(size) for size in field.shape) for field in fields] == [value.shape for value in expected]
    for field, value in zip(fields, expected, strict=True):
        assert np.isfinite(value).all()
        is_float = "float" in str(field.dtype)
        assert is_float == (value.dtype == np.float64)
        assert is_float or (value.min() >= _least(field.dtype) and value.max() <= _most(field.dtype))


def _least(dtype: Any) -> int:
    return 0 if str(dtype) == "bool" else int(np.iinfo(str(dtype)).min)


def _most(dtype: Any) -> int:
    return 1 if str(dtype) == "bool" else int(np.iinfo(str(dtype)).max)


def test_seeds_differ_and_slots_repeat() -> None:
    assert [draw_case(0, index) for index in range(8)] != [draw_case(1, index) for index in range(8)]
    kinds = [draw_case(3, index).kind for index in range(2 * len(SLOTS))]
    assert kinds == [kind for kind, _ in SLOTS] * 2
    assert math.gcd(checking.PURITY_EVERY, len(SLOTS)) == 1


def test_draws_are_varied() -> None:
    drawn = [draw_case(0, index) for index in range(1000)]
    assert set(reference.EPILOGUES) == {case.epilogue for case in drawn}
    assert set(reference.PROLOGUES) | {"none"} == {case.prologue for case in drawn}
    assert {case.inputs[0].dtype for case in drawn} >= {"float32", "float16", "int8", "int32", "bool"}
    assert {layout for case in drawn for layout in case.layouts} >= {"NCHW", "NHWC", "OIHW", "HWIO", "OHWI", "NDHWC"}
    transposes = Counter((c.get("transpose_a"), c.get("transpose_b")) for c in drawn if c.operator == "matmul")
    assert len(transposes) == 4
    weights = Counter(case.inputs[1].constant for case in drawn if case.operator == "nn.conv2d")
    assert min(weights[True], weights[False]) > 10
    assert sum(1 in item.shape for case in drawn for item in case.inputs) > 200
    assert sum(13 in item.shape or 127 in item.shape for case in drawn for item in case.inputs) > 50


# --- the check itself ----------------------------------------------------------------------------------------------
def _matmul_case(k: int, dtype: str = "float32") -> OperatorCase:
    return OperatorCase(
        seed=0,
        index=1,
        kind="matmul",
        operator="matmul",
        inputs=(
            CaseInput(shape=(4, k), dtype=dtype),
            CaseInput(shape=(k, 5), dtype=dtype, constant=True, scale=3 / math.sqrt(k)),
        ),
        attributes=(("transpose_a", (0,)), ("transpose_b", (0,))),
        arity=2,
        reduction_size=k,
        typical_magnitude=1.0,
    )


@pytest.mark.parametrize(("dtype", "k"), [("float32", 4096), ("float16", 512)])
def test_one_forgotten_product_is_seen(dtype: str, k: int) -> None:
    case = _matmul_case(k, dtype)
    a, b = case.data(0)
    right = (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
    compare(case, [right])
    short = (a[:, 1:].astype(np.float64) @ b[1:].astype(np.float64)).astype(dtype)
    with pytest.raises(WrongResultError, match="errs by"):
        compare(case, [short])


def test_one_unwritten_element_is_seen() -> None:
    case = _matmul_case(16)
    a, b = case.data(0)
    right = a @ b
    right[3, 4] = np.nan
    with pytest.raises(WrongResultError, match=r"1 of 20 elements.*\[3, 4\]: nan"):
        compare(case, [right])


def test_integers_must_be_equal() -> None:
    case = replace(
        _matmul_case(16),
        inputs=(
            CaseInput(shape=(4, 16), dtype="int8", values="integer", limit=127),
            CaseInput(shape=(16, 5), dtype="int8", values="integer", limit=127),
        ),
        out_dtype="int32",
    )
    a, b = (value.astype(np.int32) for value in case.data(0))
    assert compare(case, [a @ b]) == [(0.0, 0.0)]
    with pytest.raises(WrongResultError):
        compare(case, [a @ b + (np.arange(20).reshape(4, 5) == 7)])


def test_wrong_shapes_and_counts_are_seen() -> None:
    case = _matmul_case(8)
    a, b = case.data(0)
    with pytest.raises(WrongResultError, match=r"shape \(5, 4\) instead of \(4, 5\)"):
        compare(case, [(a @ b).T])
    with pytest.raises(WrongResultError, match="2 outputs instead of 1"):
        compare(case, [a @ b, a @ b])


class _Machine:
    """Stands in for the VM and computes ``a @ b``; stale: one element is what the run before should have given."""

    def __init__(self, case: OperatorCase, defect: str) -> None:
        self.weight, self.defect = case.data(0)[1], defect
        self.before: float | None = None

    def __getitem__(self, _name: str) -> Any:
        return self._run

    def set_instrument(self, _instrument: Any) -> None:
        """It calls no kernels that could be looked at."""

    def _run(self, x: Any) -> Any:
        result = x.numpy() @ self.weight
        before, self.before = self.before, float(result[0, 0])
        if self.defect == "stale" and before is not None:
            result[0, 0] = before
        return tensor(result)


class _Library:
    """Stands in for what `relay.build` returns."""

    def __init__(self, machine: _Machine) -> None:
        self.machine = machine
        self.report = SimpleNamespace(operators=())

    def vm(self) -> _Machine:
        return self.machine


@pytest.mark.parametrize(("defect", "outcome"), [("none", "passed"), ("stale", "wrong")])
def test_a_value_left_from_the_run_before_is_seen(defect: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _matmul_case(8)
    monkeypatch.setattr(checking, "build", lambda _case, **_settings: _Library(_Machine(case, defect)))
    monkeypatch.setattr(checking, "guard", lambda machine: machine)
    result = attempt(case)
    assert result.outcome == outcome
    assert ("second time" in result.problem) == (outcome == "wrong")


def test_a_pass_that_writes_to_its_input_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    @module_pass(opt_level=0, name="impure")
    def impure(mod: Any, _context: Any) -> Any:
        mod.update_func(mod.get_global_var("main"), mod["main"].with_attr("touched", 1))
        return mod

    case = draw_case(0, 0)
    original = checking.plan_build
    monkeypatch.setattr(checking, "plan_build", lambda *args: replace(original(*args), construct=impure))
    with pytest.raises(RuntimeError, match="Immutable module has been modified in pass: impure"):
        checking.check_purity(case)


def test_paths_are_held_to() -> None:
    case = _matmul_case(8)
    taken = [("matmul", "fallback", "its index is not affine")]
    assert "took the path fallback: its index is not affine" in path_problem(case, taken)
    assert path_problem(replace(case, must_be_constructed=False), taken) == ""
    assert "no reason" in path_problem(case, [("matmul", "rtile", "")])
    for path in ("rtile", "rows"):
        assert path_problem(case, [("matmul", path, "a tile")]) == ""


# --- many cases ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Calling:
    """Unpickled in the worker, it calls a function there."""

    function: Any
    argument: float
    index: int = 5
    kind: str = "matmul"

    def __reduce__(self) -> Any:
        return (self.function, (self.argument,))


def test_a_crash_is_the_failure_of_its_case() -> None:
    drawn: list[Any] = [draw_case(0, 2), _Calling(os._exit, 3), draw_case(0, 6)]
    results = list(FAMILY.results(drawn, limit_s=300.0))
    assert [item.outcome for item in results] == ["passed", "crashed", "passed"]
    assert "ended with code 3" in results[1].problem


def test_an_endless_loop_is_the_failure_of_its_case() -> None:
    drawn: list[Any] = [_Calling(time.sleep, 600.0), _Calling(time.sleep, 600.0)]
    results = list(FAMILY.results(drawn, limit_s=0.5))
    assert [item.outcome for item in results] == ["timed out", "timed out"]
    assert "0.5 s" in results[1].problem


def test_the_command_writes_its_counts(tmp_path: Any) -> None:
    output = tmp_path / "counts.json"
    done = CliRunner().invoke(app, ["--count", "3", "--first", "2", "--kind", "binary", "--output", str(output)])
    assert done.exit_code == 0, done.output
    record = json.loads(output.read_text())
    assert record["cases"] == 1
    assert record["outcomes"] == {"passed": 1}
    assert record["kernels"] == {"rows": 1}
    assert record["failures"] == []
    assert record["environment"]["versions"]


def test_the_command_shows_one_case() -> None:
    done = CliRunner().invoke(app, ["--case", "2"])
    assert done.exit_code == 0
    assert str(draw_case(0, 2))[:20] in done.output
    assert "rows: " in done.output


def test_the_command_refuses_an_unknown_kind() -> None:
    done = CliRunner().invoke(app, ["--kind", "convolution"])
    assert done.exit_code == 2
    assert "there is no kind 'convolution'" in done.output
