from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T  # noqa: N812 - TVMScript's own name

from tests.attack import libraries
from tests.unit.rammer_runtime.tables import needs_runtime
from tvm_ext import _native, relay
from tvm_ext.errors import OptionError
from tvm_ext.rammer_runtime import native
from tvm_ext.runtime import library
from tvm_ext.support import thread_pool
from tvm_ext.support.shared_library import load_copy, private_copy

pytestmark = needs_runtime
PARTS = 64


@T.prim_func(private=True)
def square(x: T.Buffer((64, 100), "float32"), y: T.Buffer((64, 100), "float32")):
    for part in T.parallel(64):
        for i in range(100):
            y[part, i] = x[part, i] * x[part, i]


@T.prim_func(private=True)
def picky(x: T.Buffer((64, 100), "float32"), y: T.Buffer((64, 100), "float32")):
    for part in T.parallel(64):
        assert x[part, 0] < T.float32(63), "the last part is refused"
        y[part, 0] = x[part, 0]


def make_loops(folder: Path) -> Path:
    """A library of the functions above."""
    functions = {"square": square, "picky": picky}
    named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    path = folder / "loops.so"
    tvm.tirx.build(tvm.IRModule(named), target=tvm.target.Target("llvm")).export_library(str(path))
    return path


@functools.cache
def library_bytes(folder: Path) -> bytes:
    return make_loops(folder).read_bytes()


@pytest.fixture
def path(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of a library, under a name that can be loaded again."""
    monkeypatch.delenv("TVM_EXT_THREAD_POOL", raising=False)
    path = tmp_path / "loops.so"
    path.write_bytes(library_bytes(tmp_path_factory.getbasetemp()))
    with private_copy(path) as copy:
        yield copy


@pytest.fixture
def loops(path: Path) -> tvm.runtime.Module:
    return load_copy(path)


def is_adopted(path: Path) -> bool:
    """Whether the loops of a loaded library run on own threads."""
    launch = ctypes.c_void_p.in_dll(ctypes.CDLL(str(path)), "__TVMBackendParallelLaunch").value
    return bool(launch == tvm_ffi.get_global_func("tvm_ext.rammer.parallel_launch")().value)


def check(library: tvm.runtime.Module, seed: int = 0) -> None:
    x = np.random.default_rng(seed).standard_normal((64, 100)).astype("float32")
    y = tvm.runtime.tensor(np.full((64, 100), np.nan, "float32"))
    library["square"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), x * x)


def test_own_threads_unless_those_of_tvm_are_asked_for(path, monkeypatch):
    monkeypatch.setenv("TVM_EXT_THREAD_POOL", "tvm")
    library = load_copy(path)
    check(library)
    assert not is_adopted(path)
    monkeypatch.delenv("TVM_EXT_THREAD_POOL")
    assert thread_pool.adopt(path)
    check(library)
    assert is_adopted(path)
    monkeypatch.setenv("TVM_EXT_THREAD_POOL", "omp")
    with pytest.raises(OptionError, match="TVM_EXT_THREAD_POOL is 'omp'"):
        thread_pool.adopt(path)


def test_without_a_native_part_that_loads_kernels_run_on_the_threads_of_tvm(path, tmp_path, monkeypatch, request):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    monkeypatch.setattr(_native, "_loaded", {})
    monkeypatch.setattr(_native, "library_path", lambda _name: broken)
    thread_pool._is_ready.cache_clear()
    request.addfinalizer(thread_pool._is_ready.cache_clear)
    check(load_copy(path))
    assert not is_adopted(path)
    assert not native.is_available()


def test_a_model_runs_on_own_threads_where_this_package_loads_it_and_on_those_of_tvm_elsewhere(tmp_path, monkeypatch):
    monkeypatch.delenv("TVM_EXT_THREAD_POOL", raising=False)
    first, second = tmp_path / "first.so", tmp_path / "second.so"
    built = libraries.build()
    assert libraries.is_right(built.vm()["main"](libraries.value(0)), 0)
    built.export_library(first)
    second.write_bytes(first.read_bytes())
    names: list[Path] = []
    monkeypatch.setattr(library, "load_copy", lambda copy: names.append(copy) or load_copy(copy))
    ours = relay.load(first)
    assert libraries.is_right(ours.vm()["main"](libraries.value(1)), 1)
    assert is_adopted(names[0])
    stock = tvm.relax.VirtualMachine(tvm.runtime.load_module(str(second)), tvm.cpu())
    assert libraries.is_right(stock["main"](tvm.runtime.tensor(libraries.value(2))), 2)
    assert not is_adopted(second)


def test_loops_give_the_same_as_without_threads(loops):
    for seed in range(200):
        check(loops, seed)


def test_an_error_is_worded_as_tvm_does_and_the_next_loop_runs(loops):
    x = np.broadcast_to(np.arange(64, dtype="float32")[:, None], (64, 100)).copy()
    y = tvm.runtime.tensor(np.zeros((64, 100), "float32"))
    for _ in range(20):
        with pytest.raises(RuntimeError, match=r"Task \d+ error: .*the last part is refused"):
            loops["picky"](tvm.runtime.tensor(x), y)
        check(loops)


def test_threads_call_at_once(loops):
    failed = []

    def work(seed: int) -> None:
        try:
            for number in range(50):
                check(loops, seed * 50 + number)
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("arguments", [(1, 1), (1, 2), (1, 0), (-2, 1, ["0"])])
def test_a_configured_pool_is_respected(loops, arguments):
    def work() -> None:
        tvm_ffi.get_global_func("runtime.config_threadpool")(*arguments)
        check(loops)

    thread = threading.Thread(target=work)  # what is configured counts for one thread
    thread.start()
    thread.join()
    check(loops)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own(loops):
    check(loops)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            try:
                for seed in range(5):
                    check(loops, seed)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        check(loops)


NO_POOL = """
import os
import subprocess
import sys
from tests.support.small_modules import inputs_of, module_of
from tvm_ext import relay
from tvm_ext._tvm import relax
inputs = inputs_of((256, 256), (256, 256))
before = len(os.listdir("/proc/self/task"))
library = relay.build(module_of(inputs, relax.op.matmul(*inputs)), "llvm", kernel_cache="off")
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_build_starts_no_pool_of_tvms() -> None:
    """The end of a process waits for the pool's workers: minutes, where others keep their cores busy."""
    environment = {name: value for name, value in os.environ.items() if name != "TVM_EXT_CPU"}
    run = subprocess.run([sys.executable, "-c", NO_POOL], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.split() == ["0"]
