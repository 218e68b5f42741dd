"""The front door, exporting and loading: other processes, full disks, and files that are no library."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import tvm

from tests.unit.relay.dense import X, assert_right, dense_model
from tvm_ext import relay
from tvm_ext.errors import ExportError

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def test_reload_in_another_process(library: relay.Library, tmp_path: Path, run_python: RunPython) -> None:
    library.export_library(tmp_path / "dense.so")
    np.save(tmp_path / "x.npy", X)
    result = run_python(
        dedent(f"""
        import numpy as np
        from tvm_ext import relay
        library = relay.load({str(tmp_path / "dense.so")!r})
        module = relay.GraphModule(library)
        module.run(data=np.load({str(tmp_path / "x.npy")!r}))
        np.save({str(tmp_path / "y.npy")!r}, module.get_output(0).numpy())
        open({str(tmp_path / "report.json")!r}, "w").write(library.report.to_json())
    """)
    )
    assert result.returncode == 0, result.stderr
    assert "Scope" not in result.stderr
    assert_right(np.load(tmp_path / "y.npy"))
    assert (tmp_path / "report.json").read_text() == library.report.to_json()


def test_reload_with_tvm_alone(library: relay.Library, tmp_path: Path, run_python: RunPython) -> None:
    library.export_library(tmp_path / "dense.so")
    np.save(tmp_path / "x.npy", X)
    result = run_python(
        dedent(f"""
        import numpy as np, sys, tvm
        from tvm.runtime.vm import VirtualMachine
        vm = VirtualMachine(tvm.runtime.load_module({str(tmp_path / "dense.so")!r}), tvm.cpu())
        np.save({str(tmp_path / "y.npy")!r}, vm["main"](np.load({str(tmp_path / "x.npy")!r})).numpy())
        assert "tvm_ext.relay" not in sys.modules
        """),
        TVM_USE_RUNTIME_LIB="1",
    )
    assert result.returncode == 0, result.stderr
    assert_right(np.load(tmp_path / "y.npy"))


def test_export_again_after_loading(library: relay.Library, tmp_path: Path) -> None:
    library.export_library(tmp_path / "first.so")
    relay.load(tmp_path / "first.so").export_library(tmp_path / "second.so")
    assert (tmp_path / "first.so").read_bytes() == (tmp_path / "second.so").read_bytes()
    module = relay.GraphModule(tvm.runtime.load_module(str(tmp_path / "second.so")), tvm.cpu())
    module.run(data=X)
    assert_right(module.get_output(0).numpy())


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    library: relay.Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dense.so").write_bytes(b"the old one")

    def full(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match=r"(?s)No space left.*free some space"):
        library.export_library(tmp_path / "dense.so")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"dense.so": b"the old one"}


def test_a_linker_that_cannot_write_leaves_nothing(tmp_path: Path, run_python: RunPython) -> None:
    """A real limit on file sizes, which the compiler inherits: 8 KB are not enough for a library."""
    result = run_python(
        dedent(f"""
        import resource
        from tvm import relax
        from tests.support.small_modules import inputs_of, module_of
        from tvm_ext import relay
        from tvm_ext.errors import ExportError
        inputs = inputs_of((40, 40), (40, 40))
        library = relay.build(module_of(inputs, relax.op.matmul(*inputs)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, 8_000))
        try:
            library.export_library({str(tmp_path / "product.so")!r})
        except ExportError as error:
            print("refused:", error.problem[:40])
    """)
    )
    assert result.stdout.startswith("refused:"), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "report.json").write_text("the old one")
    result = run_python(
        dedent(f"""
        import os, signal
        from tvm_ext.support.files import produce_atomically
        def half(path):
            path.write_bytes(b"half of the new")
            os.kill(os.getpid(), signal.SIGKILL)
        produce_atomically({str(tmp_path / "report.json")!r}, half)
    """)
    )
    assert result.returncode == -9
    assert (tmp_path / "report.json").read_text() == "the old one"


@pytest.mark.parametrize(("name", "message"), [("no/such/folder/a.so", "cannot write into"), ("a.txt", "call it a.so")])
def test_places_that_cannot_be_written(library: relay.Library, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        library.export_library(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_the_mode_is_that_of_any_new_file(library: relay.Library, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    library.export_library(tmp_path / "dense.so")
    modes = [(tmp_path / name).stat().st_mode & 0o666 for name in ("dense.so", "plain")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_files_that_are_no_library(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "bad.so").write_bytes(content)
    with pytest.raises(ExportError, match=r"no file|cannot be loaded"):
        relay.load(tmp_path / "bad.so")


@pytest.mark.parametrize("share", [0.2, 0.6, 0.999])
def test_a_library_that_was_cut_off(library: relay.Library, tmp_path: Path, share: float) -> None:
    """Loading one would end the process with a bus error."""
    library.export_library(tmp_path / "dense.so")
    content = (tmp_path / "dense.so").read_bytes()
    (tmp_path / "dense.so").write_bytes(content[: int(share * len(content))])
    with pytest.raises(ExportError, match="cut off"):
        relay.load(tmp_path / "dense.so")


def test_a_library_of_stock_tvm_is_refused(tmp_path: Path) -> None:
    mod, params = relay.frontend.from_onnx(dense_model())
    tvm.compile(relay.prepare(mod, params), "llvm").export_library(str(tmp_path / "stock.so"))
    with pytest.raises(ExportError, match="not exported by tvm_ext"):
        relay.load(tmp_path / "stock.so")
