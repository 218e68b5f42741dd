"""ONNX's backend tests through `relay.frontend.from_onnx` and `relay.build(enable_roller=True)`.

No case has another answer than ONNX's, crashes, hangs or ends in an error that is none of ours. What stock TVM passes
must pass; what is refused stands in a committed list that only shrinks. The everyday run takes one case of each
sixth operator, the marker `slow` all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onnx import helper

from tests.onnx_backend.cases import Case, of_each_operator
from tests.onnx_backend.harness import kind_of
from tests.onnx_backend.lists import expected_failures, stock_passes

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
STOCK_PASSES = stock_passes()
EXPECTED_FAILURES = expected_failures()
FAIR = ("pass", "pass bound", "refused")

STOCK_IS_LUCKY = {"node/test_training_dropout_zero_ratio"}
"""Whether and how much to drop is said at run time; stock TVM never drops anything, and this case's ratio is 0."""

Outcomes = dict[str, str]


def _run(folder: Path, *chosen: str) -> Outcomes:
    """Runs in a process of its own: the harness forks, which TVM's thread pool in this one would not survive."""
    output = folder / "outcomes.json"
    harness = [sys.executable, "-W", "ignore", "-m", "tests.onnx_backend.harness"]
    subprocess.run(
        [*harness, "--system", "ours", *chosen, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=True,
        capture_output=True,
        text=True,
    )
    outcomes: Outcomes = json.loads(output.read_text())["ours"]
    return outcomes


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("--each-operator", "6"), id="each sixth operator", marks=pytest.mark.timeout(1200)),
        pytest.param((), id="all", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return _run(tmp_path_factory.mktemp("onnx_backend"), *request.param)


def test_there_are_cases(outcomes: Outcomes) -> None:
    """An empty run would pass everything below."""
    assert len(outcomes) > 25
    assert sum(outcome == "pass" for outcome in outcomes.values()) > 20


def test_the_everyday_cases_have_every_operator() -> None:
    def case(name: str, *operators: str) -> Case:
        model = helper.make_model(helper.make_graph([helper.make_node(item, [], []) for item in operators], "", [], []))
        return Case(name=name, model=model, data_sets=(), rtol=0.0, atol=0.0)

    cases = [case("a", "Abs"), case("b", "Abs"), case("c", "Abs", "Add"), case("d", "Add"), case("e", "Mul")]
    assert list(of_each_operator({item.name: item for item in cases})) == ["a", "c", "e"]
    assert list(of_each_operator({item.name: item for item in cases}, 2)) == ["a", "e"]


def test_nothing_is_wrong_crashes_or_hangs(outcomes: Outcomes) -> None:
    """Every case passes or is refused by an error of ours."""
    assert {name: outcome for name, outcome in outcomes.items() if kind_of(outcome) not in FAIR} == {}


def test_what_stock_passes_passes(outcomes: Outcomes) -> None:
    """As it is: without the constants that our `from_onnx` can be given."""
    by_right = (STOCK_PASSES - STOCK_IS_LUCKY) & outcomes.keys()
    assert {name: outcomes[name] for name in by_right if outcomes[name] != "pass"} == {}
    assert {outcomes[name] for name in STOCK_IS_LUCKY & outcomes.keys()} <= {"pass bound"}


def test_no_unexpected_refusals(outcomes: Outcomes) -> None:
    refused = {name: outcome for name, outcome in outcomes.items() if kind_of(outcome) == "refused"}
    assert {name: outcome for name, outcome in refused.items() if name not in EXPECTED_FAILURES} == {}


def test_expected_failures_fail(outcomes: Outcomes) -> None:
    """A case that passes leaves the list: `python -m tests.onnx_backend.lists failures`."""
    passed = [name for name in EXPECTED_FAILURES if outcomes.get(name, "fail").startswith("pass")]
    assert passed == []


def test_list_is_sorted_and_disjoint() -> None:
    assert sorted(set(EXPECTED_FAILURES)) == EXPECTED_FAILURES
    assert not STOCK_PASSES.intersection(EXPECTED_FAILURES)
