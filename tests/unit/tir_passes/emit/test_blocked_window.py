"""Window kernels over channels in blocks (NCHW8c, NCHW16c) against float64 NumPy, and what is none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tvm import relax, te, topi

from tests.unit.kernels import constructed, cpu, legalised, relative_error, run
from tests.unit.tir_passes.emit.test_window import AVX2, SSE, depthwise, windows
from tvm_ext.records.choice import CHOICE
from tvm_ext.relay_passes.layout.blocked import ConvWindow, depthwise_convolution

op = relax.op


def blocks(x, block):
    n, c, h, w = x.shape
    return np.ascontiguousarray(x.reshape(n, c // block, block, h, w).transpose(0, 1, 3, 4, 2))


def is_blocked_window(choice):
    return choice.path == "rtile" and "channels in blocks" in choice.reason and choice.expected_s > 0


def check_blocked_depthwise(rng, size, kernel, *, channels=16, batch=1, block=8, device=None, **how):
    x = rng.standard_normal((batch, channels, *size)).astype("f4")
    w = rng.standard_normal((channels, 1, *kernel)).astype("f4")
    expected = blocks(depthwise(x, w, **how), block)
    top, left, bottom, right = how.get("padding", (0, 0, 0, 0))
    window = ConvWindow(
        strides=how.get("strides", (1, 1)), dilation=how.get("dilation", (1, 1)), pads=(top, left, bottom, right)
    )
    source, weights = te.placeholder(blocks(x, block).shape, "float32"), te.placeholder(w.shape, "float32")
    func = te.create_prim_func([source, weights, depthwise_convolution(window)(source, weights)])
    kernel_, choice = constructed(func, constants=(1,), device=device)
    assert is_blocked_window(choice), choice.reason
    assert "pad_temp" not in kernel_.without_attr(CHOICE).script()
    assert relative_error(run(kernel_, choice, [blocks(x, block), w], expected.shape, "float32"), expected) < 1e-6
    return choice


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("size", "kernel", "how"),
    [
        ((7, 7), (3, 3), {"padding": (1, 1, 1, 1)}),
        ((7, 7), (7, 7), {"padding": (3, 3, 3, 3)}),
        ((14, 13), (3, 3), {"padding": (1, 1, 1, 1), "strides": (2, 2)}),
        ((15, 37), (5, 5), {"padding": (2, 2, 1, 0), "strides": (2, 1)}),
        ((9, 40), (3, 3), {}),
        ((3, 16), (3, 3), {"padding": (12, 12, 12, 12), "dilation": (12, 12)}),
        ((30, 29), (3, 5), {"padding": (2, 2, 2, 2), "strides": (3, 3), "dilation": (2, 1)}),
        ((2, 2), (3, 3), {"padding": (5, 4, 3, 2)}),
    ],
)
def test_depthwise_of_blocks(size, kernel, how, rng):
    check_blocked_depthwise(rng, size, kernel, **how)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("channels", "batch", "block", "device"), [(8, 1, 8, AVX2), (24, 3, 8, SSE), (16, 1, 16, AVX2), (48, 2, 16, {})]
)
def test_depthwise_of_blocks_on_other_registers(channels, batch, block, device, rng):
    device = dataclasses.replace(cpu(), **device)
    how = {"padding": (1, 1, 1, 1)}
    check_blocked_depthwise(rng, (11, 19), (3, 3), channels=channels, batch=batch, block=block, device=device, **how)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("counts_padding", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), (2, 2, 0), (5, 3, 2)])
def test_poolings_of_blocks(kernel, stride, padding, counts_padding, rng):
    x = rng.standard_normal((2, 16, 17, 23)).astype("f4")
    sizes, strides, pads = (kernel, kernel), (stride, stride), (padding,) * 4
    ones = windows(np.ones_like(x), sizes, strides, (1, 1), pads, float(counts_padding)).sum(axis=(4, 5))
    average = windows(x, sizes, strides, (1, 1), pads, 0.0).sum(axis=(4, 5)) / ones
    largest = windows(x, sizes, strides, (1, 1), pads, -np.inf).max(axis=(4, 5))
    source = blocks(x, 8)
    pools = (
        (lambda a: op.nn.max_pool2d(a, sizes, strides, pads, layout="NCHW8c"), largest),
        (
            lambda a: op.nn.avg_pool2d(a, sizes, strides, pads, count_include_pad=counts_padding, layout="NCHW8c"),
            average,
        ),
    )
    for pool, expected in pools:
        kernel_, choice = constructed(legalised(pool, source.shape))
        assert is_blocked_window(choice), choice.reason
        wanted = blocks(expected, 8)
        assert relative_error(run(kernel_, choice, [source], wanted.shape, "float32"), wanted) < 1e-6


def test_padding_that_counts_is_a_number(rng):
    """Of a maximum with zeros around, what meets padding is not left out."""
    source = te.placeholder((1, 2, 9, 9, 8), "float32")
    padded = topi.nn.pad(source, [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], 0.0)
    ky, kx = (te.reduce_axis((0, 3), name) for name in ("ky", "kx"))
    pooled = te.compute(
        (1, 2, 9, 9, 8), lambda n, c, y, x, v: te.max(padded[n, c, y + ky, x + kx, v], axis=[ky, kx]), name="pool"
    )
    func = te.create_prim_func([source, pooled])
    x = rng.standard_normal((1, 16, 9, 9)).astype("f4") - 2
    wanted = blocks(windows(x, (3, 3), (1, 1), (1, 1), (1, 1, 1, 1), 0.0).max(axis=(4, 5)), 8)
    kernel, choice = constructed(func)
    assert is_blocked_window(choice), choice.reason
    assert relative_error(run(kernel, choice, [blocks(x, 8)], wanted.shape, "float32"), wanted) < 1e-6
