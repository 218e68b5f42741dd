"""Recurrent layers beside each other: products of few steps depend on these alone, and compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm

from benchmarks.networks.recurrent import Stack, build_lstm_tc
from tests.support.onnx_evaluator import by_evaluator
from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext._tvm import IRModule, relax
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.options import BuildOptions
from tvm_ext.pass_pipeline import kernel_pipeline, rammer_passes
from tvm_ext.records.rammer import RAMMER, RammerRecord
from tvm_ext.records.rtasks import RTaskGraph
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.recurrent.overlap_layers import divided, overlapped

STEPS, LAYERS = 8, 3


@pytest.fixture(scope="module")
def model() -> Any:
    return build_lstm_tc(batch=2, seed=0, stack=Stack(steps=STEPS, layers=LAYERS, hidden=16))


@pytest.fixture(scope="module")
def network(model: Any) -> IRModule:
    return relay.prepare(*relay.frontend.from_onnx(model))


def products(mod: IRModule) -> list[int]:
    """The rows of each product."""
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    calls = [value for value in values if isinstance(value, relax.Call) and "relax.matmul" in str(value.op)]
    return [int(call.args[0].ty.shape[0]) for call in calls]


def test_products_of_layers_above_another_are_divided(network: IRModule) -> None:
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        made, steps = divided(network, 3)
    assert steps == STEPS
    whole, classes = products(network)[0], products(network)[-1]
    assert products(network) == [whole] * LAYERS + [classes]
    assert sorted(products(made)) == sorted([whole, *[4, 6, 6] * (LAYERS - 1), classes])  # batch 2: of 2, 3 and 3 steps


def test_what_needs_no_division_stays(network: IRModule) -> None:
    assert products(divided(network, STEPS)[0]) == products(network)
    single = relay.prepare(
        *relay.frontend.from_onnx(build_lstm_tc(batch=1, seed=0, stack=Stack(steps=6, layers=1, hidden=8)))
    )

    def never(_mod: IRModule) -> float:
        raise AssertionError("nothing to choose")

    assert overlapped(single, never) == (single, None)


@pytest.mark.parametrize("bias", [(), (24,), (8, 24)])
def test_splits_of_other_products_stay(bias: tuple[int, ...]) -> None:
    """A bias of each row, a vector or a number is none of a layer's, which is a row of two axes."""
    *parts, weight, added = inputs_of(*[(2, 16)] * 4, (16, 24), bias)
    value = relax.op.add(relax.op.matmul(relax.op.concat(parts, axis=0), weight), added)
    mod = module_of([*parts, weight, added], relax.op.split(value, 4, axis=0))
    assert divided(mod, 1)[1] == 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("chunk", [1, 3])
def test_values_are_the_same_in_a_schedule(chunk: int, network: IRModule, model: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((STEPS, 2, 16), dtype=np.float32)
    module = relay.GraphModule(relay.build(divided(network, chunk)[0], "llvm", enable_rammer=True, kernel_cache="off"))
    module.run(x=x)
    (expected,) = by_evaluator(model, {"x": x})
    np.testing.assert_allclose(module.get_output(0).numpy(), expected, rtol=1e-4, atol=1e-5)


def depth(mod: IRModule) -> tuple[int, float]:
    """The longest way through the schedule of a build for a GPU, in operators, and its simulated time."""
    device, target = device_for_target("nvidia-v100")
    options = BuildOptions.create(enable_rammer=True, kernel_cache="off")
    with target:
        passes = [kernel_pipeline(target, device, options), *rammer_passes(device, options)[:2]]
        made = tvm.transform.Sequential(passes)(mod)
    region = max(from_json(RammerRecord, str(made.attrs[RAMMER])).regions, key=lambda item: len(item.operators))
    lengths: list[int] = []
    for operator in RTaskGraph.from_json(region.graph).operators:
        lengths.append(1 + max((lengths[item] for item in operator.predecessors), default=0))
    return max(lengths), region.predicted_us


def test_layers_run_beside_each_other_on_a_gpu(network: IRModule) -> None:
    """Layer l + 1 begins two steps behind layer l: 8 + 2 x 2 steps, not 3 x 8."""
    whole, parts = depth(network), depth(divided(network, 2)[0])
    assert parts[0] < 0.75 * whole[0] and parts[1] < whole[1]


def times(by_chunk: dict[int, float]) -> Callable[[IRModule], float]:
    return lambda mod: by_chunk[max(products(mod)[1:-1]) // 2]


@pytest.mark.parametrize(
    ("by_chunk", "chosen"), [({8: 9.0, 2: 5.0, 1: 4.0}, 1), ({8: 9.0, 2: 5.0, 1: 7.0}, 2), ({8: 9.0, 2: 9.0}, None)]
)
def test_the_quickest_size_is_chosen(by_chunk: dict[int, float], chosen: int | None, network: IRModule) -> None:
    mod, chunk = overlapped(network, times(by_chunk))
    assert chunk == chosen
    assert max(products(mod)[1:-1]) == 2 * (chosen or STEPS)
