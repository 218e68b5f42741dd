"""MatMulNBits of few rows: weights stay four bits in memory, and the product is that of the floats they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tvm_ext import relay
from tvm_ext.relay_passes.onnx.operators.packed_product import MOST_PACKED_ROWS


def model_of(
    shape: tuple[int, ...], columns: int, block: int, *, zeros: bool, bias: bool, behind: int = 1
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
        sizes: dict[str, Any] = {"K": depth, "N": columns, "bits": 4, "block_size": block}
        out = f"y{number}"
        nodes.append(helper.make_node("MatMulNBits", [name, *operands], [out], domain="com.microsoft", **sizes))
        weights = ((codes - points[:, :, None]) * scales.astype("float64")[:, :, None]).reshape(columns, depth)
        value, name, depth = value @ weights.T + tensors.get("bias", 0), out, columns
    ends = [helper.make_tensor_value_info("x", 1, shape)], [helper.make_tensor_value_info(name, 1, None)]
    graph = helper.make_graph(nodes, "packed", *ends, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), x, value


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


@pytest.mark.parametrize("rows", [MOST_PACKED_ROWS, MOST_PACKED_ROWS + 1])
def test_weights_stay_packed_for_few_rows(rows: int) -> None:
    """Of each product in a chain, whose second has a shape that is known by inference alone."""
    model, _, _ = model_of((rows, 64), 64, 32, zeros=True, bias=False, behind=2)
    text = relay.frontend.from_onnx(model)[0].script()
    assert text.count("R.call_tir(cls.packed_product") == (2 if rows <= MOST_PACKED_ROWS else 0)


def test_a_gpu_kernel_is_right() -> None:
    model, _, _ = model_of((1, 64), 37, 16, zeros=True, bias=False)
    mod, params = relay.frontend.from_onnx(model)
    relay.build(mod, "nvidia-a100", params=params, verify=True)
