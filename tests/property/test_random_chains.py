"""Random chains through the front door against ONNX Runtime, and how they are drawn (docs/testing.md)."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.support import opencl_cpu
from tests.support.case_workers import Trial, run_trials
from tests.support.random_cases import CaseResult, Settings, append_result, document, failure, refusals
from tests.support.random_chains.__main__ import FAMILY, app
from tests.support.random_chains.chain import EXACT_BELOW
from tests.support.random_chains.check import attempt
from tests.support.random_chains.draw import STEPS, draw_case
from tests.support.random_chains.draw_producers import PRODUCERS
from tests.support.random_chains.onnx_model import onnx_model
from tests.support.random_chains.record import ChainCase
from tests.support.random_chains.reference import difference, expected_outputs
from tests.support.random_operators.opencl import DEVICES, in_turn
from tests.unit.compilers import needs_cc
from tvm_ext import relay
from tvm_ext.errors import ModelError

EVERYDAY = len(PRODUCERS)
EVERYDAY_GPU = 4
ALL, ALL_GPU, ALL_TEMPLATES = 5000, 300, 100
EVERYDAY_TEMPLATES = (0, 1)
BY_TEMPLATES = Settings(devices=("nvidia-a100", "nvidia-h200", "nvidia-t4"), tensors="float16", way="templates")
MOST_REFUSED = 0.01
needs_opencl = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("index", range(EVERYDAY))
def test_agrees_with_onnx_runtime(index: int) -> None:
    case = draw_case(0, index)
    result = attempt(case)
    assert result.outcome == "passed", f"{case}\n{result.outcome}: {result.problem}"


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("index", range(2))
@pytest.mark.parametrize("settings", [Settings(tensors="bfloat16"), Settings(precision="bfloat16")])
def test_bfloat16_agrees_with_onnx_runtime(settings: Settings, index: int) -> None:
    case = FAMILY.draw(2, index, settings)
    result = attempt(case)
    assert result.outcome == "passed", f"{case}\n{result.outcome}: {result.problem}"


@needs_opencl
@pytest.mark.parametrize("index", range(EVERYDAY_GPU))
def test_the_opencl_of_a_chain_agrees_with_onnx_runtime(index: int) -> None:
    case = in_turn(draw_case(1, index), DEVICES)
    result = attempt(case)
    assert result.outcome == "passed", f"{case}\n{result.outcome}: {result.problem}"


@needs_cc
@pytest.mark.parametrize("index", EVERYDAY_TEMPLATES)
def test_a_build_with_templates_agrees_with_onnx_runtime(index: int) -> None:
    """Our kernels in the interpreter, CUTLASS's regions by their host functions and plain C++."""
    case = FAMILY.draw(1, index, BY_TEMPLATES)
    result = attempt(case)
    assert result.outcome == "passed", f"{case}\n{result.outcome}: {result.problem}"
    assert dict(result.paths)["template"] >= 1


def _none_fails(cases: list[ChainCase]) -> None:
    results = list(FAMILY.results(cases))
    assert len(results) == len(cases)
    assert not [item for item in results if item.failed], document(results, {item.index: item for item in cases}.get)
    refused = refusals(results)
    assert sum(len(indices) for indices in refused.values()) <= MOST_REFUSED * len(cases), refused


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_five_thousand_agree_with_onnx_runtime() -> None:
    _none_fails([draw_case(0, index) for index in range(ALL)])


@needs_cc
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_builds_with_templates_agree_with_onnx_runtime() -> None:
    _none_fails([FAMILY.draw(1, index, BY_TEMPLATES) for index in range(ALL_TEMPLATES)])


@needs_opencl
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_opencl_of_three_hundred_chains_agrees_with_onnx_runtime() -> None:
    _none_fails([in_turn(draw_case(1, index), DEVICES) for index in range(ALL_GPU)])


# --- how chains are drawn -------------------------------------------------------------------------------------------
cases = st.builds(draw_case, st.integers(0, 2**31), st.integers(0, 5000))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_a_chain_is_data_and_a_valid_model(case: ChainCase) -> None:
    assert draw_case(case.seed, case.index) == case
    json.dumps(asdict(case))
    for name, value in case.data(0).items():
        (item,) = (item for item in case.inputs if item.name == name)
        assert (value.shape, str(value.dtype)) == (item.content.shape, item.content.dtype)
        if item.content.constant:
            np.testing.assert_array_equal(value, case.data(1)[name])
    onnx.checker.check_model(onnx_model(case), full_check=True)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_what_the_reference_says_has_the_shapes_and_bounds_that_were_drawn(case: ChainCase) -> None:
    for output, value in zip(case.outputs, expected_outputs(case), strict=True):
        assert value.shape == output.shape
        assert np.isfinite(value.astype(np.float64)).all() or not output.finite
        if output.exact:
            assert (value == np.round(value.astype(np.float64))).all()
            assert float(np.abs(value.astype(np.float64)).max(initial=0)) <= EXACT_BELOW[output.dtype]


def test_every_step_and_every_type_is_drawn() -> None:
    drawn = [draw_case(0, index) for index in range(1500)]
    nodes = {node.operator for case in drawn for node in case.nodes}
    assert nodes >= {
        "ArgMax", "Cast", "Clip", "Concat", "Conv", "ConvTranspose", "CumSum", "DepthToSpace", "DequantizeLinear",
        "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Gemm", "Identity", "InstanceNormalization",
        "IsNaN", "LayerNormalization", "LogSoftmax", "MatMul", "MatMulInteger", "MaxPool", "Pad", "QuantizeLinear",
        "ReduceMax", "ReduceSum", "Reshape", "Resize", "ScatterElements", "ScatterND", "Slice", "Softmax",
        "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "Where",
    }  # fmt: skip
    assert {output.dtype for case in drawn for output in case.outputs} == {*EXACT_BELOW}
    assert {output.coarsest for case in drawn for output in case.outputs} >= {"float16", "float32", "float64"}
    assert {case.kind for case in drawn[: len(PRODUCERS)]} == {kind for kind, _, _ in PRODUCERS}
    outputs = [output for case in drawn for output in case.outputs]
    assert {len(output.shape) for output in outputs} == set(range(7)) and any(0 in o.shape for o in outputs)
    assert any(not output.finite for output in outputs)
    assert any(len(set(node.inputs)) < len(node.inputs) for case in drawn for node in case.nodes)
    assert any(len(case.outputs) > 1 for case in drawn) and any(case.device for case in drawn)
    assert len(STEPS) == len({step for step, _ in STEPS})


# --- what is noticed --------------------------------------------------------------------------------------------------
def _exact_case() -> ChainCase:
    """A chain of one exact output of several elements."""
    drawn = (draw_case(0, index) for index in range(500))
    return next(c for c in drawn if len(c.outputs) == 1 and c.outputs[0].exact and math.prod(c.outputs[0].shape) > 8)


@dataclass(frozen=True)
class Machine:
    """A VM whose results are changed before they are handed out."""

    machine: Any
    change: Callable[[Any], None]

    def set_instrument(self, instrument: Any) -> None:
        self.machine.set_instrument(instrument)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            outputs = self.machine[name](*arguments)
            self.change(outputs if hasattr(outputs, "numpy") else outputs[0])
            return outputs

        return call


def test_one_wrong_element_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = _exact_case()
    vm = relay.Library.vm

    def spoil(output: Any) -> None:
        values = output.numpy().copy()
        values.flat[-1] = not values.flat[-1] if values.dtype == np.bool_ else values.flat[-1] + 1
        output.copyfrom(values)

    monkeypatch.setattr(relay.Library, "vm", lambda self, device=None: Machine(vm(self, device), spoil))
    result = attempt(case)
    assert (result.outcome, result.failed) == ("wrong", True)
    assert "1 of" in result.problem


def test_a_refusal_by_an_error_of_ours_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError("operator 'x7' of shape [3, 4] is not supported.", "leave it out")

    monkeypatch.setattr(relay, "build", refuse)
    result = attempt(_exact_case())
    assert (result.outcome, result.failed) == ("refused", False)
    assert refusals([replace(result, index=5), replace(result, index=9)]) == {
        "ModelError: operator … of shape … is not supported.": [5, 9]
    }


def test_any_other_exception_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "build", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("Check failed")))
    result = attempt(_exact_case())
    assert (result.outcome, result.failed) == ("raised", True)


def _die_or_hang(case: ChainCase) -> CaseResult:
    if case.index == 1:
        os._exit(11)
    if case.index == 2:
        time.sleep(600)
    return failure(case, "passed", "", 0.0)


def test_a_crash_and_a_hang_cost_one_case_each() -> None:
    trial = Trial(attempt=_die_or_hang, failure=failure)
    drawn = [draw_case(0, index) for index in range(5)]
    results = {item.index: item for item in run_trials(drawn, trial, jobs=1, limit_s=3.0)}
    assert [results[i].outcome for i in range(5)] == ["passed", "crashed", "timed out", "passed", "passed"]


@pytest.mark.parametrize(
    ("actual", "exact", "coarsest", "wrong"),
    [
        (1.0 + 1e-6, False, "float32", ""),
        (1.0 + 1e-6, True, "float32", "1 of 3"),
        (1.0 + 1e-6, False, "float64", "1 of 3"),
        (1.0 + 1e-2, False, "float16", ""),
        (np.nan, False, "float16", "1 of 3"),
    ],
)
def test_what_differs(actual: float, exact: bool, coarsest: str, wrong: str) -> None:
    problem = difference(
        np.array([1.0, 2.0, actual]), np.array([1.0, 2.0, 1.0]), dtype="float64", exact=exact, coarsest=coarsest
    )
    assert (wrong in problem) if wrong else not problem
    assert difference(np.ones(3), np.ones((3, 1)), dtype="float64", exact=True, coarsest="float64")


def test_infinities_and_nan_must_be_where_the_reference_has_them() -> None:
    wanted = np.array([np.inf, np.nan, 3.0])

    def found(*actual: float) -> str:
        return difference(np.array(actual), wanted, dtype="float64", exact=False, coarsest="float32", finite=False)

    assert not found(np.inf, np.nan, 3.0001)
    assert "1 of 3" in found(-np.inf, np.nan, 3.0)
    assert "2 of 3" in found(1.0, 1.0, 3.0)
    assert "1 of 3" in found(np.inf, np.nan, np.nan)


# --- the command ------------------------------------------------------------------------------------------------------
def test_the_command_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    kept, output = tmp_path / "results.jsonl", tmp_path / "counts.json"
    done = failure(draw_case(0, 0), "passed", "", 1.0)
    refused = failure(draw_case(0, 1), "refused", "ModelError: no 7", 1.0)
    for result in (done, refused):
        append_result(kept, result)
    with kept.open("a") as file:
        file.write('{"index": 2, "kind": ')  # what a run that was killed leaves
    result = CliRunner().invoke(app, ["--count", "2", "--results", str(kept), "--output", str(output)])
    assert result.exit_code == 0, result.output
    record = json.loads(output.read_text())
    assert record["outcomes"] == {"passed": 1, "refused": 1}
    assert record["refusals"] == {"ModelError: no #": [1]}
    assert "refused 1 times, first by case 1" in result.output


def test_the_command_fails_where_a_chain_did(tmp_path: Path) -> None:
    kept, output = tmp_path / "results.jsonl", tmp_path / "counts.json"
    append_result(kept, failure(draw_case(0, 0), "crashed", "code -11", 1.0))
    result = CliRunner().invoke(app, ["--count", "1", "--results", str(kept), "--output", str(output)])
    assert result.exit_code == 1
    (failed,) = json.loads(output.read_text())["failures"]
    assert failed["outcome"] == "crashed" and failed["case"][0].startswith("#0")


def test_one_chain_is_shown_with_its_kernels() -> None:
    result = CliRunner().invoke(app, ["--case", "2"])
    assert result.exit_code == 0, result.output
    assert "Gemm" in result.output and "rtile" in result.output
