"""Recurrent layers whose number of steps is known only at run time: one library runs inputs of any length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

from tests.support.guarded_memory import build_guarded
from tests.support.recurrent_nodes import FORMS, LSTM, RecurrentNode, drawn, expected, model_of, operands
from tvm_ext import relay
from tvm_ext.errors import InputError, ModelError

LENGTHS = (1, 2, 7, 50)


def opened(model: onnx.ModelProto, axis: int, name: str = "steps") -> onnx.ModelProto:
    """``model`` whose first input is open at ``axis``."""
    model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    return model


def run(library: relay.Library, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    module = relay.GraphModule(library["default"](tvm.cpu()))
    for name, value in values.items():
        module.set_input(name, value)
    module.run()
    return [module.get_output(index).numpy() for index in range(module.get_num_outputs())]


def assert_close(actual: list[np.ndarray], reference: list[np.ndarray], limit: float = 4e-6) -> None:
    for one, other in zip(actual, reference, strict=True):
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= limit * (1e-3 + np.linalg.norm(other))


def built(
    node: RecurrentNode, values: Mapping[str, np.ndarray], *, guarded: bool = False, **settings: Any
) -> tuple[relay.Library, list[str]]:
    mod, params = relay.frontend.from_onnx(opened(model_of(node, values), node.layout))
    names = [str(parameter.name) for parameter in mod["main"].params[: int(mod["main"].attrs["num_input"])]]
    build = build_guarded if guarded else relay.build
    return build(mod, "llvm", params=params, **settings), names


def of_length(node: RecurrentNode, steps: int) -> RecurrentNode:
    lengths = tuple(min(steps, 1 + (steps * (row + 1)) // 3) for row in range(len(node.lengths)))
    return dataclasses.replace(node, steps=steps, lengths=lengths)


def check_lengths(node: RecurrentNode, seed: int = 0, **settings: Any) -> None:
    values = operands(node, seed)
    values["r"] /= np.float32(node.hidden**0.5)  # else roundings grow in 50 steps of an RNN
    library, names = built(node, values, **settings)
    for steps in LENGTHS:
        now = of_length(node, steps)
        drawn_now = operands(now, seed=steps)
        given = {**values, **{key: drawn_now[key] for key in ("x", "lengths") if key in drawn_now}}
        assert_close(run(library, {key: given[key] for key in names}), expected(now, given))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", FORMS)
def test_one_library_runs_any_length(name: str) -> None:
    check_lengths(FORMS[name])


def test_stock_kernels_run_any_length() -> None:
    check_lengths(FORMS["gru"], enable_roller=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_nodes(seed: int) -> None:
    node = dataclasses.replace(drawn(seed), activations=(), alphas=(), betas=())  # some grow without end in 50 steps
    check_lengths(node, seed, guarded=seed % 3 == 1, **({"enable_rammer": True} if seed % 3 == 0 else {}))


def network() -> onnx.ModelProto:
    """LSTM of two directions, GRU, RNN in reverse, then a product with softmax over what it gives at each step."""
    random = np.random.default_rng(14)
    batch, features, hidden = 2, 6, 8
    constants: dict[str, np.ndarray] = {}

    def constant(name: str, *shape: int) -> str:
        constants[name] = random.uniform(-0.5, 0.5, shape).astype(np.float32)
        return name

    def layer(kind: str, x: str, width: int, gates: int, **attributes: Any) -> onnx.NodeProto:
        count, name = 2 if attributes.get("direction") == "bidirectional" else 1, kind.lower()
        weights = [
            constant(f"{name}_w", count, gates * hidden, width),
            constant(f"{name}_r", count, gates * hidden, hidden),
        ]
        bias = constant(f"{name}_b", count, 2 * gates * hidden)
        return helper.make_node(kind, [x, *weights, bias], [f"{name}_y", f"{name}_h"], hidden_size=hidden, **attributes)

    constants |= {f"at{place}": np.int64([place]) for place in range(5)} | {"axis": np.int64([1])}
    nodes = [
        layer("LSTM", "x", features, 4, direction="bidirectional"),
        helper.make_node("Transpose", ["lstm_y"], ["swapped"], perm=[0, 2, 1, 3]),
        # As exporters write it: the target's first element is known at run time only.
        helper.make_node("Shape", ["swapped"], ["extents"]),
        *(
            helper.make_node("Slice", ["extents", f"at{axis}", f"at{axis + 1}", "at0"], [f"extent{axis}"])
            for axis in range(4)
        ),
        helper.make_node("Mul", ["extent2", "extent3"], ["columns"]),
        helper.make_node("Concat", ["extent0", "extent1", "columns"], ["rows"], axis=0),
        helper.make_node("Reshape", ["swapped", "rows"], ["both"]),
        layer("GRU", "both", 2 * hidden, 3, linear_before_reset=1),
        helper.make_node("Squeeze", ["gru_y", "axis"], ["forward"]),
        layer("RNN", "forward", hidden, 1, direction="reverse"),
        helper.make_node("Squeeze", ["rnn_y", "axis"], ["reversed"]),
        helper.make_node("MatMul", ["reversed", constant("classes", hidden, 10)], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["steps", batch, features])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "lstm_h", "gru_h")],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def layers() -> tuple[onnx.ModelProto, relay.Library]:
    model = network()
    mod, params = relay.frontend.from_onnx(model)
    return model, relay.build(mod, "llvm", params=params)


def references(model: onnx.ModelProto) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    session = onnxruntime.InferenceSession(model.SerializeToString())
    inputs = [np.random.default_rng(steps).normal(size=(steps, 2, 6)).astype(np.float32) for steps in LENGTHS]
    return [(x, session.run(None, {"x": x})) for x in inputs]


def test_layers_upon_each_other_give_what_onnx_runtime_gives(layers: tuple[onnx.ModelProto, relay.Library]) -> None:
    model, library = layers
    for x, reference in references(model):
        assert_close(run(library, {"x": x}), reference)


def test_the_loops_run_constructed_kernels(layers: tuple[onnx.ModelProto, relay.Library]) -> None:
    """Cells by the kernel of one step, products and softmax by that of a block of rows; none is stock TVM's."""
    choices = [operator.choice for operator in layers[1].report.operators]
    steps = [item for item in choices if "steps are counted at run time" in item.reason]
    rows = [item for item in choices if "rows are counted at run time" in item.reason]
    assert len(steps) == 4 and all(item.path == "rtile" for item in steps)
    assert sum("a cell of" in item.reason for item in steps) == 3  # an rnn has one gate: a product with an epilogue
    assert any(item.path == "rtile" for item in rows)
    assert {item.path for item in choices if item not in steps} <= {"rtile", "rows"}


def test_an_exported_library_runs_any_length(layers: tuple[onnx.ModelProto, relay.Library], tmp_path: Path) -> None:
    model, library = layers
    library.export_library(str(tmp_path / "layers.so"))
    loaded = relay.load(str(tmp_path / "layers.so"))
    for x, reference in references(model):
        assert_close(run(loaded, {"x": x}), reference)


def test_schedules_leave_the_loops_outside_and_say_so() -> None:
    """What has no open axis is scheduled; the report names the rest with the reason."""
    model = network()
    mod, params = relay.frontend.from_onnx(model)
    library = relay.build(mod, "llvm", params=params, enable_rammer=True)
    for x, reference in references(model):
        assert_close(run(library, {"x": x}), reference)
    outside = {item.name: item.reason for item in library.report.rammer.outside}
    loops = {name: reason for name, reason in outside.items() if "_steps" in name}
    assert len(loops) == 4
    assert all("only known at run time" in reason for reason in loops.values())


def test_no_steps_at_all(layers: tuple[onnx.ModelProto, relay.Library]) -> None:
    """The states stay what they were, and nothing is written."""
    y, lstm_h, gru_h = run(layers[1], {"x": np.zeros((0, 2, 6), np.float32)})
    assert y.shape == (0, 2, 10)
    assert not lstm_h.any() and not gru_h.any()


@pytest.mark.parametrize(("axis", "what"), [(1, r"batch \(axis 1\)"), (2, r"number of features \(axis 2\)")])
def test_other_open_extents_are_refused_with_the_remedy(axis: int, what: str) -> None:
    model = opened(model_of(LSTM, operands(LSTM)), axis, "n")
    with pytest.raises(ModelError, match=rf"LSTM(.|\n)*{what} is open(.|\n)*shape="):
        relay.frontend.from_onnx(model)


def test_gpus_are_refused_with_the_remedy() -> None:
    mod, params = relay.frontend.from_onnx(opened(model_of(LSTM, operands(LSTM)), 0))
    with pytest.raises(InputError, match=r"'steps' of input 'x'(.|\n)*shape="):
        relay.build(mod, "nvidia-a100", params=params)


def test_an_open_dimension_that_counts_no_steps_is_refused() -> None:
    """Only what recurrent layers loop over may stay open."""
    model = opened(model_of(LSTM, operands(LSTM)), 0)
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, ["other", 4]))
    model.graph.node.append(helper.make_node("Relu", ["z"], ["relu"]))
    model.graph.output.append(helper.make_tensor_value_info("relu", TensorProto.FLOAT, None))
    mod, params = relay.frontend.from_onnx(model)
    with pytest.raises(InputError, match=r"1 dimension\(s\) have no value: 'other' of input 'z'"):
        relay.build(mod, "llvm", params=params)
