"""Random operators as GPU kernels, run through OpenCL on the CPU, against float64 NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support import opencl_cpu
from tests.support.random_cases import document
from tests.support.random_operators.__main__ import FAMILY
from tests.support.random_operators.check import attempt
from tests.support.random_operators.draw import SLOTS, draw_case
from tests.support.random_operators.opencl import DEVICES, in_turn, is_gpu
from tests.support.random_operators.record import OperatorCase
from tvm_ext.errors import CompileError, IllegalRewrite

pytestmark = pytest.mark.skipif(opencl_cpu.why_not() is not None, reason=str(opencl_cpu.why_not()))

EVERYDAY = 12
ALL = 300
LOOPS_ON_THE_HOST = ("cumsum",)
"""Stock TVM's own scan: its host function computes the sizes of its launches, which `opencl_cpu` does not do."""


def cases(count: int, seed: int = 0) -> list[OperatorCase]:
    drawn = (in_turn(draw_case(seed, index), DEVICES) for index in range(count))
    return [case for case in drawn if case.kind not in LOOPS_ON_THE_HOST]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", cases(EVERYDAY), ids=lambda case: f"{case.index}-{case.kind}-{case.device}")
def test_the_opencl_of_an_operator_agrees_with_numpy(case: OperatorCase) -> None:
    result = attempt(case)
    assert result.passed, f"{case}\n{result.outcome}: {result.problem}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_opencl_of_three_hundred_operators_agrees_with_numpy() -> None:
    drawn = cases(ALL)
    results = list(FAMILY.results(drawn))
    assert len(results) == len(drawn)
    assert all(result.passed for result in results), document(results, {item.index: item for item in drawn}.get)


def test_every_device_has_its_turn() -> None:
    assert {case.device for case in cases(EVERYDAY)} == set(DEVICES)
    assert all(is_gpu(device) for device in DEVICES) and not is_gpu("") and not is_gpu("cpu-avx2")
    assert in_turn(draw_case(0, 3), ()) == draw_case(0, 3)


def test_what_loops_on_the_host_is_refused_with_its_reason() -> None:
    index = next(i for i, (kind, _) in enumerate(SLOTS) if kind in LOOPS_ON_THE_HOST)
    result = attempt(replace(draw_case(0, index), device="nvidia-a100"))
    assert result.outcome == "raised"
    assert "computes on the host" in result.problem


def test_a_kernel_that_writes_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results' buffers are full of NaN beforehand; launches are dropped here."""

    def no_launch(_self: Any, _name: str, _buffers: Any) -> None:
        return None

    monkeypatch.setattr(opencl_cpu.OpenClDevice, "call", no_launch)
    result = attempt(replace(draw_case(0, 0), device="nvidia-a100"))
    assert result.outcome == "wrong" and "errs by inf" in result.problem


def test_source_that_does_not_compile_is_refused_with_the_compilers_words() -> None:
    program = opencl_cpu.OpenClProgram(source="__kernel void f() { nonsense(); }", functions={})
    with pytest.raises(CompileError, match="nonsense"):
        opencl_cpu.OpenClDevice(program)


def test_an_unscheduled_function_is_refused() -> None:
    from tvm_ext._tvm import te

    x = te.placeholder((8,), "float32", "x")
    func = te.create_prim_func([x, te.compute((8,), lambda i: x[i] + 1.0, "y")])
    with pytest.raises(IllegalRewrite, match="was not scheduled"):
        opencl_cpu.run_opencl(func, [np.zeros(8, "float32")])
