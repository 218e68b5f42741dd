"""The benchmark of attention: that it times attention, and what it writes; times are not looked at."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest
from rich.console import Console

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "attention", raising=False)
    return importlib.import_module("attention")


def test_the_model_is_attention_with_padding(script: ModuleType) -> None:
    model, inputs = script.attention_model(20), script.attention_inputs(20)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, inputs)[0]
    query, key, value = (
        inputs[name].reshape(20, 12, 64).transpose(1, 0, 2)[:, slice(None) if name == "query" else slice(18)]
        for name in ("query", "key", "value")
    )
    scores = query.astype("f8") @ key.transpose(0, 2, 1) / 8
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (powers / powers.sum(-1, keepdims=True)) @ value
    assert np.allclose(found, wanted.transpose(1, 0, 2).reshape(1, 20, 768), atol=1e-5)


def test_a_result_says_what_was_gained(script: ModuleType) -> None:
    result = script.AttentionResult(
        name="attention 20",
        fused=1,
        considered=1,
        seconds={script.ONE: 0.001, script.APART: 0.0015, script.ONNX_RUNTIME: 0.002, script.OPENVINO: 0.001},
        samples={},
        relative_error=1e-7,
        memory_bytes={script.ONE: 1 << 20, script.APART: 3 << 20},
    )
    assert result.record()["speedup"] == {script.APART: 1.5, script.ONNX_RUNTIME: 2.0, script.OPENVINO: 1.0}
    console = Console(width=160, record=True)
    console.print(script.table([result]))
    text = console.export_text()
    assert "1.50x" in text and "3.0 MiB" in text
    assert result.record()["same_code"] == {}


def test_a_network_is_built_twice_and_equal_code_is_compared(script: ModuleType) -> None:
    """Where the first build of one form happens to be slow, the mean of both is what counts."""
    again = {script.ONE + script.AGAIN: 0.096, script.APART + script.AGAIN: 0.108}
    seconds = {script.ONE: 0.104, script.APART: 0.102, **again}
    result = script.AttentionResult(
        name="network", fused=12, considered=12, seconds=seconds, samples={}, relative_error=1e-6
    )
    record = result.record()
    assert record["speedup"] == {script.APART: pytest.approx(1.05)}
    assert record["same_code"][script.ONE] == pytest.approx(0.923, abs=1e-3)
    assert record["same_code"][script.APART] == pytest.approx(1.059, abs=1e-3)
