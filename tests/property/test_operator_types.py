"""Each operator with each type against ONNX Runtime, and how the cases are made (docs/testing.md)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.case_workers import Trial, run_trials
from tests.support.operator_types import check
from tests.support.operator_types.__main__ import app
from tests.support.operator_types.cases import (
    SCHEMAS,
    all_cases,
    cases_of,
    empty_cases,
    inputs_of,
    model_of,
    slice_of,
    without_recipe,
)
from tests.support.operator_types.check import TRIAL, expected_outputs
from tests.support.operator_types.draw import KINDS, draw_case
from tests.support.operator_types.recipes import NOT_TRIED, RECIPES
from tests.support.operator_types.record import TypeCase, TypeResult

EVERYDAY_PARTS = 6
MOST_REFUSED = 0.45
"""Of the everyday slice, whose types are four-bit and complex numbers and text too."""


def _case(name: str) -> TypeCase:
    return next(case for case in cases_of(name.split()[0]) if case.name == name)


def _results(cases: list[TypeCase]) -> dict[str, TypeResult]:
    results = {item.name: item for item in run_trials(cases, TRIAL, jobs=1, limit_s=300.0)}
    assert results.keys() == {case.name for case in cases}
    return results


def _failures(results: dict[str, TypeResult]) -> list[str]:
    return [f"{item.name}: {item.outcome}: {item.problem}" for item in results.values() if item.failed]


def test_every_sixth_operator_is_right_or_refused() -> None:
    """Each with one of its types, which follows from its place."""
    results = _results(slice_of(0, EVERYDAY_PARTS))
    assert _failures(results) == []
    assert sum(item.outcome == "refused" for item in results.values()) <= MOST_REFUSED * len(results)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_operator_with_an_axis_of_no_elements_is_right_or_refused() -> None:
    assert _failures(_results(list(empty_cases()))) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_operator_is_right_or_refused_in_every_type() -> None:
    assert _failures(_results(list(all_cases()))) == []


def test_drawn_nodes_are_right_or_refused() -> None:
    """One of each kind."""
    assert _failures(_results([draw_case(0, index) for index in range(len(KINDS))])) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_drawn_nodes_are_right_or_refused() -> None:
    assert _failures(_results([draw_case(1, index) for index in range(450)])) == []


def test_a_drawn_node_follows_from_its_number() -> None:
    first, second = draw_case(3, 1), draw_case(3, 1)
    assert first.name == second.name and first.drawn is not None and second.drawn is not None
    assert first.drawn[1].operands == second.drawn[1].operands
    assert first.drawn[1].attributes == second.drawn[1].attributes
    assert draw_case(4, 1).drawn != first.drawn


def test_every_operator_is_tried_or_excused() -> None:
    """A release of ONNX with a new operator fails here."""
    assert without_recipe() == set()
    assert not set(RECIPES) & set(NOT_TRIED)
    assert set(RECIPES) <= set(SCHEMAS)


def test_cases_have_names_of_their_own_and_every_type_of_the_schema() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names)) > 1900
    types = {dict(case.types)["T"] for case in cases_of("Add")}
    assert len(types) == len(SCHEMAS["Add"].type_constraints[0].allowed_type_strs) == 12
    assert {case.tried for case in cases_of("Gather")} == {("T",), ("Tind",)}
    assert {"Cast T1=bool T2=float16", "Cast T1=bfloat16"} <= set(names)


def test_an_operator_has_another_type_in_another_slice() -> None:
    operators = [{case.operator for case in slice_of(part, EVERYDAY_PARTS)} for part in range(EVERYDAY_PARTS)]
    assert set.union(*operators) == set(RECIPES)
    assert len({case.types[0][1] for case in slice_of(0, EVERYDAY_PARTS) if case.types}) > 10


def test_inputs_are_the_same_in_every_run_and_hold_the_highest_bit() -> None:
    case = _case("Max T=uint64")
    first, second = inputs_of(case), inputs_of(case)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert first["x0"].max() > np.iinfo(np.int64).max


def test_a_wrong_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of ReduceMin instead of ReduceMax's."""
    case = _case("ReduceMax T=int8")
    values = inputs_of(case)
    wrong = model_of(replace(case, operator="ReduceMin"), values)
    monkeypatch.setattr(check, "model_of", lambda found, given, *opset: _minimum_for_builds(wrong, found, given, opset))
    result = check.attempt(case)
    assert result.outcome == "wrong" and result.failed, result
    assert "y0 is [" in result.problem


def _minimum_for_builds(wrong, found, given, opset):  # type: ignore[no-untyped-def]
    """References say the operator set."""
    return model_of(found, given, *opset) if opset else wrong


def test_a_wrong_type_is_told() -> None:
    case = _case("Add T=float16")
    model = model_of(case, inputs_of(case))
    wide = [np.zeros((3, 4), np.float32)]
    assert "not float16" in check._difference(wide, wide, model, 1.0)


def test_a_refusal_is_no_failure_and_has_its_reason() -> None:
    result = check.attempt(_case("Gather T=complex64"))
    assert result.outcome == "refused" and not result.failed
    assert "COMPLEX64" in result.problem


def test_where_onnx_runtime_has_no_type_the_evaluator_answers() -> None:
    case = _case("BitwiseXor T=uint16")
    values = inputs_of(case)
    assert all(np.array_equal(found[0], values["x0"] ^ values["x1"]) for found in expected_outputs(case, values))
    assert list(expected_outputs(case, values))


def test_half_precision_is_compared_with_float32() -> None:
    case = _case("MatMul T=bfloat16")
    assert next(expected_outputs(case, inputs_of(case)))[0].dtype == np.float32


def _die(case: TypeCase) -> TypeResult:
    os._exit(7)


def test_a_dead_worker_costs_one_case() -> None:
    trial = Trial(attempt=_die, failure=check.failure)
    (result,) = run_trials([_case("Abs T=int8")], trial, jobs=1, limit_s=60.0)
    assert result.outcome == "crashed" and result.failed and "code 7" in result.problem


def test_the_command_writes_what_came_of_each_case(tmp_path: Path) -> None:
    output, log = tmp_path / "counts.json", tmp_path / "log.jsonl"
    arguments = ["--match", "^Sign T=(uint8|bfloat16)$", "--output", str(output), "--log", str(log)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(output.read_text())
    assert record["cases"] == 2 and record["failures"] == [] and sum(record["outcomes"].values()) == 2
    assert len(log.read_text().splitlines()) == 2
