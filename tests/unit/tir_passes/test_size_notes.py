"""What size limits change about a kernel is in its reason, which the build report shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tvm import relax

from tests.unit.kernels import constructed, legalised
from tvm_ext.devices import device_db
from tvm_ext.options import BuildOptions
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import from_json
from tvm_ext.tir_passes.construct_kernels import construct_kernel

op = relax.op
LIMIT = "in a buffer: an expression may have 512 operations"
CUT = "arguments of nested functions stored first"


def nested(function: Callable[[Any], Any], times: int) -> Any:
    def build(value: Any) -> Any:
        for _ in range(times):
            value = function(value)
        return value

    return legalised(build, (37,))


def on_gpu(func: Any) -> str:
    kernel = construct_kernel(func, "operator", device_db.lookup("nvidia-a100"), BuildOptions())
    return from_json(KernelChoice, str(kernel.attrs[CHOICE])).reason


def on_cpu(func: Any) -> str:
    return constructed(func)[1].reason


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("reason", [on_cpu, on_gpu])
def test_computations_kept_for_their_size_are_named(reason: Callable[[Any], str]) -> None:
    assert LIMIT in reason(nested(lambda p: op.add(p, p), 12))
    assert LIMIT not in reason(nested(lambda p: op.add(p, p), 3))


def test_cut_expressions_are_counted() -> None:
    assert f"2 {CUT}" in on_cpu(nested(op.tanh, 3))
    assert CUT not in on_cpu(nested(op.tanh, 1))
