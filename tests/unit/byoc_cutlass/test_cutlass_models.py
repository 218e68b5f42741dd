"""What is taken of real models as this package imports them, and why the rest is not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.networks import repvgg as repvgg_network
from benchmarks.networks import vision
from benchmarks.networks.bert import build_bert_base_layer
from benchmarks.networks.graph import GraphWriter, he_normal, near_one, small_normal
from tests.unit.byoc_cutlass.graphs import decided, graph_of
from tvm_ext.bench import light
from tvm_ext.records.partition import CutlassPartition
from tvm_ext.relay_passes.onnx.half import to_half


@pytest.fixture
def light_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Models of the onnx wheel in halves, whose weights are all alike: only the graph counts here."""
    monkeypatch.setattr(light, "_random_weight", lambda _role, _seed, _name, shape: np.full(shape, 0.5, np.float32))
    return lambda name: to_half(light.build_light(name, batch=1, seed=0, logits=False))


def counted(record: CutlassPartition) -> dict[str, int]:
    return dict(Counter(region.pattern for region in record.taken))


def test_resnet50(light_model: Any) -> None:
    """53 convolutions and a classifier: the first has 3 channels, what ends with a ReLU has it in its epilogue.

    Of the 16 blocks 4 have a convolution in their shortcut, whose bias is all of its own.
    """
    record = decided(graph_of(light_model("resnet50"), "nvidia-a100"))
    assert counted(record) == {
        "conv2d_bias_relu": 33,
        "conv2d_bias_residual_add_relu": 16,
        "conv2d_bias": 4,
        "matmul_bias": 1,
    }
    assert record.refused == ()
    strided = [region for region in record.taken if region.problem.window and region.problem.window.strides == (2, 2)]
    assert len(strided) == 7
    shortcuts = [region.ended for region in record.taken if region.pattern == "conv2d_bias"]
    assert all(reason.endswith("is in the epilogue of another product") for reason in shortcuts)


def test_resnet18() -> None:
    """20 convolutions, 3 of them in shortcuts, and a classifier; the global mean computes what is behind the last."""
    model = to_half(vision.build_resnet18(batch=2, seed=0))
    record = decided(graph_of(model, "nvidia-t4"))
    assert counted(record) == {
        "conv2d_bias_relu": 9,
        "conv2d_bias_residual_add_relu": 7,
        "conv2d_bias": 3,
        "conv2d": 1,
        "matmul_bias": 1,
    }
    assert record.refused == ()
    windows = [region.problem.window for region in record.taken if region.problem.window]
    assert Counter(window.filter_extents for window in windows) == {(7, 8): 1, (3, 3): 16, (1, 1): 3}
    assert sum(window.strides == (2, 2) for window in windows) == 7


def test_vgg16() -> None:
    """13 convolutions and 3 matrices; by itself, with a smaller image, it has no view behind the last."""
    model = to_half(vision.build_vgg16(batch=2, seed=0, extent=32, hidden=256))
    record = decided(graph_of(model, "nvidia-a100"))
    assert counted(record) == {"conv2d_bias_relu": 13, "matmul_bias_relu": 2, "matmul_bias": 1}
    assert record.refused == ()
    assert {window.padding for region in record.taken if (window := region.problem.window)} == {(1, 1)}
    assert record.taken[-1].ended.endswith("is the function's result")


@pytest.mark.parametrize("name", ["a0", pytest.param("b0", marks=pytest.mark.slow)])
def test_repvgg_as_it_is_deployed(name: repvgg_network.RepVggName) -> None:
    """22 and 28 convolutions and a classifier: the bias and ReLU of the last are in the kernel of the global mean."""
    record = decided(graph_of(to_half(repvgg_network.build_repvgg(name, batch=2)), "nvidia-a100"))
    count = len(list(repvgg_network.blocks_of(name)))
    assert counted(record) == {"conv2d_bias_relu": count - 1, "conv2d": 1, "matmul_bias": 1}
    assert (count, record.refused) == ({"a0": 22, "b0": 28}[name], ())


@pytest.mark.slow
def test_vgg19(light_model: Any) -> None:
    """16 convolutions and 3 matrices of 143 million weights; the last has a view behind it."""
    record = decided(graph_of(light_model("vgg19"), "nvidia-h200"))
    assert counted(record) == {"conv2d_bias_relu": 16, "matmul_bias_relu": 2, "matmul_bias": 1}
    assert record.refused == ()
    assert "relax.reshape is no function of epilogues" in record.taken[-1].ended


def test_bert_base_layer() -> None:
    """Every product is taken: projections, attention with its scale and mask, GELU and both residual additions."""
    record = decided(graph_of(to_half(build_bert_base_layer(batch=1, sequence=128, seed=0)), "nvidia-a100"))
    assert not record.refused
    assert counted(record) == {"matmul_bias": 3, "attention": 1, "matmul_bias_residual_add": 2, "matmul_bias_gelu": 1}
    (gelu,) = [region.epilogue[-1] for region in record.taken if region.pattern == "matmul_bias_gelu"]
    assert gelu.operators == 5
    scores = next(region.problem for region in record.taken if region.problem.batch > 1)
    assert [operand.leading_dimension for operand in scores.operands] == [768, 768]
    assert Counter(left.operator for left in record.others) == {"relax.nn.layer_norm": 2}


def repvgg_block(graph: GraphWriter, name: str, source: str, channels: tuple[int, int], stride: int) -> str:
    """A 3x3 and a 1x1 convolution, and where the shape stays the input itself, each with BatchNormalization."""
    inner, outer = channels
    branches = []
    for size in (3, 1):
        shape = (outer, inner, size, size)
        weight = graph.constant(f"{name}_w{size}", he_normal(0, f"{name}_w{size}", shape, fan_in=inner * size * size))
        pads, strides = [size // 2] * 4, [stride, stride]
        value = graph.op("Conv", source, weight, kernel_shape=[size, size], pads=pads, strides=strides)
        branches.append(normalised(graph, f"{name}_{size}", value, outer))
    if inner == outer and stride == 1:
        branches.append(normalised(graph, f"{name}_same", source, outer))
    total = branches[0]
    for branch in branches[1:]:
        total = graph.op("Add", total, branch)
    return graph.op("Relu", total)


def normalised(graph: GraphWriter, name: str, source: str, channels: int) -> str:
    scales = [graph.constant(f"{name}_{part}", near_one(0, f"{name}_{part}", (channels,), 0.2)) for part in ("g", "v")]
    shifts = [graph.constant(f"{name}_{part}", small_normal(0, f"{name}_{part}", (channels,))) for part in ("b", "m")]
    return graph.op("BatchNormalization", source, scales[0], shifts[0], shifts[1], scales[1])


def repvgg() -> onnx.ModelProto:
    """The first stages of RepVGG-A0 as it is trained: 48, 48 and 96 channels."""
    graph = GraphWriter("repvgg_a0")
    value = graph.input("x", (1, 3, 64, 64))
    for index, (inner, outer, stride) in enumerate([(3, 48, 2), (48, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1)]):
        value = repvgg_block(graph, f"b{index}", value, (inner, outer), stride)
    graph.output(value, (1, 96, 4, 4))
    return graph.model()


def test_repvgg_before_it_is_folded() -> None:
    """The first branch of a block takes the sum and the ReLU; a branch without convolution is an operand of it."""
    record = decided(graph_of(to_half(repvgg()), "nvidia-a100", layout="NHWC"))
    assert record.refused == ()
    assert counted(record) == {
        "conv2d_bias_residual_add_relu": 3,
        "conv2d_bias": 5,
        "conv2d_bias_residual_add_residual_add_relu": 1,
        "conv2d_bias_residual_add_residual_add_relu_to_nchw": 1,
    }


def test_repvgg_in_the_layout_of_its_file() -> None:
    """Its branches of BatchNormalization alone keep the automatic layout from channels last: nothing is taken."""
    record = decided(graph_of(to_half(repvgg()), "nvidia-a100"))
    assert not record.taken
    assert len(record.refused) == 10
    assert all("templates take NHWC, OHWI, NHWC" in refusal.reason for refusal in record.refused)
