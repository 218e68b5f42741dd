"""Chains of element-wise operators between bytes: which become look-ups, and that they are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from tvm_ext import relay
from tvm_ext._tvm import relax
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.relay_passes.expand_quantised import ExpandQuantised
from tvm_ext.relay_passes.tabulate_bytes import TabulateBytes

AVX512, AVX2 = ("x86-64-v4", ("avx512vnni",)), ("x86-64-v3", ())
SHAPE = (3, 16, 16)
CHAINS = {
    "silu": ["Sigmoid", "Mul"],
    "gelu": ["Gelu"],
    "hard_swish": ["HardSwish"],
    "tanh": ["Tanh"],
    "leaky": ["LeakyRelu"],
}


def chain(operators: list[str], kind: str) -> onnx.ModelProto:
    """Bytes, ``operators`` between DequantizeLinear and QuantizeLinear, bytes; each result goes through bytes."""
    zeros = {"uint8": (np.uint8(131), np.uint8(11)), "int8": (np.int8(3), np.int8(-117))}[kind]
    scales = (np.float32(0.047), np.float32(0.031))
    constants = [numpy_helper.from_array(np.asarray(v), f"c{n}") for n, v in enumerate((*scales, *zeros))]
    nodes = [helper.make_node("DequantizeLinear", ["x", "c0", "c2"], ["r"])]
    last = "r"
    for number, name in enumerate(operators):
        inputs = ["r", last] if name == "Mul" else [last]
        nodes.append(helper.make_node(name, inputs, [f"f{number}"]))
        nodes.append(helper.make_node("QuantizeLinear", [f"f{number}", "c1", "c3"], [f"q{number}"]))
        nodes.append(helper.make_node("DequantizeLinear", [f"q{number}", "c1", "c3"], [f"d{number}"]))
        last = f"d{number}"
    code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    values = [helper.make_tensor_value_info("x", code, SHAPE)]
    results = [helper.make_tensor_value_info(f"q{len(operators) - 1}", code, SHAPE)]
    graph = helper.make_graph(nodes[:-1], "chain", values, results, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def device_of(row: tuple[str, tuple[str, ...]]) -> Any:
    cpu, features = row
    target = {"kind": "llvm", "mcpu": cpu, "mattr": [f"+{name}" for name in features], "num-cores": 2}
    return device_for_target({key: value for key, value in target.items() if value})[0]


def tables(model: onnx.ModelProto, row: tuple[str, tuple[str, ...]]) -> int:
    mod, params = relay.frontend.from_onnx(model)
    mod = relax.transform.BindParams("main", params)(mod) if params else mod
    mod = TabulateBytes(device_of(row))(ExpandQuantised()(mod))
    return str(mod["main"]).count("table")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["uint8", "int8"])
@pytest.mark.parametrize("name", list(CHAINS))
def test_results_are_those_of_onnx_runtime(name: str, kind: str) -> None:
    model = chain(CHAINS[name], kind)
    x = np.arange(np.prod(SHAPE)).astype(np.uint8).view(kind).reshape(SHAPE)
    mod, params = relay.frontend.from_onnx(model)
    module = relay.GraphModule(relay.build(mod, "llvm", params=params)["default"](relay.tvm.cpu()))
    module.run(x=x)
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    wanted = onnxruntime.InferenceSession(model.SerializeToString(), settings).run(None, {"x": x})[0]
    steps = np.abs(module.get_output(0).numpy().astype(int) - wanted.astype(int))
    assert steps.max() <= 1 and (steps > 0).mean() < 0.02


def test_several_operators_are_one_table() -> None:
    assert tables(chain(CHAINS["silu"], "uint8"), AVX512) == 1
    assert tables(chain(["Tanh", "Sigmoid"], "int8"), AVX512) == 1


def test_what_loads_one_by_one_would_not_speed_up_stays() -> None:
    """A Relu is a few operations of a vector; look-ups without permutations are three for each lane."""
    assert tables(chain(["Relu"], "uint8"), AVX2) == 0
    assert tables(chain(["Tanh", "Sigmoid"], "uint8"), AVX2) == 1
