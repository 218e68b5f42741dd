"""Kernels with trusted arguments do not look at them; what they themselves assert they still do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import inputs_of, module_of
from tests.unit.kernels import legalised
from tvm_ext import relay
from tvm_ext._tvm import CPU_PIPELINE
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.errors import IndexRangeError
from tvm_ext.records.choice import TRUSTED_ARGUMENTS


def _lowered(func: Any) -> Any:
    target = device_for_target("llvm")[1]
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    pipeline, _, _ = tvm.tirx.get_tir_pipeline(CPU_PIPELINE)
    return pipeline(tvm.tirx.transform.BindTarget(target.with_host(target))(module))["main"]


def _asserted(func: Any) -> int:
    return str(func.script()).count("assert ")


@pytest.fixture
def kernel() -> Any:
    return legalised(lambda x, y: relax.op.add(x, y), (4, 8), (4, 8))


def test_trusted_arguments_are_not_looked_at(kernel: Any) -> None:
    assert _asserted(_lowered(kernel)) > 10
    assert _asserted(_lowered(kernel.with_attr(TRUSTED_ARGUMENTS, True))) == 0


def test_a_kernels_own_assertions_stay() -> None:
    """The indices that the graph adds up are no input, and what looks at them is a kernel like any other."""
    x, y = inputs_of((4,), (4,), dtype="int64")
    rows = relax.const(np.arange(10, dtype="f4"))
    library = relay.build(module_of([x, y], relax.op.take(rows, relax.op.add(x, y), axis=0, mode="fast")), "llvm")
    machine = relax.VirtualMachine(library.executable, tvm.cpu())
    ones = np.ones(4, "i8")
    np.testing.assert_array_equal(machine["main"](ones, 7 * ones).numpy(), np.full(4, 8.0))
    with pytest.raises(IndexRangeError, match="outside"):
        machine["main"](ones, 9 * ones)
