"""What contenders take in memory, counted in processes of their own."""

from __future__ import annotations

import mmap
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from tvm_ext import relay
from tvm_ext.bench import models
from tvm_ext.bench.compare import BenchResult, Timing, result_table
from tvm_ext.bench.contenders import ONNX_RUNTIME, OURS
from tvm_ext.bench.environment import current_environment
from tvm_ext.bench.memory import MIB, Meter, measured
from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.records.memory import MemoryUse
from tvm_ext.records.serialise import from_json, to_json

SIZE = 64 * MIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as a file and as a library, and its inputs."""
    found = tmp_path_factory.mktemp("memory")
    model = models.build_model("mlp", 1)
    onnx.save(model, found / "model.onnx")
    np.savez(found / "inputs.npz", **models.random_inputs(model, 0))
    mod, params = relay.frontend.from_onnx(model)
    relay.build(mod, "llvm", params=params).export_library(found / "model.so")
    return found


def test_a_peak_is_that_since_the_last_call() -> None:
    meter = Meter()
    with mmap.mmap(-1, SIZE) as block:  # an allocator may have as much left that is resident already
        block[:: mmap.PAGESIZE] = bytes(SIZE // mmap.PAGESIZE)
        assert meter.resident_bytes() > 0.9 * SIZE
    assert meter.peak_bytes() > 0.9 * SIZE
    assert meter.peak_bytes() < 0.5 * SIZE, "the block was gone"


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("name", "file"), [(OURS, "model.so"), (ONNX_RUNTIME, "model.onnx")])
def test_a_contender_holds_its_weights(name: str, file: str, folder: Path) -> None:
    """1.9 million weights of float32 are 7.4 MiB."""
    memory = measured(name, folder / file, folder / "inputs.npz", threads=1)
    assert memory.resident_bytes > 7 * MIB
    assert memory.peak_bytes >= memory.resident_bytes
    assert memory.load_peak_bytes > 7 * MIB


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Traceback:\n  File x\ntvm_ext.errors.ExportError: there is no file a.so.\n  remedy: check the path\n"
    ended = subprocess.CompletedProcess([], 1, stdout="", stderr=said)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(UnsupportedEnvironmentError, match=r"of tvm_ext was not measured: .*there is no file a\.so"):
        measured(OURS, Path("a.so"), Path("inputs.npz"), threads=1)


def test_tables_and_json_have_the_peaks_where_they_were_measured() -> None:
    memory = MemoryUse(load_peak_bytes=3 * MIB, run_peak_bytes=5 * MIB, resident_bytes=4 * MIB)
    timings = [
        Timing(name=name, import_s=0.0, build_s=0.0, samples_s=(1.0,), relative_error=None, memory=own)
        for name, own in ((OURS, memory), ("stock_tvm", None))
    ]
    result = BenchResult(
        model="m", inputs=(("x", (1,)),), target="llvm", environment=current_environment(), timings=tuple(timings)
    )
    columns = {str(column.header): list(column.cells) for column in result.table().columns}
    assert (columns["load MiB"], columns["run MiB"]) == (["3.0", "-"], ["5.0", "-"])
    assert from_json(BenchResult, to_json(result)) == result
    assert "load MiB" not in {str(column.header) for column in result_table([]).columns}
