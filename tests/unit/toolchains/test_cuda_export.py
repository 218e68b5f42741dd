"""Machine code in exported libraries: the formats, and loading under a driver that has no device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fatbins import Image, read_fatbin
from tests.support.small_modules import module_of
from tests.support.stub_driver import StubDriver, build_stub_driver, stub_events
from tests.unit.compilers import needs_cc, needs_nvcc
from tvm_ext import relay
from tvm_ext._tvm import pack_imports, relax, tirx
from tvm_ext.errors import CompileError, ExportError, OptionError, UnsupportedEnvironmentError
from tvm_ext.ir.build_ir import index, load, store
from tvm_ext.ir.simt_ir import launch
from tvm_ext.runtime import cuda_runtime, open_library
from tvm_ext.runtime.export import METADATA_FUNCTION, export_executable
from tvm_ext.toolchains.cuda_export import architecture_of, embed_machine_code
from tvm_ext.toolchains.cuda_fatbin import MAGIC, write_fatbin
from tvm_ext.toolchains.cuda_toolchain import compile_cuda
from tvm_ext.toolchains.device_modules import (
    OWN_CODE,
    CudaModule,
    DeviceModule,
    KernelInfo,
    LibraryModules,
    read_cuda,
    read_library,
    replace_source,
    write_cuda,
    write_library,
)

pytestmark = pytest.mark.optimised  # without it, TVM exports every module as a system library

BLOCKS, THREADS = 6, 128


def _kernel() -> Any:
    """y = 2 x, as a module compiled for CUDA on a machine without a driver."""
    x, y = (tirx.decl_buffer([index(BLOCKS * THREADS)], "float32", name) for name in "xy")

    def body(block: Any, thread: Any) -> Any:
        at = [block * index(THREADS) + thread]
        return store(y, load(x, at) * tirx.const(2, "float32"), at)

    func = tirx.PrimFunc([x, y], launch(BLOCKS, THREADS, body))
    for name, value in (("global_symbol", "double"), ("s_tir", True), ("tirx.noalias", True)):
        func = func.with_attr(name, value)
    return tvm.compile(tvm.IRModule({"double": func}), target=tvm.target.Target({"kind": "cuda", "arch": "sm_80"}))


@pytest.fixture(scope="module")
def executable() -> Any:
    return _kernel()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> StubDriver:
    return build_stub_driver(tmp_path_factory.mktemp("stub"))


# --- formats ------------------------------------------------------------------------------------------------------
names = st.text(min_size=1, max_size=12)
kernels = st.builds(
    KernelInfo,
    name=names,
    arguments=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    launch=st.lists(names, max_size=4).map(tuple),
    marks=st.lists(st.integers(0, 1), max_size=4).map(tuple),
)


@given(st.builds(CudaModule, format=names, kernels=st.lists(kernels, max_size=3).map(tuple), code=st.binary()))
def test_cuda_modules_come_back_as_they_were(module: CudaModule) -> None:
    assert read_cuda(write_cuda(module)) == module


@given(st.lists(st.builds(DeviceModule, kind=names.filter(lambda name: name != OWN_CODE), content=st.binary())))
def test_libraries_come_back_as_they_were(modules: list[DeviceModule]) -> None:
    count = len(modules)
    modules = [DeviceModule(kind=OWN_CODE, content=b""), *modules]
    offsets = (0, *(count,) * (count + 1))  # the first imports all others
    whole = LibraryModules(offsets=offsets, children=tuple(range(1, count + 1)), modules=tuple(modules))
    assert read_library(write_library(whole)) == whole


def test_what_was_cut_off_is_refused(executable: Any) -> None:
    data = pack_imports(executable.mod)
    for length in (0, 7, 20, len(data) - 1):
        with pytest.raises(ExportError, match="cut off"):
            read_library(data[:length])


def test_the_format_is_stock_tvms(executable: Any) -> None:
    data = pack_imports(executable.mod)
    whole = read_library(data)
    assert write_library(whole) == data
    assert [module.kind for module in whole.modules] == [OWN_CODE, "cuda"]
    cuda = read_cuda(whole.modules[1].content)
    assert write_cuda(cuda) == whole.modules[1].content
    assert (cuda.format, [kernel.name for kernel in cuda.kernels]) == ("cuda", ["double_kernel"])
    assert cuda.kernels[0].launch == ("blockIdx.x", "threadIdx.x") and len(cuda.kernels[0].arguments) == 2
    assert cuda.code.decode() == executable.mod.imports[0].inspect_source()


def test_only_source_is_replaced(executable: Any) -> None:
    data = replace_source(pack_imports(executable.mod), lambda source: b"machine code")
    cuda = read_cuda(read_library(data).modules[1].content)
    assert (cuda.format, cuda.code) == ("fatbin", b"machine code")
    assert replace_source(data, lambda source: b"again") == data


def test_fatbins_are_written_as_they_are_read() -> None:
    image = write_fatbin([(70, b"\x7fELF-volta"), (75, b"\x7fELF-turing--")])
    assert int.from_bytes(image[:4], "little") == MAGIC
    assert read_fatbin(image) == (
        Image(kind="elf", architecture=70, size_bytes=16),
        Image(kind="elf", architecture=75, size_bytes=16),
    )
    with pytest.raises(ValueError, match="cut off"):
        read_fatbin(image[:-1])
    with pytest.raises(ValueError, match="no fatbin"):
        read_fatbin(b"#include <cuda_fp16.h>")


@needs_nvcc
def test_fatbins_are_written_as_nvidias_own_tool_writes_them() -> None:
    image = compile_cuda("__global__ void f(float* x) { *x = 1; }", ["sm_80", "sm_90"]).image
    cubins, start = [], 16
    for item in read_fatbin(image):
        cubins.append((item.architecture, image[start + 64 : start + 64 + item.size_bytes]))
        start += 64 + item.size_bytes
    assert write_fatbin(cubins) == image


@pytest.mark.parametrize(
    ("target", "architecture"),
    [
        ('{"kind":"cuda","arch":"sm_80"}', "sm_80"),
        ("cuda -keys=cuda,gpu -arch=sm_90a", "sm_90a"),
        ('{"kind":"llvm","mcpu":"sm_80"}', None),
        ('{"kind":"opencl"}', None),
    ],
)
def test_the_architecture_is_the_targets(target: str, architecture: str | None) -> None:
    assert architecture_of(target) == architecture


def test_a_target_names_its_architecture_as_we_read_it() -> None:
    assert architecture_of(str(tvm.target.Target({"kind": "cuda", "arch": "sm_75"}))) == "sm_75"


# --- embedding ----------------------------------------------------------------------------------------------------
def test_without_a_compiler_the_source_stays_with_a_warning(executable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_NVCC", "off")
    monkeypatch.setattr("tvm_ext.toolchains.cuda_nvrtc.find_nvrtc", lambda: None)
    data = pack_imports(executable.mod)
    with pytest.warns(RuntimeWarning, match="carries CUDA source"):
        assert embed_machine_code(data, ["sm_80"]) == data
    with pytest.raises(OptionError, match="not a CUDA architecture"):
        embed_machine_code(data, ["hopper"])


def _python(code: str, stub: StubDriver, log: Path, architecture: int) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process with TVM's runtime alone, a device of ``architecture``, and this package's sources."""
    environment = {**os.environ, **stub.environment(log, architecture), "TVM_USE_RUNTIME_LIB": "1"}
    root = str(Path(__file__).resolve().parents[3])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


def _run(path: Path, stub: StubDriver, log: Path, architecture: int) -> subprocess.CompletedProcess[str]:
    """Open the library ``path`` as a receiver would, and call its function."""
    code = f"""
import numpy as np, tvm
from tvm_ext.runtime.cuda_runtime import load_cuda_runtime
assert tvm.base._RUNTIME_ONLY
load_cuda_runtime()
module = tvm.runtime.load_module({str(path)!r})
x, y = (tvm.runtime.tensor(np.full({BLOCKS * THREADS}, 3, "float32"), tvm.cuda(0)) for _ in range(2))
module["double"](x, y)
print(x.numpy().sum(), module["{METADATA_FUNCTION}"]())
"""
    return _python(code, stub, log, architecture)


@needs_nvcc
@needs_cc
def test_a_library_loads_where_a_gpu_is(executable: Any, stub: StubDriver, tmp_path: Path) -> None:
    path = tmp_path / "double.so"
    export_executable(executable, '{"a": 1}', path, 1 << 20, architectures=["sm_80", "sm_90"])
    sizes = set()
    for architecture in (80, 90):
        log = tmp_path / f"log{architecture}"
        done = _run(path, stub, log, architecture)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [str(3.0 * BLOCKS * THREADS), '{"a":', "1}"]
        loaded, launched = stub_events(log)
        assert (loaded["event"], loaded["status"], loaded["magic"]) == ("load", 0, "ba55ed50")
        assert (launched["kernel"], launched["grid"], launched["block"], launched["status"]) == (
            "double_kernel", [BLOCKS, 1, 1], [THREADS, 1, 1], 0,
        )  # fmt: skip
        sizes.add(loaded["image_bytes"])
    assert len(sizes) == 2  # each device took its own image


@needs_nvcc
@needs_cc
def test_a_device_of_another_architecture_is_refused(executable: Any, stub: StubDriver, tmp_path: Path) -> None:
    path = tmp_path / "double.so"
    export_executable(executable, "{}", path, 1 << 20, architectures=["sm_90"])
    done = _run(path, stub, tmp_path / "log", 80)
    assert done.returncode != 0 and "NO_BINARY_FOR_GPU" in done.stderr
    assert [event["event"] for event in stub_events(tmp_path / "log")] == ["load"]


@needs_nvcc
def test_a_refused_source_leaves_no_file(executable: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvcc"
    fake.write_text(
        '#!/bin/sh\ncase "$1" in --version) echo "release 13.0, V13.0.88";; --list*) echo sm_80;; *) exit 3;; esac'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("TVM_EXT_NVCC", str(fake))
    with pytest.raises(CompileError, match="exit status 3"):
        export_executable(executable, "{}", tmp_path / "double.so", 1 << 20, architectures=["sm_80"])
    assert not list(tmp_path.glob("*.so"))


def test_without_a_driver_opening_a_library_says_what_is_missing(executable: Any, tmp_path: Path) -> None:
    if tvm_ffi.get_global_func(cuda_runtime.CUDA_LOADER, allow_missing=True) is not None:
        pytest.skip("this machine has a CUDA driver")
    path = tmp_path / "double.so"
    export_executable(executable, "{}", path, 1 << 20)
    with pytest.raises(UnsupportedEnvironmentError, match=r"double.so holds CUDA kernels: ") as refused:
        open_library.load(path)
    assert "\n" not in refused.value.problem
    if "libcudart" not in refused.value.problem:
        assert refused.value.problem.endswith("this machine has no CUDA driver (libcuda.so.1).")
        assert "580" in refused.value.remedy and "'llvm'" in refused.value.remedy


@needs_cc
def test_a_stub_that_cannot_be_compiled_says_why(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedEnvironmentError, match="stub driver"):
        build_stub_driver(tmp_path, compiler="no-such-compiler")


# --- whole models -------------------------------------------------------------------------------------------------
def _model() -> Any:
    """softmax(x w): two kernels, one behind the other."""
    x = relax.Var("x", relax.TensorType((16, 32), "float32"))
    w = relax.Var("w", relax.TensorType((32, 24), "float32"))
    product = relax.op.matmul(x, w)
    return module_of([x, w], relax.op.nn.softmax(product))


@needs_nvcc
@needs_cc
@pytest.mark.parametrize(
    ("schedules", "launched"), [(False, ["launch", "launch"]), pytest.param(True, ["launch"], marks=pytest.mark.slow)]
)
def test_a_model_runs_where_a_gpu_and_the_runtime_are(
    schedules: bool, launched: list[str], stub: StubDriver, tmp_path: Path
) -> None:
    """Built and exported without a GPU; opened by `open_library.load` in a process that has TVM's runtime alone."""
    path, log = tmp_path / "model.so", tmp_path / "log"
    library_ = relay.build(_model(), "nvidia-a100", enable_rammer=schedules)
    library_.export_library(path, architectures=["sm_80", "sm_90"])
    code = f"""
import numpy as np, tvm
from tvm_ext.runtime import open_library
assert tvm.base._RUNTIME_ONLY
module = open_library.load({str(path)!r})["default"](tvm.cuda(0))
module.run(x=np.ones((16, 32), "float32"), w=np.ones((32, 24), "float32"))
print(module.get_output(0).numpy().shape)
"""
    done = _python(code, stub, log, 90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(16, 24)"
    events = stub_events(log)
    assert [event["event"] for event in events] == ["load", *launched]
    assert all(event["status"] == 0 for event in events)


@needs_nvcc
def test_a_model_can_be_exported_as_source(tmp_path: Path) -> None:
    library_ = relay.build(_model(), "nvidia-a100")
    library_.export_library(tmp_path / "source.so", architectures=())
    library_.export_library(tmp_path / "code.so")
    source, code = ((tmp_path / name).read_bytes() for name in ("source.so", "code.so"))
    magic = MAGIC.to_bytes(4, "little")
    assert (b"__global__" in source, magic in source) == (True, False)
    assert (b"__global__" in code, magic in code) == (False, True)
