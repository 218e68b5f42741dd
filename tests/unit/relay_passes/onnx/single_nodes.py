"""Models of a single node on given arrays: cleaned, built and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import tvm
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tvm_ext import relay
from tvm_ext.relay_passes.onnx.graph import model_from_graph
from tvm_ext.relay_passes.onnx.import_model import checked_graph, clean_graph


def model_of(
    node: onnx.NodeProto, inputs: Mapping[str, Any], constants: Mapping[str, Any] | None = None, opset: int = 18
) -> onnx.ModelProto:
    """`bare_model_of` with the shapes that ONNX infers."""
    return onnx.shape_inference.infer_shapes(bare_model_of(node, inputs, constants, opset))


def bare_model_of(
    node: onnx.NodeProto, inputs: Mapping[str, Any], constants: Mapping[str, Any] | None = None, opset: int = 18
) -> onnx.ModelProto:
    """A model of one node whose inputs have the types and shapes of the arrays given."""
    graph = helper.make_graph(
        [node],
        "test",
        [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(x).dtype), np.shape(x))
            for name, x in inputs.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in node.output if name],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def cleaned(model: onnx.ModelProto) -> onnx.ModelProto:
    result = model_from_graph(clean_graph(checked_graph(model)), lambda _: True)
    result.ir_version = 10
    return result


def built(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> list[Any]:
    mod, params = relay.frontend.from_onnx(model)
    machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(np.asarray(x)) for x in inputs.values()])
    return [item.numpy() for item in ([result] if isinstance(result, tvm.runtime.Tensor) else result)]


def assert_same(got: Sequence[Any], wanted: Sequence[Any], rtol: float = 1e-5) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(mine, theirs, rtol=rtol, atol=1e-6)


def check_rewriting(model: onnx.ModelProto, inputs: Mapping[str, Any]) -> None:
    assert_same(
        ReferenceEvaluator(cleaned(model)).run(None, dict(inputs)), ReferenceEvaluator(model).run(None, dict(inputs))
    )


def floats(*shape: int, seed: int = 3) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
