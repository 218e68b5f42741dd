"""Libraries with open dimensions: any size runs as single elements do, and stays so behind export and import."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.support.small_models import onnx_model
from tvm_ext import InferenceSession, SessionOptions, relay
from tvm_ext.cli.app import main
from tvm_ext.errors import ConcurrentUseError, ExportError, InputError, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.batching import cheapest
from tvm_ext.support.arrays import Array

DRAW = np.random.default_rng(5)
DEVICE = "cpu-zen3"


def _whole(*shape: int) -> Array:
    """Small whole numbers, whose sums are exact in any order."""
    return DRAW.integers(-2, 3, shape).astype("float32")


def _convolutions() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["y"]),
    ]
    constants = {"k": _whole(8, 3, 3, 3), "m": _whole(72, 5)}
    return onnx_model(nodes, {"x": ("batch", 3, 6, 6)}, ["y"], constants)


def _encoder(closing: str = "Relu") -> onnx.ModelProto:
    """Attention of two heads over "seq" tokens and a residual; its maximum in place of softmax keeps numbers whole."""
    nodes = []
    for name in "qkv":
        nodes += [
            helper.make_node("MatMul", ["x", f"w{name}"], [f"{name}0"]),
            helper.make_node("Reshape", [f"{name}0", "heads"], [f"{name}1"]),
            helper.make_node("Transpose", [f"{name}1"], [name], perm=[0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]),
        ]
    nodes += [
        helper.make_node("MatMul", ["q", "k"], ["s"]),
        helper.make_node("ReduceMax", ["s"], ["top"], axes=[3], keepdims=1),
        helper.make_node("Equal", ["s", "top"], ["best"]),
        helper.make_node("Cast", ["best"], ["a"], to=1),
        helper.make_node("MatMul", ["a", "v"], ["o"]),
        helper.make_node("Transpose", ["o"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["t", "joined"], ["j"]),
        helper.make_node("Add", ["j", "x"], ["e"]),
        helper.make_node(closing, ["e"], ["y"], **({"axis": 0} if closing == "Softmax" else {})),
    ]
    constants = {f"w{name}": _whole(8, 8) for name in "qkv"} | {
        "heads": np.array([0, 0, 2, 4]),
        "joined": np.array([0, 0, 8]),
    }
    return onnx_model(nodes, {"x": ("batch", "seq", 8)}, ["y"], constants)


@pytest.fixture(scope="module")
def library() -> relay.OpenLibrary:
    return relay.build_open(_convolutions(), {"batch": (1, 12)}, device=DEVICE)


def _command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def _run(module: relay.OpenModule, x: Array) -> Array:
    module.run(x=x)
    result: Array = module.get_output(0).numpy()
    return result


@settings(max_examples=12, deadline=None)
@given(size=st.integers(1, 12))
def test_a_batch_runs_as_its_elements_do(library: relay.OpenLibrary, size: int) -> None:
    module = library["default"]()
    x = _whole(size, 3, 6, 6)
    single = [_run(module, x[place : place + 1]) for place in range(size)]
    np.testing.assert_array_equal(_run(module, x), np.concatenate(single))


def test_what_the_library_says(library: relay.OpenLibrary) -> None:
    assert [(own.name, own.sizes) for own in library.variants] == [(f"batch_{n}", (n,)) for n in (1, 2, 4, 8)]
    assert (library.inputs[0].shape, library.outputs[0].shape) == (("batch", 3, 6, 6), ("batch", 5))
    assert "batch: 1, 2, 4, 8; up to 12 divided or padded: " in str(library.report)
    costs = {own.sizes[0]: own.predicted_s for own in library.variants}
    for size in range(1, 13):
        parts = tuple(part for (part,) in library.parts([size]))
        assert parts == ((size,) if size in costs else cheapest(size, costs))
        assert sum(parts[:-1]) < size <= sum(parts)
    assert library.report.of(4).operators
    module = library["default"]()
    for size in (0, 13):
        with pytest.raises(InputError, match="the library runs 1 to 12"):
            _run(module, _whole(size, 3, 6, 6))
    with pytest.raises(InputError, match="expects batchx3x6x6 float32"):
        module.run(x=_whole(2, 3, 6, 5))
    with pytest.raises(InputError, match="no variant"):
        library.variant(3)


def test_outputs_are_the_callers(library: relay.OpenLibrary) -> None:
    module, x = library["default"](), _whole(7, 3, 6, 6)
    first = _run(module, x)
    kept, out = first.copy(), np.empty((7, 5), "float32")
    _run(module, _whole(7, 3, 6, 6))
    np.testing.assert_array_equal(first, kept)
    module.set_input("x", x)
    x[...] = 0  # inputs are copied
    for _ in range(2):
        module.run()
        np.testing.assert_array_equal(module.get_output(0, out=out), kept)
    module.set_input(0, x[:4])
    module.run()
    assert module.get_output(0, out=np.empty((4, 5), "float32")).shape == (4, 5)


def test_a_variant_that_ran_before_takes_inputs_as_they_come(library: relay.OpenLibrary) -> None:
    module, x = library["default"](), _whole(4, 3, 6, 6)
    first, other = _run(module, x), _run(module, x + 1)
    np.testing.assert_array_equal(_run(library["default"](), x + 1), other)
    x[...] = 0  # the variant has copied them
    module.run()
    np.testing.assert_array_equal(module.get_output(0).numpy(), other)
    assert module.has_input("x") and module.parts() == [(4,)]
    with pytest.raises(InputError, match="expects batchx3x6x6 float32"):
        module.run(x=_whole(4, 3, 6, 5))
    with pytest.raises(InputError, match="but was given 4x3x6x6 float64"):
        module.run(x=x.astype("float64"))
    module.run()
    np.testing.assert_array_equal(module.get_output(0).numpy(), other)
    assert not np.array_equal(first, other)


def test_exported_and_loaded(library: relay.OpenLibrary, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "open.so"
    library.export_library(path)
    loaded = relay.load(path)
    assert isinstance(loaded, relay.OpenLibrary)
    assert (loaded.inputs, loaded.outputs, loaded.report) == (library.inputs, library.outputs, library.report)
    x = _whole(5, 3, 6, 6)
    wanted = _run(library["default"](), x)
    np.testing.assert_array_equal(_run(loaded["default"](), x), wanted)
    plain = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    np.testing.assert_array_equal(plain["batch_4"](tvm.runtime.tensor(x[:4])).numpy(), wanted[:4])
    loaded.export_library(tmp_path / "again.so")
    assert (tmp_path / "again.so").read_bytes() == path.read_bytes()
    session = InferenceSession(path)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], wanted)
    assert len(session.report.pieces[0].builds) == 4
    assert _command("run", str(path), "--shape", "x=3,3,6,6") == 0
    printed = capsys.readouterr()
    assert f"ran as {' + '.join(f'batch_{part}' for (part,) in loaded.parts([3]))}" in printed.err
    assert "y: 3x5 float32" in printed.out
    (tmp_path / "cut.so").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ExportError):
        relay.load(tmp_path / "cut.so")


def test_constants_are_there_once(tmp_path: Path) -> None:
    """A table that is gathered from is laid out alike for every size."""
    nodes = [helper.make_node("Cast", ["x"], ["i"], to=7), helper.make_node("Gather", ["table", "i"], ["y"])]
    table = _whole(4000, 64)
    model = onnx_model(nodes, {"x": ("n",)}, ["y"], {"table": table})
    library = relay.build_open(model, {"n": (1, 8)}, device=DEVICE)
    x = np.arange(7, dtype="float32")
    np.testing.assert_array_equal(_run(library["default"](), x), table[:7])
    library.export_library(tmp_path / "table.so")
    assert table.nbytes < (tmp_path / "table.so").stat().st_size < 1.5 * table.nbytes


def test_an_encoder_of_listed_lengths() -> None:
    library = relay.build_open(_encoder(), {"batch": (1, 3), "seq": [4, 6]}, device=DEVICE)
    assert [own.sizes for own in library.variants] == [(1, 4), (1, 6), (2, 4), (2, 6)]
    module = library["default"]()
    for length in (6, 4):
        x = _whole(3, length, 8)
        single = [_run(module, x[place : place + 1]) for place in range(3)]
        np.testing.assert_array_equal(_run(module, x), np.concatenate(single))
    with pytest.raises(InputError, match=r"'seq' is 5, and the library has variants for 4, 6 .* listed") as error:
        _run(module, _whole(1, 5, 8))
    assert error.value.remedy.startswith("pad a sequence of tokens to 6, with zeros in its attention mask, build it")
    with pytest.raises(InputError, match="'seq' is 7") as error:
        _run(module, _whole(1, 7, 8))
    assert error.value.remedy.startswith("build it for this size, too, or use tvm_ext.InferenceSession")


def test_a_batch_that_mixes_is_built_size_by_size_or_refused() -> None:
    with pytest.raises(InputError, match=r"relax.nn.softmax \(value Softmax .+\): it works across the batch") as error:
        relay.build_open(_encoder("Softmax"), {"batch": (1, 9), "seq": [4]}, device=DEVICE)
    assert "list the sizes" in error.value.remedy
    library = relay.build_open(_encoder("Softmax"), {"batch": (2, 3)}, shape={"x": (None, 4, 8)}, device=DEVICE)
    assert [own.sizes for own in library.variants] == [(2,), (3,)]
    assert "softmax" in str(library.report)
    assert _run(library["default"](), _whole(3, 4, 8)).shape == (3, 4, 8)


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"bach": (1, 4)}, "no open dimension 'bach'"),
        ({"batch": (4, 1)}, "are no sizes"),
        ({"batch": []}, "are no sizes"),
        ({"batch": [0]}, "are no sizes"),
        ({"batch": (1, 500)}, "looks at each of its 500"),
        ({"batch": list(range(1, 40))}, "more than 32"),
    ],
)
def test_sizes_that_are_none(sizes: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        relay.build_open(_convolutions(), sizes, device=DEVICE)


def test_what_it_is_not_for() -> None:
    with pytest.raises(OptionError, match="for CPUs"):
        relay.build_open(_convolutions(), {"batch": (1, 4)}, "nvidia-h200")
    with pytest.raises(OptionError, match="rTasks"):
        relay.build_open(_convolutions(), {"batch": (1, 4)}, enable_rammer=True)


def test_threads_take_a_module_each(library: relay.OpenLibrary) -> None:
    inputs = [_whole(size, 3, 6, 6) for size in (3, 5, 7)]
    wanted = [_run(library["default"](), x) for x in inputs]
    wrong: list[int] = []

    def serve(place: int) -> None:
        module = library["default"]()
        wrong.extend(place for _ in range(20) if not np.array_equal(_run(module, inputs[place]), wanted[place]))

    threads = [threading.Thread(target=serve, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    module = library["default"]()
    module.set_input("x", inputs[0])
    other = threading.Thread(target=lambda: module.set_input("x", inputs[1]))
    other.start()
    other.join()
    with pytest.raises(ConcurrentUseError):
        module.run()


def test_sessions_divide_where_it_is_proven() -> None:
    options = SessionOptions(build=BuildOptions(device=DEVICE))
    session = InferenceSession(_convolutions(), options)
    x = _whole(15, 3, 6, 6)
    single = np.concatenate([session.run(None, {"x": x[place : place + 1]})[0] for place in range(15)])
    for size in (15, 5):  # padded, and as 4 + 1
        np.testing.assert_array_equal(session.run(None, {"x": x[:size]})[0], single[:size])
    assert {shapes[0][0] for shapes, _ in session.report.pieces[0].builds} == {1, 4, 16}
    mixing = InferenceSession(_encoder("Softmax"), options)
    assert mixing.run(None, {"x": _whole(3, 4, 8)})[0].shape == (3, 4, 8)
    assert {shapes[0][0] for shapes, _ in mixing.report.pieces[0].builds} == {3}


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(_convolutions(), tmp_path / "model.onnx")
    library, report = tmp_path / "open.so", tmp_path / "report.json"
    arguments = ["compile", str(tmp_path / "model.onnx"), "-o", str(library)]
    assert _command(*arguments, "--open", "batch=1:3", "--report", str(report)) == 0
    assert "batch: 1, 2; up to 3 divided or padded: 3 by " in capsys.readouterr().out
    assert report.exists()
    for wrong in ("batch", "batch=a", "batch=1:2:3"):
        assert _command(*arguments, "--open", wrong) == 2
    assert _command(*arguments, "--open", "batch=1:2", "--profile") == 2
