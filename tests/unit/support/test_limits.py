"""Every step of a build has a limit: beyond it the operator goes the next simpler way, and the report says so."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tests.unit.kernels import legalised
from tvm_ext import relay
from tvm_ext.devices import device_db
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.support.limits import Limits, limited, limits
from tvm_ext.tir_passes.construct_kernels import construct_kernel

op = relax.op
Array = np.ndarray[Any, Any]
Function = Callable[[Any], Any]
ROWS, COLUMNS = 24, 37


def nested(function: Function, value: Any, times: int) -> Any:
    for _ in range(times):
        value = function(value)
    return value


def softmax(a: Array) -> Array:
    powers = np.exp(a - a.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


WEIGHT = np.linspace(-1, 1, COLUMNS * 48).reshape(COLUMNS, 48).astype("f4")
ALTERNATING: tuple[Function, Function] = (
    lambda v: nested(lambda p: op.sin(op.multiply(p, v)), v, 6),
    lambda a: nested(lambda p: np.sin(p * a), a, 6),
)
PRODUCT: tuple[Function, Function] = (
    lambda v: op.nn.relu(op.matmul(v, relax.const(WEIGHT))),
    lambda a: np.maximum(a @ WEIGHT, 0),
)
SOFTMAX: tuple[Function, Function] = (op.nn.softmax, softmax)
TANH: tuple[Function, Function] = (lambda v: nested(op.tanh, v, 3), lambda a: np.tanh(np.tanh(np.tanh(a))))
LEAKY: tuple[Function, Function] = (
    lambda v: nested(lambda p: op.nn.leakyrelu(op.add(p, relax.const(np.float32(0.25)))), v, 5),
    lambda a: nested(lambda p: np.where(p + 0.25 > 0, p + 0.25, 0.01 * (p + 0.25)), a, 5),
)
CLIPS: tuple[Function, Function] = (
    lambda v: nested(lambda p: op.nn.relu(op.subtract(p, relax.const(np.float32(0.125)))), v, 4),
    lambda a: nested(lambda p: np.maximum(p - 0.125, 0), a, 4),
)
OUTER: tuple[Function, Function] = (
    lambda v: op.add(v, op.sum(op.subtract(relax.const(WEIGHT[:, :1]), relax.const(WEIGHT[0])), axis=[1])),
    lambda a: a + (WEIGHT[:, :1] - WEIGHT[0]).sum(1),
)
ERF: tuple[Function, Function] = (
    lambda v: op.add(v, op.sum(op.erf(relax.const(WEIGHT)), axis=[1])),
    lambda a: a + np.vectorize(math.erf)(WEIGHT).sum(1),
)
KEPT = "of constants is computed by each run: it has 1776"

# Limit -> a value that the operator passes, the operator, what the report says, the paths that it then takes.
CASES: dict[str, tuple[float, tuple[Function, Function], str, set[str]]] = {
    "joined_tensors": (
        3,
        (
            lambda v: op.concat([op.multiply(v, relax.const(np.float32(i))) for i in range(11)], axis=1),
            lambda a: np.concatenate([a * i for i in range(11)], 1),
        ),
        "a concatenation of 11 tensors is made in steps of 3",
        {"rows"},
    ),
    "fused_operators": (2, ALTERNATING, r"\d kernels are of 2 operators", {"rows"}),
    "folded_elements": (10, OUTER, rf"subtract {KEPT} elements \(limit 10\)", {"rows", "rtile"}),
    "folded_points": (10, OUTER, rf"subtract {KEPT} points \(limit 10\)", {"rows", "rtile"}),
    "folded_calls_of_python": (10, ERF, rf"erf {KEPT} elements of a function that NumPy lacks", {"rows"}),
    "computations": (2, SOFTMAX, r"it has 4 computations \(limit 2\)", {"fallback"}),
    "value_operations": (2, ALTERNATING, r"it has 3 operations in \w+ \(limit 2\)", {"fallback"}),
    "inlined_operations": (4, ALTERNATING, "in a buffer: an expression may have 4 operations", {"rows"}),
    "inlined_choices": (2, LEAKY, "in a buffer: an expression may have 2 choices", {"rows"}),
    "nested_extremes": (1, CLIPS, "arguments of nested functions stored first", {"rows"}),
    "kernel_operations": (5, PRODUCT, r"it has \d+ operations in its kernels \(limit 5\)", {"fallback"}),
    "expanded_functions": (1, TANH, r"functions by the C library: 3 of them \(limit 1\)", {"rows"}),
    "construction_s": (-1.0, PRODUCT, r"its construction took more than -1 s", {"fallback"}),
}
ELSEWHERE = {
    "chained_products": "tests/unit/relay_passes/test_fuse_persistent.py",
    "folded_filling": "tests/unit/relay_passes/test_fold_calls.py",
    "folded_products": "tests/unit/relay_passes/test_fold_calls.py",
    "pipelined_operations": "below",
    "search_steps": "below",
}


def build(function: Function) -> relay.Library:
    x = relax.Var("x", relax.TensorType((ROWS, COLUMNS), "float32"))
    return relay.build(module_of([x], function(x)), "llvm", kernel_cache="off")


def said(library: relay.Library) -> str:
    return " | ".join([*library.report.notes, *(kernel.choice.reason for kernel in library.report.operators)])


def test_every_limit_is_tried() -> None:
    assert {field.name for field in fields(Limits)} == set(CASES) | set(ELSEWHERE)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", CASES)
def test_beyond_a_limit_the_answer_is_right_and_the_report_says_which(name: str, rng: np.random.Generator) -> None:
    value, (function, reference), expected, paths = CASES[name]
    with limited(**{name: value}):
        library = build(function)
    assert re.search(expected, said(library)), said(library)
    assert set(library.report.path_counts()) == paths, said(library)
    x = rng.normal(0, 1, (ROWS, COLUMNS)).astype("f4")
    actual = library.vm()["main"](tvm.runtime.tensor(x)).numpy()
    np.testing.assert_allclose(actual, reference(x.astype("f8")), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [PRODUCT[0], SOFTMAX[0], ALTERNATING[0], TANH[0]])
def test_usual_operators_come_nowhere_near(function: Function) -> None:
    tenth = {f.name: getattr(limits(), f.name) / 10 for f in fields(Limits) if f.name.endswith(("steps", "operations"))}
    with limited(**tenth, computations=limits().computations / 10, expanded_functions=limits().expanded_functions / 10):
        assert "limit" not in said(build(function))


def gpu_choice(function: Function) -> KernelChoice:
    func = legalised(function, (256, 256))
    kernel = construct_kernel(func, "operator", device_db.lookup("nvidia-a100"), BuildOptions())
    return from_json(KernelChoice, str(kernel.attrs[CHOICE]))


def test_gpu_kernels_have_the_same_limits() -> None:
    def squared(v: Any) -> Any:
        return op.matmul(v, v)

    assert gpu_choice(squared).path == "rtile"
    for name, value in {"computations": 0, "kernel_operations": 5, "construction_s": -1.0}.items():
        with limited(**{name: value}):
            choice = gpu_choice(squared)
        assert choice.path == "stock"
        assert "no kernel constructed: it" in choice.reason
    with limited(search_steps=60):
        assert "vector units (best of 60 tiles looked at (limit))" in gpu_choice(squared).reason
    with limited(pipelined_operations=5):
        choice = gpu_choice(squared)
    assert choice.path == "rtile"
    assert re.search(r"not pipelined: it has \d+ operations \(limit 5\)", choice.reason)


def test_the_report_shows_notes_and_keeps_them(tmp_path: Path) -> None:
    with limited(joined_tensors=3):
        library = build(CASES["joined_tensors"][1][0])
    assert "limit: a concatenation of 11 tensors is made in steps of 3" in str(library.report)
    library.export_library(tmp_path / "joined.so")
    assert relay.load(tmp_path / "joined.so").report.notes == library.report.notes
