"""A build or an export that is stopped: what it leaves behind, what it raises, and that the next one works."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from tvm import relax

from tests.attack import libraries
from tests.attack.interrupts import process_state
from tests.support.small_modules import inputs_of, module_of
from tvm_ext import errors, relay
from tvm_ext._tvm import tvm_ffi
from tvm_ext.cli.common import Interrupts
from tvm_ext.errors import InputError
from tvm_ext.support.limited_process import worker_threads
from tvm_ext.toolchains import code_generation, host_compiler

pytestmark = pytest.mark.usefixtures("interruptible")

RunPython = Callable[..., Any]
A, B = np.random.default_rng(5).standard_normal((2, 40, 40)).astype("float32")

MODEL = """
    import os, signal, sys
    import numpy as np
    from tvm import relax
    from tests.support.small_modules import inputs_of, module_of
    from tvm_ext import relay
    inputs = inputs_of((40, 40), (40, 40))
    mod = module_of(inputs, relax.op.nn.relu(relax.op.matmul(*inputs)))
    def is_right(library):
        a, b = np.random.default_rng(5).standard_normal((2, 40, 40)).astype("float32")
        wanted = np.maximum(a.astype("float64") @ b, 0)
        return np.linalg.norm(library.vm()["main"](a, b).numpy() - wanted) < 1e-5 * np.linalg.norm(wanted)
"""


def module() -> tvm.IRModule:
    inputs = inputs_of((40, 40), (40, 40))
    return module_of(inputs, relax.op.nn.relu(relax.op.matmul(*inputs)))


def assert_right(library: relay.Library) -> None:
    wanted = np.maximum(A.astype("float64") @ B, 0)
    assert np.linalg.norm(library.vm()["main"](A, B).numpy() - wanted) <= 1e-5 * np.linalg.norm(wanted)


def visible_files(folder: Path) -> list[Path]:
    """What a user sees; a kill may leave a temporary file whose name starts with a dot."""
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


PASSES = [
    "LegalizeOps",
    "tvm_ext.ConstructKernels",
    "tvm_ext.PackConstants",
    "VMShapeLower",
    "kernel 1 of 1: fused_matmul_relu",
]


@pytest.mark.parametrize("pass_name", PASSES)
def test_ctrl_c_is_a_keyboard_interrupt_and_the_next_build_works(pass_name: str) -> None:
    def interrupt(name: str) -> None:
        if name == pass_name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        relay.build(module(), progress=interrupt)
    assert_right(relay.build(module()))


@pytest.mark.sampled(every=4)
@pytest.mark.slow  # tests/attack/test_kills.py kills builders everyday
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("pass_name", ["tvm_ext.ConstructKernels", "kernel 1 of 1: fused_matmul_relu"])
def test_a_build_that_is_killed_leaves_no_half_written_file(
    pass_name: str, name: str, tmp_path: Path, run_python: RunPython
) -> None:
    cache = tmp_path / "cache"
    environment = {"TVM_EXT_CACHE_DIR": str(cache)}
    kill = f"""
    def stop(name):
        if name == {pass_name!r}:
            os.kill(os.getpid(), signal.{name})
    relay.build(mod, progress=stop)
    """
    killed = run_python(dedent(MODEL) + dedent(kill), **environment)
    assert killed.returncode < 0, killed.stderr
    for path in visible_files(cache):
        if path.suffix == ".json":
            json.loads(path.read_text())
    assert visible_files(tmp_path) == visible_files(cache)
    after = run_python(dedent(MODEL) + "print(is_right(relay.build(mod)))", **environment)
    assert (after.stdout.strip(), after.returncode) == ("True", 0), after.stderr
    assert "Warning" not in after.stderr


def test_an_export_that_is_killed_leaves_the_old_library(tmp_path: Path, run_python: RunPython) -> None:
    """The linker's output is half there when the process dies; the library of before still loads and runs."""
    path = tmp_path / "model.so"
    relay.build(module()).export_library(path)
    before = path.read_bytes()
    kill = f"""
    from tvm_ext.runtime import export
    def half(executable, addons, temporary, *others):
        temporary.write_bytes(b"\\x7fELF, and no more")
        os.kill(os.getpid(), signal.SIGTERM)
    export._link = half
    relay.build(mod).export_library({str(path)!r})
    """
    assert run_python(dedent(MODEL) + dedent(kill)).returncode == -15
    assert path.read_bytes() == before
    assert visible_files(tmp_path) == [path]
    assert_right(relay.load(path))


def test_an_export_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = relay.build(module())

    def interrupt(*_arguments: Any, **_keywords: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(host_compiler, "create_shared", interrupt)
    with pytest.raises(KeyboardInterrupt):
        library.export_library(tmp_path / "model.so")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    library.export_library(tmp_path / "model.so")
    assert relay.load(tmp_path / "model.so").inputs == library.inputs


# --- Ctrl-C is not kept waiting, and not lost -----------------------------------------------------------------------
def test_ctrl_c_does_not_wait_for_code_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM may be at a kernel for seconds. Here the kernels take until the test says so."""
    generate, go_on, ended = code_generation._compile, threading.Event(), threading.Event()

    def slow(kernel: Any, target: Any, context: Any, path: Path) -> Any:
        if threading.current_thread() is threading.main_thread():
            return generate(kernel, target, context, path)
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(60)
        try:
            return generate(kernel, target, context, path)
        finally:
            ended.set()

    monkeypatch.setattr(code_generation, "_compile", slow)
    monkeypatch.setattr(relay, "usable_core_count", lambda: 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        relay.build(chain(), kernel_cache="off")
    assert not ended.is_set()
    assert list(tmp_path.iterdir()) == []
    go_on.set()
    assert ended.wait(60)
    assert list(tmp_path.iterdir()) == []


def chain() -> tvm.IRModule:
    """Two kernels, so that threads compile them."""
    x = relax.Var("x", relax.TensorType((40, 40), "float32"))
    return module_of([x], relax.op.sum(relax.op.matmul(x, x), axis=[1]))


@pytest.fixture
def stubborn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A C++ compiler (``CXX``) with a child that ignores SIGTERM; a call interrupts us as soon as it runs.

    The test's end checks that none of it is left.
    """
    compiler, started, left = tmp_path / "c++", tmp_path / "started", tmp_path / "cc1.res"  # g++ has such a file
    compiler.write_text(
        f"#!/bin/sh\ntrap 'rm {left}; exit 1' TERM\ntouch {left}\n"
        f"echo $$ > {started}.part; mv {started}.part {started}\n(trap '' TERM; sleep 60) & wait\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    def interrupt() -> None:
        while not started.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    return interrupt


def all_ended(folder: Path) -> bool:
    for _ in range(1000):  # what was killed takes a moment to end
        if not group_members(int((folder / "started").read_text())):
            return True
        time.sleep(0.01)
    return False


def test_ctrl_c_ends_the_linker(tmp_path: Path, stubborn: Callable[[], None]) -> None:
    """A linker that goes on writes its output after the folder was cleaned up."""
    thread = threading.Thread(target=stubborn)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        host_compiler.create_shared(str(tmp_path / "out.so"), [])
    thread.join()
    assert all_ended(tmp_path)
    assert not (tmp_path / "cc1.res").exists()


def test_ctrl_c_ends_compilers_that_threads_run(tmp_path: Path, stubborn: Callable[[], None]) -> None:
    thread = threading.Thread(target=stubborn)
    thread.start()
    begun: list[str] = []

    def compile_one(name: str) -> None:
        begun.append(name)
        host_compiler.create_shared(str(tmp_path / name), [])

    with pytest.raises(KeyboardInterrupt), worker_threads(1, "test") as pool:
        list(pool.map(compile_one, ["a.so", "b.so", "c.so"]))
    thread.join()
    assert all_ended(tmp_path)
    assert begun == ["a.so"]


def group_members(group: int) -> list[str]:
    """The processes of a group that have not ended."""
    states = {path.parent.name: process_state(path.parent) for path in Path("/proc").glob("[0-9]*/stat")}
    return [name for name, state in states.items() if state and state[0] != "Z" and int(state[2]) == group]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_keyboard_interrupt_that_was_dropped_is_raised_again() -> None:
    class Dropping:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    with interrupts.watched():
        interrupts.check()
        Dropping()
        gc.collect()
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        interrupts.check()
    assert signal.getsignal(signal.SIGINT) is before


STUCK = """
    import ctypes, os, signal, threading, time
    from tvm_ext.cli import common as cli_common; from tvm_ext.support import files, limited_process
    pause = ctypes.CDLL(None).nanosleep  # one call in C, which lets other threads run, as TVM's do
    with cli_common.interrupts.watched(), files.temporary_folder("test"):
        with files._temporary_beside(files.Path("out.so"), False):
            threading.Thread(target=limited_process.run_to_end, args=(["sleep", "60"],), daemon=True).start()
            while not limited_process._RUNNING:
                time.sleep(0.01)
            print(min(process.pid for process in limited_process._RUNNING), flush=True)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # another thread gets it: the call goes on
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            pause((ctypes.c_long * 2)(60, 0), None)
"""


def test_ctrl_c_ends_a_command_whose_main_thread_is_in_cpp(tmp_path: Path, run_python: RunPython) -> None:
    start = time.monotonic()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = run_python(dedent(STUCK), TMPDIR=str(temporary))
    assert done.returncode == 130, done.stderr
    assert time.monotonic() - start < 60  # the call would have gone on
    assert list(tmp_path.iterdir()) == [temporary]
    assert list(temporary.iterdir()) == []
    assert group_members(int(done.stdout)) == []


COMMAND = """
    import os, signal, sys
    from tvm_ext.cli import app as cli; from tvm_ext.support import pass_clock
    from tvm_ext.toolchains import host_compiler
    def interrupted(function, moment):
        def call(first, *others):
            if moment in ("", others and others[0]):
                os.kill(os.getpid(), signal.SIGINT)
            return function(first, *others)
        return call
    moment = sys.argv[1]
    if moment == "link":
        host_compiler.create_shared = interrupted(host_compiler.create_shared, "")
    else:
        pass_clock.PassClock.before = interrupted(pass_clock.PassClock.before, moment)
    cli.main(["compile", "model.onnx", "-o", "out/model.so"])
"""


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("LegalizeOps", marks=pytest.mark.slow),
        pytest.param("tvm_ext.ConstructKernels", marks=pytest.mark.slow),
        "link",
    ],
)
def test_ctrl_c_of_the_command(moment: str, tmp_path: Path) -> None:
    """More moments, in time: tests/attack/test_interrupts.py."""
    onnx.save(libraries.model(40), tmp_path / "model.onnx")
    folders = [tmp_path / name for name in ("out", "cache", "temporary")]
    for folder in folders:
        folder.mkdir()
    environment = {"TVM_EXT_CACHE_DIR": str(folders[1]), "TMPDIR": str(folders[2])}
    done = subprocess.run(
        [sys.executable, "-c", dedent(COMMAND), moment],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 130, done.stderr
    assert [path for folder in (folders[0], folders[2]) for path in folder.rglob("*")] == []


# --- errors on their way through C++ ----------------------------------------------------------------------------------
def _through_cpp(error: BaseException) -> None:
    def fail() -> None:
        raise error

    tvm_ffi.convert(fail)()


@pytest.mark.parametrize("kind", errors.ALL)
def test_our_errors_keep_their_class_and_their_parts(kind: type[errors.TvmExtError]) -> None:
    with pytest.raises(kind) as caught:
        _through_cpp(kind("tensor x is wrong.", "correct it"))
    assert type(caught.value) is kind
    assert (caught.value.problem, caught.value.remedy) == ("tensor x is wrong.", "correct it")
    assert str(caught.value) == "tensor x is wrong.\n  remedy: correct it"


def test_an_error_without_remedy_has_none() -> None:
    with pytest.raises(InputError) as caught:
        _through_cpp(InputError("tensor x is wrong."))
    assert (caught.value.problem, caught.value.remedy) == ("tensor x is wrong.", "")


def test_every_error_class_is_listed() -> None:
    classes = {value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__}
    classes = {value for value in classes if isinstance(value, type)}
    assert classes == set(errors.ALL)
