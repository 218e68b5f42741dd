"""LSTM, GRU and RNN: what they compute, in which form they are in the graph, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tvm

from tests.support.recurrent_nodes import FORMS, FUNCTIONS, LSTM, RecurrentNode, drawn, expected, model_of, operands
from tvm_ext import relay
from tvm_ext._tvm import CALL_TIR, BlockBuilder, Call, PrimFunc, relax, structural_walk
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.errors import ModelError
from tvm_ext.pass_pipeline import graph_passes, operator_passes
from tvm_ext.records.recurrent import CELL, GateActivation, RecurrentCell
from tvm_ext.records.serialise import from_json
from tvm_ext.relay_passes.fold_calls import FoldCalls
from tvm_ext.relay_passes.onnx.import_limits import ImportLimits
from tvm_ext.relay_passes.onnx.operators.recurrent_attributes import settings_of
from tvm_ext.relay_passes.recurrent import unroll

TAME = 100.0
"""Draws of growing activations (Elu of Affine, say) reach 10^60 in six steps, where float32 has infinity."""


def relative_error(actual: np.ndarray, reference: np.ndarray) -> float:
    assert actual.shape == reference.shape
    return float(np.linalg.norm(actual - reference) / (1e-6 + np.linalg.norm(reference)))


def tame(seed: int, *, for_onnx_runtime: bool = False) -> tuple[RecurrentNode, dict[str, Any], list[Any]] | None:
    node = drawn(seed, for_onnx_runtime=for_onnx_runtime)
    values = operands(node, seed)
    with np.errstate(over="ignore"):
        reference = expected(node, values)
    return (node, values, reference) if max(float(np.abs(one).max()) for one in reference) < TAME else None


def check_built(node: RecurrentNode, seed: int = 0, **settings: Any) -> None:
    values = operands(node, seed)
    mod, params = relay.frontend.from_onnx(model_of(node, values))
    module = relay.GraphModule(relay.build(mod, "llvm", params=params, **settings)["default"](tvm.cpu()))
    for name in _input_names(mod):
        module.set_input(name, values[name])
    module.run()
    for index, reference in enumerate(expected(node, values)):
        assert relative_error(module.get_output(index).numpy(), reference) < 2e-6


def _input_names(mod: Any) -> list[str]:
    return [parameter.name for parameter in mod["main"].params[: int(mod["main"].attrs["num_input"])]]


def test_the_reference_is_onnx_runtime() -> None:
    """What the builds below are compared with is what ONNX Runtime computes, where it computes anything."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    compared = 0
    for seed in range(150):
        case = tame(seed, for_onnx_runtime=True)
        if case is None:
            continue
        node, values, reference = case
        model = model_of(node, values)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        results = session.run(None, {item.name: values[item.name] for item in session.get_inputs()})
        assert all(relative_error(*pair) < 1e-5 for pair in zip(results, reference, strict=True)), node
        compared += 1
    assert compared > 140


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", FORMS)
def test_a_build_computes_the_equations(name: str) -> None:
    node = FORMS[name]
    check_built(dataclasses.replace(node, steps=1) if node.kind == "RNN" else node)  # one step has no loop to unroll


def test_every_activation() -> None:
    """Eleven functions in two nodes, by the plain path of stock TVM's kernels as well."""
    alphas, betas = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8), (0.2, 0.3, 0.6)
    one = RecurrentNode(
        kind="LSTM", steps=2, batch=1, features=2, hidden=3, direction="bidirectional",
        activations=("Affine", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScaledTanh"), alphas=alphas[:5],
        betas=betas,
    )  # fmt: skip
    other = dataclasses.replace(
        one, activations=("Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Relu"), alphas=(0.3,), betas=()
    )
    assert {*one.activations, *other.activations} == set(FUNCTIONS)
    check_built(one)
    check_built(other, enable_roller=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_random_nodes(seed: int) -> None:
    case = tame(seed)
    if case is not None:
        check_built(case[0], seed, enable_roller=seed % 4 != 0)


def operators_of(node: RecurrentNode) -> Any:
    """The module behind FuseTIR, parameters bound."""
    mod, params = relay.frontend.from_onnx(model_of(node, operands(node)))
    target = tvm.target.Target("llvm")
    passes = [*graph_passes(), *operator_passes(target)]
    with target, tvm.transform.PassContext(config={"testing.immutable_module": True}):
        return tvm.transform.Sequential(passes)(relay.bind_params(mod, params))


def test_all_steps_of_a_shape_call_one_function() -> None:
    """Both directions of a layer share their cell, whose parameters are those of the record."""
    mod = operators_of(dataclasses.replace(LSTM, direction="bidirectional"))
    cells = {gv: func for gv, func in mod.functions_items() if func.attrs and CELL in func.attrs}
    ((variable, func),) = cells.items()
    assert isinstance(func, PrimFunc) and variable.name_hint == "lstm_cell"
    cell = from_json(RecurrentCell, str(func.attrs[CELL]))
    shapes = [tuple(int(extent) for extent in item.ty.shape) for item in func.params]
    assert shapes == [item.shape for item in (*cell.operands, *cell.results)]
    calls: list[Call] = []
    structural_walk(mod["main"].body, (Call, calls.append), order="pre")
    assert sum(call.op == CALL_TIR and call.args[0] == variable for call in calls) == 2 * LSTM.steps
    assert not any(isinstance(func, relax.Function) for gv, func in mod.functions_items() if gv.name_hint != "main")


def test_what_is_known_of_the_weights_is_computed_at_build() -> None:
    """Transposed weights and summed biases: left are the product, its split, the cell and the join of results."""
    mod = operators_of(LSTM)
    assert len([func for _, func in mod.functions_items() if isinstance(func, PrimFunc)]) == 4


@pytest.mark.parametrize("chunk", [1, 2, 3, None])
def test_products_by_chunks_of_time(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 steps of 2 rows, every step's part of the product is a constant expression of its own."""
    monkeypatch.setattr(unroll, "MOST_PARTS", 4)
    rows, weight = np.arange(14.0, dtype="f").reshape(14, 1), np.float32([[1, 10]])
    builder = BlockBuilder()
    with builder.function("main", []):
        operands_of_layer = relax.const(rows), relax.const(weight), relax.const(weight)
        with builder.dataflow():
            made = unroll.input_products(builder, *operands_of_layer, steps=7, chunk=chunk)
            result = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(result)
    products: list[Call] = []
    structural_walk(builder.get()["main"].body, (Call, products.append), order="pre")
    count = sum(operator_name(call) == "relax.matmul" for call in products)
    assert count == {1: 7, 2: 4, 3: 3, None: 2}[chunk]
    folded = FoldCalls()(builder.get())["main"]
    bound = relax.analysis.get_var2val(folded)
    values = [bound[item].value.numpy() for item in bound[folded.body.body].fields]
    assert [value.shape for value in values] == [(2, 2)] * 7
    np.testing.assert_array_equal(np.concatenate(values), rows @ weight + weight)


def test_parameters_of_activations_are_taken_in_order() -> None:
    attributes = {"activations": [b"LeakyRelu", b"tanh", b"Affine"], "activation_alpha": [0.5, 2.0]}
    assert settings_of("lstm", attributes).activations == (
        GateActivation(name="LeakyRelu", alpha=0.5),
        GateActivation(name="Tanh"),
        GateActivation(name="Affine", alpha=2.0, beta=0.0),
    )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"direction": "sideways"}, "direction 'sideways'"),
        ({"activations": ("Sigmoid", "Tanh")}, "names 2 activations, where it has 3"),
        ({"activations": ("Sigmoid", "Tanh", "Sine")}, "activation 'Sine'"),
        ({"clip": -1.0}, "clips at -1"),
    ],
)
def test_attributes_that_onnx_does_not_have_are_refused(change: dict[str, Any], match: str) -> None:
    node = dataclasses.replace(LSTM, **change)
    with pytest.raises(ModelError, match=match):
        relay.frontend.from_onnx(model_of(node, operands(LSTM)))


def test_operands_that_do_not_fit_are_refused() -> None:
    values = operands(LSTM)
    values["r"] = values["r"][:, :12]
    with pytest.raises(ModelError, match=r"'r'|LSTM"):
        relay.frontend.from_onnx(model_of(LSTM, values))


def test_too_many_steps_are_refused() -> None:
    node = dataclasses.replace(LSTM, direction="bidirectional")
    model = model_of(node, operands(node))
    with pytest.raises(ModelError, match=r"have 10 steps together(.|\n)*ImportLimits\(nodes=10\)"):
        relay.frontend.from_onnx(model, limits=ImportLimits(nodes=9))
