"""Consumers of other extents than their producer's, in the same kernel: slices, paddings and crops behind tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, topi

from tests.unit.kernels import constructed, from_te, relative_error, run
from tests.unit.tir_passes.emit.simt_operators import convolved
from tvm_ext.analysis.computations import read_operator
from tvm_ext.devices import device_db
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.construct_kernels import construct_kernel
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu
from tvm_ext.tir_passes.plan.plan_kernels import TileGroup, plan, simplify
from tvm_ext.verify.verification import verify

Array = Any


# --- anchors: (input placeholders, tensor, reference) -----------------------------------------------------------------
def product() -> tuple[list[Any], Any, Callable[..., Array]]:
    a, b = te.placeholder((12, 20), name="a"), te.placeholder((20, 24), name="b")
    return [a, b], topi.nn.matmul(a, b), lambda x, y: x @ y


def convolution() -> tuple[list[Any], Any, Callable[..., Array]]:
    x, w = te.placeholder((1, 6, 9, 11), name="x"), te.placeholder((8, 6, 3, 3), name="w")
    return [x, w], topi.nn.conv2d_nchw(x, w, 1, 1, 1), lambda a, b: convolved(a, b, 1, 1)


def depthwise() -> tuple[list[Any], Any, Callable[..., Array]]:
    x, w = te.placeholder((1, 6, 9, 19), name="x"), te.placeholder((6, 1, 3, 3), name="w")
    return [x, w], topi.nn.depthwise_conv2d_nchw(x, w, 1, 1, 1), lambda a, b: convolved(a, b, 1, 1, groups=6)


def pooling() -> tuple[list[Any], Any, Callable[..., Array]]:
    x = te.placeholder((1, 6, 9, 19), name="x")

    def reference(a: Array) -> Array:
        return np.lib.stride_tricks.sliding_window_view(a, (3, 3), axis=(2, 3)).max((4, 5))

    return [x], topi.nn.pool2d(x, (3, 3), (1, 1), (1, 1), (0, 0, 0, 0), "max"), reference


def columns() -> tuple[list[Any], Any, Callable[..., Array]]:
    x = te.placeholder((40, 6, 24), name="x")
    return [x], topi.sum(x, axis=0), lambda a: a.sum(0)


ANCHORS = [product, convolution, depthwise, pooling, columns]


# --- consumers with identity indices, written as a graph compiler writes them -----------------------------------------
def first_half(t: Any, axis: int) -> tuple[Any, Callable[[Array], Array]]:
    shape = [int(n) for n in t.shape]
    shape[axis] = max(1, shape[axis] // 2)
    kept = tuple(slice(0, n) for n in shape)
    return te.compute(shape, lambda *i: t(*i) * 2.0 + 1.0, "cut"), lambda a: a[kept] * 2 + 1


def padded_behind(t: Any, axis: int) -> tuple[Any, Callable[[Array], Array]]:
    after = [3 if axis % len(t.shape) == d else 0 for d in range(len(t.shape))]
    widths = [(0, n) for n in after]
    return topi.nn.pad(t, [0] * len(after), after), lambda a: np.pad(a, widths)


def cut_and_padded(t: Any, axis: int) -> tuple[Any, Callable[[Array], Array]]:
    """Shorter along ``axis``, longer along the axis before it."""
    cut, cut_array = first_half(t, axis)
    pad, pad_array = padded_behind(cut, axis - 1)
    return pad, lambda a: pad_array(cut_array(a))


CONSUMERS = [first_half, padded_behind, cut_and_padded]


def chain(anchor: Any, consumer: Any, axis: int) -> tuple[Any, list[Array], Array]:
    """(function, inputs, reference) of ``consumer`` along ``axis`` behind ``anchor``."""
    inputs, tensor, reference = anchor()
    result, rest = consumer(tensor, axis)
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal([int(n) for n in p.shape]).astype("float32") for p in inputs]
    return from_te(*inputs, result), arrays, rest(reference(*(a.astype("float64") for a in arrays)))


@pytest.mark.sampled
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_a_consumer_of_other_extents_is_no_epilogue(anchor: Any, consumer: Any, axis: int) -> None:
    func, arrays, expected = chain(anchor, consumer, axis)
    tiles = [g for g in plan(simplify(read_operator(func, "operator"))) if isinstance(g, TileGroup)]
    assert tiles, "the anchor is in register tiles"
    assert all(not group.epilogue for group in tiles)
    kernel, choice = constructed(func)
    assert choice.path == "rtile"
    assert relative_error(run(kernel, choice, arrays, expected.shape, "float32"), expected) < 1e-6


@pytest.mark.sampled
@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize("anchor", [product, convolution, columns])
def test_gpu_kernels_store_what_the_consumer_has(anchor: Any, consumer: Any) -> None:
    func, arrays, expected = chain(anchor, consumer, -1)
    kernel = gpu_kernel(func)
    inputs = {param.name: array for param, array in zip(kernel.params, arrays, strict=False)}
    output = kernel.params[-1].name
    verification = verify(kernel, "nvidia-a100", inputs=inputs, reference=lambda _: {output: expected})
    assert verification.ok, str(verification)


def gpu_kernel(func: Any, device: str = "nvidia-a100") -> Any:
    spec = device_db.lookup(device)
    with tvm.target.Target(dict(spec.target)):
        return construct_kernel(func, "operator", spec, BuildOptions()).with_attr("global_symbol", "main")


def test_what_runs_behind_one_product_is_not_computed_before_the_next_one() -> None:
    """The ReLU of the first product is its epilogue: its own result is not stored, and none may read it."""
    a, b, c = (te.placeholder(shape, name=name) for name, shape in (("a", (12, 20)), ("b", (20, 24)), ("c", (24, 16))))
    first = topi.nn.matmul(a, b)
    func = from_te(a, b, c, topi.nn.matmul(topi.nn.relu(first), c))
    one, two = plan_for_gpu(simplify_for_gpu(read_operator(func, "operator")))
    assert [computation.name for computation in one.epilogue] == ["compute"]
    assert two.prologue == ()
    verification = verify(gpu_kernel(func), "nvidia-a100")
    assert verification.ok, str(verification)


def test_a_window_over_weights_that_are_padded_takes_no_padding_of_theirs() -> None:
    x, w = te.placeholder((1, 6, 9, 19), name="x"), te.placeholder((6, 1, 2, 2), name="w")
    padded = topi.nn.pad(w, [0, 0, 0, 0], [0, 0, 1, 1])
    func = from_te(x, w, topi.nn.depthwise_conv2d_nchw(x, padded, 1, 0, 1))
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape).astype("float32") for shape in ((1, 6, 9, 19), (6, 1, 2, 2))]
    expected = convolved(arrays[0], np.pad(arrays[1], [(0, 0), (0, 0), (0, 1), (0, 1)]), 1, 0, groups=6)
    kernel, choice = constructed(func)
    assert "bands of" in choice.reason
    assert relative_error(run(kernel, choice, arrays, expected.shape, "float32"), expected) < 1e-6
