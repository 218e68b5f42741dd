"""``tvm-ext tune`` and ``tvm-ext database base``: arguments, bad input, what is printed. The measuring is simulated."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.support.small_models import onnx_model
from tvm_ext.autotune.database import MeasurementDatabase
from tvm_ext.cli import app
from tvm_ext.cli.app import main
from tvm_ext.records.measurement import Trial
from tvm_ext.tuning import model as tuning_model

Command = Callable[..., tuple[int, str, str]]
REQUIRE = tuning_model.require_measurable


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """In a folder with ``model.onnx``, a product; every second candidate takes 0.7 of the constructed kernel's time."""
    weights = {"w": np.ones((24, 40), "float32")}
    product = helper.make_node("MatMul", ["x", "w"], ["y"])
    onnx.save(onnx_model([product], {"x": (33, 24)}, constants=weights), tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning_model, "require_measurable", lambda *_: None)
    monkeypatch.setattr(tuning_model, "KernelMeasure", lambda *_: simulated)

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([*map(str, arguments)])
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    return call


def simulated(task: Any, configurations: list[str]) -> Iterator[Trial]:
    for configuration in configurations:
        place = task.space.index(configuration)
        time_us = 10.0 if configuration == task.constructed else 7.0 + 6.0 * (place % 2)
        yield Trial(configuration=configuration, outcome="ok", times_us=(time_us,))


def test_a_model_is_tuned_and_the_next_build_needs_no_trial(command: Command) -> None:
    tune = ("tune", "model.onnx", "--trials", 4, "--database", "own.db")
    code, out, _ = command(*tune, "--report", "tuned.html")
    assert code == 0
    assert "30 % faster than the 10 us constructed" in out
    assert "1 of 1 kernels by measurement: 10 us a run to 7 us, 1.43 times as fast; 4 trials" in out
    assert "kept in" in out
    assert 'id="tuning"' in Path("tuned.html").read_text()
    again = json.loads(command(*tune, "--json")[1])
    assert (again["trials"], again["known"]) == (0, 4)
    code, out, _ = command("database", "base", "--database", "own.db", "-o", "cpu.base")
    assert out.startswith("cpu.base: 1 kernels in ")


def test_ctrl_c_keeps_what_was_measured(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(100))

    def interrupted(task: Any, configurations: list[str]) -> Iterator[Trial]:
        if next(count) == 1:
            raise KeyboardInterrupt
        yield from simulated(task, configurations[:3])

    monkeypatch.setattr(tuning_model, "KernelMeasure", lambda *_: interrupted)
    monkeypatch.setattr(app.common, "leave_at_once", sys.exit)  # which ends the process, and all tests
    code, _, error = command("tune", "model.onnx", "--trials", 9, "--database", "own.db")
    assert code == 130
    assert "stopped after 2 candidates, which are kept in" in error
    with MeasurementDatabase("own.db") as kept:
        (workload,) = (item for item in kept.workloads().values() if item.kind == "cpu_tile")
        assert len(kept.trials(workload)) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--database", "off"), "the database is switched off"),
        (("--database", "absent/text.txt/own.db"), "which is not a folder"),
        (("--database", "text.txt"), "cannot be used"),
        (("--target", "nvidia-a100", "--database", "own.db"), "TVM finds no cuda device"),
        (("--tracker", "nowhere", "--database", "own.db"), "no address of a tracker"),
    ],
)
def test_bad_input_is_said_before_anything_is_measured(
    arguments: tuple[str, ...], says: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_model, "require_measurable", REQUIRE if "--target" in arguments else lambda *_: None)
    Path("text.txt").write_text("no database, but some text that is long enough to be one")
    Path("absent").mkdir()
    Path("absent/text.txt").write_text("")
    code, _, error = command("tune", "model.onnx", "--trials", 4, *arguments)
    assert code == 2
    assert says in error
    assert "remedy:" in error
