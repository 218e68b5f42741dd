"""Hostile and damaged model files: each runs, or is refused by an error of ours, in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support.case_workers import Trial, run_trials
from tests.support.hostile_models.check import LIMIT_S, TRIAL, failure
from tests.support.hostile_models.draw import draw_case
from tests.support.hostile_models.made import made_cases
from tests.support.hostile_models.record import HostileCase, HostileResult, counts

# Of the hand-made ones, those of every kind that are over in a moment.
EVERYDAY = (
    "a constant filled 30 times over", "a function inside a branch that calls itself", "a function that lost an input",
    "a function that calls itself", "branches 28 deep", "branches 3000 deep", "functions that double 60 times",
    "functions 300 deep", "loops 3 deep", "Concat doubles 70 times", "Tile doubles 70 times", "Pad grows tenfold",
    "Tile of 4611686018427387904", "Tile of -1", "Pad of -2147483648", "OneHot of 2147483648", "Trilu of 2147483648",
    "Range to 2147483648", "Resize by nan", "Reshape of 2147483648", "Split num_outputs 4611686018427387904",
    "ConvTranspose, huge output shape", "MaxPool, kernel larger than the input", "Conv, zero strides",
    "Conv of ['x']", "input of [-1, 3]", "input of [1099511627776, 1099511627776]", "input of 70 ones",
    "constant of [4294967296, 4294967296]", "a chain of 20 LeakyRelu", "a chain of 20 Relu", "1000 attributes",
    "1000 functions",
)  # fmt: skip
MUTATED = range(14)


def _run(cases: Iterable[HostileCase]) -> list[HostileResult]:
    results = list(run_trials(cases, TRIAL, jobs=1, limit_s=LIMIT_S))
    wrong = [f"{item.name} {item.outcome}: {item.problem[:300]}" for item in results if item.failed]
    assert not wrong, "\n".join(wrong)
    return results


def test_hand_made_models() -> None:
    cases = {case.name: case for case in made_cases(lambda name: name in EVERYDAY)}
    assert set(cases) == set(EVERYDAY)
    results = {item.name: item for item in _run(cases.values())}
    assert results["a chain of 20 Relu"].outcome == "ran"
    assert sum(item.outcome == "refused" for item in results.values()) >= 25
    assert all("remedy:" in item.problem for item in results.values() if item.outcome == "refused")


def test_mutated_models() -> None:
    found = counts(_run(draw_case(0, index) for index in MUTATED))
    assert found["mutated"]["refused"] >= 3
    assert found["mutated"]["ran"] >= 3, "mutations that leave nothing sound test nothing behind the import"


def test_drawing_is_repeatable() -> None:
    for index in MUTATED[:12]:
        assert draw_case(0, index) == draw_case(0, index)
    assert draw_case(0, 1) != draw_case(1, 1)


def _misbehave(case: HostileCase) -> HostileResult:
    if case.name == "endless":
        while True:
            pass
    raise SystemExit(3)


def test_a_crash_and_a_hang_are_failures_of_one_model() -> None:
    trial = Trial(attempt=_misbehave, failure=failure, alone=True)
    cases = [HostileCase(kind="planted", name=name, data=b"") for name in ("endless", "crash")]
    results = {item.name: item for item in run_trials(cases, trial, jobs=1, limit_s=2.0)}
    assert results["endless"].outcome == "timed out"
    assert results["crash"].outcome == "crashed"
    assert all(item.failed for item in results.values())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_mutated_and_all_hand_made_models() -> None:
    made = list(made_cases())
    assert len(made) >= 200
    _run((*made, *(draw_case(0, index, suite=True) for index in range(1000))))
