"""``tvm-ext profile``: what it counts, and what it says where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tvm_ext.cli.app import main
from tvm_ext.toolchains import cutlass_samples

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.setenv("TVM_EXT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TVM_EXT_DATABASE")

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["profile", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def test_a_plan_counts_and_measures_nothing(command: Command, tmp_path: Path) -> None:
    code, out, _ = command("mlp", "--plan", "--templates", 3, "--json")
    found = json.loads(out)
    assert code == 0 and found["profile"] is None
    counted = found["estimate"]
    assert counted["regions"] > 0 and counted["programs"] <= 3 * counted["regions"]
    assert counted["to_compile"] == counted["programs"] and counted["device_seconds"] > 0
    assert not (tmp_path / "measurements.db").exists()


def test_without_a_gpu_it_says_why(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutlass_samples, "why_no_gpu", lambda _device: "there is no NVIDIA driver")
    code, out, _ = command("mlp")
    assert code == 1
    assert "different products" in out and "nothing was measured: there is no NVIDIA driver" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("mlp", "--dtype", "int3"), "--dtype 'int3' is not known"),
        (("mlp", "--device", "nvidia-a10000"), "nvidia-a10000"),
        (("mlp", "--device", "nvidia-v100"), "CUTLASS has no templates for nvidia-v100"),
        (("mlp", "--device", "cpu-epyc-zen5"), "CUTLASS has no templates for cpu-epyc-zen5"),
        (("no_such_model",), "neither a file nor a built-in model"),
    ],
)
def test_bad_input_is_one_line(command: Command, arguments: tuple[str, ...], problem: str) -> None:
    code, _, error = command(*arguments)
    assert code == 2 and problem in error
