"""BlockChannels: where chains become channel-blocked, how many transforms that takes, and that the meaning stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, topi

from tests.support.layout_graphs import Graph, Shape, calls, conv, module, record, same_meaning, stock, transforms
from tvm_ext import relay
from tvm_ext._tvm import CALL_TIR, structural_equal
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.padding import LAYOUT
from tvm_ext.relay_passes.layout.block_channels import BlockChannels

op = relax.op


@pytest.fixture
def block(immutable_modules: None) -> Callable[..., tvm.IRModule]:
    return lambda mod, layout="auto", device="cpu-avx512": BlockChannels(lookup(device), layout)(mod)


# --- structure -----------------------------------------------------------------------------------------------------
def test_a_chain_needs_no_transform_between_its_ends(block) -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        value = conv(builder, inputs[0], 64, 7, strides=2)
        value = builder.emit(op.nn.max_pool2d(value, (3, 3), (2, 2), (1, 1)))
        value = conv(builder, value, 64)
        return op.mean(conv(builder, value, 128), axis=[2, 3])

    after = block(module(graph, (1, 3, 56, 56)))
    assert transforms(after) == 0
    assert calls(after).count("conv2d_NCHW16c") == 3
    assert calls(after)[-2:] == ["mean", "reshape"]  # one element per channel is NCHW as it lies
    assert [chain.transform_count for chain in record(after).chains] == [0]


def test_the_block_is_the_devices_register(block) -> None:
    mod = module(lambda b, x: op.nn.max_pool2d(conv(b, x[0], 24), (2, 2), (2, 2)), (1, 3, 16, 16))
    assert "conv2d_NCHW8c" in calls(block(mod, "NCHWc", "cpu-avx2"))
    assert "conv2d_NCHW16c" not in calls(block(mod, "NCHWc"))  # 24 channels are not whole blocks of 16


@pytest.mark.parametrize(
    "graph",
    [
        lambda b, x: conv(b, x[0], 64, 1),
        lambda b, x: conv(b, x[0], 64, 3, groups=64),
        lambda b, x: op.nn.max_pool2d(x[0], (3, 3), (1, 1), (1, 1)),
        lambda b, x: op.nn.relu(x[0]),
        lambda b, x: op.nn.relu(b.emit(op.nn.max_pool2d(b.emit(op.nn.relu(x[0])), (3, 3), (1, 1), (1, 1)))),
    ],
    ids=["1x1 convolution", "depthwise convolution", "pooling", "element-wise", "pooling between element-wise"],
)
def test_what_stands_alone_stays_as_it_is(graph: Graph, block) -> None:
    mod = module(graph, (1, 64, 28, 28))
    after = block(mod)
    assert structural_equal(after.without_attr(LAYOUT), mod)
    assert "cost more" in record(after).chains[0].reason
    assert record(after).blocked_count == 0
    assert transforms(block(mod, "NCHWc")) >= 1  # the switch that says always


def test_a_convolution_to_odd_channels_reads_blocks(block) -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        value = builder.emit(op.nn.max_pool2d(conv(builder, inputs[0], 64), (3, 3), (2, 2)))
        return conv(builder, value, 42)

    after = block(module(graph, (1, 3, 28, 28)))
    assert transforms(after) == 0
    assert calls(after)[0] == "conv2d_NCHW16c"
    assert shape_of_results(after) == [(1, 42, 13, 13)]


def shape_of_results(mod: tvm.IRModule) -> list[Shape]:
    result = mod["main"].ret_ty
    parts = result.fields if isinstance(result, relax.TupleType) else [result]
    return [tuple(int(size) for size in part.shape) for part in parts]


def test_a_result_in_the_middle_is_transformed_once(block) -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        middle = builder.emit(op.nn.max_pool2d(conv(builder, inputs[0], 64), (3, 3), (2, 2)))
        return middle, op.mean(conv(builder, conv(builder, middle, 256), 64), axis=[2, 3], keepdims=True)

    after = block(module(graph, (1, 3, 28, 28)), "NCHWc")
    assert transforms(after) == 1
    assert shape_of_results(after) == [(1, 64, 13, 13), (1, 64, 1, 1)]


def test_several_readers_share_one_transform(block) -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        pooled = [builder.emit(op.nn.max_pool2d(inputs[0], (3, 3), (s, s), (1, 1))) for s in (1, 2)]
        return tuple(conv(builder, value, 5) for value in pooled)

    after = block(module(graph, (1, 32, 16, 16)), "NCHWc")
    assert transforms(after) == 1


def test_the_switch_of_a_build() -> None:
    mod = module(lambda b, x: op.nn.max_pool2d(conv(b, x[0], 64), (3, 3), (2, 2)), (1, 3, 28, 28))
    library = relay.build(mod, "llvm", layout="NCHW")
    assert library.report.layout is None
    assert not any("blocked" in operator.choice.reason for operator in library.report.operators)
    automatic = relay.build(mod, "llvm", layout="NCHWc")
    assert automatic.report.layout is not None
    assert automatic.report.layout_summary() in str(automatic.report)


# --- what is left alone --------------------------------------------------------------------------------------------
def test_half_precision_stays(block) -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        half = relax.const(np.ones((32, 16, 3, 3), "float16"), "float16")
        value = builder.emit(op.nn.conv2d(inputs[0], half, padding=1))
        return op.nn.max_pool2d(value, (3, 3), (2, 2))

    mod = module(graph, (1, 16, 16, 16), dtype="float16")
    after = block(mod, "NCHWc")
    assert structural_equal(after.without_attr(LAYOUT), mod)
    assert record(after).chains == ()


def test_dynamic_shapes_stay(block) -> None:
    batch = tvm.tirx.Var("n", "int64")
    mod = module(lambda b, x: op.nn.max_pool2d(conv(b, x[0], 64), (3, 3), (2, 2)), (batch, 16, 16, 16))  # type: ignore[arg-type]
    assert structural_equal(block(mod, "NCHWc").without_attr(LAYOUT), mod)


def test_weights_that_are_inputs_stay(block) -> None:
    mod = module(lambda b, x: op.nn.conv2d(x[0], x[1], padding=1), (1, 32, 16, 16), (64, 32, 3, 3))
    assert structural_equal(block(mod, "NCHWc").without_attr(LAYOUT), mod)


def test_channels_last_stays(block) -> None:
    mod = module(lambda b, x: op.nn.max_pool2d(x[0], (3, 3), (2, 2), layout="NHWC"), (1, 32, 32, 32))
    assert structural_equal(block(mod, "NCHWc").without_attr(LAYOUT), mod)


# --- numerics ------------------------------------------------------------------------------------------------------
WINDOWS: list[tuple[int, int, dict[str, Any]]] = [
    (32, 1, {"strides": 2}),
    (32, 3, {"strides": 2}),
    (16, 3, {"dilation": 2, "padding": 2}),
    (16, 3, {"padding": (0, 1, 2, 3)}),
    (16, 5, {"strides": (1, 2), "padding": (2, 0)}),
    (64, 3, {"groups": 2}),
    (32, 3, {"groups": 32}),
    (32, 3, {"groups": 32, "strides": 2, "padding": (1, 0, 0, 1)}),
    (32, 3, {"groups": 32, "dilation": (2, 1)}),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("first", [0, 1])
def test_convolutions_compute_what_they_did(first: int) -> None:
    """Of the windows every second one."""
    windows = WINDOWS[first::2]
    depthwise = sum(how.get("groups") == 32 for _, _, how in windows)

    def graph(builder: Any, inputs: Any) -> Any:
        before = conv(builder, inputs[0], 32, 1)
        blocked = [conv(builder, before, features, taps, **how) for features, taps, how in windows]
        return (*(conv(builder, value, 5, 1) for value in blocked), blocked[0])

    mod = module(graph, (2, 5, 11, 9))
    same_meaning(mod, (2, 5, 11, 9))
    names = calls(BlockChannels(lookup("cpu-avx512"), "NCHWc")(mod))
    assert sum(name.startswith("depthwise_conv2d_NCHW16c") for name in names) == depthwise > 0
    assert sum(name.startswith("conv2d_NCHW16c") for name in names) == 1 + len(windows) - depthwise + len(windows)
    assert not any(name == "nn.conv2d" for name in names)


def test_poolings_compute_what_they_did() -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        x = conv(builder, inputs[0], 32, 1)
        return (
            op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)),
            op.nn.max_pool2d(x, (3, 2), (2, 1), (1, 0, 0, 1), ceil_mode=True),
            op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), count_include_pad=True),
            op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), ceil_mode=True, count_include_pad=False),
            op.nn.avg_pool2d(x, (11, 9)),
            op.nn.adaptive_avg_pool2d(x, (1, 1)),
            op.mean(x, axis=[2, 3]),
            op.max(x, axis=[-1, -2], keepdims=True),
        )

    mod = module(graph, (2, 5, 11, 9))
    same_meaning(mod, (2, 5, 11, 9))
    assert transforms(BlockChannels(lookup("cpu-avx512"), "NCHWc")(mod)) == 4  # the four that leave several elements


def test_residual_adds_and_concatenation() -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        left = conv(builder, inputs[0], 32)
        right = conv(builder, left, 32, relu=False)
        total = builder.emit(op.add(left, right))
        joined = builder.emit(op.concat([total, left, right], axis=1))
        stacked = builder.emit(op.concat([joined, joined], axis=-1))
        return op.nn.max_pool2d(stacked, (3, 3), (2, 2)), left

    same_meaning(module(graph, (2, 3, 9, 7)), (2, 3, 9, 7))


OPERANDS: list[Shape] = [(1, 32, 1, 1), (32, 1, 1), (2, 32, 7, 7), (7,), (7, 1), (2, 1, 7, 7), (1, 1, 1, 1), ()]


def test_operands_that_broadcast() -> None:
    rng = np.random.default_rng(1)

    def graph(builder: Any, inputs: Any) -> Any:
        value = conv(builder, inputs[0], 32)
        for shape, given in zip(OPERANDS, inputs[1:], strict=True):
            value = builder.emit(op.multiply(value, relax.const(rng.uniform(0.5, 2, shape).astype("float32"))))
            value = builder.emit(op.add(given, value))
        return conv(builder, value, 5)

    shapes = ((2, 3, 7, 7), *OPERANDS)
    mod = module(graph, *shapes)
    same_meaning(mod, *shapes)
    assert transforms(BlockChannels(lookup("cpu-avx512"), "NCHWc")(mod)) == 1  # of the input (2, 32, 7, 7)


def test_a_gate_of_one_element_per_channel() -> None:
    """Squeeze and excitation: mean, two products, sigmoid, times the whole."""

    def graph(builder: Any, inputs: Any) -> Any:
        value = conv(builder, inputs[0], 64)
        gate = builder.emit(op.mean(value, axis=[2, 3], keepdims=True))
        gate = conv(builder, conv(builder, gate, 16, 1), 64, 1, relu=False)
        return conv(builder, builder.emit(op.multiply(value, builder.emit(op.sigmoid(gate)))), 5)

    mod = module(graph, (2, 3, 9, 9))
    same_meaning(mod, (2, 3, 9, 9))
    assert transforms(BlockChannels(lookup("cpu-avx512"), "NCHWc")(mod)) == 0


def test_element_wise_functions_of_the_importer() -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        value = conv(builder, inputs[0], 32, relu=False)
        clipped = builder.emit_te(topi.minimum, value, relax.const(np.float32(0.5)))
        return conv(builder, clipped, 5)

    mod = module(graph, (2, 3, 9, 9))
    same_meaning(mod, (2, 3, 9, 9))
    assert transforms(BlockChannels(lookup("cpu-avx512"), "NCHWc")(mod)) == 0


def test_functions_that_depend_on_where_they_are_stay(block) -> None:
    def ramp(x: Any) -> Any:
        return tvm.te.compute(x.shape, lambda n, c, h, w: x[n, c, h, w] * tvm.tirx.Cast("float32", c), name="ramp")

    mod = module(lambda b, x: b.call_te(ramp, x[0]), (1, 32, 4, 4))
    assert record(block(mod, "NCHWc")).chains == ()


def test_blocks_of_eight() -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        value = conv(builder, conv(builder, inputs[0], 24), 24, 3, groups=24)
        return op.nn.max_pool2d(value, (3, 3), (2, 2))

    mod, data = module(graph, (1, 3, 9, 9)), np.random.default_rng(5).standard_normal((1, 3, 9, 9)).astype("float32")
    library = relay.build(mod, "llvm", device="cpu-avx2", layout="NCHWc")
    assert library.report.layout is not None
    assert (library.report.layout.block, library.report.layout.blocked_count) == (8, 7)
    (expected,) = stock(mod, [data])
    np.testing.assert_allclose(library.vm(tvm.cpu())["main"](data).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_strided_window_over_memory_reads_blocks(block) -> None:
    """16 images of (64, 56, 56) are 12.8 MB, of which every other line is asked for."""

    def graph(builder: Any, inputs: Any) -> Any:
        value = conv(builder, conv(builder, inputs[0], 64), 64, 1)
        return op.mean(conv(builder, value, 64, strides=2), axis=[2, 3])

    after = block(module(graph, (16, 3, 56, 56)))
    assert transforms(after) == record(after).transform_count == 0
    assert [len(item.shape) for item in convolution_inputs(after)] == [4, 5, 5]


def convolution_inputs(mod: tvm.IRModule) -> list[Any]:
    """Types of the data of main's blocked convolutions, in order."""
    return [
        binding.value.args[1].fields[0].ty
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, tvm.ir.Call)
        and binding.value.op == CALL_TIR
        and str(binding.value.args[0].name_hint).startswith("conv2d_NCHW")
    ]
