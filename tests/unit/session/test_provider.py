"""The execution provider inside ONNX Runtime: compiles when a session is made, and runs what was compiled ahead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper

from tvm_ext import _native, register_execution_provider, relay, write_context_model
from tvm_ext.errors import ModelError, OptionError
from tvm_ext.runtime.library import Library
from tvm_ext.session.provider import build_options

pytestmark = pytest.mark.skipif(
    _native.library_path(_native.PROVIDER_LIBRARY) is None, reason="the native part is not built here"
)

DRAW = np.random.default_rng(5)
PROVIDER = "TvmExtExecutionProvider"
OrtError = (onnxruntime.capi.onnxruntime_pybind11_state.Fail, onnxruntime.capi.onnxruntime_pybind11_state.EPFail)


def _value(name: str, shape: Sequence[int | str] | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.random.default_rng(len(name)).standard_normal(shape).astype("float32"), name)


def _graph_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _model(batch: int | str = 4, *, loop: bool = False, grows: bool = False) -> onnx.ModelProto:
    """A layer, with ``loop`` a Loop, and more behind it, with attributes of all kinds.

    With ``grows`` the Loop carries another value, which grows, so that only ONNX Runtime runs it.
    """
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["sum"], alpha=0.5, transB=1),
        helper.make_node("LeakyRelu", ["sum"], ["first"], alpha=0.3),
    ]
    if loop:
        inside = [helper.make_node("Add", ["v", "b"], ["more"]), helper.make_node("Identity", ["go"], ["on"])]
        inputs = [_value("i", [], TensorProto.INT64), _value("go", [], TensorProto.BOOL), _value("v", [batch, 6])]
        outputs = [_value("on", [], TensorProto.BOOL), _value("more", [batch, 6])]
        if grows:
            inside[0].output[0] = "shifted"
            inside += [
                helper.make_node("Concat", ["p", "p"], ["pile"], axis=0),
                helper.make_node("ReduceMax", ["p"], ["top"], keepdims=0),
                helper.make_node("Add", ["shifted", "top"], ["more"]),
            ]
            inputs.append(_value("p", None))
            outputs.append(_value("pile", None))
        body = helper.make_graph(inside, "body", inputs, outputs)
        kept = ["second", "grown"]
        count = 1 + grows
        nodes.append(helper.make_node("Loop", ["times", "", *["first"] * count], kept[:count], body=body))
    else:
        nodes.append(helper.make_node("Add", ["first", "first"], ["second"]))
    nodes += [
        helper.make_node("Constant", [], ["c"], value=_weight("", 6)),
        helper.make_node("Mul", ["second", "c"], ["scaled"]),
        helper.make_node("Transpose", ["scaled"], ["turned"], perm=[1, 0]),
        helper.make_node("Clip", ["turned", "", "most"], ["y"]),
    ]
    constants = [
        *(_weight("w", 6, 8), _weight("b", 6)),
        numpy_helper.from_array(np.array(3, "int64"), "times"),
        numpy_helper.from_array(np.array(0.5, "float32"), "most"),
    ]
    model = _graph_model(nodes, [_value("x", [batch, 8])], [_value("y", [6, batch])], constants)
    model.graph.value_info.append(_value("second", [batch, 6]))  # nothing says that a Loop keeps it
    return model


def _options(options: Mapping[str, str] | None = None) -> onnxruntime.SessionOptions:
    session = onnxruntime.SessionOptions()
    session.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session.add_provider_for_devices(register_execution_provider(), dict(options or {}))
    return session


def _assigned(session: Any) -> dict[str, str]:
    parts = session.get_provider_graph_assignment_info()
    return {node.op_type: part.ep_name for part in parts for node in part.get_nodes()}


def _data(batch: int) -> dict[str, Any]:
    return {"x": DRAW.standard_normal((batch, 8)).astype("float32")}


def _assert_same(session: Any, model: onnx.ModelProto, feed: Mapping[str, Any]) -> None:
    plain = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    session.disable_fallback()  # to ONNX Runtime's kernels, where ours fail
    (wanted,), (got,) = plain.run(None, feed), session.run(None, feed)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def _build(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Library:
    mod, params = relay.frontend.from_onnx(model, shape=shapes)
    return relay.build(mod, "llvm", params=params)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("context") / "ctx.onnx"
    write_context_model(_model(loop=True, grows=True), path, build=_build)
    return path


def test_a_model_is_compiled_whole_when_its_session_is_made() -> None:
    model = _model()
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    assert set(_assigned(session).values()) == {PROVIDER}
    _assert_same(session, model, _data(4))


def test_open_shapes_are_compiled_as_they_come() -> None:
    model = _model("batch")
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options({"enable_roller": "True"}))
    for batch in (2, 3, 2):
        _assert_same(session, model, _data(batch))


def test_control_flow_of_known_shapes_is_compiled() -> None:
    model = _model(loop=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    assert set(_assigned(session).values()) == {PROVIDER}
    assert "Loop" in _assigned(session)
    _assert_same(session, model, _data(4))


@pytest.mark.parametrize("positive", [True, False])
def test_branches_and_scans_are_compiled(positive: bool) -> None:
    """An If with a Scan in one branch; both read the graph around them."""
    step = helper.make_graph(
        [helper.make_node("Add", ["state", "row"], ["next"]), helper.make_node("Mul", ["next", "b"], ["out"])],
        "step",
        [_value("state", [6]), _value("row", [6])],
        [_value("next", [6]), _value("out", [6])],
    )
    scan = helper.make_node("Scan", ["b", "x"], ["last", "then"], body=step, num_scan_inputs=1)
    branches = {
        "then_branch": helper.make_graph([scan], "sums", [], [_value("then", [4, 6])]),
        "else_branch": helper.make_graph(
            [helper.make_node("Neg", ["x"], ["other"])], "other", [], [_value("other", [4, 6])]
        ),
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["go"]),
        helper.make_node("If", ["go"], ["y"], **branches),
    ]
    constants = [_weight("b", 6), numpy_helper.from_array(np.array(0, "float32"), "zero")]
    model = _graph_model(nodes, [_value("x", [4, 6])], [_value("y", [4, 6])], constants)
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    assert set(_assigned(session).values()) == {PROVIDER}
    sign = 1 if positive else -1
    _assert_same(session, model, {"x": sign * np.abs(DRAW.standard_normal((4, 6))).astype("float32")})


def test_what_the_import_refuses_runs_in_onnx_runtime_between_compiled_parts() -> None:
    model = _model(loop=True, grows=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    assigned = _assigned(session)
    assert assigned["Gemm"] == assigned["Transpose"] == PROVIDER
    assert assigned["Loop"] == "CPUExecutionProvider"
    _assert_same(session, model, _data(4))


@pytest.mark.skipif(
    tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24), reason="tells no scalar from an open rank"
)
@pytest.mark.parametrize("times", [0, 3])
def test_control_flow_with_scalar_inputs_is_compiled(times: int) -> None:
    step = [helper.make_node("Mul", ["v", "factor"], ["more"]), helper.make_node("Identity", ["go"], ["on"])]
    inputs = [_value("i", [], TensorProto.INT64), _value("go", [], TensorProto.BOOL), _value("v", [4, 6])]
    body = helper.make_graph(step, "body", inputs, [_value("on", [], TensorProto.BOOL), _value("more", [4, 6])])
    model = _graph_model(
        [helper.make_node("Loop", ["times", "", "x"], ["y"], body=body)],
        [_value("x", [4, 6]), _value("factor", []), _value("times", [], TensorProto.INT64)],
        [_value("y", [4, 6])],
    )
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    assert set(_assigned(session).values()) == {PROVIDER}
    data = DRAW.standard_normal((4, 6)).astype("float32")
    _assert_same(session, model, {"x": data, "factor": np.array(0.5, "float32"), "times": np.array(times, "int64")})


def _ends_that_are_no_numbers() -> dict[str, tuple[onnx.ModelProto, Any]]:
    text = _value("t", [2], TensorProto.STRING)
    exp, rest = helper.make_node("Exp", ["x"], ["e"]), [_value("x", [4, 6])]
    rows = helper.make_tensor_sequence_value_info("t", TensorProto.FLOAT, None)
    joined = helper.make_node("ConcatFromSequence", ["t"], ["u"], axis=0)
    ends = _value("e", [4, 6])
    return {
        "strings": (
            _graph_model(
                [exp, helper.make_node("Identity", ["t"], ["u"])],
                [*rest, text],
                [ends, _value("u", [2], TensorProto.STRING)],
            ),
            np.array(["a", "b"], object),
        ),
        "sequence": (
            _graph_model([exp, joined], [*rest, rows], [ends, _value("u", None)]),
            [np.ones((1, 2), "float32"), np.zeros((1, 2), "float32")],
        ),
    }


@pytest.mark.parametrize("kind", ["strings", "sequence"])
def test_inputs_that_are_no_numbers_stay_in_onnx_runtime(kind: str) -> None:
    model, value = _ends_that_are_no_numbers()[kind]
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    assert _assigned(session).pop("Exp") == PROVIDER
    assert set(_assigned(session).values()) == {PROVIDER, "CPUExecutionProvider"}
    feed = {"x": np.zeros((4, 6), "float32"), "t": value}
    numbers, passed = session.run(None, feed)
    assert np.all(numbers == 1)
    np.testing.assert_array_equal(passed, np.concatenate(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("kind", ["strings", "sequence"])
def test_outputs_that_are_no_numbers_stay_in_onnx_runtime(kind: str) -> None:
    last = {
        "strings": (
            helper.make_node("Cast", ["e"], ["y"], to=TensorProto.STRING),
            _value("y", [2], TensorProto.STRING),
        ),
        "sequence": (
            helper.make_node("SplitToSequence", ["e"], ["y"], axis=0),
            helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None),
        ),
    }
    node, output = last[kind]
    model = _graph_model([helper.make_node("Exp", ["x"], ["e"]), node], [_value("x", [2])], [output])
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    assert _assigned(session) == {"Exp": PROVIDER, node.op_type: "CPUExecutionProvider"}
    (got,) = session.run(None, {"x": np.zeros(2, "float32")})
    assert [float(np.squeeze(item)) for item in got] == [1, 1]


def test_an_initializer_that_is_an_input_may_change_from_run_to_run() -> None:
    inputs = [_value("x", [4, 6]), _value("b", [6])]
    model = _graph_model([helper.make_node("Add", ["x", "b"], ["y"])], inputs, [_value("y", [4, 6])], [_weight("b", 6)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), _options())
    data = DRAW.standard_normal((4, 6)).astype("float32")
    _assert_same(session, model, {"x": data})
    _assert_same(session, model, {"x": data, "b": np.ones(6, "float32")})


def test_a_context_model_runs_without_python_compiling(context: Path) -> None:
    assert sorted(file.name for file in context.parent.iterdir()) == ["ctx.0.so", "ctx.2.so", "ctx.onnx"]
    operators = [node.op_type for node in onnx.load(context).graph.node]
    assert operators == ["EPContext", "Loop", "EPContext"]
    # Not even tvm_ext is imported: as in a program in another language.
    program = """
import sys, numpy, onnxruntime
onnxruntime.register_execution_provider_library("tvm_ext", sys.argv[1])
options = onnxruntime.SessionOptions()
options.add_provider_for_devices([d for d in onnxruntime.get_ep_devices() if d.ep_name == sys.argv[2]], {})
session = onnxruntime.InferenceSession(sys.argv[3], options)
numpy.save(sys.argv[5], session.run(None, {"x": numpy.load(sys.argv[4])})[0])
assert not {"tvm", "tvm_ffi", "tvm_ext"} & sys.modules.keys()
"""
    feed, result = context.parent.parent / "x.npy", context.parent.parent / "y.npy"
    data = _data(4)
    np.save(feed, data["x"])
    folders = [Path(str(package.__file__)).parent / "lib" for package in (tvm, tvm_ffi)]
    environment = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
    library = str(_native.library_path(_native.PROVIDER_LIBRARY))
    arguments = [sys.executable, "-c", program, library, PROVIDER, str(context), str(feed), str(result)]
    subprocess.run(arguments, check=True, env=environment, timeout=60)
    plain = onnxruntime.InferenceSession(
        _model(loop=True, grows=True).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(np.load(result), plain.run(None, data)[0], rtol=1e-5, atol=1e-5)


def test_a_context_model_gives_the_models_values(tmp_path: Path) -> None:
    model = _model("batch", loop=True)
    write_context_model(model, tmp_path / "ctx.onnx", shape={"x": (3, 8)}, build=_build, embed=True)
    assert [file.name for file in tmp_path.iterdir()] == ["ctx.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "ctx.onnx", _options())
    _assert_same(session, model, _data(3))
    apart = np.zeros(3 * 8 + 1, "float32")[1:].reshape(3, 8)  # does not start at a cache line
    _assert_same(session, model, {"x": apart})
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(20):
                _assert_same(session, model, _data(3))
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_context_model_refuses_other_shapes(tmp_path: Path) -> None:
    model = _model("batch")
    write_context_model(model, tmp_path / "ctx.onnx", shape={"x": (3, 8)}, build=_build)
    context = onnx.load(tmp_path / "ctx.onnx")
    context.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    context.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "batch"
    onnx.save(context, tmp_path / "ctx.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "ctx.onnx", _options())
    session.disable_fallback()
    with pytest.raises(OrtError, match="compiled ahead for inputs of shape 3x8 alone"):
        session.run(None, _data(4))


@pytest.mark.parametrize(("content", "said"), [("gone.so", "gone.so is missing"), ("../x.so", "not beside the model")])
def test_a_context_model_without_its_library_is_an_error(
    content: str, said: str, context: Path, tmp_path: Path
) -> None:
    model = onnx.load(context)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "ep_cache_context":
                attribute.s = content.encode()
    onnx.save(model, tmp_path / "ctx.onnx")
    with pytest.raises(OrtError, match=said):
        onnxruntime.InferenceSession(tmp_path / "ctx.onnx", _options())


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="features of x86-64")
def test_a_library_for_another_processor_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    # No processor has both: some of Intel's have the one, some of AMD's the other.
    target = {"kind": "llvm", "mcpu": "x86-64-v3", "mattr": ["+avx512fp16", "+avx512vp2intersect"]}

    def build(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> Library:
        mod, params = relay.frontend.from_onnx(model, shape=shapes)
        return relay.build(mod, target, params=params)

    write_context_model(_model(), tmp_path / "ctx.onnx", build=build)
    with pytest.raises(OrtError, match=r"cannot run on this processor, which lacks .*avx512"):
        onnxruntime.InferenceSession(tmp_path / "ctx.onnx", _options())


def test_bad_requests_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OrtError, match="has no option 'prescision'"):
        onnxruntime.InferenceSession(_model().SerializeToString(), _options({"prescision": "auto"}))
    session = _options()
    session.add_session_config_entry("ep.context_enable", "1")
    with pytest.raises(OrtError, match="use `tvm-ext compile"):
        onnxruntime.InferenceSession(_model().SerializeToString(), session)
    with pytest.raises(ModelError, match="input 'x' has open dimensions"):
        write_context_model(_model("batch"), tmp_path / "ctx.onnx", build=_build)
    assert not list(tmp_path.iterdir())


def test_options_are_those_of_a_build() -> None:
    options = build_options({"layout": "auto", "num_threads": "2", "enable_roller": "False"})
    assert (options.layout, options.num_threads, options.enable_roller) == ("auto", 2, False)
    with pytest.raises(OptionError):
        build_options({"num_threads": "many"})


def test_set_denormal_as_zero_is_an_option_of_the_build() -> None:
    """The activations, 1e-30 times 1e-12, are subnormal numbers."""
    tiny = numpy_helper.from_array(np.full((8, 4), 1e-12, "float32"), "tiny")
    nodes = [helper.make_node("MatMul", ["x", "tiny"], ["y"])]
    model = _graph_model(nodes, [_value("x", [2, 8])], [_value("y", [2, 4])], [tiny]).SerializeToString()
    results = {}
    for value in ("0", "1"):
        options = _options()
        options.add_session_config_entry("session.set_denormal_as_zero", value)
        session = onnxruntime.InferenceSession(model, options)
        assert _assigned(session) == {"MatMul": "TvmExtExecutionProvider"}
        (results[value],) = session.run(None, {"x": np.full((2, 8), 1e-30, "float32")})
    assert results["0"].all()
    assert not results["1"].any()
