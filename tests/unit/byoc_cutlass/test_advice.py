"""What the co-design helper says of a model, and that it agrees with what it is predicted from."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.networks.graph import GraphWriter, he_normal
from benchmarks.networks.repvgg import blocks_of, build_repvgg
from tests.unit.byoc_cutlass.graphs import decided, product
from tvm_ext.byoc_cutlass.advice import Advisor, aligned_product
from tvm_ext.cli.advise import advice_on
from tvm_ext.cost.alignment_model import product_us
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.advice import ModelAdvice
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.relay import frontend, prepare
from tvm_ext.relay_passes.onnx.half import to_half


def convolution(graph: GraphWriter, source: str, name: str, shape: tuple[int, int, int, int], **attributes: Any) -> str:
    weight = graph.constant(name, he_normal(0, name, shape, fan_in=shape[1] * shape[2] ** 2))
    size = shape[2]
    return graph.op("Conv", source, weight, kernel_shape=[size, size], pads=[size // 2] * 4, **attributes)


def bent(graph: GraphWriter, source: str) -> str:
    """A function that no epilogue has."""
    return graph.op("Mul", source, graph.op("Erf", source))


def network() -> onnx.ModelProto:
    """Odd channels, GELU's cheap rival, a function of no epilogue, a convolution worth deepening, and a wide one."""
    graph = GraphWriter("advice", opset=20)
    value = graph.input("x", (8, 3, 56, 56))
    value = graph.op("Relu", convolution(graph, value, "first", (46, 3, 3, 3)))
    value = graph.op("Gelu", convolution(graph, value, "second", (64, 46, 3, 3)))
    value = graph.op("Relu", convolution(graph, value, "third", (64, 64, 3, 3)))
    value = bent(graph, convolution(graph, value, "fourth", (64, 64, 1, 1)))
    value = graph.op("Relu", convolution(graph, value, "fifth", (640, 64, 3, 3), strides=[4, 4]))
    graph.output(value, (8, 640, 14, 14))
    return graph.model()


def advice(model: onnx.ModelProto, device: str = "nvidia-a100") -> ModelAdvice:
    mod, params = frontend.from_onnx(to_half(model))
    return advice_on(prepare(mod, params), lookup(device))


@pytest.fixture(scope="module")
def found() -> ModelAdvice:
    return advice(network())


def test_channels(found: ModelAdvice) -> None:
    """The first convolution has 3 channels and writes 46, padded to 48, which the second reads."""
    entries = {item.depth: item for item in found.alignment}
    assert set(entries) == {(3, 8), (46, 48)}
    assert entries[3, 8].columns == (46, 48)
    assert entries[3, 8].handled == "padded by the kernel before"
    assert entries[46, 48].handled == "padded by the product before"
    assert all(item.gain_us >= 0 and item.now_us > 0 for item in found.alignment)
    assert (found.products, found.refused) == (5, ())


def test_activations(found: ModelAdvice) -> None:
    fused, apart = sorted(found.activations, key=lambda item: not item.fused)
    assert (fused.function, fused.calls) == ("gelu", 1)
    (hardswish, cheaper), (relu, cheapest) = fused.alternatives
    assert (hardswish, relu) == ("hardswish", "relu")
    assert fused.now_us > cheaper > cheapest > 0
    assert not apart.fused and "erf" in apart.function and apart.now_us > apart.alternatives[0][1]


def test_depth(found: ModelAdvice) -> None:
    """A 1x1 convolution is nearly free in the kernel of a 3x3 one of 64 filters; of 640 it is not."""
    texts = [item.described for item in found.deepening]
    assert any(text.startswith("(8, 56, 56, 64)") for text in texts)
    assert not any("640" in text for text in texts)
    (other,) = [text for text in found.not_deepened if "640" in text]
    assert ": " in other
    for item in found.deepening:
        assert item.alone_us < item.fused_us < item.apart_us
        assert 0 < item.added_share <= 0.25


def test_changes_together(found: ModelAdvice) -> None:
    """Seven sets of three changes; each set adds up what its changes save and cost alone."""
    alone = {item.changes[0]: item.then_us - item.now_us for item in found.combinations if len(item.changes) == 1}
    aligned, hardswish, deepened = sorted(alone, key=lambda name: ("1x1" in name, "Hardswish" in name))
    assert len(found.combinations) == 7
    for item in found.combinations:
        assert item.then_us == pytest.approx(item.now_us + sum(alone[name] for name in item.changes))
    assert alone[aligned] == pytest.approx(-sum(item.gain_us for item in found.alignment))
    assert alone[deepened] == pytest.approx(sum(item.fused_us - item.alone_us for item in found.deepening))
    # two functions become cheaper, by more than what three ReLUs' elements cost beyond
    assert alone[hardswish] < sum(dict(item.alternatives)["hardswish"] - item.now_us for item in found.activations) / 2
    assert [item.speed for item in found.combinations] == sorted((i.speed for i in found.combinations), reverse=True)


def test_the_changed_model_is_as_fast_as_was_predicted() -> None:
    """Bolt's Table 6: the first blocks of RepVGG-A0, deepened and with Hardswish, against the advice on them."""
    blocks = list(blocks_of("a0"))[:5]

    def predicted(**options: Any) -> ModelAdvice:
        return advice(build_repvgg(batch=32, size=112, classes=16, blocks=blocks, **options), "nvidia-t4")

    plain, changed = predicted(), predicted(activation="HardSwish", deepened=True)
    (both,) = [item for item in plain.combinations if len(item.changes) == 2 and "16 bytes" not in item.changes[0]]
    now_us = changed.products_us + changed.epilogues_us - changed.chains_saved_us
    padded_us = sum(item.gain_us for item in changed.alignment)
    assert both.then_us == pytest.approx(now_us + padded_us, rel=0.15)


def test_an_aligned_model_has_nothing_to_change() -> None:
    graph = GraphWriter("aligned")
    value = graph.input("x", (64, 256))
    weight = graph.constant("w", np.zeros((256, 512), np.float32))
    graph.output(graph.op("Relu", graph.op("MatMul", value, weight)), (64, 512))
    found = advice(graph.model())
    assert (found.products, found.alignment, found.activations, found.deepening) == (1, (), (), ())
    assert [item.changes for item in found.combinations] == [("Hardswish for all activations",)]


@pytest.mark.parametrize("device", ["nvidia-t4", "nvidia-a100"])
def test_small_products_are_predicted_in_small_tiles(device: str) -> None:
    """Which 128 x 128 tiles would leave most units without work; of large ones nothing else is said than before."""

    def predicted(rows: int, depth: int, columns: int) -> tuple[float, float]:
        (region,) = decided(product((rows, depth), (depth, columns)), device).taken
        problem = region.problem
        return Advisor(lookup(device)).product_us(problem), product_us(aligned_product(problem), lookup(device))

    small, in_large_tiles = predicted(256, 2048, 512)
    assert small < 0.7 * in_large_tiles
    large, in_large_tiles = predicted(4096, 1024, 4096)
    assert large == in_large_tiles


def test_the_advice_is_read_back(found: ModelAdvice) -> None:
    assert from_json(ModelAdvice, to_json(found)) == found
