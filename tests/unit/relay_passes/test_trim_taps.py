"""Convolutions lose the taps that meet nothing but padding, and keep their results."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.analysis.relax_values import operator_name, static_shape
from tvm_ext.analysis.window import WindowAxis
from tvm_ext.relay_passes.trim_taps import TrimTaps, outputs, padding_after, trimmed


def _module(shape: Any, kernel: Any, *, constant: bool = True, **attrs: Any) -> tvm.IRModule:
    rng = np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    if constant:
        weight, given = relax.const(rng.standard_normal(kernel).astype("float32")), [x]
    else:
        weight = relax.Var("w", relax.TensorType(kernel, "float32"))
        given = [x, weight]
    convolution = {3: relax.op.nn.conv1d, 4: relax.op.nn.conv2d, 5: relax.op.nn.conv3d}[len(shape)]
    return module_of(given, convolution(x, weight, **attrs))


def _kernel(mod: tvm.IRModule) -> tuple[int, ...] | None:
    """Extents of the weights of the module's convolution."""
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    (call,) = [b.value for b in bindings if (operator_name(b.value) or "").startswith("relax.nn.conv")]
    return static_shape(call.args[1])


CASES = [
    # shape, kernel, attributes, taps left
    ((1, 3, 16, 16), (4, 3, 3, 3), {"padding": 24, "dilation": 24}, (1, 1)),
    ((1, 3, 16, 40), (4, 3, 3, 3), {"padding": 24, "dilation": 24}, (1, 3)),
    ((1, 3, 16, 16), (4, 3, 3, 3), {"padding": 12, "dilation": 12}, (3, 3)),
    ((1, 4, 3, 3), (4, 1, 7, 7), {"padding": 3, "groups": 4}, (5, 5)),
    ((1, 4, 1, 5), (4, 4, 3, 3), {"padding": 1}, (1, 3)),
    ((2, 3, 2, 2), (4, 3, 5, 5), {"padding": 2, "strides": 2}, (2, 2)),
    ((1, 3, 4, 4), (4, 3, 2, 3), {"padding": (6, 1, 0, 1), "dilation": (6, 1)}, (1, 3)),
    ((1, 3, 5), (4, 3, 3), {"padding": 7, "dilation": 7}, (1,)),
    ((1, 2, 2, 3, 4), (4, 2, 3, 3, 3), {"padding": 4, "dilation": 4}, (1, 1, 1)),
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("shape", "kernel", "attrs", "left"), CASES)
def test_keeps_the_results(shape: Any, kernel: Any, attrs: Any, left: Any, constant: bool) -> None:
    mod = _module(shape, kernel, constant=constant, **attrs)
    trimmed = TrimTaps()(mod)
    taps = _kernel(trimmed)
    assert taps is not None
    assert taps[2:] == left
    rng = np.random.default_rng(1)
    inputs = [rng.standard_normal(shape).astype("float32")]
    inputs += [] if constant else [rng.standard_normal(kernel).astype("float32")]
    before, after = (tvm.compile(m, "llvm") for m in (mod, trimmed))
    results = [
        relax.VirtualMachine(built, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs)).numpy()
        for built in (before, after)
    ]
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


def test_leaves_what_always_meets_an_element() -> None:
    mod = _module((1, 3, 8, 8), (4, 3, 3, 3), padding=1)
    tvm.ir.assert_structural_equal(TrimTaps()(mod), mod)


def test_meets_as_every_place_says() -> None:
    """`WindowAxis.outputs_of` against all places that a tap has, and outputs that stay."""
    for size, taps, stride, dilation, before, after in itertools.product(
        (1, 2, 5), (1, 2, 3, 5), (1, 2, 3), (1, 2, 6), (0, 1, 4, 7), (0, 1, 4, 7)
    ):
        extent = (size + before + after - dilation * (taps - 1) - 1) // stride + 1
        if extent < 1:
            continue
        axis = WindowAxis(
            variable=None,
            tap=None,
            extent=extent,
            taps=taps,
            stride=stride,
            dilation=dilation,
            before=before,
            first=0,
            size=size,
        )
        for tap in range(taps):
            places = ((output, stride * output + dilation * tap - before) for output in range(extent))
            assert [output for output, place in places if 0 <= place < size] == list(axis.outputs_of(tap))
        first, own = trimmed(axis)
        kept = own is axis or outputs(own, padding_after(own)) == extent
        assert kept
        assert {tap for tap in range(taps) if axis.outputs_of(tap)} <= set(range(first, first + own.taps))


def test_a_pyramid_of_dilations_builds_and_runs() -> None:
    mod = _module((1, 8, 6, 6), (8, 8, 3, 3), padding=18, dilation=18)
    library = relay.build(mod, "llvm")
    assert library.report.operators[0].choice.flops == 2 * 8 * 8 * 36
