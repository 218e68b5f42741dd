"""3-D convolutions become 2-D ones over slices, with what follows them, and compute what they did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.quick_target import UNOPTIMISED
from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.devices.device_db import lookup
from tvm_ext.relay_passes.layout.block_channels import BlockChannels
from tvm_ext.relay_passes.layout.fold_depth import FoldDepth

DEVICE = lookup("cpu-avx512")
op = relax.op
Shape = tuple[int, ...]


def weight(*shape: int) -> Any:
    values = np.random.default_rng(sum(shape)).standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
    return relax.const(values.astype("float32"))


def graph(shapes: Sequence[Shape], *steps: Callable[..., Any]) -> tvm.IRModule:
    """``main`` of the steps one after the other, each on the value before it; the first also gets the inputs."""
    builder, inputs = relax.BlockBuilder(), inputs_of(*shapes)
    with builder.function("main", inputs):
        with builder.dataflow():
            value = builder.emit(steps[0](*inputs))
            for step in steps[1:]:
                value = builder.emit(step(value))
            value = builder.emit_output(value)
        builder.emit_func_output(value)
    return builder.get()


def conv(filters: int, taps: Shape = (3, 3, 3), **attrs: Any) -> Callable[[Any], Any]:
    attrs = {"padding": [size // 2 for size in taps], **attrs}
    return lambda x: op.nn.conv3d(x, weight(filters, int(x.ty.shape[1]) // attrs.get("groups", 1), *taps), **attrs)


def bias(channels: int) -> Callable[[Any], Any]:
    return lambda x: op.add(x, weight(1, channels, 1, 1, 1))


CASES: dict[str, tuple[Shape, list[Callable[..., Any]]]] = {
    "chain": ((1, 4, 5, 6, 7), [conv(16), bias(16), op.nn.relu, conv(16), op.nn.relu]),
    "batch, stride": ((3, 4, 6, 9, 8), [conv(96, strides=2), conv(32, strides=(2, 1, 1))]),
    "no padding": ((2, 3, 6, 6, 6), [conv(32, padding=0), conv(16, (2, 1, 1), padding=0)]),
    "uneven padding": ((2, 3, 4, 5, 6), [conv(32, padding=(2, 1, 0, 0, 1, 2))]),
    "dilation": ((2, 3, 7, 8, 8), [conv(32, dilation=(2, 2, 1), padding=(2, 2, 1))]),
    "one slice at a time": ((2, 4, 5, 6, 6), [conv(16, (1, 3, 3), groups=2), conv(6, (1, 1, 1), strides=(2, 1, 1))]),
    "max pool": ((2, 4, 6, 8, 8), [conv(16), lambda x: op.nn.max_pool3d(x, (2, 2, 2), (2, 2, 2)), conv(16)]),
    "mean pool": (
        (2, 4, 6, 8, 8),
        [conv(16), lambda x: op.nn.avg_pool3d(x, (3, 2, 2), (1, 2, 2), padding=(0, 1, 1)), conv(16)],
    ),
    "pool of slices": ((2, 4, 3, 8, 8), [conv(16), lambda x: op.nn.max_pool3d(x, (1, 2, 2), (1, 2, 2)), conv(16)]),
    "pool over padded depth": ((2, 4, 4, 8, 8), [conv(16), lambda x: op.nn.max_pool3d(x, 3, 2, padding=1), conv(16)]),
    "mean": ((2, 4, 3, 5, 5), [conv(16), lambda x: op.mean(x, [2, 3, 4], keepdims=True), op.sigmoid]),
    "residual": ((2, 16, 3, 5, 5), [lambda x: op.add(conv(16)(x), x), op.nn.relu, conv(16)]),
    "gate": ((2, 16, 3, 5, 5), [conv(16), lambda x: op.multiply(x, op.mean(x, [2, 3, 4], keepdims=True)), conv(16)]),
    "operand over depth": ((1, 8, 3, 5, 5), [conv(16), lambda x: op.add(x, weight(1, 1, 3, 1, 1)), conv(16)]),
    "concatenation": ((2, 8, 3, 5, 5), [conv(16), lambda x: op.concat([x, op.nn.relu(x)], axis=1), conv(16)]),
}


def named(mod: tvm.IRModule) -> list[str]:
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [str(operator_name(binding.value)).removeprefix("relax.") for binding in bindings]


def results(mod: tvm.IRModule, inputs: Sequence[Any], target: Any = UNOPTIMISED) -> np.ndarray[Any, Any]:
    machine = relax.VirtualMachine(tvm.compile(mod, target), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, inputs)).numpy()


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("name", CASES)
def test_computes_what_it_did(name: str) -> None:
    shape, steps = CASES[name]
    mod = graph([shape], *steps)
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        folded = relax.transform.DeadCodeElimination()(FoldDepth(DEVICE)(mod))
    assert "nn.conv2d" in named(folded)
    assert "nn.conv3d" not in named(folded)
    data = [np.random.default_rng(5).standard_normal(shape).astype("float32")]
    expected = results(mod, data)
    blocked = BlockChannels(DEVICE, "NCHWc")(folded)
    for changed in (folded, blocked):
        actual = results(changed, data)
        assert actual.shape == expected.shape
        assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)


def test_values_are_turned_at_the_ends_of_a_chain_alone() -> None:
    shape, steps = CASES["chain"]
    folded = named(relax.transform.DeadCodeElimination()(FoldDepth(DEVICE)(graph([shape], *steps))))
    assert folded.count("permute_dims") == 2
    assert folded.count("call_tir") == 2  # a window over depth for each convolution


def test_half_precision_summed_in_single_stays() -> None:
    x = relax.Var("x", relax.TensorType((1, 4, 5, 6, 7), "float16"))
    half = relax.const(np.ones((16, 4, 3, 3, 3), "float16"))
    mod = module_of([x], op.nn.conv3d(x, half, out_dtype="float32"))
    tvm.ir.assert_structural_equal(FoldDepth(DEVICE)(mod), mod)


@pytest.mark.parametrize(
    "step",
    [
        conv(16, (3, 1, 1)),
        conv(12),
        conv(64, groups=2),
        lambda x: op.nn.conv3d(x, weight(64, 3, 3, 3, 4), kernel_layout="OHWDI"),
    ],
)
def test_what_would_not_gain_stays(step: Callable[[Any], Any]) -> None:
    mod = graph([(1, 4, 5, 6, 7)], step)
    tvm.ir.assert_structural_equal(FoldDepth(DEVICE)(mod), mod)


def test_the_layout_option_leaves_all_as_it_is() -> None:
    shape, steps = CASES["chain"]
    mod = graph([shape], *steps)
    folded, plain = (relay.build(mod, "llvm", layout=layout).report for layout in ("auto", "NCHW"))
    assert any("join_slices" in item.name for item in folded.operators)
    assert any("conv3d" in item.name for item in plain.operators)
