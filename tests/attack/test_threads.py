"""Many threads that import and build at once: each gets its own model, and nothing of the process is swapped."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnx.helper
import pytest

from tvm_ext import relay
from tvm_ext.errors import ModelError

THREADS = 8
X = np.random.default_rng(0).standard_normal((6, 8)).astype("float32")


def model(number: int) -> onnx.ModelProto:
    """relu(x @ w) + ``number``, whose w and width differ between numbers; every fourth has an operator nobody knows."""
    helper = onnx.helper
    weight = np.random.default_rng(number).standard_normal((8, 5 + number)).astype("float32")
    constants = {"w": weight, "c": np.full((1,), number, "float32")}
    last = helper.make_node("NoSuchOperator" if number % 4 == 3 else "Add", ["r", "c"], ["y"], name=f"last{number}")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["r"]), last]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def expected(number: int) -> np.ndarray:
    weight = np.random.default_rng(number).standard_normal((8, 5 + number)).astype("float32")
    return np.maximum(X @ weight, 0) + number


def build_and_run(number: int) -> np.ndarray | str:
    try:
        mod, params = relay.frontend.from_onnx(model(number))
    except ModelError as error:
        return str(error)
    library = relay.build(mod, params=params, kernel_cache="off")
    return np.asarray(library.vm()["main"](X).numpy())


@pytest.mark.timeout(300)
def test_imports_and_builds_at_once() -> None:
    streams, error_stream = (sys.stdout, sys.stderr), os.fstat(2).st_ino
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(build_and_run, range(2 * THREADS)))
    for number, result in enumerate(results):
        if number % 4 == 3:
            assert isinstance(result, str)
            assert "NoSuchOperator" in result
        else:
            assert not isinstance(result, str), result
            np.testing.assert_allclose(result, expected(number), rtol=1e-4, atol=1e-4)
    assert (sys.stdout, sys.stderr) == streams
    assert os.fstat(2).st_ino == error_stream


def test_an_operator_that_fails_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Stock TVM's importer prints the operands of a node that it cannot convert."""
    helper = onnx.helper
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape_me")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (4, 6))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.array([5, 7], "int64"), "shape")],
    )
    with pytest.raises(ModelError, match="reshape_me"):
        relay.frontend.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert capfd.readouterr().out == ""
