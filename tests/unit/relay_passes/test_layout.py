"""BlockChannels: where chains become channel-blocked, how many transforms that takes, and that the meaning stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, topi

from tests.support.quick_target import UNOPTIMISED
from tests.support.small_modules import inputs_of
from tvm_ext import relay
from tvm_ext._tvm import CALL_TIR, structural_equal, structural_walk
from tvm_ext.devices.device_db import lookup
from tvm_ext.records.padding import LAYOUT, LayoutRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.expand_transposed import ExpandTransposedConvolutions
from tvm_ext.relay_passes.layout.block_channels import BlockChannels

op = relax.op
Shape = tuple[int, ...]
Graph = Callable[[relax.BlockBuilder, Sequence[Any]], Any]


def weight(*shape: int) -> Any:
    fan_in = float(np.prod(shape[1:]))
    values = np.random.default_rng(sum(shape)).standard_normal(shape) / np.sqrt(fan_in)
    return relax.const(values.astype("float32"))


def module(graph: Graph, *shapes: Shape, dtype: str = "float32") -> tvm.IRModule:
    """A module whose main(x0, x1, ...) returns what ``graph`` emits (one result, or a tuple of several)."""
    builder = relax.BlockBuilder()
    inputs = inputs_of(*shapes, dtype=dtype)
    with builder.function("main", inputs):
        with builder.dataflow():
            made = graph(builder, inputs)
            results = [builder.emit_output(item) for item in (made if isinstance(made, tuple) else (made,))]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.get()


def conv(
    builder: relax.BlockBuilder,
    data: Any,
    features: int,
    taps: int = 3,
    *,
    groups: int = 1,
    relu: bool = True,
    **how: Any,
) -> Any:
    """convolution + bias + ReLU, padded to keep its size"""
    depth = int(data.ty.shape[1]) // groups
    how = {"padding": taps // 2, "groups": groups, **how}
    value = builder.emit(op.nn.conv2d(data, weight(features, depth, taps, taps), **how))
    value = builder.emit(op.add(value, weight(1, features, 1, 1)))
    return builder.emit(op.nn.relu(value)) if relu else value


def calls(mod: tvm.IRModule) -> list[str]:
    """Operators and called functions of main, in order."""
    names: list[str] = []

    def visit(call: Any) -> None:
        if call.op == CALL_TIR:
            names.append(str(call.args[0].name_hint).rstrip("0123456789"))
        elif isinstance(call.op, tvm.ir.Op):
            names.append(str(call.op.name).removeprefix("relax."))

    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            structural_walk(binding.value, (tvm.ir.Call, visit), order="pre")
    return names


def transforms(mod: tvm.IRModule) -> int:
    return sum(name.startswith(("to_NCHW", "from_NCHW")) for name in calls(mod))


def record(mod: tvm.IRModule) -> LayoutRecord:
    return from_json(LayoutRecord, str(mod.attrs[LAYOUT]))


@pytest.fixture
def block(immutable_modules: None) -> Callable[..., tvm.IRModule]:
    return lambda mod, layout="auto", device="cpu-avx512": BlockChannels(lookup(device), layout)(mod)


def run(mod: tvm.IRModule, inputs: Sequence[np.ndarray[Any, Any]], layout: str) -> list[np.ndarray[Any, Any]]:
    result = relay.build(mod, "llvm", layout=layout).vm(tvm.cpu())["main"](*inputs)
    return [item.numpy() for item in (result if isinstance(result, (list, tuple, tvm.ir.Array)) else [result])]


def stock(mod: tvm.IRModule, inputs: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    executable = tvm.compile(mod, UNOPTIMISED)
    result = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(item) for item in inputs))
    return [item.numpy() for item in (result if isinstance(result, (list, tuple, tvm.ir.Array)) else [result])]


def same_meaning(mod: tvm.IRModule, *shapes: Shape, layout: str = "NCHWc") -> None:
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(shape).astype("float32") for shape in shapes]
    for expected, actual in zip(stock(mod, inputs), run(mod, inputs, layout), strict=True):
        assert expected.shape == actual.shape
        assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)


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


def test_convolutions_compute_what_they_did() -> None:
    def graph(builder: Any, inputs: Any) -> Any:
        first = conv(builder, inputs[0], 32, 1)
        blocked = [conv(builder, first, features, taps, **how) for features, taps, how in WINDOWS]
        return (*(conv(builder, value, 5, 1) for value in blocked), blocked[0])

    mod = module(graph, (2, 5, 11, 9))
    same_meaning(mod, (2, 5, 11, 9))
    names = calls(BlockChannels(lookup("cpu-avx512"), "NCHWc")(mod))
    assert sum(name.startswith("depthwise_conv2d_NCHW16c") for name in names) == 3
    assert sum(name.startswith("conv2d_NCHW16c") for name in names) == 1 + 6 + 9
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


@pytest.mark.parametrize(("taps", "groups"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_transposed_convolutions_compute_what_they_did(taps: int, groups: int) -> None:
    same_meaning(module(upsampled(taps, groups), (1, 3, 28, 28)), (1, 3, 28, 28))


def test_padding_computes_what_it_did() -> None:
    same_meaning(module(padded, (2, 32, 9, 7)), (2, 32, 9, 7))


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
