"""BlockChannels: padding and the phases of transposed convolutions, between convolutions of blocked channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax

from tests.support.layout_graphs import Graph, calls, conv, module, same_meaning, transforms, weight
from tvm_ext.devices.device_db import lookup
from tvm_ext.relay_passes.expand_transposed import ExpandTransposedConvolutions
from tvm_ext.relay_passes.layout.block_channels import BlockChannels

op = relax.op


@pytest.fixture
def block(immutable_modules: None) -> Callable[..., tvm.IRModule]:
    return lambda mod, layout="auto", device="cpu-avx512": BlockChannels(lookup(device), layout)(mod)


def padded(builder: Any, inputs: Any) -> Any:
    """A depthwise convolution whose padding is a value of its own, as of a quantised activation with a zero point."""
    value = conv(builder, inputs[0], 32)
    value = builder.emit(op.nn.pad(value, [0, 0, 0, 0, 1, 2, 0, 1], pad_value=0.25))
    return conv(builder, value, 32, groups=32, padding=0)


def upsampled(taps: int, groups: int = 1, channels: int = 96) -> Graph:
    """Convolutions around a transposed one of stride 2, of which three taps are four convolutions."""

    def graph(builder: Any, inputs: Any) -> Any:
        value = conv(builder, inputs[0], channels)
        kernel = weight(channels, channels // groups, taps, taps)
        how = {"strides": 2, "padding": taps // 2, "output_padding": taps % 2, "groups": groups}
        value = builder.emit(op.nn.conv2d_transpose(value, kernel, **how))
        return conv(builder, value, channels)

    return graph


@pytest.mark.parametrize(("taps", "parts"), [(2, 1), (3, 4)])
def test_phases_of_transposed_convolutions_are_of_blocks(block, taps: int, parts: int) -> None:
    with tvm.target.Target("llvm"):
        mod = ExpandTransposedConvolutions()(module(upsampled(taps), (1, 3, 28, 28)))
    after = block(mod)
    assert calls(after).count("conv2d_NCHW16c") == parts + 2
    assert "weave" in calls(after)
    assert transforms(after) == 1  # of the result


def test_padding_within_a_chain_is_of_blocks(block) -> None:
    after = block(module(padded, (1, 32, 14, 14)))
    assert {"conv2d_NCHW16c", "nn.pad", "depthwise_conv2d_NCHW16c"} <= set(calls(after))
    assert transforms(after) == 1  # a convolution reads NCHW as well
    behind = module(lambda b, x: op.nn.pad(x[0], [0, 0, 0, 16, 1, 1, 1, 1]), (1, 32, 14, 14))
    assert calls(block(behind, "NCHWc")) == ["nn.pad"]  # more channels: other blocks


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("taps", "groups"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_transposed_convolutions_compute_what_they_did(taps: int, groups: int) -> None:
    same_meaning(module(upsampled(taps, groups, channels=32), (1, 3, 9, 11)), (1, 3, 9, 11))


def test_padding_computes_what_it_did() -> None:
    same_meaning(module(padded, (2, 32, 9, 7)), (2, 32, 9, 7))
