"""`tvm-ext quantize`: ONNX Runtime's quantisers, calibration files, and the errors of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tvm_ext.bench.models import build_model
from tvm_ext.bench.quantise import calibration_samples, quantised
from tvm_ext.cli.app import main
from tvm_ext.errors import InputError, ModelError, UnsupportedEnvironmentError

pytest.importorskip("onnxruntime", reason="its quantisers are what the command runs")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``command("quantize", "mlp")`` gives (exit code, output, errors)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, x=np.random.default_rng(0).standard_normal((4, 784)))
    return path


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", [("--mode", "static"), ("--mode", "operators", "--activations", "int8"), None])
def test_a_model_is_quantised_and_compared(
    options: tuple[str, ...] | None, command: Command, data: Path, tmp_path: Path
) -> None:
    chosen = ("--mode", "dynamic") if options is None else (*options, "--calibrate", data)
    code, out, _ = command("quantize", "mlp", "-o", tmp_path / "q.onnx", "--json", *chosen)
    result = json.loads(out.splitlines()[-1])
    assert code == 0
    assert result["samples"] == (1 if options is None else 4)
    assert result["bytes_after"] < 0.3 * result["bytes_before"]
    assert result["errors"][0][0] == "logits"
    assert 0 < result["errors"][0][1] < 0.1
    written = onnx.load(tmp_path / "q.onnx")
    assert any("Linear" in node.op_type or "Integer" in node.op_type for node in written.graph.node)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs calibration data"),
        (["--mode", "half"], "'half' is not one of"),
        (["--activations", "int4"], "'int4' is not one of"),
        (["--calibrate", "/nowhere.npz"], "cannot be read"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, command: Command, tmp_path: Path) -> None:
    code, _, err = command("quantize", "mlp", "-o", tmp_path / "q.onnx", *arguments)
    assert code == 2
    assert words in err
    assert not (tmp_path / "q.onnx").exists()


def _model(*shapes: tuple[int | str, ...]) -> onnx.ModelProto:
    """A sum over inputs a, b, ..."""
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in zip("abc", shapes, strict=False)
    ]
    node = onnx.helper.make_node("Sum", [item.name for item in inputs], ["y"])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    return onnx.helper.make_model(onnx.helper.make_graph([node], "sum", inputs, [output]), ir_version=8)


@pytest.mark.parametrize(
    ("shapes", "arrays", "count"),
    [
        ([(1, 3)], {"a": (5, 3)}, 5),
        ([(1, 3)], {"a": (5, 1, 3)}, 5),
        ([(2, 3)], {"a": (4, 3)}, 2),
        ([("batch", 3)], {"a": (4, 3)}, 4),
        ([("batch", 3)], {"a": (4, 7, 3)}, 4),
        ([(1, 3), ()], {"a": (5, 3), "b": (5,)}, 5),
        ([(1, 3), (1, 3)], {"a": (5, 3), "b": (1, 3)}, 5),
    ],
)
def test_samples_lie_along_the_first_axis(shapes: Any, arrays: dict[str, tuple[int, ...]], count: int) -> None:
    values = {name: np.arange(np.prod(shape), dtype="float64").reshape(shape) for name, shape in arrays.items()}
    samples = calibration_samples(_model(*shapes), values)
    assert len(samples) == count
    for name, own in zip("abc", shapes, strict=False):
        assert all(sample[name].ndim == len(own) and sample[name].dtype == np.float32 for sample in samples)
    np.testing.assert_array_equal(np.stack([sample["a"] for sample in samples]).ravel(), values["a"].ravel())


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": (5, 3)}, "no calibration data for b"),
        ({"a": (5, 3), "b": (5, 3), "d": (1,)}, "no input d"),
        ({"a": (5, 4), "b": (5, 3)}, "have shape 5x4, the input 1x3"),
        ({"a": (5, 3), "b": (4, 3)}, "different numbers of samples"),
        ({"a": (0, 3), "b": (4, 3)}, "or none"),
    ],
)
def test_calibration_data_that_do_not_fit(arrays: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(InputError, match=words):
        calibration_samples(_model((1, 3), (1, 3)), {name: np.zeros(shape) for name, shape in arrays.items()})
    with pytest.raises(InputError, match="are complex128"):
        calibration_samples(_model((1, 3)), {"a": np.zeros((1, 3), complex)})
    with pytest.raises(InputError, match="data of a have NaN or infinity"):
        calibration_samples(_model((1, 3)), {"a": np.array([[0, np.nan, 1]], "float32")})


def test_onnx_runtime_is_missing_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = _model((1, 3))
    broken.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(ModelError, match="quantiser does not take the model"):
        quantised(broken, "dynamic")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UnsupportedEnvironmentError, match="needs ONNX Runtime"):
        quantised(build_model("mlp"), "dynamic")
