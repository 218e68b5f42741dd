"""Kernels' objects become a library without the C++ library, and as usual where a compiler refuses that."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.compilers import needs_cc
from tvm_ext.support.shared_library import load_library
from tvm_ext.toolchains import host_compiler

SOURCE = 'extern "C" float expf(float); extern "C" float __tvm_ffi_f(float x) { return expf(x); }'


@needs_cc
@pytest.mark.parametrize("refuses", [False, True])
def test_kernels_are_linked_without_the_cpp_library(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.cc").write_text(SOURCE)
    subprocess.run([host_compiler.compiler(), "-c", "-fPIC", "f.cc"], cwd=tmp_path, check=True)
    asked: list[bool] = []
    create_shared = host_compiler.create_shared

    def compile_it(output: str, objects: Sequence[str], options: Sequence[str] = ()) -> None:
        asked.append("-nostdlib" in options)
        if refuses and asked[-1]:
            raise RuntimeError("cannot find -lgcc")
        create_shared(output, objects, options)

    monkeypatch.setattr(host_compiler, "create_shared", compile_it)
    monkeypatch.setattr(host_compiler, "_WITH_LIBRARY", set())
    host_compiler.link_kernels(str(tmp_path / "f.so"), [str(tmp_path / "f.o")])
    assert asked == [True, False][: 1 + refuses]
    host_compiler.link_kernels(str(tmp_path / "f.so"), [str(tmp_path / "f.o")])
    assert asked == ([True, False, False] if refuses else [True, True])
    assert (b"libstdc++" in (tmp_path / "f.so").read_bytes()) <= refuses
    assert load_library(tmp_path / "f.so").implements_function("f")
