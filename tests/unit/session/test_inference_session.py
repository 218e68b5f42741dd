"""`InferenceSession` beside ONNX Runtime's: the same calls, the same answers."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvm_ext import BuildOptions, InferenceSession, SessionOptions, relay
from tvm_ext.errors import InputError, ModelError, OptionError
from tvm_ext.session import pieces
from tvm_ext.support.arrays import Array

DRAW = np.random.default_rng(11)
WEIGHT = numpy_helper.from_array(DRAW.standard_normal((8, 4)).astype("float32"), "w")
LAYER = [helper.make_node("MatMul", ["x", "w"], ["sum"]), helper.make_node("Relu", ["sum"], ["y"])]


def _model(
    nodes: list[onnx.NodeProto],
    shape: tuple[int | str, ...] = ("batch", 8),
    outputs: dict[str, int] | None = None,
    constants: list[onnx.TensorProto] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(n, kind, None) for n, kind in (outputs or {"y": TensorProto.FLOAT}).items()],
        [WEIGHT, *(constants or [])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    model.producer_name, model.model_version = "tests", 3
    return model


def _loop(rows: int | str = "batch", *, grows: bool = False) -> onnx.ModelProto:
    """A layer, a Loop that reads the layer's result from outside, or adds its rows, and a layer behind it."""
    step = helper.make_node("Concat", ["v", "y"], ["more"], axis=0) if grows else None
    body = helper.make_graph(
        [step or helper.make_node("Add", ["v", "y"], ["more"]), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("more", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        *LAYER,
        helper.make_node("Loop", ["count", "true", "y"], ["z"], body=body),
        helper.make_node("Mul", ["z", "z"], ["product"]),
        helper.make_node("ReduceSum", ["product"], ["total"], keepdims=0),
    ]
    constants = [numpy_helper.from_array(np.array(3), "count"), numpy_helper.from_array(np.array(True), "true")]
    return _model(nodes, (rows, 8), {"total": TensorProto.FLOAT, "y": TensorProto.FLOAT}, constants)


def _choice() -> onnx.ModelProto:
    """An If whose condition is a value of the model."""
    out = [helper.make_tensor_value_info("chosen", TensorProto.FLOAT, None)]
    branches = {
        f"{name}_branch": helper.make_graph([helper.make_node(operator, ["y"], ["chosen"])], name, [], out)
        for name, operator in (("then", "Neg"), ("else", "Exp"))
    }
    nodes = [
        *LAYER,
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["z"], **branches),
    ]
    return _model(nodes, outputs={"z": TensorProto.FLOAT}, constants=[numpy_helper.from_array(np.float32(0), "zero")])


def _x(rows: int = 3) -> Array:
    return DRAW.standard_normal((rows, 8)).astype("float32")


def _compare(session: InferenceSession, model: onnx.ModelProto, x: Array) -> None:
    peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for own, wanted in zip(session.run(None, {"x": x}), peer.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5)


def test_its_answers_are_onnx_runtimes() -> None:
    model = _model(LAYER)
    own = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for ours, theirs in ((own.get_inputs(), peer.get_inputs()), (own.get_outputs(), peer.get_outputs())):
        assert [(item.name, item.type) for item in ours] == [(item.name, item.type) for item in theirs]
    assert own.get_inputs()[0].shape == peer.get_inputs()[0].shape == ["batch", 8]
    for name in ("producer_name", "graph_name", "domain", "version", "custom_metadata_map"):
        assert getattr(own.get_modelmeta(), name) == getattr(peer.get_modelmeta(), name)
    assert own.get_providers() == ["TvmExtExecutionProvider"]
    for rows in (1, 5, 5, 2):
        _compare(own, model, _x(rows))
    assert {shapes for shapes, _ in own.report.pieces[0].builds} == {((1, 8),), ((2, 8),), ((4, 8),)}


def test_a_session_says_why_a_batch_is_not_divided() -> None:
    nodes = [*LAYER, helper.make_node("Softmax", ["y"], ["z"], "over_the_batch", axis=0)]
    session = InferenceSession(_model(nodes, outputs={"z": TensorProto.FLOAT}))
    session.run(None, {"x": _x(3)})
    assert "over_the_batch" in "".join(session.report.pieces[0].undivided)
    assert "batches are not divided: operator relax.nn.softmax" in str(session.report)
    divided = InferenceSession(_model(LAYER))
    divided.run(None, {"x": _x(3)})
    assert divided.report.pieces[0].undivided == ()


def test_outputs_are_the_callers() -> None:
    session = InferenceSession(_model(LAYER))
    first, x = session.run(["y"], {"x": (ones := np.ones((2, 8), "float32"))})[0], _x(2)
    kept = first.copy()
    session.run(["y"], {"x": x})
    np.testing.assert_array_equal(first, kept)
    first[...] = 0
    np.testing.assert_array_equal(session.run([], {"x": ones})[0], kept)


@pytest.mark.parametrize("options", [None, SessionOptions(), onnxruntime.SessionOptions()])
def test_static_models_are_compiled_when_the_session_is_made(options: Any) -> None:
    session = InferenceSession(_model(LAYER, shape=(2, 8)), options)
    assert [shapes for shapes, _ in session.report.pieces[0].builds] == [((2, 8),)]
    with pytest.raises(InputError, match="'x' is tensor"):
        session.run(None, {"x": _x(3)})


def test_dimensions_are_overridden_by_name() -> None:
    options = SessionOptions(intra_op_num_threads=1, build=BuildOptions(enable_roller=False))
    options.add_free_dimension_override_by_name("batch", 6)
    session = InferenceSession(_model(LAYER), options)
    ((shapes, report),) = session.report.pieces[0].builds
    assert shapes == ((6, 8),)
    assert ("enable_roller", "False") in report.options
    assert ("num_threads", "1") in report.options


@pytest.mark.parametrize(("make", "engines"), [(_loop, "tot"), (_choice, "to")])
def test_what_is_refused_runs_beside_it(make: Any, engines: str) -> None:
    model = make()
    session = InferenceSession(model)
    for rows in (1, 3):
        _compare(session, model, _x(rows))
    assert "".join(piece.engine[0] for piece in session.report.pieces) == engines
    assert session.get_providers() == ["TvmExtExecutionProvider", "CPUExecutionProvider"]
    assert "cannot be compiled: " in str(session.report)


def test_control_flow_of_known_shapes_is_compiled() -> None:
    session = InferenceSession(_loop(3))
    assert session.get_providers() == ["TvmExtExecutionProvider"]
    _compare(session, _loop(3), _x(3))


def test_control_flow_that_changes_shapes_runs_beside_it_and_says_why() -> None:
    session = InferenceSession(_loop(3, grows=True))
    _compare(session, _loop(3, grows=True), _x(3))
    assert "".join(piece.engine[0] for piece in session.report.pieces) == "tot"
    assert "3x4 before a step, float32 of 6x4 after it" in session.report.pieces[1].reason


def test_without_onnx_runtime_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = _model([*LAYER, helper.make_node("Bernoulli", ["y"], ["z"])], outputs={"z": TensorProto.FLOAT})
    with pytest.raises(ModelError, match=r"RandomUniformLike \(opset 17\)"):
        InferenceSession(drawn, enable_fallback=False)
    monkeypatch.setattr(pieces, "onnx_runtime", lambda: None)
    monkeypatch.setattr("tvm_ext.session.inference_session.onnx_runtime", lambda: None)
    with pytest.raises(ModelError, match=r"RandomUniformLike \(opset 17\)"):
        InferenceSession(drawn)


@pytest.mark.parametrize("make", [_loop, _choice])
def test_control_flow_is_compiled_where_nothing_may_run_beside(make: Any) -> None:
    session = InferenceSession(make(), enable_fallback=False)
    _compare(session, make(), _x())
    assert {piece.engine for piece in session.report.pieces} == {"tvm_ext"}


def test_a_shape_that_cannot_be_compiled_runs_in_onnx_runtime() -> None:
    """The target of this Reshape is a value of the model: the import needs it when it compiles."""
    nodes = [
        helper.make_node("Cast", ["x"], ["numbers"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["x", "numbers"], ["y"]),
    ]
    model = _model(nodes, shape=("n",))
    session = InferenceSession(model)
    with pytest.warns(UserWarning, match="ONNX Runtime runs what cannot be compiled"):
        _compare(session, model, np.array([2, 1], "float32"))
    assert session.report.pieces[0].engine == "onnxruntime"
    session = InferenceSession(model)
    session.disable_fallback()
    with pytest.raises(ModelError):
        session.run(None, {"x": np.array([2, 1], "float32")})


def test_variants_share_their_constants() -> None:
    """A table that is gathered from is the same for each; weights are where they are packed alike."""
    weight, table = (DRAW.standard_normal((64, 64)).astype("float32") for _ in range(2))
    nodes = [
        helper.make_node("Cast", ["x"], ["places"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "places"], ["rows"]),
        helper.make_node("MatMul", ["rows", "weight"], ["y"]),
    ]
    constants = [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(table, "table")]
    session = InferenceSession(
        _model(nodes, shape=("batch",), constants=constants), SessionOptions(build=BuildOptions(device="cpu-zen3"))
    )
    for rows in (16, 32):
        places = np.arange(rows, dtype="float32")
        np.testing.assert_allclose(session.run(None, {"x": places})[0], table[:rows] @ weight, rtol=1e-4, atol=1e-4)
    assert len(session.report.pieces[0].builds) == 2
    assert len(session._constants) < 4


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("falls_back", [True, False])
def test_more_shapes_than_are_kept(monkeypatch: pytest.MonkeyPatch, falls_back: bool) -> None:
    monkeypatch.setattr(pieces, "MOST_VARIANTS", 2)
    model = _model(LAYER)
    session = InferenceSession(model, enable_fallback=falls_back)
    beyond = pytest.warns(UserWarning, match="beyond the first 2") if falls_back else contextlib.nullcontext()
    with beyond:
        for rows in (1, 2, 4, 1):
            _compare(session, model, _x(rows))
    kept = [shapes for shapes, _ in session.report.pieces[0].builds]
    assert kept == ([((2, 8),), ((1, 8),)] if falls_back else [((4, 8),), ((1, 8),)])


def test_arguments_that_are_not_known_are_named() -> None:
    with pytest.warns(UserWarning, match="without a meaning here: disabled_optimizers"):
        InferenceSession(_model(LAYER), disabled_optimizers=[])


def test_bound_memory() -> None:
    session = InferenceSession(_loop())
    x, y = _x(), np.zeros((3, 4), "float32")
    binding = session.io_binding()
    with pytest.raises(InputError, match="no output is bound"):
        session.run_with_iobinding(binding)
    binding.bind_input("x", "cpu", 0, np.float32, x.shape, x.ctypes.data)
    binding.bind_output("y", "cpu", 0, TensorProto.FLOAT, y.shape, y.ctypes.data)
    binding.bind_output("total")
    for _ in range(2):
        session.run_with_iobinding(binding)
        total, wanted = session.run(["total", "y"], {"x": x})
        np.testing.assert_array_equal(y, wanted)
        np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[1], total)
        x[...] = _x()
    value = onnxruntime.OrtValue.ortvalue_from_numpy(_x())
    into = onnxruntime.OrtValue.ortvalue_from_numpy(y)
    binding.clear_binding_outputs()
    binding.bind_ortvalue_input("x", value)
    binding.bind_ortvalue_output("y", into)
    session.run_with_iobinding(binding)
    (again,) = session.run_with_ort_values(["y"], {"x": value})
    np.testing.assert_array_equal(into.numpy(), again.numpy())
    binding.bind_output("y", "cpu", 0, np.float32, (2, 4), y.ctypes.data)
    with pytest.raises(InputError, match="bound to float32"):
        session.run_with_iobinding(binding)
    with pytest.raises(InputError, match="cuda"):
        binding.bind_input("x", "cuda", 0, np.float32, x.shape, x.ctypes.data)
    with pytest.raises(InputError, match="no output called 'w'"):
        binding.bind_output("w")


def test_threads_share_a_session() -> None:
    session = InferenceSession(_model(LAYER))
    inputs = [_x(rows) for rows in (1, 2, 3, 2)]
    wanted = [session.run(None, {"x": x})[0] for x in inputs]
    results: list[list[Array]] = [[] for _ in inputs]

    def runs(place: int) -> None:
        results[place] = [session.run(None, {"x": inputs[place]})[0] for _ in range(50)]

    threads = [threading.Thread(target=runs, args=(place,)) for place in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own, right in zip(results, wanted, strict=True):
        assert len(own) == 50
        assert all(np.array_equal(result, right) for result in own)


def test_a_library_is_a_model(tmp_path: Path) -> None:
    mod, params = relay.frontend.from_onnx(_model(LAYER, shape=(3, 8)))
    relay.build(mod, "llvm", params=params).export_library(tmp_path / "layer.so")
    session = InferenceSession(tmp_path / "layer.so")
    x = _x()
    np.testing.assert_allclose(
        session.run(["y"], {"x": x})[0], np.maximum(x @ numpy_helper.to_array(WEIGHT), 0), rtol=1e-5, atol=1e-6
    )
    assert session.get_inputs()[0].shape == [3, 8]
    assert session.report.pieces[0].builds[0][0] == ((3, 8),)


@pytest.mark.parametrize(
    ("names", "feed", "said"),
    [
        (None, {}, "'x' is missing"),
        (None, {"x": np.zeros((1, 8))}, "was given 1x8 float64"),
        (None, {"x": np.zeros(8, "float32")}, "was given 8 float32"),
        (None, {"x": np.zeros((1, 8), "float32"), "z": 1}, "no input called 'z'"),
        (["z"], {"x": np.zeros((1, 8), "float32")}, "no output called 'z'"),
    ],
)
def test_bad_input_is_named(names: list[str] | None, feed: dict[str, Any], said: str) -> None:
    session = InferenceSession(_model(LAYER))
    with pytest.raises(InputError, match=said):
        session.run(names, feed)
    assert not session.report.pieces[0].builds


def test_unknown_providers_are_refused() -> None:
    with pytest.raises(OptionError, match="'NpuExecutionProvider'"):
        InferenceSession(_model(LAYER), providers=["NpuExecutionProvider"])
    assert InferenceSession(_model(LAYER), providers=[("CPUExecutionProvider", {})]).get_inputs()[0].name == "x"


@pytest.mark.parametrize("kind", [SessionOptions, onnxruntime.SessionOptions], ids=["ours", "ONNX Runtime's"])
def test_set_denormal_as_zero_is_an_option_of_the_build(kind: Any) -> None:
    """The activations, 1e-30 times 1e-12, are subnormal numbers."""
    tiny = numpy_helper.from_array(np.full((8, 4), 1e-12, "float32"), "tiny")
    model = _model([helper.make_node("MatMul", ["x", "tiny"], ["y"])], (2, 8), constants=[tiny])
    results = {}
    for value in ("0", "1"):
        options = kind()
        options.add_session_config_entry("session.set_denormal_as_zero", value)
        (results[value],) = InferenceSession(model, options).run(None, {"x": np.full((2, 8), 1e-30, "float32")})
    assert results["0"].all()
    assert not results["1"].any()


def test_what_runs_in_onnx_runtime_takes_subnormal_numbers_for_0_too() -> None:
    options = SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    assert options.get_session_config_entry("session.set_denormal_as_zero") == "1"
    session = InferenceSession(_loop(), options)
    runtime = [piece for piece in session._pieces if isinstance(piece, pieces.RuntimePiece)]
    entries = [piece._session.get_session_options() for piece in runtime]
    assert [entry.get_session_config_entry("session.set_denormal_as_zero") for entry in entries] == ["1"] * len(runtime)
    assert runtime
