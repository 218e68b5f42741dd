"""Models whose builds took minutes, or for ever: each in a process of its own, which has a minute of processor time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60  # a busy machine gives it less processor time; the idle two cores it was written on take a third
HANGS_AFTER_S = 900

# Expressions over v, a vector of 37 elements; `nested(f, v, n)` applies f n times, `c(x)` is a constant.
SAMPLE = {
    "mish": "op.multiply(v, op.tanh(op.log(op.add(op.exp(v), c(1)))))",
    "a product of constants of 2000^2": (
        "op.add(v, op.sum(op.matmul(c(np.ones((2000, 2000))), c(np.ones((2000, 2000))))))"
    ),
}
CASES = {
    "tanh(tanh(x))": "op.tanh(op.tanh(v))",
    "p + p, 50 times": "nested(lambda p: op.add(p, p), v, 50)",
    "erf, 30 times": "nested(op.erf, v, 30)",
    "mish, 20 times": "nested(lambda p: op.multiply(p, op.tanh(op.log(op.add(op.exp(p), c(1))))), v, 20)",
    "Fibonacci": "fibonacci(v, 60)",
    "choices of choices": "nested(lambda p: op.where(op.less(p, v), op.add(p, v), op.multiply(p, v)), v, 40)",
    "maxima of maxima": "nested(lambda p: op.maximum(op.multiply(p, v), op.add(p, p)), v, 40)",
    "softmax, 100 times": "nested(lambda p: op.nn.softmax(op.add(p, v)), v, 100)",
    "a chain of 1000": "functools.reduce(lambda a, i: op.add(a, c(i)), range(1000), v)",
    "a sum of 600 products": "functools.reduce(op.add, [op.multiply(v, c(i)) for i in range(600)])",
    "concatenation of 1000": "op.concat([v] * 1000, axis=0)",
    "concatenation of 2000": "op.concat([v] * 2000, axis=0)",
    "concatenation of 600 different ones": "op.concat([op.add(v, c(i)) for i in range(600)], axis=0)",
    "concatenation of 400 slices": (
        "op.concat([op.strided_slice(v, [0], [i % 30], [i % 30 + 1]) for i in range(400)], axis=0)"
    ),
    "100 pads and slices": (
        "nested(lambda p: op.strided_slice(op.nn.pad(op.add(p, v), (1, 1)), [0], [0], [37]), v, 100)"
    ),
    "100 gathers": "nested(lambda p: op.take(op.add(p, v), c(np.arange(37)[::-1], 'int64'), axis=0), v, 100)",
    "200 flips": "nested(lambda p: op.flip(op.add(p, v), 0), v, 200)",
    "an expanded constant": "op.add(op.sum(op.exp(op.broadcast_to(c(1), (30000, 10000)))), v)",
    "a determinant's products": (
        "functools.reduce(op.subtract, [op.multiply(op.take(v, c(i % 37, 'int64'), axis=0),"
        " op.take(v, c(i * 7 % 37, 'int64'), axis=0)) for i in range(200)])"
    ),
    "100 products of matrices": (
        "functools.reduce(op.add, [op.matmul(op.reshape(v, (1, 37)), c(np.ones((37, 37)))) for _ in range(100)])"
    ),
}

PROGRAM = """
import functools
import resource
import numpy as np
from tvm import relax
from tvm_ext import relay
op = relax.op
resource.setrlimit(resource.RLIMIT_CPU, ({limit}, {limit}))
def c(value, dtype="float32"):
    return relax.const(np.asarray(value, dtype), dtype)
def nested(function, value, times):
    for _ in range(times):
        value = function(value)
    return value
def fibonacci(value, times):
    a, b = value, op.multiply(value, c(0.5))
    for _ in range(times):
        a, b = b, op.add(a, b)
    return b
v = relax.Var("v", relax.TensorType((37,), "float32"))
builder = relax.BlockBuilder()
with builder.function("main", [v]):
    with builder.dataflow():
        result = builder.emit_output(builder.emit({case}))
    builder.emit_func_output(result)
library = relay.build(builder.get(), "llvm", kernel_cache="off")
assert all(kernel.choice.reason for kernel in library.report.operators)
library.vm()["main"](relay.tvm.runtime.tensor(np.linspace(-1, 1, 37).astype("f4")))
print("built")
"""


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES)])
def test_the_build_ends(name: str) -> None:
    program = PROGRAM.replace("{case}", {**SAMPLE, **CASES}[name]).replace("{limit}", str(LIMIT_S))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANGS_AFTER_S
    )
    assert done.stdout.strip().endswith("built"), f"{done.returncode}: {done.stderr[-2000:]}"
