"""Local memory of kernels that stock TVM wrote: of each thread, not of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax
from tvm.ir import assert_structural_equal

from tests.support.opencl_graph import run_graph
from tests.support.simt_graph import KernelFault, SimtDevice
from tests.support.small_modules import inputs_of, module_of
from tests.unit.kernels import legalised
from tvm_ext import relay
from tvm_ext._tvm import IRModule
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import plan_build
from tvm_ext.tir_passes import allocate_in_threads
from tvm_ext.tir_passes.allocate_in_threads import AllocateInThreads

X = np.arange(128, dtype=np.float32).reshape(64, 2) % 7


def computed() -> Any:
    """The sums up to each column, without it, as a default build for a GPU computes them."""
    (x,) = inputs_of((64, 2))
    plan = plan_build("nvidia-v100", BuildOptions())
    with plan.target:
        kernels = plan.construct(relay.prepare(module_of([x], relax.op.cumsum(x, axis=1, exclusive=True)), {}))
        name = kernels["main"].params[0].name
        return run_graph(kernels, {name: X}, lambda functions: SimtDevice(functions, plan.device, plan.target))[0]


def test_stock_tvm_s_scan_has_its_places_in_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    np.testing.assert_array_equal(computed(), np.cumsum(X, axis=1) - X)
    monkeypatch.setattr(allocate_in_threads, "_is_launch", lambda _statement: False)
    with pytest.raises(KernelFault, match="race"):
        computed()


def test_what_asks_for_nothing_outside_of_launches_stays_as_it_is() -> None:
    func = legalised(lambda x: relax.op.nn.softmax(x), (4, 8))
    assert_structural_equal(AllocateInThreads()(IRModule({"main": func}))["main"], func)
