"""Channels last on GPUs: what is converted, what is kept, and that the values stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.quick_target import UNOPTIMISED
from tvm_ext._tvm import assert_structural_equal
from tvm_ext.devices import device_db
from tvm_ext.records.padding import CHANNELS_LAST, LAYOUT, LayoutRecord
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.layout.channels_last import CONVOLUTION, TRANSPOSE, ChannelsLast, _calls
from tvm_ext.relay_passes.partition_cutlass import PartitionCutlass

A100, MI50 = device_db.lookup("nvidia-a100"), device_db.lookup("amd-mi50")


def network(*, convolutions: int = 5, groups: int = 1, dtype: str = "float16", flatten: bool = False) -> tvm.IRModule:
    """Convolutions with ReLU between them; with ``flatten``, a reshape that no layout goes through."""
    random = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 8, 10, 10), dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            value: Any = x
            for _ in range(convolutions):
                weight = relax.const((random.standard_normal((8, 8 // groups, 3, 3)) / 8).astype(dtype))
                value = builder.emit(relax.op.nn.conv2d(value, weight, padding=1, groups=groups))
                if flatten:
                    value = builder.emit(relax.op.reshape(value, (1, 8, 100)))
                    value = builder.emit(relax.op.reshape(value, (1, 8, 10, 10)))
                value = builder.emit(relax.op.nn.relu(value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def record(mod: tvm.IRModule) -> LayoutRecord:
    return from_json(LayoutRecord, str(mod.attrs[LAYOUT]))


def run(mod: tvm.IRModule) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((1, 8, 10, 10)).astype("float16")
    vm = relax.VirtualMachine(tvm.compile(mod, target=UNOPTIMISED), tvm.cpu())
    return np.asarray(vm["main"](tvm.runtime.tensor(x)).numpy(), "float64")


def test_a_chain_is_transposed_at_its_two_ends_only() -> None:
    before = network()
    after = ChannelsLast(A100)(before)
    layouts = [(str(call.attrs.data_layout), str(call.attrs.kernel_layout)) for call in _calls(after, CONVOLUTION)]
    assert layouts == [("NHWC", "OHWI")] * 5
    assert len(_calls(after, TRANSPOSE)) == 2
    assert record(after).block == CHANNELS_LAST
    assert (record(after).blocked_count, record(after).transform_count) == (5, 2)


def test_values_stay() -> None:
    before = network()
    np.testing.assert_allclose(run(ChannelsLast(A100)(before)), run(before), rtol=2e-2, atol=2e-3)


def test_too_many_transposes_keep_the_layout_unless_it_is_demanded() -> None:
    before = network(flatten=True)
    after = ChannelsLast(A100)(before)
    assert [str(call.attrs.data_layout) for call in _calls(after, CONVOLUTION)] == ["NCHW"] * 5
    assert record(after).blocked_count == 0
    assert "transposes of activations would remain for 5 convolutions" in record(after).chains[0].reason
    forced = ChannelsLast(A100, always=True)(before)
    assert [str(call.attrs.data_layout) for call in _calls(forced, CONVOLUTION)] == ["NHWC"] * 5


@pytest.mark.parametrize(
    ("before", "device"),
    [
        (network(dtype="float32"), A100),
        (network(groups=8), A100),
        (network(), MI50),
        (network(), device_db.lookup("opencl")),
    ],
    ids=["float32", "grouped", "no matrix units", "opencl"],
)
def test_what_matrix_units_do_not_serve_is_left_alone(before: tvm.IRModule, device: Any) -> None:
    after = ChannelsLast(device, always=True)(before)
    assert_structural_equal(after, before)


def test_the_input_module_is_left_alone() -> None:
    before = network()
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        ChannelsLast(A100)(before)
    assert_structural_equal(before, network())


def mobile_network() -> tvm.IRModule:
    """What stops stock's conversion: depthwise and grouped convolutions, Clip, scales of three axes."""
    random = np.random.default_rng(0)

    def constant(*shape: int) -> Any:
        return relax.const((random.standard_normal(shape) / 8).astype("float16"))

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 8, 10, 10), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            value: Any = x
            for groups in (1, 8, 2, 1):
                value = builder.emit(
                    relax.op.nn.conv2d(value, constant(8, 8 // groups, 3, 3), padding=1, groups=groups)
                )
                value = builder.emit(relax.op.multiply(value, constant(8, 1, 1)))
                value = builder.emit(relax.op.clip(value, -0.25, 6))
                limit = relax.const(np.float16(4))
                value = builder.emit(builder.call_te(tvm.topi.minimum, value, limit))
                rows = builder.emit(relax.op.greater(value, constant(8, 1, 1)))
                value = builder.emit(relax.op.where(rows, value, relax.op.negative(value)))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def test_grouped_convolutions_and_what_is_between_them_follow_on_request() -> None:
    before = mobile_network()
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        after = ChannelsLast(A100, grouped=True)(before)
    relax.analysis.well_formed(after)
    layouts = [(str(call.attrs.data_layout), str(call.attrs.kernel_layout)) for call in _calls(after, CONVOLUTION)]
    assert layouts == [("NHWC", "OHWI")] * 4
    assert len(_calls(after, TRANSPOSE)) == 2
    np.testing.assert_allclose(run(after), run(before), rtol=2e-2, atol=2e-3)
    assert not PartitionCutlass(A100)(after).attrs["tvm_ext.partition"].count('"remedy"')
    stock = ChannelsLast(A100, always=True)(before)
    kept = [call for call in _calls(stock, CONVOLUTION) if int(call.attrs.groups) > 1]
    assert [str(call.attrs.kernel_layout) for call in kept] == ["OIHW"] * 2


def test_transposes_of_axes_of_one_element_are_views() -> None:
    """An image of one channel at the first kernel, a pool's result at the last: no launch is left of either."""
    random = np.random.default_rng(0)
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 1, 9, 7), "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            weight = relax.const(random.standard_normal((8, 1, 3, 3)).astype("float16"))
            value = builder.emit(relax.op.nn.relu(builder.emit(relax.op.nn.conv2d(x, weight, padding=1))))
            pooled = builder.emit(relax.op.nn.adaptive_avg_pool2d(value, (1, 1)))
            ends = [builder.emit_output(pooled), builder.emit_output(value)]
        builder.emit_func_output(relax.Tuple(ends))
    before = builder.get()
    after = ChannelsLast(A100, always=True, grouped=True)(before)
    (kept,) = _calls(after, TRANSPOSE)
    assert tuple(map(int, kept.ty.shape)) == (2, 8, 9, 7)
    data = tvm.runtime.tensor(random.standard_normal((2, 1, 9, 7)).astype("float16"))
    results = [relax.VirtualMachine(tvm.compile(mod, UNOPTIMISED), tvm.cpu())["main"](data) for mod in (before, after)]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(other.numpy(), one.numpy(), rtol=2e-2, atol=2e-3)
