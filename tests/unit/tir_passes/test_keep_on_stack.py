"""The sums of register tiles are on the stack of a CPU's kernels: nothing is asked of the workspace pool for them."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import relax

from tests.unit.kernels import constructed, legalised
from tvm_ext._tvm import CPU_PIPELINE
from tvm_ext.devices.device_db import device_for_target, lookup

op = relax.op
POOL = "TVMBackendAllocWorkspace"


def _code(kernel: Any, pipeline: str) -> str:
    target = device_for_target("llvm")[1]
    module = tvm.IRModule({"main": kernel.with_attr("global_symbol", "main")})
    with target:
        return str(tvm.tirx.build(module, target=target, pipeline=pipeline).inspect_source("ll"))


def _convolution(x: Any, w: Any) -> Any:
    return op.nn.relu(op.nn.conv2d(x, w))


@pytest.mark.parametrize(
    ("build", "shapes"),
    [(op.matmul, ((60, 64), (64, 96))), (_convolution, ((1, 16, 14, 14), (64, 16, 3, 3)))],
    ids=["product", "convolution"],
)
def test_sums_of_more_than_1_kib_are_no_workspace(build: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    kernel, choice = constructed(legalised(build, *shapes), constants=(1,), device=lookup("cpu-epyc-zen5"))
    assert choice.path == "rtile"
    assert POOL in _code(kernel, "default"), "stock TVM would keep them, and there would be nothing to test"
    assert POOL not in _code(kernel, CPU_PIPELINE)


def test_large_buffers_stay_workspaces() -> None:
    """A padded input of 100 KB is no place for a thread's stack."""
    kernel, _ = constructed(
        legalised(lambda x, w: op.nn.conv2d(x, w, padding=1), (1, 16, 40, 40), (64, 16, 3, 3)),
        constants=(1,),
        device=lookup("cpu-epyc-zen5"),
    )
    assert POOL in _code(kernel, CPU_PIPELINE)
