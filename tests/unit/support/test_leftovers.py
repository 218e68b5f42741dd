"""Builds leave nothing behind: no mapped libraries, no objects, no folders; and what they hand out is the caller's."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.support.small_modules import module_of
from tvm_ext import relay
from tvm_ext.relay_passes.copy_outputs import CopyConstantOutputs
from tvm_ext.support import files

op = relax.op


def built(make: Callable[[Any], Any]) -> relay.Library:
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    return relay.build(module_of([x], make(x)), "llvm", kernel_cache="off")


def run(library: relay.Library) -> list[Any]:
    result = library.vm()["main"](tvm.runtime.tensor(np.ones(3, "f4")))
    return [result] if hasattr(result, "numpy") else list(result)


def linked_libraries() -> list[str]:
    """What is mapped of copies that were loaded: in memory, or in a folder where memory cannot be run."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in mappings if "/memfd:" in line or f"tvm_ext-load-{os.getpid()}-" in line]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is mapped")
def test_a_library_is_unloaded_with_the_last_that_uses_it() -> None:
    gc.collect()
    before = len(linked_libraries())
    library = built(lambda x: op.exp(x))
    (result,) = run(library)
    machine = library.vm()
    assert len(linked_libraries()) > before
    del library
    gc.collect()
    again = machine["main"](tvm.runtime.tensor(np.ones(3, "f4"))).numpy()  # which keeps the code
    del machine
    gc.collect()
    assert len(linked_libraries()) == before
    np.testing.assert_array_equal(result.numpy(), again)


OBJECTS = """
import gc
import numpy as np
from tvm import relax
from tvm_ext import relay
x = relax.Var("x", relax.TensorType((3,), "float32"))
builder = relax.BlockBuilder()
with builder.function("main", [x]):
    with builder.dataflow():
        result = builder.emit_output(builder.emit(relax.op.exp(x)))
    builder.emit_func_output(result)
mod = builder.get()
counts = []
for _ in range(8):
    relay.build(mod, "llvm", kernel_cache="off")
    gc.collect()
    counts.append(len(gc.get_objects()))
print(counts[-1] - counts[3])
"""


def test_builds_leave_no_objects() -> None:
    """A class, an instrument and two tables were left by each once, some hundred objects."""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", OBJECTS], cwd=root, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40, done.stdout


def folder(parent: Path, name: str, age_s: float) -> Path:
    path = parent / name
    path.mkdir()
    (path / "kernel.o").write_bytes(b"")
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = folder(tmp_path, f"tvm_ext-link-{ended.pid}-abc", 5000)
    young = folder(tmp_path, f"tvm_ext-kernel-{ended.pid}-abc", 5)
    running = folder(tmp_path, f"tvm_ext-nvcc-{os.getpid()}-abc", 5000)
    foreign = folder(tmp_path, "tvm_ext-notes", 5000)
    outside = folder(tmp_path, "elsewhere", 5000)
    (tmp_path / f"tvm_ext-export-{ended.pid}-abc").symlink_to(outside)
    with files.temporary_folder("kernel") as made:
        assert made.parent == tmp_path
        assert made.is_dir()
    assert not gone.exists()
    assert not made.exists()
    assert all(path.exists() for path in (young, running, foreign, outside))


CONSTANT = np.arange(3, dtype="f4")


def with_constants(x: Any) -> Any:
    constant = relax.const(CONSTANT)
    return relax.Tuple([op.add(x, constant), constant, op.exp(constant), op.negative(relax.const(np.float32(2)))])


def overwrite(library: relay.Library) -> tuple[list[Any], list[Any]]:
    """What the library computes before and after somebody has written to all of its outputs."""
    tensors = run(library)
    before = [tensor.numpy().copy() for tensor in tensors]
    for tensor in tensors:
        tensor.copyfrom(np.full(tensor.shape, 99, "f4"))
    return before, [tensor.numpy() for tensor in run(library)]


def test_writing_to_a_constant_output_leaves_the_library_as_it_is(tmp_path: Path) -> None:
    library = built(with_constants)
    library.export_library(tmp_path / "constants.so")
    for each in (library, relay.load(tmp_path / "constants.so")):
        before, after = overwrite(each)
        expected = [1 + CONSTANT, CONSTANT, np.exp(CONSTANT), np.float32(-2)]
        for first, second, value in zip(before, after, expected, strict=True):
            np.testing.assert_allclose(first, value, rtol=1e-6)
            np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("name", ["alone", "view", "nothing"])
def test_a_constant_that_is_the_only_output(name: str) -> None:
    constant = relax.const(np.zeros((0, 2), "f4") if name == "nothing" else CONSTANT)
    library = built(lambda _: op.reshape(constant, (3, 1)) if name == "view" else constant)
    before, after = overwrite(library)
    np.testing.assert_array_equal(before[0], after[0])
    assert before[0].shape == {"alone": (3,), "view": (3, 1), "nothing": (0, 2)}[name]


def test_outputs_that_are_computed_are_not_copied() -> None:
    assert [kernel.name for kernel in built(op.exp).report.operators] == ["tir_exp"]


def test_a_view_of_a_constant_among_the_outputs_is_copied() -> None:
    """In a dataflow block, whose variables are unknown behind it."""
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    view = op.reshape(relax.const(CONSTANT), (3, 1))
    behind = CopyConstantOutputs()(module_of([x], relax.Tuple([op.exp(x), view])))["main"].body.blocks[-1]
    calls = [binding.value for binding in behind.bindings if isinstance(binding.value, tvm.ir.Call)]
    assert len(calls) == 1
    assert not any(isinstance(field, relax.DataflowVar) for field in calls[0].args[1].fields)
