"""Builds end: nested functions, doubling sums, wide concatenations, in a process of its own with a time limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120  # all take some seconds; what this file is against took hours, or for ever

CASES = {
    "tanh(tanh(...))": "f = lambda v: nested(op.tanh, v, 8); g = lambda a: nested(np.tanh, a, 8)",
    "erf(erf(...))": "f = lambda v: nested(op.erf, v, 6); g = lambda a: nested(np.vectorize(math.erf), a, 6)",
    "sigmoid(sigmoid(...))": "f = lambda v: nested(op.sigmoid, v, 8); g = lambda a: nested(sigmoid, a, 8)",
    "mish(mish(x))": (
        "m = lambda v: op.multiply(v, op.tanh(op.log(op.add(op.exp(v), relax.const(1.0, 'float32')))));"
        "f = lambda v: nested(m, v, 2); g = lambda a: nested(lambda b: b * np.tanh(np.log1p(np.exp(b))), a, 2)"
    ),
    "p + p, 50 times": (
        "f = lambda v: op.multiply(nested(lambda p: op.add(p, p), v, 50), relax.const(2.0**-50, 'float32'));"
        "g = lambda a: a"
    ),
    "max(max(...), ...)": (
        "f = lambda v: nested(lambda p: op.maximum(op.multiply(p, v), op.add(p, v)), v, 6);"
        "g = lambda a: nested(lambda p: np.maximum(p * a, p + a), a, 6)"
    ),
    "LSTM cell": (
        "def f(v):\n"
        "    c = h = v\n"
        "    for _ in range(3):\n"
        "        i, o, u = op.sigmoid(op.add(v, h)), op.sigmoid(op.subtract(v, h)), op.tanh(op.multiply(v, h))\n"
        "        c = op.add(op.multiply(op.sigmoid(h), c), op.multiply(i, u)); h = op.multiply(o, op.tanh(c))\n"
        "    return h\n"
        "def g(a):\n"
        "    c = h = a\n"
        "    for _ in range(3):\n"
        "        i, o, u = sigmoid(a + h), sigmoid(a - h), np.tanh(a * h)\n"
        "        c = sigmoid(h) * c + i * u; h = o * np.tanh(c)\n"
        "    return h"
    ),
    "Concat of 100": (
        "f = lambda v: op.concat([op.add(v, relax.const(float(i), 'float32')) if i % 20 == 0 else v"
        " for i in range(100)], axis=0);"
        "g = lambda a: np.concatenate([a + i if i % 20 == 0 else a for i in range(100)])"
    ),
}
SLOW_CASES = {"Concat of 2000": "f = lambda v: op.concat([v] * 2000, axis=0); g = lambda a: np.concatenate([a] * 2000)"}

PROGRAM = """
import math
import numpy as np, tvm
from tvm import relax
from tvm_ext import relay
op = relax.op
sigmoid = lambda a: 1 / (1 + np.exp(-a))
def nested(function, value, times):
    for _ in range(times):
        value = function(value)
    return value
def check(f, g):
    x = relax.Var("x", relax.TensorType((37,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(f(x)))
        builder.emit_func_output(result)
    library = relay.build(builder.get(), "llvm", kernel_cache="off")
    values = np.linspace(-2, 2, 37).astype("f4")
    actual = library.vm()["main"](tvm.runtime.tensor(values))
    actual = actual[0] if isinstance(actual, (list, tuple)) else actual
    np.testing.assert_allclose(np.asarray(actual.numpy()), g(values.astype("f8")), rtol=2e-5, atol=1e-6)
"""


@pytest.mark.parametrize("cases", [CASES, pytest.param(SLOW_CASES, marks=pytest.mark.slow)], ids=["", "slow"])
def test_they_end_and_are_right(cases: dict[str, str]) -> None:
    """One process for all, which says what is done: what hangs or fails is the first that it does not name."""
    program = PROGRAM + "".join(f"{case}\ncheck(f, g)\nprint({name!r}, flush=True)\n" for name, case in cases.items())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.splitlines() == [*cases], done.stderr[-2000:]
