"""What a contender takes in memory while it is loaded and while it runs, measured in a process of its own.

A process that imports, builds or compares models keeps memory that has nothing to do with the one that serves them.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.records.memory import MemoryUse
from tvm_ext.support.arrays import Array

from .contenders import ONNX_RUNTIME, OPENVINO, OURS

MIB = 1 << 20  # bytes
RUNS = 5  # a choice: memory of later runs is that of the first ones
_TIMEOUT_S = 600.0  # a choice: ample
_RESET_PEAK = "5"  # to /proc/self/clear_refs, proc(5)


class Meter:
    """Counts the resident memory of this process from now on; raises UnsupportedEnvironmentError without /proc."""

    def __init__(self) -> None:
        self._before = _resident("VmRSS")
        self._reset()

    def peak_bytes(self) -> int:
        """The most since the last call, over what there was in the beginning."""
        peak = _resident("VmHWM") - self._before
        self._reset()
        return peak

    def resident_bytes(self) -> int:
        return _resident("VmRSS") - self._before

    def _reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        except OSError as error:
            raise UnsupportedEnvironmentError(f"memory cannot be measured here: {error}.", "leave it out") from error


def _resident(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise UnsupportedEnvironmentError("memory is measured on Linux alone.", "leave it out") from error
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def measured(name: str, file: Path, inputs: Path, threads: int) -> MemoryUse:
    """The memory of contender ``name``, which loads ``file`` and runs it on ``inputs`` (.npz), in a new process.

    Of this plugin ``file`` is a library, of others a model. Raises UnsupportedEnvironmentError where it fails.
    """
    command = [sys.executable, "-m", __name__, name, str(file), str(inputs), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]  # behind the traceback
        reason = [f"exit code {done.returncode}", *said][-1]
        raise UnsupportedEnvironmentError(f"the memory of {name} was not measured: {reason}", "measure times alone")
    return MemoryUse(**json.loads(done.stdout.splitlines()[-1]))


def _load_ours(file: str, threads: int) -> Callable[[Mapping[str, Array]], object]:
    from tvm_ext import relay

    module = relay.GraphModule(relay.load(file))

    def run(inputs: Mapping[str, Array]) -> object:
        module.run(**inputs)
        return [module.get_output(index).numpy() for index in range(module.get_num_outputs())]

    return run


def _load_onnx_runtime(file: str, threads: int) -> Callable[[Mapping[str, Array]], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(inputs))


def _load_openvino(file: str, threads: int) -> Callable[[Mapping[str, Array]], object]:
    import openvino

    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": "1"}
    request = openvino.Core().compile_model(file, "CPU", settings).create_infer_request()
    return lambda inputs: [np.array(value) for value in request.infer(dict(inputs)).values()]


_LOADERS = {OURS: _load_ours, ONNX_RUNTIME: _load_onnx_runtime, OPENVINO: _load_openvino}
"""By contender. Stock TVM's model would have to be built in the process that is measured."""
_PACKAGES = {OURS: "tvm_ext.relay", ONNX_RUNTIME: "onnxruntime", OPENVINO: "openvino"}

MEASURED = tuple(_LOADERS)
"""The contenders whose memory is measured."""


def measure_here(name: str, file: str, inputs: Mapping[str, Array], threads: int) -> MemoryUse:
    """`measured` of this process, into which the contender's package is imported first."""
    importlib.import_module(_PACKAGES[name])
    meter = Meter()
    run = _LOADERS[name](file, threads)
    load_peak = meter.peak_bytes()
    for _ in range(RUNS):
        run(inputs)
    run_peak, resident = meter.peak_bytes(), meter.resident_bytes()  # Linux's two counters differ by a few pages
    return MemoryUse(load_peak_bytes=load_peak, run_peak_bytes=max(run_peak, resident), resident_bytes=resident)


if __name__ == "__main__":
    contender, path, values, count = sys.argv[1:]
    with np.load(values) as archive:
        sys.stdout.write(json.dumps(asdict(measure_here(contender, path, dict(archive), int(count)))) + "\n")
