"""Each program's remedies are its own: nobody whose linker is missing is told to install CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tvm_ext.errors import CompileError
from tvm_ext.support.limited_process import Remedies, run_limited
from tvm_ext.toolchains import cutlass_toolchain, host_compiler
from tvm_ext.toolchains.remedies import AMD_LINKER, HOST, NVCC, NVRTC

FAILS = "echo 'error: x'; exit 1"


def _remedy(remedies: Remedies, command: Sequence[str], limit_s: float = 60.0) -> str:
    with pytest.raises(CompileError) as caught:
        run_limited(command, limit_s, remedies=remedies)
    assert caught.value.remedy
    return caught.value.remedy


@pytest.mark.parametrize(
    ("remedies", "installed"),
    [(NVCC, "tvm-ext[cuda]"), (NVRTC, "tvm-ext[cuda12]"), (HOST, "binutils"), (AMD_LINKER, "tvm-ext[rocm]")],
)
def test_what_is_missing_slow_or_fails_has_the_remedy_of_its_program(remedies: Remedies, installed: str) -> None:
    said = [
        _remedy(remedies, ["/nowhere/program"]),
        _remedy(remedies, ["sleep", "60"], 0.01),
        _remedy(remedies, ["sh", "-c", FAILS]),
        _remedy(remedies, ["sh", "-c", "echo 'a.h: No such file or directory'; exit 1"]),
    ]
    assert installed in said[0]
    is_of_cuda = remedies in (NVCC, NVRTC)
    assert ("TVM_EXT_NVCC_TIME_LIMIT_S" in said[1]) == is_of_cuda
    assert is_of_cuda or not any(word in text for text in said for word in ("nvcc", "NVCC", "CUDA", "cuda"))


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("g++: error: cc1plus: No such file or directory", "nvcc preprocesses with it"),
        ("cannot open source file 'cuda_fp16.h'", "headers that are missing"),
        ("ptxas fatal: Unsupported .version 9.0", "in one version"),
    ],
)
def test_what_nvcc_says_chooses_the_remedy(text: str, remedy: str) -> None:
    assert remedy in _remedy(NVCC, ["sh", "-c", f'echo "{text}"; exit 1'])


def test_a_full_disk_is_told_from_a_missing_library() -> None:
    assert "TMPDIR" in _remedy(HOST, ["sh", "-c", "echo 'ld: final link failed: No space left on device'; exit 1"])
    assert "install what is missing" in _remedy(HOST, ["sh", "-c", "echo 'ld: cannot find -lstdc++'; exit 1"])


def test_host_code_of_templates_asks_for_the_hosts_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_compiler, "compiler", lambda: str(tmp_path / "absent"))
    with pytest.raises(CompileError, match="cannot be started") as caught:
        cutlass_toolchain._compile_host("int x;", tmp_path)
    assert caught.value.remedy == HOST.start
