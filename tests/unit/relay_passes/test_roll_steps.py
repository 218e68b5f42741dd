"""Steps that an importer wrote out become loops: which do, what is left of the graph, and the same bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tvm

from tests.support.recurrent_nodes import RecurrentNode, model_of, operands
from tvm_ext import pass_pipeline, relay
from tvm_ext._tvm import (
    CALL_TIR,
    BlockBuilder,
    Call,
    GlobalVar,
    IRModule,
    Var,
    assert_structural_equal,
    relax,
    structural_walk,
)
from tvm_ext.analysis.relax_values import operator_name
from tvm_ext.devices import device_db
from tvm_ext.options import BuildOptions
from tvm_ext.records.recurrent import GateActivation, RecurrentCell
from tvm_ext.relay_passes.recurrent import unroll
from tvm_ext.relay_passes.recurrent.cell_function import cell_function, is_cell
from tvm_ext.relay_passes.roll_steps import RollSteps

LSTM = RecurrentNode(kind="LSTM", steps=5, batch=2, features=3, hidden=4)
FORMS = {
    "lstm of everything": dataclasses.replace(
        LSTM, direction="bidirectional", clip=0.5, layout=1, lengths=(5, 2), has_state=True, has_cell=True,
        has_peepholes=True,
    ),
    "gru": RecurrentNode(kind="GRU", steps=4, batch=1, features=3, hidden=20, lengths=(3,)),
    "reverse gru": RecurrentNode(kind="GRU", steps=4, batch=2, features=3, hidden=5, direction="reverse"),
    "rnn": RecurrentNode(kind="RNN", steps=3, batch=2, features=2, hidden=3, direction="bidirectional"),
}  # fmt: skip


def imported(node: RecurrentNode) -> IRModule:
    mod, params = relay.frontend.from_onnx(model_of(node, operands(node)))
    return relay.bind_params(mod, params)


def rolled(mod: IRModule) -> IRModule:
    with tvm.transform.PassContext(config={"testing.immutable_module": True}):
        done = tvm.transform.Sequential([RollSteps(), relax.transform.DeadCodeElimination()])(mod)
    relax.analysis.well_formed(done)
    return done


def calls_of(mod: IRModule) -> list[Call]:
    found: list[Call] = []
    structural_walk(mod["main"].body, (Call, found.append), order="pre")
    return found


def loops_of(mod: IRModule) -> list[Call]:
    return [call for call in calls_of(mod) if call.op == CALL_TIR]


def steps_of(mod: IRModule) -> int:
    return sum(isinstance(call.op, GlobalVar) for call in calls_of(mod))


def results(node: RecurrentNode, **settings: Any) -> list[np.ndarray[Any, Any]]:
    values = operands(node)
    mod, params = relay.frontend.from_onnx(model_of(node, values))
    module = relay.GraphModule(relay.build(mod, "llvm", params=params, **settings)["default"](tvm.cpu()))
    for name in (item for item in ("x", "lengths") if item in values):
        module.set_input(name, values[name])
    module.run()
    return [module.get_output(index).numpy() for index in range(module.get_num_outputs())]


@pytest.mark.parametrize("name", FORMS)
def test_every_direction_is_one_loop(name: str) -> None:
    node = FORMS[name]
    mod = imported(node)
    assert steps_of(mod) == node.steps * node.directions
    done = rolled(mod)
    assert steps_of(done) == 0 and len(loops_of(done)) == node.directions
    assert not any(is_cell(func) for _, func in done.functions_items())
    operators = [operator_name(call) for call in calls_of(done)]
    assert "relax.split" not in operators  # parts of the product were the steps'
    assert operators.count("relax.concat") <= 3 * (node.directions - 1)  # of the two directions' results
    assert "relax.strided_slice" not in operators or node.kind == "GRU" or node.directions == 2  # weights by direction


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["lstm of everything", "reverse gru"])
def test_loops_give_what_the_steps_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: the kernel of a step is the same."""
    looped = results(FORMS[name])
    monkeypatch.setattr(pass_pipeline, "recurrent_passes", lambda *_: [])
    for own, other in zip(looped, results(FORMS[name]), strict=True):
        np.testing.assert_array_equal(own, other)


def test_many_steps_are_several_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of the inputs has parts; a loop's states go to the next one."""
    monkeypatch.setattr(unroll, "MOST_PARTS", 2)
    done = rolled(imported(LSTM))
    loops = loops_of(done)
    assert [int(call.args[1].fields[0].ty.shape[0]) for call in loops] == [2, 2]  # the first of 5 = 1 + 2 + 2 is alone
    assert steps_of(done) == 1


def test_schedules_and_gpus_keep_their_steps() -> None:
    cpu, gpu = device_db.lookup("cpu-cascade-lake"), device_db.lookup("nvidia-a100")
    assert pass_pipeline.recurrent_passes(cpu, BuildOptions())
    assert not pass_pipeline.recurrent_passes(cpu, BuildOptions(enable_rammer=True))
    assert not pass_pipeline.recurrent_passes(cpu, BuildOptions(enable_rammer="auto"))
    assert not pass_pipeline.recurrent_passes(gpu, BuildOptions())


def test_the_report_counts_all_steps() -> None:
    node = dataclasses.replace(LSTM, hidden=32, batch=1)
    mod, params = relay.frontend.from_onnx(model_of(node, operands(node)))
    report = relay.build(mod, "llvm", params=params).report
    (loop,) = [item for item in report.operators if "by a loop around" in item.choice.reason]
    assert loop.choice.reason.startswith("5 steps") and loop.choice.path == "rtile"
    assert loop.choice.program is not None and loop.choice.expected_s is not None
    assert loop.choice.expected_s >= 4.9 * loop.choice.program.prediction.time_s


# --- graphs of one's own ---------------------------------------------------------------------------------------------
def steps(reads: str) -> IRModule:
    """Three steps of an LSTM, and what somebody reads: ``reads`` names a state, or "" for the last ones alone."""
    activations = tuple(GateActivation(name=name) for name in ("Sigmoid", "Tanh", "Tanh"))
    cell = RecurrentCell(kind="lstm", batch_size=1, hidden_size=4, dtype="float32", activations=activations)
    builder = BlockBuilder()
    parameters = [
        Var("rows", relax.TensorType((3, 16), "float32")),
        Var("state", relax.TensorType((1, 4), "float32")),
        Var("weights", relax.TensorType((4, 16), "float32")),
    ]
    rows, state, weights = parameters
    with builder.function("main", parameters):
        with builder.dataflow():
            function = builder.add_func(cell_function(cell), "lstm_step")
            split = builder.emit(relax.op.split(rows, 3, axis=0))
            hidden, memory, all_hidden, all_memory = state, state, [], []
            for number in range(3):
                part = builder.emit(relax.TupleGetItem(split, number))
                both = builder.emit(Call(function, [part, hidden, memory, weights]))
                hidden, memory = (builder.emit(relax.TupleGetItem(both, place)) for place in range(2))
                all_hidden.append(hidden)
                all_memory.append(memory)
            sequence = builder.emit(relax.op.concat(all_hidden, axis=0))
            extra = {"": sequence, "hidden": all_hidden[1], "cell": all_memory[1]}[reads]
            output = builder.emit_output(relax.Tuple([sequence, hidden, memory, builder.emit(relax.op.nn.relu(extra))]))
        builder.emit_func_output(output)
    return builder.get()


def test_a_hidden_state_that_is_read_is_a_part_of_all() -> None:
    done = rolled(steps("hidden"))
    assert len(loops_of(done)) == 1 and steps_of(done) == 0
    assert [operator_name(call) for call in calls_of(done)].count("relax.strided_slice") == 1
    assert "relax.strided_slice" not in [operator_name(call) for call in calls_of(rolled(steps("")))]


def test_a_cell_state_that_is_read_between_keeps_the_steps() -> None:
    mod = steps("cell")
    assert_structural_equal(RollSteps()(mod), mod)
    assert steps_of(mod) == 3


def test_a_graph_without_cells_is_left_alone() -> None:
    builder = BlockBuilder()
    x = Var("x", relax.TensorType((2, 2), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            output = builder.emit_output(relax.op.nn.relu(x))
        builder.emit_func_output(output)
    mod = builder.get()
    assert RollSteps()(mod).same_as(mod)
