"""Quantised models built for tiles (AMX), which run on a model of these, beside ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.amx_machine import counts, emulate_in_builds, fault
from tests.support.dot_rows import use_models_of_missing_instructions
from tests.unit.relay_passes.onnx.test_integer_products import Writer, run_both


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Any:
    use_models_of_missing_instructions(monkeypatch)
    chosen = emulate_in_builds(monkeypatch)
    counts(), fault()
    yield chosen
    assert fault() is None
    ran = counts()
    assert ran["tdpbusd"] > 0
    assert ran["tilerelease"] > 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("depth", [64, 100, 268])
def test_products_of_any_depth(depth: int, options: dict[str, Any]) -> None:
    """100 and 268 bytes are no even rows of tiles: they are padded to 104 and 280."""
    rng = np.random.default_rng(depth)
    writer, zero = Writer(), np.array(100, "uint8")
    x = writer.through_bytes("x", 0.03, zero)
    weight = rng.integers(-128, 128, (depth, 40)).astype("int8")
    y = writer.add("MatMul", x, writer.dequantised(weight, rng.uniform(0.001, 0.002, 40).astype("float32"), 1))
    y = writer.through_bytes(
        writer.add("Add", y, writer.constant(rng.standard_normal(40).astype("float32"))), 0.05, zero
    )
    model = writer.model((70, depth), y)
    ours, runtime = run_both(model, rng.uniform(-4, 4, (70, depth)).astype("float32"), **options)
    assert np.abs(ours - runtime).max() <= 0.05 * 1.001


def test_a_residual_network_in_blocks(options: dict[str, Any]) -> None:
    """3x3 and 1x1 convolutions, one of stride 2, with what quantises fused behind them."""
    rng = np.random.default_rng(5)
    writer, zero = Writer(), np.array(3, "uint8")
    x = writer.through_bytes("x", 0.02, zero)

    def convolution(y: str, channels: int, filters: int, taps: int, stride: int = 1) -> str:
        weight = rng.integers(-128, 128, (filters, channels, taps, taps)).astype("int8")
        scale = rng.uniform(0.0005, 0.001, filters).astype("float32")
        pads, strides = [taps // 2] * 4, [stride] * 2
        weights = writer.dequantised(weight, scale, 0)
        y = writer.add("Conv", y, weights, pads=pads, strides=strides, kernel_shape=[taps] * 2)
        return writer.through_bytes(writer.add("Relu", y), 0.05, zero)

    y = convolution(x, 3, 64, 7, 2)
    first = convolution(y, 64, 48, 1)
    second = convolution(convolution(first, 48, 48, 3), 48, 64, 1)
    y = writer.through_bytes(writer.add("Add", y, second), 0.08, zero)
    y = convolution(y, 64, 96, 3, 2)
    model = writer.model((1, 3, 46, 38), y)
    image = rng.uniform(0, 4, (1, 3, 46, 38)).astype("float32")
    ours, runtime = run_both(model, image, **options)
    assert np.abs(ours - runtime).max() <= 0.05 * 2.001  # a step may differ in the residual, and so another behind
    vectors, _ = run_both(model, image, device="cpu-avx2")
    assert (ours == vectors).all()
