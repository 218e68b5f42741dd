"""``tvm-ext advise``: what it prints, and what it says of bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.helper import make_node

from tests.support.small_models import onnx_model
from tvm_ext.cli.app import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["advise", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions, of which one reads 46 channels."""
    nodes = [
        make_node("Conv", ["x", "a"], ["p"], pads=[1] * 4),
        make_node("Relu", ["p"], ["q"]),
        make_node("Conv", ["q", "b"], ["y"], pads=[1] * 4),
    ]
    weights = {name: np.ones((64, depth, 3, 3), "float32") for name, depth in (("a", 46), ("b", 64))}
    path = tmp_path_factory.mktemp("advise") / "model.onnx"
    onnx.save(onnx_model(nodes, {"x": (1, 46, 14, 14)}, constants=weights), path)
    return path


def test_text_says_that_times_are_predicted(command: Command, model: Path) -> None:
    code, out, _ = command(model)
    assert code == 0
    assert "All times are predicted" in out and "nvidia-a100" in out
    assert "Channels that are not divisible" in out and "Activations" in out and "3x3 convolutions" in out


def test_json(command: Command, model: Path) -> None:
    code, out, _ = command(model, "--json", "--device", "h200", "--batch", "2")
    found = json.loads(out)
    assert code == 0
    assert found["device"] == "nvidia-h200"
    assert set(found) >= {"alignment", "activations", "deepening", "refused", "products_us"}


def test_float32_as_it_is_has_no_advice(command: Command, model: Path) -> None:
    """Vector units read element by element, and have no use for padding."""
    code, out, _ = command(model, "--json", "--dtype", "keep")
    assert code == 0
    assert json.loads(out)["alignment"] == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("resnet50", "--device", "cpu-epyc-zen5"), "cpu-epyc-zen5 has none of NVIDIA's matrix units"),
        (("resnet50", "--device", "amd-mi50"), "amd-mi50 has none"),
        (("resnet50", "--device", "nvidia-k80"), "nvidia-k80 has none"),
        (("resnet50", "--device", "nvidia-a10000"), "nvidia-a10000"),
        (("resnet5",), "'resnet5' is neither a file nor a built-in model"),
        (("mlp", "--dtype", "int3"), "--dtype 'int3' is not known"),
        (("mlp", "--shape", "x"), "--shape 'x' is not of the form"),
    ],
)
def test_bad_arguments(command: Command, arguments: tuple[str, ...], problem: str) -> None:
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert problem in err and "remedy: " in err


def test_a_file_that_is_no_model(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(b"nothing of the kind")
    code, _, err = command(path)
    assert code == 2 and "error: " in err and "remedy: " in err
