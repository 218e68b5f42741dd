"""CUDA source that TVM's runtime wants compiled: by our compiler in builds and loads, whatever else is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tvm

from tests.support.quick_imports import PATH_WITHOUT_TORCH
from tests.support.stub_driver import build_stub_driver, stub_events
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext.runtime.cuda_source import own_cuda_compiler

SOURCE = 'extern "C" __global__ void nothing(float* x) { x[threadIdx.x] = 1.0f / x[0]; }'
ROOT = Path(__file__).resolve().parents[3]

BUILD = """
import sys, types
import numpy as np, tvm
from tvm import relax
from tvm_ext import relay
from tvm_ext.runtime.cuda_runtime import load_cuda_runtime
load_cuda_runtime()
assert tvm.cuda(0).exist
builder = relax.BlockBuilder()
x = relax.Var("x", relax.TensorType((64,), "float32"))
with builder.function("main", [x]):
    with builder.dataflow():
        result = builder.emit_output(builder.emit(relax.op.exp(x)))
    builder.emit_func_output(result)
library = relay.build(builder.get(), "nvidia-a100")
path = sys.argv[1]
library.export_library(path)
module = relay.GraphModule(relay.load(path), tvm.cuda(0))
module.run(x=np.zeros(64, "float32"))
"""
NVRTC = '''
"""Bindings as `cuda-python` brings them without a library to bind."""
def __getattr__(name):
    raise RuntimeError("libnvrtc is not there")
'''


def compile_as_tvm(source: str) -> bytes:
    with tvm.target.Target({"kind": "cuda", "arch": "sm_80"}):
        return bytes(tvm.get_global_func("tvm_callback_cuda_compile")(source))


@needs_nvcc
def test_within_our_compiler_makes_the_code_and_outside_stock_tvm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "none of the two")
    with own_cuda_compiler():
        assert compile_as_tvm(SOURCE).startswith(b"\x50\xed\x55\xba")  # a fatbin
        refused = []

        def in_another_thread() -> None:
            with pytest.raises(Exception, match="Invalid TVM_CUDA_COMPILE_MODE"):
                compile_as_tvm(SOURCE)
            refused.append(True)

        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
        assert refused
    with pytest.raises(Exception, match="Invalid TVM_CUDA_COMPILE_MODE"):
        compile_as_tvm(SOURCE)


def test_without_a_compiler_of_ours_stock_tvm_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "none of the two")
    monkeypatch.setenv("TVM_EXT_NVCC", "off")
    monkeypatch.setattr("tvm_ext.toolchains.cuda_nvrtc.find_nvrtc", lambda: None)
    with own_cuda_compiler(), pytest.raises(Exception, match="Invalid TVM_CUDA_COMPILE_MODE"):
        compile_as_tvm(SOURCE)


@needs_cc
@needs_nvcc
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("bindings", [True, False], ids=["bindings without a library", "no bindings"])
def test_packages_that_others_bring_change_no_verdict(bindings: bool, tmp_path: Path) -> None:
    """A machine with a GPU and nvcc, with and without a Python module ``cuda`` that does not work."""
    package = tmp_path / "packages" / "cuda"
    package.mkdir(parents=True)
    if bindings:
        (package / "bindings").mkdir()
        (package / "bindings" / "__init__.py").touch()
        (package / "bindings" / "nvrtc.py").write_text(NVRTC)
        (package / "__init__.py").touch()
    else:
        (package / "__init__.py").write_text("raise ImportError('there is no package cuda')")
    log = tmp_path / "log"
    environment = {**os.environ, **build_stub_driver(tmp_path / "stub").environment(log, architecture=80)}
    environment["PYTHONPATH"] = os.pathsep.join([str(package.parent), PATH_WITHOUT_TORCH])
    command = [sys.executable, "-c", BUILD, str(tmp_path / "model.so")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert {event["event"] for event in stub_events(log)} >= {"load", "launch"}
