"""Small networks as single GPU kernels, interpreted and compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.networks import models, random_cells, recurrent
from benchmarks.networks.recurrent import Stack
from tests.support.merged_runs import Runs, fits, merged_graph, nobody
from tvm_ext import relay
from tvm_ext.tir_passes.merge_rtasks import AskCompiler
from tvm_ext.verify.simt import Concurrency

SLOW_CELLS = (7, 13, 21, 40)


def lstm() -> onnx.ModelProto:
    return recurrent.build_lstm_tc(batch=1, seed=0, stack=Stack(steps=3, layers=2, hidden=8))


def cell(index: int) -> onnx.ModelProto:
    return random_cells.build_random_cell(index, channels=8, extent=4)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("build", "ask"),
    [
        (lstm, fits),
        (lambda: cell(0), nobody),
        pytest.param(lstm, nobody, marks=pytest.mark.slow),
        *(pytest.param(lambda index=index: cell(index), fits, marks=pytest.mark.slow) for index in SLOW_CELLS),
    ],
)
def test_small_networks_agree_with_onnx_runtime(
    build: Callable[[], onnx.ModelProto], ask: AskCompiler, reference: Any
) -> None:
    """Two runs, so that the second one starts from the counters that the first has left."""
    model = build()
    mod, params = relay.frontend.from_onnx(model)
    graph = merged_graph(relay.prepare(mod, params), measure=ask)
    assert graph.record.outside == ()
    runs, inputs = Runs(graph), models.random_inputs(model, 1)
    for order in (Concurrency(order="backward"), Concurrency(order="random", seed=1)):
        for actual, expected in zip(runs(list(inputs.values()), order), reference(model, inputs), strict=True):
            assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)
    assert runs.findings == []


def test_steps_of_a_layer_share_their_bodies() -> None:
    mod, params = relay.frontend.from_onnx(lstm())
    (region,) = merged_graph(relay.prepare(mod, params)).record.regions
    (launch,) = region.launches
    assert launch.bodies < len(region.operators) / 2 + 1
