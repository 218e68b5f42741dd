"""Builds one case, runs it and compares it with a reference."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tvm_ext import relay
from tvm_ext._tvm import tensor
from tvm_ext.errors import TvmExtError
from tvm_ext.options import BuildOptions
from tvm_ext.runtime.graph_module import flatten_outputs

from ..case_workers import Trial
from ..onnx_evaluator import by_evaluator, by_onnx_runtime
from ..onnx_runtime import states
from ..random_cases import EXPECTED_ERRORS
from ..random_chains.reference import LACKING
from ..random_operators.record import Array
from .cases import OPSET, inputs_of, known_names, model_of, recipe_of
from .record import TypeCase, TypeResult

TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""By the coarsest type of a case, times the output's largest magnitude. Integers and bools are equal."""

WIDENED = ("float16", "bfloat16")
"""Compared with the same operator in float32 on the same numbers, which does not round in between."""

SUBSTITUTES = {"float64": "float32", "bool": "uint8"}

MODEL_ERRORS = (onnx.shape_inference.InferenceError, onnx.checker.ValidationError)

OLDER_OPSET = 20
"""ONNX Runtime has not every operator in the newest set."""

NOT_WIDENED = ("BitCast",)
"""Whose results depend on the type's bits."""


NOT_BY_RUNTIME = (
    "AveragePool",
    "CausalConvWithState",
    "Conv",
    "ConvInteger",
    "ConvTranspose",
    "Einsum",
    "GRU",
    "LSTM",
    "RNN",
    "RoiAlign",
)
"""On tensors without elements ONNX Runtime kills the process, or gives memory that it has not written."""


FOLLOWERS: Mapping[str, Callable[[Array], Array]] = {"Sign": np.sign, "Abs": np.abs, "Identity": np.copy}
"""Operators that read a drawn node's first output."""


class NoReferenceError(LookupError):
    """Neither ONNX Runtime nor the ONNX package computes a case that we build."""


def attempt(case: TypeCase) -> TypeResult:
    """Import, build, run, compare; whatever goes wrong becomes the result."""
    start = time.perf_counter()
    outcome, problem = _outcome(case)
    return TypeResult(name=case.name, outcome=outcome, problem=problem, seconds=time.perf_counter() - start)


def _outcome(case: TypeCase) -> tuple[str, str]:
    try:
        values = inputs_of(case)
        model = model_of(case, values)
        machine = _build(model)
    except TvmExtError as refusal:
        return "refused", f"{type(refusal).__name__}: {refusal}"
    except EXPECTED_ERRORS as error:
        return "raised", f"{type(error).__name__}: {error}"
    try:
        known = known_names(case)
        given = [tensor(value) for name, value in values.items() if name not in known]
        outputs = [item.numpy() for item in flatten_outputs(machine["main"](*given))]
        opinions = (_with_followers(case, expected, outputs[0]) for expected in expected_outputs(case, values))
        problem = _problem(outputs, opinions, model, _tolerance(case))
    except NoReferenceError:
        if _is_empty(values):  # that it runs, and its shape is the model's, is what is tried
            return "right", ""
        raise
    except EXPECTED_ERRORS as error:
        return "raised", f"{type(error).__name__}: {error}"
    return ("wrong", problem) if problem else ("right", "")


def _build(model: onnx.ModelProto) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mod, params = relay.frontend.from_onnx(model)
        library = relay.build(mod, "llvm", params=params, options=BuildOptions().updated(kernel_cache="off"))
    return library.vm()


def expected_outputs(case: TypeCase, values: Mapping[str, Array]) -> Iterator[list[Array]]:
    """What is right, by ONNX Runtime and by the ONNX package's evaluator, as far as they compute the case.

    Two opinions because neither is always right: ONNX Runtime computes Shrink of float64 in float32. Half precision is
    computed in float32, and so is float64, and bools as bytes, where nothing else computes it.
    """
    definition = recipe_of(case).definition
    if definition is not None:
        with np.errstate(all="ignore"):
            outputs = definition([values.get(f"x{i}") for i in range(len(recipe_of(case).operands))])
        yield outputs
        return
    if case.operator not in NOT_WIDENED and any(name in WIDENED for _, name in case.types):
        case, values = _in_other_types(case, values, dict.fromkeys(WIDENED, "float32"))
    given = {name: value for name, value in values.items() if name not in known_names(case)}
    has_any = False
    ways = [(_by_onnx_runtime, OPSET), (_by_onnx_runtime, OLDER_OPSET), (by_evaluator, OPSET)]
    for compute, opset in ways[2:] if _is_empty(values) and case.operator in NOT_BY_RUNTIME else ways:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                outputs = compute(model_of(case, values, opset), given)
            except (*LACKING, *EXPECTED_ERRORS, *MODEL_ERRORS, states.InvalidArgument):
                continue
        has_any = True
        yield outputs
    if not has_any and any(name in SUBSTITUTES for _, name in case.types):
        yield from expected_outputs(*_in_other_types(case, values, SUBSTITUTES))


def _with_followers(case: TypeCase, expected: list[Array], first: Array) -> list[Array]:
    """What followers make of the first output as it is: the sign of a sum that cancels is either.

    Worked example: sums of halves, 0 here and 1e-9 in float64. `Sign` of them is 0 and 1.
    """
    recipe = recipe_of(case)
    return [*expected[: recipe.outputs], *(FOLLOWERS[name](first) for name in recipe.followers)]


def _is_empty(values: Mapping[str, Array]) -> bool:
    return any(value.size == 0 for value in values.values())


def _in_other_types(
    case: TypeCase, values: Mapping[str, Array], substitutes: Mapping[str, str]
) -> tuple[TypeCase, Mapping[str, Array]]:
    """The case on the same numbers, with types replaced."""
    values = {
        name: value.astype(substitutes[value.dtype.name]) if value.dtype.name in substitutes else value
        for name, value in values.items()
    }
    types = tuple((name, substitutes.get(chosen, chosen)) for name, chosen in case.types)
    return replace(case, types=types), values


def _by_onnx_runtime(model: onnx.ModelProto, given: Mapping[str, Array]) -> list[Array]:
    return by_onnx_runtime(model.SerializeToString(), given)


def _tolerance(case: TypeCase) -> float:
    """That of the coarsest of the case's types."""
    return max((TOLERANCE.get(name, 0.0) for _, name in case.types), default=TOLERANCE["float32"])


def _problem(outputs: list[Array], opinions: Iterator[list[Array]], model: onnx.ModelProto, tolerance: float) -> str:
    """What is wrong by every opinion, in the words of the first; empty where one agrees.

    Raises
    ------
    NoReferenceError
        There is no opinion.
    """
    problem = None
    for expected in opinions:
        found = _difference(outputs, expected, model, tolerance)
        if not found:
            return ""
        problem = problem or found
    if problem is None:
        raise NoReferenceError("neither ONNX Runtime nor ONNX's reference computes it")
    return problem


def _difference(outputs: list[Array], expected: list[Array], model: onnx.ModelProto, tolerance: float) -> str:
    """What is wrong; empty where nothing is."""
    types = [helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type) for value in model.graph.output]
    problems = []
    for index, (actual, wanted, dtype) in enumerate(zip(outputs, expected, types, strict=True)):
        if (actual.shape, actual.dtype) != (wanted.shape, dtype):
            problems.append(f"y{index} is {actual.dtype}{actual.shape}, not {dtype}{wanted.shape}")
        elif not _is_close(actual, wanted, tolerance):
            problems.append(f"y{index} is {actual.ravel()[:6].tolist()}, not {wanted.ravel()[:6].tolist()}")
    return "; ".join(problems)


def _is_close(actual: Array, expected: Array, tolerance: float) -> bool:
    """Within the tolerance, or the reference's where that is float32 for float64."""
    wanted = expected.astype(actual.dtype)
    if wanted.dtype.name not in TOLERANCE:
        return bool(np.array_equal(actual, wanted))
    got, right = actual.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(right)
    if not np.array_equal(got[~finite], right[~finite], equal_nan=True):
        return False
    allowed = max(tolerance, TOLERANCE.get(expected.dtype.name, 0.0)) * float(np.abs(right[finite]).max(initial=0.0))
    return bool((np.abs(got[finite] - right[finite]) <= allowed).all())


def failure(case: TypeCase, outcome: str, problem: str, seconds: float) -> TypeResult:
    return TypeResult(name=case.name, outcome=outcome, problem=problem, seconds=seconds)


TRIAL: Trial[TypeCase, TypeResult] = Trial(attempt=attempt, failure=failure)
