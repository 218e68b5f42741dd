"""Finding and running nvcc: with the real one where it is installed, with fakes for everything that goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fatbins import read_fatbin
from tests.unit.compilers import needs_nvcc
from tvm_ext import options
from tvm_ext.devices import device_db
from tvm_ext.errors import CompileError, OptionError, UnsupportedEnvironmentError
from tvm_ext.support.kernel_cache import KernelCache
from tvm_ext.support.limited_process import run_limited
from tvm_ext.toolchains import cuda_nvrtc, cuda_toolchain
from tvm_ext.toolchains.cuda_toolchain import compile_cuda, find_nvcc, gencode
from tvm_ext.toolchains.remedies import NVRTC

KERNEL = """
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(256) reverse(const half* in, float* out) {
  __shared__ float tile[256];
  tile[threadIdx.x] = __half2float(in[threadIdx.x]);
  __syncthreads();
  out[threadIdx.x] = tile[255 - threadIdx.x];
}
"""

FakeNvcc = Callable[[str], Path]


@pytest.fixture
def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """Makes a program that says it is nvcc 13.0 for sm_75 to sm_90, and compiles by running a shell script."""

    def make(script: str) -> Path:
        path = tmp_path / "nvcc"
        path.write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            '--version) echo "Cuda compilation tools, release 13.0, V13.0.88";;\n'
            '--list-gpu-code) printf "sm_90\\nsm_75\\nsm_80\\n";;\n'
            f"*) {script};;\n"
            "esac\n"
        )
        path.chmod(0o755)
        monkeypatch.setenv("TVM_EXT_NVCC", str(path))
        return path

    return make


def test_a_compiler_says_its_version_and_architectures(fake_nvcc: FakeNvcc) -> None:
    path = fake_nvcc("exit 0")
    nvcc = find_nvcc()
    assert (nvcc.path, nvcc.origin, nvcc.release) == (path, "TVM_EXT_NVCC", (13, 0))
    assert nvcc.architectures == ("sm_75", "sm_80", "sm_90")


def test_a_compiler_is_asked_again_when_its_file_changes(fake_nvcc: FakeNvcc) -> None:
    path = fake_nvcc("exit 0")
    assert find_nvcc().version == "13.0.88"
    path.write_text(path.read_text().replace("release 13.0, V13.0.88", "release 13.12, V13.12.4"))
    assert find_nvcc().release == (13, 12)


def test_toolkit_variables_come_before_the_path(
    fake_nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_nvcc("exit 0")
    monkeypatch.delenv("TVM_EXT_NVCC")
    for name in ("toolkit/bin", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        shutil.copy(program, tmp_path / name / "nvcc")
    monkeypatch.setenv("PATH", f"{tmp_path / 'elsewhere'}{os.pathsep}{os.environ['PATH']}")
    assert find_nvcc().path.parent == tmp_path / "elsewhere" or "CUDA_HOME" in os.environ
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert (find_nvcc().path.parent, find_nvcc().origin) == (tmp_path / "toolkit" / "bin", "CUDA_HOME")


def test_without_any_compiler_the_remedy_is_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolchain, "_candidates", lambda settings: iter(()))
    with pytest.raises(UnsupportedEnvironmentError, match=r"no CUDA compiler(.|\n)*pip install tvm-ext\[cuda\]"):
        find_nvcc()
    state, detail, remedy = cuda_toolchain.describe()
    assert state == "note" and "no CUDA compiler" in detail and "tvm-ext[cuda]" in remedy


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_NVCC", "/nowhere/nvcc")
    with pytest.raises(UnsupportedEnvironmentError, match="/nowhere/nvcc"):
        find_nvcc()


def test_off_means_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_NVCC", "off")
    with pytest.raises(UnsupportedEnvironmentError, match="switched off"):
        find_nvcc()


def test_another_program_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nvcc"
    path.write_text("#!/bin/sh\necho gcc 12\n")
    path.chmod(0o755)
    monkeypatch.setenv("TVM_EXT_NVCC", str(path))
    with pytest.raises(UnsupportedEnvironmentError, match="does not say its version"):
        find_nvcc()


@pytest.mark.parametrize("text", ["soon", "0", "-3", "inf"])
def test_a_time_limit_is_a_positive_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_EXT_NVCC_TIME_LIMIT_S", text)
    with pytest.raises(OptionError, match="TVM_EXT_NVCC_TIME_LIMIT_S"):
        options.cuda_settings()


def test_a_failure_shows_command_and_first_errors(fake_nvcc: FakeNvcc) -> None:
    fake_nvcc('echo "kernels.cu(1): error: identifier y is undefined"; exit 2')
    with pytest.raises(CompileError) as caught:
        compile_cuda("int x = y;", ["sm_80"])
    assert "identifier y is undefined" in caught.value.problem
    assert "-gencode arch=compute_80,code=sm_80" in caught.value.problem
    assert "exit status 2" in caught.value.problem and caught.value.remedy


def test_a_missing_host_compiler_is_the_remedy(fake_nvcc: FakeNvcc) -> None:
    fake_nvcc('echo "nvcc fatal: cannot execute cc1plus: No such file or directory"; exit 1')
    with pytest.raises(CompileError, match=r"C\+\+ compiler"):
        compile_cuda("", ["sm_80"])


def test_a_compiler_that_writes_nothing_is_an_error(fake_nvcc: FakeNvcc) -> None:
    fake_nvcc("exit 0")
    with pytest.raises(CompileError, match=r"left no kernels\.fatbin"):
        compile_cuda("", ["sm_80"])


def test_a_hanging_compiler_is_ended_with_its_children(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    fake_nvcc(f"sleep 300 & echo $! > {tmp_path}/child; wait")
    start = time.monotonic()
    with pytest.raises(CompileError, match="longer than 1 s"):
        compile_cuda("", ["sm_80"], time_limit_s=1)
    assert time.monotonic() - start < 30
    assert _is_gone(int((tmp_path / "child").read_text()))


def _is_gone(process: int) -> bool:
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{process}/stat").exists() and ") Z " in Path(f"/proc/{process}/stat").read_text():
            return True  # dead, and whoever adopted it has not looked yet
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    return False


def test_results_are_kept_by_source_flags_and_version(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    path = fake_nvcc(f"echo run >> {tmp_path}/runs; cp kernels.cu kernels.fatbin")
    cache = KernelCache(tmp_path / "cache")

    def compiled(source: str, *architectures: str) -> bool:
        return compile_cuda(source, architectures, cache=cache).cached

    assert not compiled("a", "sm_80")
    assert compiled("a", "sm_80")
    assert not compiled("b", "sm_80")
    assert not compiled("a", "sm_90")
    path.write_text(path.read_text().replace("V13.0.88", "V13.0.99"))
    assert not compiled("a", "sm_80")
    assert len((tmp_path / "runs").read_text().split()) == 4


def test_a_failure_is_not_kept(fake_nvcc: FakeNvcc, tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "cache")
    fake_nvcc("exit 1")
    with pytest.raises(CompileError):
        compile_cuda("a", ["sm_80"], cache=cache)
    fake_nvcc("cp kernels.cu kernels.fatbin")
    assert compile_cuda("a", ["sm_80"], cache=cache).image == b"a"


@pytest.mark.parametrize("architecture", ["sm80", "80", "sm_", "sm_80x", "gfx906"])
def test_what_is_no_architecture_is_refused(architecture: str, fake_nvcc: FakeNvcc) -> None:
    fake_nvcc("exit 0")
    with pytest.raises(OptionError, match="not a CUDA architecture"):
        compile_cuda("", [architecture])


def test_an_unknown_architecture_names_the_nearest(fake_nvcc: FakeNvcc) -> None:
    fake_nvcc("exit 0")
    with pytest.raises(OptionError, match=r"does not compile for sm_85(.|\n)*sm_80"):
        compile_cuda("", ["sm_85"])
    with pytest.raises(OptionError, match="at least one"):
        compile_cuda("", [])


def test_a_dropped_architecture_asks_for_the_older_compiler(
    fake_nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc("exit 0")
    monkeypatch.setattr(cuda_nvrtc, "find_nvrtc", lambda: None)
    with pytest.raises(OptionError, match=r"sm_70(.|\n)*tvm-ext\[cuda12\]"):
        compile_cuda("", ["sm_70"])


@pytest.mark.parametrize("nvrtc", [None, cuda_nvrtc.Nvrtc(library=Path(), ptxas=Path(), includes=(), version="12.9")])
def test_no_compiler_of_ours_knows_the_k80(
    nvrtc: cuda_nvrtc.Nvrtc | None, fake_nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc("exit 0")
    monkeypatch.setattr(cuda_nvrtc, "find_nvrtc", lambda: nvrtc)
    with pytest.raises(OptionError, match=r"does not compile for sm_37(.|\n)*no compiler after CUDA 11.8") as caught:
        compile_cuda("", [str(dict(device_db.lookup("nvidia-k80").target)["arch"])])
    assert "cuda12" not in str(caught.value)


def test_flags_for_architectures() -> None:
    assert gencode(["sm_80", "sm_90a"]) == [
        "-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90a,code=sm_90a",
    ]  # fmt: skip
    assert "arch=compute_90,code=[sm_90,compute_90]" in gencode(["sm_90", "sm_80"], with_ptx=True)


@needs_nvcc
def test_machine_code_for_two_architectures_with_its_report() -> None:
    done = compile_cuda(KERNEL, ["sm_80", "sm_90"])
    assert {(image.kind, image.architecture) for image in read_fatbin(done.image)} == {("elf", 80), ("elf", 90)}
    assert [(use.name, use.architecture) for use in done.uses] == [("reverse", "sm_80"), ("reverse", "sm_90")]
    assert all(use.shared_bytes == 1024 and use.register_count > 0 and not use.spills for use in done.uses)


@needs_nvcc
def test_ptx_for_devices_to_come() -> None:
    images = read_fatbin(compile_cuda(KERNEL, ["sm_80", "sm_90"], with_ptx=True).image)
    assert {image.architecture for image in images if image.kind == "ptx"} == {90}


@needs_nvcc
def test_the_compilers_own_words_reach_the_error() -> None:
    with pytest.raises(CompileError, match='identifier "y" is undefined'):
        compile_cuda("int x = y;", ["sm_80"])


@pytest.mark.skipif(cuda_nvrtc.find_nvrtc() is None, reason="NVRTC 12.9 (extra cuda12) is not installed")
def test_nvrtc_compiles_for_volta() -> None:
    done = compile_cuda(KERNEL, ["sm_70"])
    assert [(image.kind, image.architecture) for image in read_fatbin(done.image)] == [("elf", 70)]
    assert [(use.name, use.architecture, use.shared_bytes) for use in done.uses] == [("reverse", "sm_70", 1024)]
    with pytest.raises(CompileError, match='identifier "y" is undefined'):
        compile_cuda("int x = y;", ["sm_70"])


def test_nvrtc_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The command line, with a library that does not exist: the worker must fail, not hang or answer nothing."""
    nvrtc = cuda_nvrtc.Nvrtc(library=tmp_path / "libnvrtc.so.12", ptxas=tmp_path / "ptxas", includes=(), version="12.9")
    command = cuda_nvrtc.prepare(KERNEL, "sm_70", nvrtc, tmp_path)
    assert command[0] == sys.executable and (tmp_path / "kernels.cu").read_text().endswith(KERNEL)
    with pytest.raises(CompileError, match=r"libnvrtc\.so\.12"):
        run_limited(command, 60, tmp_path, remedies=NVRTC)
