"""The native runtime in processes that end, fork, or are kept from their cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.unit.rammer_runtime.tables import needs_runtime

pytestmark = needs_runtime

PREAMBLE = """
import contextlib, os, sys, threading, time
import numpy as np, tvm, tvm_ext
from tests.unit.rammer_runtime.tables import chain, expected, kernels, run
from tvm_ext.rammer_runtime import native

inputs = tuple(np.random.default_rng(0).standard_normal((2, 64)).astype("float32") * np.float32(1e-3))
wanted = expected(*inputs, 40)
module = native.make_module(chain(40, 4), [kernels()])

def check(module=module):
    assert np.array_equal(run(module, "chain", inputs), wanted)

def threads():
    return len(os.listdir("/proc/self/task"))

before, cores = threads(), os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores)})  # as owners bind their first thread, which says nothing of the others
check()
assert threads() == before + 1 + (len(cores) > 1), "a caller that is bound has no workers"  # and the witness of cores
os.sched_setaffinity(0, cores)
check()
"""

FORKS = """
stop = []
def work():
    while not stop:
        check()
others = [threading.Thread(target=work) for _ in range(2)]
for other in others:
    other.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        for _ in range(5):
            check()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
child = os.fork()
if child == 0:
    sys.exit(0)  # as programs do: it waits for none of its parent's threads
assert os.waitpid(child, 0)[1] == 0
stop.append(True)
for other in others:
    other.join()
check()
"""

LOSES_CORES = """
cores = sorted(os.sched_getaffinity(0))
for kept in ([cores[0]], [cores[-1]], cores):
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), kept)  # as taskset -a does: no worker is where it should be
    for _ in range(50):
        check()
"""

TWO_MODELS = """
failed = []
def work(units, length):
    own = native.make_module(chain(length, units), [kernels()])
    right = expected(*inputs, length)
    failed.extend(units for _ in range(200) if not np.array_equal(run(own, "chain", inputs), right))
threads = [threading.Thread(target=work, args=item) for item in ((3, 20), (2, 30))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed
"""

WORKERS_SLEEP = """
for _ in range(20):
    time.sleep(0.005)
    check()
"""

ENDS = """
from pathlib import Path
from tests.unit.support.test_thread_pool import check as check_loops, make_loops
from tvm_ext.support.shared_library import load_library

loops = load_library(make_loops(Path(sys.argv[1])))
copied = tvm.runtime.tensor(inputs[0])

def work(step):
    while True:
        step()
for step in (check, check, lambda: check_loops(loops), copied.numpy, lambda: copied.copyto(tvm.runtime.empty((64,)))):
    threading.Thread(target=work, args=(step,), daemon=True).start()
time.sleep(0.3)
"""
"""Threads that are in a table, in a loop on own threads, and anywhere else in TVM."""


def ends_well(program: str, cores: set[int], folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    assert result.returncode == 0, result.stderr[-2000:] or signal.Signals(-result.returncode)


def test_forks_lost_cores_two_models_and_an_end_while_threads_run(tmp_path: Path) -> None:
    ends_well(FORKS + LOSES_CORES + TWO_MODELS + WORKERS_SLEEP + ENDS, os.sched_getaffinity(0), tmp_path)


def test_one_core_walks_all_streams(tmp_path: Path) -> None:
    many_threads = "native.set_thread_limit(8)\n"
    ends_well(many_threads + WORKERS_SLEEP + FORKS + ENDS, {min(os.sched_getaffinity(0))}, tmp_path)
