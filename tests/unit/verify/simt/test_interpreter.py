"""Values, dtypes, control flow and launches of the interpreter, against NumPy."""

from __future__ import annotations

import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.simt import good_kernels
from tests.support.simt.good_kernels_tensor import tensor_core_kernels
from tests.unit.verify.simt.small_kernels import DEVICE, function, lowered, numbers, run, tensors
from tvm_ext._tvm import tirx
from tvm_ext.errors import InputError
from tvm_ext.ir.build_ir import SERIAL, VECTORIZED, allocate, index, load, loop, sequence, store
from tvm_ext.ir.simt_ir import gpu_buffer, launch
from tvm_ext.verify import simt

GOOD = {kernel.name: kernel for kernel in (*good_kernels.simt_kernels(), *tensor_core_kernels())}


@pytest.mark.sampled
@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("seed", [0, 1])
def test_good_kernels_are_right_and_not_accused(name: str, seed: int) -> None:
    kernel = GOOD[name]
    kernels = simt.lower(kernel.function, DEVICE)
    parameters = [str(p.name) for p in kernel.function.params]
    inputs = kernel.inputs(seed)
    result = simt.run(kernels, dict(zip(parameters, inputs, strict=False)), device=DEVICE)
    assert result.ok, "\n".join(map(str, result.findings))
    wanted = kernel.reference(*(x.astype(np.float64) for x in inputs))
    got = result.outputs[parameters[-1]].astype(np.float64)
    assert np.abs(got - wanted).max() <= 2e-3 * np.abs(wanted).max()


def pointwise(make: Any, *, dtype: str = "float32", out: str | None = None, size: int = 64) -> Any:
    """The output of ``B[i] = make(A[i], i)``."""
    (a,), (b,) = tensors("A", size=size, dtype=dtype), tensors("B", size=size, dtype=out or dtype)
    return function([a, b], launch(1, size, lambda block, t: store(b, make(load(a, [t]), t), [t])))


UNARY = {
    "exp": np.exp, "tanh": np.tanh, "sqrt": lambda x: np.sqrt(np.abs(x)), "floor": np.floor,
    "log": lambda x: np.log(np.abs(x) + 1),
    "rsqrt": lambda x: 1 / np.sqrt(np.abs(x) + 1), "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_mathematical_functions(name: str, dtype: str) -> None:
    one = tirx.const(1.0, dtype)
    argument = {"sqrt": tirx.abs, "log": lambda x: tirx.abs(x) + one, "rsqrt": lambda x: tirx.abs(x) + one}
    change = argument.get(name, lambda x: x)
    func = pointwise(lambda x, i: getattr(tirx, name)(change(x)), dtype=dtype)
    x = np.linspace(-3, 3, 64).astype(dtype)
    got = run(lowered(func), A=x).outputs["B"].astype(np.float64)
    tolerance = 1e-6 if dtype == "float32" else 2e-3
    assert np.abs(got - UNARY[name](x.astype(np.float64))).max() <= tolerance * 20


@pytest.mark.parametrize(("dtype", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_halves_round_after_every_operation(dtype: str, kind: Any) -> None:
    func = pointwise(lambda x, i: x * x + x, dtype=dtype)
    x = np.random.default_rng(0).standard_normal(64).astype(kind)
    assert np.array_equal(run(lowered(func), A=x).outputs["B"].astype(np.float32), ((x * x) + x).astype(np.float32))


def test_bytes_wrap_and_widen() -> None:
    func = pointwise(lambda x, i: tirx.Cast("int32", x) * tirx.Cast("int32", x), dtype="int8", out="int32")
    x = np.arange(-32, 32).astype(np.int8) * 3
    assert np.array_equal(run(lowered(func), A=x).outputs["B"], x.astype(np.int32) ** 2)
    narrow = pointwise(lambda x, i: tirx.Cast("int8", x), dtype="int32", out="int8")
    y = np.arange(64, dtype=np.int32) * 37 - 900
    assert np.array_equal(run(lowered(narrow), A=y).outputs["B"], y.astype(np.int8))


@pytest.mark.parametrize("divisor", [3, -3, 8])
def test_integer_division_is_cs_or_pythons_as_written(divisor: int) -> None:
    x = np.arange(-32, 32).astype(np.int32)
    c = tirx.IntImm("int32", divisor)
    cases = {
        "floordiv": (tirx.floordiv, x // divisor), "floormod": (tirx.floormod, x % divisor),
        "truncdiv": (tirx.truncdiv, np.trunc(x / divisor)), "truncmod": (tirx.truncmod, np.fmod(x, divisor)),
    }  # fmt: skip
    for name, (op, wanted) in cases.items():
        got = run(lowered(pointwise(lambda v, i, op=op: op(v, c), dtype="int32")), A=x).outputs["B"]
        assert np.array_equal(got, wanted.astype(np.int32)), name


def test_loops_whose_extents_differ_between_lanes() -> None:
    a, b = tensors("A", "B")
    total = gpu_buffer((1,), "float32", "total", "local")

    def body(block: Any, t: Any) -> Any:
        add = lambda k: store(total, load(total, [index(0)]) + load(a, [k]), [index(0)])  # noqa: E731
        zero = store(total, tirx.const(0.0, "float32"), [index(0)])
        return sequence(
            allocate(total), zero, loop(t + index(1), SERIAL, "k", add), store(b, load(total, [index(0)]), [t])
        )

    result = run(lowered(function([a, b], launch(1, 64, body))), A=numbers())
    assert result.ok, result.findings
    assert np.array_equal(result.outputs["B"], np.cumsum(numbers()))


def test_guards_protect_what_they_guard() -> None:
    """``i >= 3 && A[i - 3] > 10`` reads A only where i >= 3, in conditions, conditional values and branches alike."""
    zero = tirx.const(0.0, "float32")
    a, b = tensors("A", "B")

    def condition(t: Any) -> Any:
        return tirx.And(t >= index(3), load(a, [t - index(3)]) > tirx.const(10.0, "float32"))

    def body(block: Any, t: Any) -> Any:
        return store(b, tirx.if_then_else(condition(t), load(a, [t - index(3)]), zero), [t])

    result = run(lowered(function([a, b], launch(1, 64, body))), A=numbers())
    assert result.ok, result.findings
    before = np.concatenate([np.zeros(3, "f4"), numbers()[:-3]])
    assert np.array_equal(result.outputs["B"], np.where(before > 10, before, 0))


def test_blocks_that_are_no_whole_warps() -> None:
    a, b = tensors("A", "B", size=3 * 48)
    func = function(
        [a, b], launch(3, 48, lambda block, t: store(b, load(a, [block * index(48) + t]), [block * index(48) + t]))
    )
    result = run(lowered(func), A=numbers(144))
    assert result.ok and np.array_equal(result.outputs["B"], numbers(144))


def test_results_do_not_depend_on_how_blocks_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = GOOD["matmul_predicated"]
    kernels = simt.lower(kernel.function, DEVICE)
    arrays = dict(zip("AB", kernel.inputs(0), strict=True))
    together = simt.run(kernels, arrays, device=DEVICE)
    monkeypatch.setattr("tvm_ext.verify.simt.interpreter.LANES_AT_ONCE", 1)
    alone = simt.run(kernels, arrays, device=DEVICE)
    assert np.array_equal(together.outputs["C"], alone.outputs["C"])
    pairs = zip(together.counters.accesses, alone.counters.accesses, strict=True)
    assert all((a.requests, a.sectors, a.wavefronts) == (b.requests, b.sectors, b.wavefronts) for a, b in pairs)
    assert together.counters.flops == alone.counters.flops and together.counters.barriers == alone.counters.barriers


def test_lowering_of_several_launches() -> None:
    kernels = simt.lower(GOOD["two_kernels"].function, DEVICE)
    assert len(kernels) == 2 and len(kernels[0].workspaces) == 1
    assert set(kernels[0].arguments) & set(kernels[1].arguments) >= set(kernels[0].workspaces)


def test_wrong_arrays_are_refused() -> None:
    kernels = lowered(pointwise(lambda x, i: x))
    with pytest.raises(InputError, match=r"A is float32\[3\].*float32\[64\]"):
        run(kernels, A=numbers(3))


def test_an_unknown_call_is_named() -> None:
    func = pointwise(lambda x, i: tirx.call_pure_extern("float32", "my_function", x))
    with pytest.raises(InputError, match="my_function"):
        run(lowered(func), A=numbers())


@pytest.mark.slow
def test_a_block_of_a_tiled_matmul_takes_a_fraction_of_a_second() -> None:
    kernel = GOOD["matmul_shared"]
    kernels = simt.lower(kernel.function, DEVICE)
    arrays = dict(zip("AB", kernel.inputs(0), strict=True))
    start = time.perf_counter()
    simt.run(kernels, arrays, device=DEVICE, blocks=[0])
    assert time.perf_counter() - start < 2.0


def test_workspaces_of_vector_elements() -> None:
    """Stock TVM makes ``float32x4[16]`` of a workspace that is only read and written by float4."""
    a, b, between = tensors("A", "B", "W")
    four = lambda body: loop(4, VECTORIZED, "v", body)  # noqa: E731

    def first(block: Any, t: Any) -> Any:
        return four(lambda v: store(between, load(a, [t * index(4) + v]), [t * index(4) + v]))

    def second(block: Any, t: Any) -> Any:
        return four(lambda v: store(b, load(between, [t * index(4) + v]), [t * index(4) + v]))

    func = function([a, b], tirx.AllocBuffer(between, {}), launch(1, 16, first), launch(1, 16, second))
    kernels = lowered(func)
    assert "float32x4" in str(kernels[0].function)
    result = run(kernels, A=numbers())
    assert result.ok and np.array_equal(result.outputs["B"], numbers())
