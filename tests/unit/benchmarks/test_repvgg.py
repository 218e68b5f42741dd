"""RepVGG: its shapes and sizes are the paper's, and the re-parameterised network computes what the trained one does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from benchmarks.networks.repvgg import RepVggBlock, blocks_of, branches_of, build_repvgg, reparameterised
from tvm_ext import relay
from tvm_ext.bench.models import random_inputs


def parameters(model: onnx.ModelProto) -> int:
    return sum(int(np.prod(item.dims)) for item in model.graph.initializer)


def nodes(model: onnx.ModelProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("name", "millions", "count"), [("a0", 8.31, 22), ("a1", 12.79, 22), ("b0", 14.34, 28)])
def test_sizes_are_those_of_table_5(name: str, millions: float, count: int) -> None:
    model = build_repvgg(name)  # type: ignore[arg-type]
    assert len(nodes(model, "Conv")) == count
    assert parameters(model) / 1e6 == pytest.approx(millions, abs=0.01)


def test_channels_of_a0() -> None:
    blocks = list(blocks_of("a0"))
    assert [block.outer for block in blocks if block.stride == 2] == [48, 48, 96, 192, 1280]
    assert sum(block.has_identity for block in blocks) == 17


def convolved(data: np.ndarray, filters: np.ndarray, border: int) -> np.ndarray:
    """A convolution of stride 1 in float64."""
    size = filters.shape[2]
    wide = np.pad(data, ((0, 0), (0, 0), (border, border), (border, border)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, (size, size), axis=(2, 3))
    return np.einsum("nchwrs,ocrs->nohw", windows, filters)


@pytest.mark.parametrize("inner", [8, 5])
def test_one_convolution_is_the_sum_of_the_branches(inner: int) -> None:
    block = RepVggBlock(name="b", inner=inner, outer=8, stride=1)
    branches = branches_of(block, seed=3)
    assert len(branches) == (3 if inner == 8 else 2)
    data = np.random.default_rng(0).standard_normal((2, inner, 7, 6))
    total = np.zeros((2, 8, 7, 6))
    for branch in branches:
        value = data
        if branch.weight is not None:
            value = convolved(data, branch.weight.astype("f8"), branch.weight.shape[2] // 2)
        columns = [
            item.astype("f8").reshape(1, -1, 1, 1)
            for item in (branch.mean, branch.variance, branch.scale, branch.shift)
        ]
        mean, variance, scale, shift = columns
        total += (value - mean) / np.sqrt(variance + 1e-5) * scale + shift
    filters, bias = reparameterised(branches)
    np.testing.assert_allclose(convolved(data, filters, 1) + bias.reshape(1, -1, 1, 1), total, rtol=1e-5, atol=1e-5)


def agree(blocks: list[RepVggBlock] | None, **options: Any) -> None:
    results = []
    for trained in (True, False):
        model = build_repvgg(size=32, classes=10, trained=trained, blocks=blocks, **options)
        mod, params = relay.frontend.from_onnx(model)
        module = relay.GraphModule(relay.build(mod, "llvm", params=params))
        module.run(**random_inputs(model))
        results.append(module.get_output(0).numpy().astype("f8"))
    assert np.abs(results[1]).max() > 0.01
    assert np.linalg.norm(results[0] - results[1]) < 1e-5 * np.linalg.norm(results[1])


def test_the_trained_and_the_reparameterised_network_agree() -> None:
    """The first three blocks, the last of which has a branch of the input itself."""
    agree(list(blocks_of("a0"))[:3])


@pytest.mark.slow
def test_the_whole_networks_agree() -> None:
    agree(None)
    agree(None, deepened=True, activation="Softplus")


def test_variants() -> None:
    deep = build_repvgg(size=32, deepened=True, activation="HardSwish")
    sizes = [numpy_helper.to_array(item).shape[2:] for item in deep.graph.initializer if len(item.dims) == 4]
    assert (sizes.count((3, 3)), sizes.count((1, 1))) == (22, 21)
    assert len(nodes(deep, "HardSwish")) == 43
    onnx.checker.check_model(deep)
    first = build_repvgg(size=32, deepened=3)  # Bolt's last example of §4.3
    assert [node.input[1] for node in nodes(first, "Conv")][:7:2] == [
        f"stage{s}_w" for s in ("0_0", "1_0", "1_1", "2_0")
    ]
