"""Operators that are rewritten: random shapes, attributes and types against ONNX Runtime or ONNX's reference."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from tests.unit.relay_passes.onnx.drawn_nodes import others, quantised, windows
from tests.unit.relay_passes.onnx.random_nodes import NodeCase, assert_same, imported_graph, rewritten_result
from tvm_ext import relay
from tvm_ext.errors import ModelError
from tvm_ext.relay_passes.onnx.operators.tables import REPLACED

SEEDS = 8
DRAWS = {draw.__name__: draw for draw in (*others.DRAWN, *quantised.DRAWN, *windows.DRAWN)}
# Of an element: half precision's unit roundoff times a sum of a dozen terms.
TOLERANCE = {"float16": 4e-3, "float32": 3e-6, "float64": 1e-7}


def _tolerance(case: NodeCase) -> float:
    return max(TOLERANCE.get(str(value.dtype), 0.0) for value in (*case.feeds.values(), *case.expected()))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", DRAWS)
def test_means_the_same_after_rewriting(name: str, seed: int) -> None:
    case = DRAWS[name](np.random.default_rng([seed, *map(ord, name)]))
    graph = imported_graph(case)
    assert not {node.op_type for node in graph.nodes} & REPLACED
    actual = rewritten_result(graph, case)
    assert_same(actual, case.expected(), tolerance=_tolerance(case), describe=str(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_means_the_same_when_built(name: str) -> None:
    """The kernels too, on one case of each operator."""
    case = DRAWS[name](np.random.default_rng([1, *map(ord, name)]))
    mod, params = relay.frontend.from_onnx(case.model, constants=case.constants)
    machine = relay.build(mod, "llvm", params=params).vm(tvm.cpu())
    given = [tvm.runtime.tensor(value) for key, value in case.feeds.items() if key not in case.constants]
    result = machine["main"](*given)
    actual = [result] if isinstance(result, tvm.runtime.Tensor) else list(result)
    expected = case.expected()
    assert_same([value.numpy() for value in actual], expected, tolerance=_tolerance(case), describe=str(case))


REFUSED: dict[str, tuple[NodeCase, str]] = {
    "unknown axis": (
        NodeCase(operator="DFT", operands={"x": np.ones((2, 4, 1), "f"), "n": None, "axis": np.int64(0)}, opset=20),
        "needs the value of 'axis'",
    ),
    "matrix too big": (
        NodeCase(operator="DFT", operands={"x": np.ones((1, 9000, 1), "f")}, attributes={"axis": 1}, opset=17),
        "MiB",
    ),
    "no step": (
        NodeCase(operator="STFT", operands={"x": np.ones((1, 9, 1), "f"), "s": np.int64(0)}, known=("s",), opset=17),
        "0 apart",
    ),
    "window of unknown size": (NodeCase(operator="HannWindow", operands={"size": np.int64(5)}), "needs the value"),
    "unpooled to less": (
        NodeCase(
            operator="MaxUnpool",
            operands={"x": np.ones((1, 1, 2), "f"), "i": np.zeros((1, 1, 2), np.int64), "shape": np.asarray([1, 1, 3])},
            attributes={"kernel_shape": [2], "strides": [2]},
            known=("shape",),
        ),
        "inferred",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    case, reason = REFUSED[name]
    with pytest.raises(ModelError, match=reason) as error:
        relay.frontend.from_onnx(case.model, constants=case.constants)
    assert case.operator in str(error.value)
