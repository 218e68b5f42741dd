"""Atomic writing, and the filter on the error stream."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm

from tvm_ext.errors import ExportError
from tvm_ext.runtime.export import c_literal
from tvm_ext.support.files import check_space, produce_atomically, write_atomically
from tvm_ext.support.stderr_filter import without_lines


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    for content in (b"one", b"another"):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_failure_leaves_the_old_content_alone(tmp_path: Path, code: int) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(code, os.strerror(code))

    with pytest.raises(ExportError, match=os.strerror(code)) as caught:
        produce_atomically(tmp_path / "file", fail)
    assert caught.value.remedy
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce_atomically(tmp_path / "file", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_space_is_checked_and_given_back(tmp_path: Path) -> None:
    check_space(tmp_path, 1000)
    with pytest.raises(ExportError, match="has no room for"):
        check_space(tmp_path, 1 << 60)
    with pytest.raises(ExportError, match="has no room for"):
        check_space(tmp_path / "missing", 1)
    assert list(tmp_path.iterdir()) == []


def test_literals_survive_a_c_compiler(tmp_path: Path) -> None:
    text = '{"quote\\"":"back\\\\slash, ??/ and %d"}' * 100
    source = tmp_path / "literal.cc"
    source.write_text(f"#include <cstdio>\nint main() {{ std::fputs({c_literal(text)}, stdout); }}\n")
    compiler = tvm.support.cc.get_cc()
    subprocess.run([compiler, str(source), "-o", str(tmp_path / "literal")], check=True, timeout=120)
    printed = subprocess.run([str(tmp_path / "literal")], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout == text


def test_only_matching_lines_are_withheld(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever tests before left running
    with without_lines(re.compile(rb"secret")):
        os.write(2, b"before\na secret line\n")
        subprocess.run(["sh", "-c", "echo from a child >&2; echo secret >&2; printf 'no newline' >&2"], check=True)
    os.write(2, b"\nafter\n")
    assert capfd.readouterr().err == "before\nfrom a child\nno newline\nafter\n"


def test_lines_survive_an_exception(capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with without_lines(re.compile(rb"secret")):
            os.write(2, b"said before\n")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert capfd.readouterr().err == "said before\n"


def test_a_process_without_error_stream(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    result = run_python(
        "import os, re\n"
        "from tvm_ext.support.stderr_filter import without_lines\n"
        "os.close(2)\n"
        "with without_lines(re.compile(b'x')):\n"
        "    print('worked')\n"
    )
    assert result.stdout == "worked\n"
