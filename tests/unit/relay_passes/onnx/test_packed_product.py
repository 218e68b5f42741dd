"""MatMulNBits: which products keep weights of four bits in memory, which are int8, and what they compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.support.dot_rows import FEATURES, row_of
from tvm_ext import relay
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.relay_passes.settle_packed import MOST_PACKED_ROWS, SettlePackedProducts


def model_of(
    shape: tuple[int, ...], columns: int, block: int, *, zeros: bool, bias: bool, behind: int = 1, level: int = 0
) -> tuple[onnx.ModelProto, Any, Any]:
    """(model, x, result in float64); ``behind`` products of as many columns as rows of weights follow each other."""
    rng = np.random.default_rng([*shape, columns, block])
    depth, nodes, constants = shape[-1], [], []
    x = rng.standard_normal(shape).astype("float32")
    value, name = x.astype("float64"), "x"
    for number in range(behind):
        blocks = depth // block
        codes = rng.integers(0, 16, (columns, blocks, block)).astype("uint8")
        scales = rng.uniform(0.01, 0.02, (columns, blocks)).astype("float32")
        points = rng.integers(0, 16, (columns, blocks)) if zeros else np.full((columns, blocks), 8)
        padded = np.pad(points, [(0, 0), (0, blocks % 2)]).astype("uint8")
        tensors = {
            "b": codes[:, :, 0::2] | codes[:, :, 1::2] << 4,
            "s": scales.reshape(-1),
            **({"z": (padded[:, 0::2] | padded[:, 1::2] << 4).reshape(-1)} if zeros else {}),
            **({"bias": rng.standard_normal(columns).astype("float32")} if bias else {}),
        }
        constants += [numpy_helper.from_array(array, f"{key}{number}") for key, array in tensors.items()]
        operands = [f"{key}{number}" if key in tensors else "" for key in ("b", "s", "z", "order", "bias")]
        sizes: dict[str, Any] = {"K": depth, "N": columns, "bits": 4, "block_size": block, "accuracy_level": level}
        out = f"y{number}"
        nodes.append(helper.make_node("MatMulNBits", [name, *operands], [out], domain="com.microsoft", **sizes))
        weights = ((codes - points[:, :, None]) * scales.astype("float64")[:, :, None]).reshape(columns, depth)
        value, name, depth = value @ weights.T + tensors.get("bias", 0), out, columns
    ends = [helper.make_tensor_value_info("x", 1, shape)], [helper.make_tensor_value_info(name, 1, None)]
    graph = helper.make_graph(nodes, "packed", *ends, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), x, value


@pytest.mark.sampled
@pytest.mark.parametrize("target", ["llvm", "cpu-sse2", "cpu-avx2"])
@pytest.mark.parametrize(
    ("shape", "columns", "block", "zeros", "bias"),
    [
        ((1, 1, 64), 96, 32, False, False),
        ((1, 64), 37, 16, True, True),
        ((2, 2, 128), 40, 64, True, False),
        ((MOST_PACKED_ROWS, 256), 17, 128, False, True),
        ((MOST_PACKED_ROWS + 1, 64), 33, 32, True, False),
    ],
)
def test_is_the_product_of_what_the_codes_stand_for(
    shape: tuple[int, ...], columns: int, block: int, zeros: bool, bias: bool, target: str
) -> None:
    model, x, wanted = model_of(shape, columns, block, zeros=zeros, bias=bias)
    mod, params = relay.frontend.from_onnx(model)
    module = relay.GraphModule(relay.build(mod, target, params=params)["default"]())
    module.run(x=x)
    error = np.linalg.norm(module.get_output(0).numpy() - wanted) / np.linalg.norm(wanted)
    assert error < 1e-6


def settled(model: onnx.ModelProto, device: str | None, **settings: Any) -> str:
    """The graph as text, its parameters known, behind the pass that decides."""
    mod = relay.bind_params(*relay.frontend.from_onnx(model))
    row = None if device is None else row_of(device) if device in FEATURES else lookup(device)
    return str(SettlePackedProducts(row, BuildOptions(database="off", **settings))(mod).script())


@pytest.mark.parametrize("rows", [MOST_PACKED_ROWS, MOST_PACKED_ROWS + 1])
@pytest.mark.parametrize("level", [0, 1, 4])
def test_weights_stay_packed_for_few_rows(rows: int, level: int) -> None:
    """Of each product in a chain, whose second has a shape that is known by inference alone; int8 needs a device."""
    model, _, _ = model_of((rows, 64), 64, 32, zeros=True, bias=False, behind=2, level=level)
    for device in (None, "cpu-cascade-lake", "nvidia-a100", *([] if level == 4 else ["cpu-epyc-zen5"])):
        text = settled(model, device)
        assert "rounded" not in text
        assert text.count("R.call_tir(cls.packed_product") == (2 if rows <= MOST_PACKED_ROWS else 0)
        assert text.count("R.matmul(") == (2 if rows > MOST_PACKED_ROWS else 0)


@pytest.mark.parametrize(
    ("level", "precision", "is_rounded"),
    [(4, "float32", True), (4, "int8", True), (0, "int8", True), (0, "float32", False), (1, "int8", False)],
)
def test_the_model_or_the_build_asks_for_int8(level: int, precision: Any, is_rounded: bool) -> None:
    model, _, _ = model_of((9, 64), 24, 32, zeros=False, bias=True, behind=1, level=level)
    text = settled(model, "cpu-epyc-zen5", precision=precision)
    assert ("R.call_tir(cls.packed_product_rounded" in text) == is_rounded
    assert ("R.matmul(" in text) != is_rounded
    assert ("R.add(" in text) != is_rounded, "the bias is the kernel's"
    assert "R.matmul(" in settled(model, "cpu-epyc-zen5", precision=precision, enable_roller=False)


@pytest.mark.parametrize("block", [16, 20])
def test_blocks_that_are_no_whole_groups_stay_floats(block: int) -> None:
    model, _, _ = model_of((2, 80), 24, block, zeros=False, bias=False, level=4)
    assert ("packed_product_rounded" in settled(model, "cpu-epyc-zen5")) == (block == 16)


def test_weights_that_a_run_is_given_stay_packed() -> None:
    model, x, wanted = model_of((6, 64), 24, 32, zeros=True, bias=True, level=4)
    mod, params = relay.frontend.from_onnx(model)
    module = relay.GraphModule(relay.build(mod, "cpu-avx2")["default"]())
    module.run(x=x, **params)
    assert np.linalg.norm(module.get_output(0).numpy() - wanted) / np.linalg.norm(wanted) < 1e-6


def test_a_gpu_kernel_is_right() -> None:
    model, _, _ = model_of((1, 64), 37, 16, zeros=True, bias=False)
    mod, params = relay.frontend.from_onnx(model)
    relay.build(mod, "nvidia-a100", params=params, verify=True)
