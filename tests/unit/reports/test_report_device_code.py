"""What a report says of GPU kernels: source or machine code, for which architectures, before and after exporting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext import relay
from tvm_ext.records.build_profile import DeviceCode
from tvm_ext.records.serialise import from_json
from tvm_ext.reports.report import BuildReport
from tvm_ext.runtime.export import METADATA_FUNCTION
from tvm_ext.runtime.library import Signature
from tvm_ext.toolchains import cuda_export


def product() -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((32, 16), "float32"))
    return module_of([x], relax.op.matmul(x, relax.const(np.ones((16, 48), "float32"))))


def forms_of(report: BuildReport) -> tuple[str, ...]:
    """All that people read, and what programs do."""
    assert BuildReport.from_json(report.to_json()) == report
    return report.table(), report.to_html()


@pytest.mark.parametrize(("target", "language"), [("nvidia-a100", "CUDA C++ source"), ("opencl", "OpenCL C source")])
def test_a_build_for_a_gpu_says_that_it_is_source(target: str, language: str) -> None:
    report = relay.build(product(), target).report
    assert report.device_code is not None and report.device_code.architectures == ()
    assert all(language in text for text in forms_of(report))


def test_a_build_for_a_cpu_says_nothing_of_gpus() -> None:
    report = relay.build(product(), "llvm").report
    assert report.device_code is None
    assert all("GPU" not in text for text in forms_of(report))


@needs_nvcc
@needs_cc
def test_exporting_compiles_once_and_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    compile_cuda = cuda_export.compile_cuda
    monkeypatch.setattr(cuda_export, "compile_cuda", lambda *a, **k: (calls.append(a), compile_cuda(*a, **k))[1])
    library = relay.build(product(), "nvidia-a100")
    library.export_library(tmp_path / "model.so", architectures=("sm_80", "sm_90"))
    assert len(calls) == 1
    code = library.report.device_code
    assert code is not None and code.architectures == ("sm_80", "sm_90")
    assert code.compiler.startswith("nvcc ") and code.size_bytes > 1000 and code.spills == ()
    assert all("machine code for sm_80, sm_90" in text for text in forms_of(library.report))
    library.export_library(tmp_path / "source.so", architectures=())
    assert library.report.device_code == DeviceCode(language="CUDA C++")


@needs_cc
def test_without_a_compiler_the_report_says_why_it_is_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_NVCC", "off")
    monkeypatch.setattr("tvm_ext.toolchains.cuda_nvrtc.find_nvrtc", lambda: None)
    library = relay.build(product(), "nvidia-a100")
    with pytest.warns(RuntimeWarning, match="carries CUDA source"):
        library.export_library(tmp_path / "model.so")
    assert "source (CUDA compilers are switched off" in library.report.device_code_summary()


@needs_nvcc
@needs_cc
def test_the_exported_file_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description that goes into the file, read where it is made: opening the file takes a driver."""
    written: list[str] = []
    from tvm_ext.runtime import library as libraries

    export = libraries.export_executable
    monkeypatch.setattr(
        libraries, "export_executable", lambda e, text, *a, **k: (written.append(text), export(e, text, *a, **k))[1]
    )
    relay.build(product(), "nvidia-a100").export_library(tmp_path / "model.so")
    assert METADATA_FUNCTION.encode() in (tmp_path / "model.so").read_bytes()
    (text,) = written
    assert from_json(Signature, text).report.device_code_summary().startswith("GPU kernels: machine code for sm_80 by")


def test_spills_are_counted() -> None:
    code = DeviceCode(language="CUDA C++", architectures=("sm_80",), spills=(("a_kernel", 8), ("b_kernel", 4)))
    report = replace(relay.build(product(), "nvidia-a100").report, device_code=code)
    assert report.device_code_summary() == "GPU kernels: machine code for sm_80, 2 kernels spill registers"
