"""A process that ran a library and is forked: its children run and build as well, or say at once that they cannot."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.attack.children import in_child
from tests.attack.libraries import build, is_right, loaded, model, value
from tvm_ext import forks, relay
from tvm_ext.errors import ForkError
from tvm_ext.exclusive import EXCLUSIVE

pytestmark = pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork")


@pytest.fixture(scope="module", params=["built", "loaded"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> relay.Library:
    """A library whose kernels have run in this process, in its main thread."""
    library = build()
    if request.param == "loaded":
        library = loaded(library, tmp_path_factory.mktemp("fork"))
    assert is_right(library.vm()["main"](value(0)), 0)
    return library


def runs(library: relay.Library, number: int = 1) -> bool:
    module = library["default"]()
    module.run(x=value(number))
    return is_right(module.get_output(0), number)


def test_a_child_runs_instances_old_and_new(library: relay.Library) -> None:
    machine, module = library.vm(), library["default"]()
    module.run(x=value(2))
    time.sleep(0.5)  # TVM's workers sleep by now

    def work() -> tuple[bool, ...]:
        right = is_right(machine["main"](value(3)), 3), is_right(module.get_output(0), 2), runs(library)
        module.run(x=value(4))
        return (*right, is_right(module.get_output(0), 4))

    assert in_child(work) == (True,) * 4
    assert work() == (True,) * 4


@pytest.mark.sampled(every=2)
def test_a_child_of_a_child(library: relay.Library) -> None:
    assert in_child(lambda: in_child(lambda: runs(library)))
    assert in_child(lambda: (runs(library), in_child(lambda: runs(library)))) == (True, True)


def test_threads_of_a_child_do_not_take_a_workers_place(library: relay.Library) -> None:
    def work() -> bool:
        threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        return runs(library)

    assert in_child(work)


@pytest.mark.sampled(every=2)
def test_a_child_imports_builds_and_runs(library: relay.Library) -> None:
    """A fork on a busy machine may come too late, which is refused; of several one is in time."""
    for _ in range(10):
        with contextlib.suppress(ForkError):
            assert in_child(lambda: runs(build()))
            return
    pytest.fail("every fork was refused")


def _worker(number: int) -> bool:
    assert _shared is not None
    module = _shared["default"]()
    module.run(x=value(number))
    return is_right(module.get_output(0), number)


_shared: relay.Library | None = None


def test_a_pool_of_forked_workers(library: relay.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """As loaders of data have them: the library is inherited, not sent."""
    monkeypatch.setattr(sys.modules[__name__], "_shared", library)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(_worker, range(8)).get(timeout=60) == [True] * 8


@pytest.mark.sampled(every=2)
def test_a_child_runs_while_its_parent_does(library: relay.Library) -> None:
    machine, done = library.vm(), threading.Event()

    def keep_running() -> None:
        while not done.is_set():
            machine["main"](value(0))

    thread = threading.Thread(target=keep_running)
    thread.start()
    try:
        assert [in_child(lambda: runs(library)) for _ in range(3)] == [True] * 3
    finally:
        done.set()
        thread.join()


# --- forks that took long: nobody knows whether the workers slept ---------------------------------------------------
@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_workers_were_awake", lambda: False)


@pytest.mark.usefixtures("late")
def test_after_a_late_fork_kernels_run_elsewhere(library: relay.Library) -> None:
    machine = library.vm()
    time.sleep(0.5)
    assert in_child(lambda: (is_right(machine["main"](value(3)), 3), runs(library))) == (True, True)
    assert in_child(lambda: in_child(lambda: runs(library)))


@pytest.mark.sampled(every=2)
@pytest.mark.usefixtures("late")
def test_after_a_late_fork_a_build_is_refused_in_the_main_thread_alone(library: relay.Library) -> None:
    def build_in_a_thread() -> list[bool]:
        results: list[bool] = []
        thread = threading.Thread(target=lambda: results.append(runs(build())))
        thread.start()
        thread.join()
        return results

    with pytest.raises(ForkError, match=r"spawn"):
        in_child(build)
    assert in_child(build_in_a_thread) == [True]


def test_a_worker_that_slept_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the fork took: what counts is whether a worker waited, not how much time it had to."""
    worker = subprocess.Popen(["sh", "-c", "read line; while :; do :; done"], stdin=subprocess.PIPE, text=True)
    monkeypatch.setattr(forks, "_parent", worker.pid)

    def activity() -> forks.Activity | None:
        return forks._activity(worker.pid, [worker.pid])[worker.pid]

    def stays_awake(then: forks.Activity | None) -> bool:
        monkeypatch.setattr(forks, "_activity_then", {worker.pid: then})
        return forks._workers_were_awake()

    try:
        while activity() is not None:
            time.sleep(0.01)
        assert not stays_awake(None)
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
        while (then := activity()) is None:
            time.sleep(0.01)
        time.sleep(0.2)
        assert stays_awake(then)
        assert stays_awake(then._replace(waits=then.waits - 1, ran_s=then.ran_s + 100))
        assert not stays_awake(then._replace(waits=then.waits - 1, ran_s=then.ran_s - 100))
        worker.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        assert not stays_awake(then)
    finally:
        worker.kill()
        worker.wait()
    assert not stays_awake(then)  # it has ended


# --- locks that another thread held ---------------------------------------------------------------------------------
@pytest.fixture
def meanwhile() -> Iterator[Callable[[Callable[[threading.Event], None]], None]]:
    """``meanwhile(work)`` runs ``work(here)`` in a thread until it sets ``here``, where it stays till the end."""
    threads, end = [], threading.Event()

    def start(work: Callable[[threading.Event], None]) -> None:
        arrived = threading.Event()

        class Stay(threading.Event):
            def set(self) -> None:
                arrived.set()
                end.wait()

        threads.append(threading.Thread(target=work, args=(Stay(),)))
        threads[-1].start()
        assert arrived.wait(60)

    yield start
    end.set()
    for thread in threads:
        thread.join()


@pytest.mark.sampled
@pytest.mark.parametrize("is_late", [False, True])
def test_a_fork_amid_a_build_of_another_thread(
    library: relay.Library, meanwhile: Any, is_late: bool, request: pytest.FixtureRequest
) -> None:
    if is_late:
        request.getfixturevalue("late")

    def work(here: threading.Event) -> None:
        mod, params = relay.frontend.from_onnx(model())
        relay.build(mod, params=params, kernel_cache="off", progress=lambda name: name == "LegalizeOps" and here.set())

    meanwhile(work)
    for forbidden in (build, lambda: relay.frontend.from_onnx(model()), EXCLUSIVE.take):
        with pytest.raises(ForkError, match="another thread imported or built"):
            in_child(forbidden)
    assert in_child(lambda: runs(library))


def test_a_fork_amid_a_run_of_another_thread(library: relay.Library, meanwhile: Any) -> None:
    machine = library.vm()

    def work(here: threading.Event) -> None:
        machine.set_instrument(lambda *_: here.set() or 0)
        machine["main"](value(0))

    meanwhile(work)
    with pytest.raises(ForkError, match="running in another thread"):
        in_child(lambda: machine["main"](value(1)))
    assert in_child(lambda: runs(library))


def test_a_fork_waits_for_the_run_of_another_thread(library: relay.Library) -> None:
    """TVM's allocator has a lock, which that run may hold: the child's first run would wait for it for ever."""
    machine, inside, done = library.vm(), threading.Event(), threading.Event()

    def stay(*_: Any) -> int:
        inside.set()
        time.sleep(0.005)
        return 0

    def keep_running() -> None:
        while not done.is_set():
            machine["main"](value(0))

    machine.set_instrument(stay)
    thread = threading.Thread(target=keep_running)
    thread.start()
    try:
        assert inside.wait(60)
        assert in_child(lambda: is_right(machine["main"](value(1)), 1)), "nobody was inside the instance"
    finally:
        done.set()
        thread.join()


# --- the end of the process -----------------------------------------------------------------------------------------
EXIT = """
    import os, sys, time
    from tests.attack.children import wait
    from tests.attack.libraries import build, is_right, value
    from tvm_ext import forks
    forks._END_WITHIN_S = 0.5
    machine = build().vm()
    machine["main"](value(0))
    time.sleep(0.5)
    for work in (False, True):
        child = os.fork()
        if child == 0:
            right = not work or is_right(machine["main"](value(1)), 1)
            sys.exit(0 if not right else 8 if forks.left_behind else 7)
        print(os.waitstatus_to_exitcode(wait(child)))
"""
LATE = "8", str(-signal.SIGALRM), str(-signal.SIGABRT)


@pytest.mark.parametrize("spins", [pytest.param(None, marks=pytest.mark.slow), "0"])
def test_a_child_that_ends_as_programs_do(run_python: Callable[..., Any], spins: str | None) -> None:
    """Workers that do not spin sleep at once: then the end comes late, with the status of a signal, and still comes."""
    result: subprocess.CompletedProcess[str] = run_python(textwrap.dedent(EXIT), TVM_THREAD_POOL_SPIN_COUNT=spins)
    ends = result.stdout.split()
    assert len(ends) == 2 and set(ends) <= {"7", *LATE}, result.stderr
    assert spins is None or set(ends) & set(LATE)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forks_at_random_moments_of_other_threads(library: relay.Library) -> None:
    """Two threads import and build without end. A child runs and builds, or refuses to build; it never hangs."""
    done = threading.Event()

    def keep_building(seed: int) -> None:
        while not done.is_set():
            build(seed=seed)

    def work() -> str:
        assert runs(library)
        try:
            return "built" if runs(build()) else "wrong"
        except ForkError:
            return "refused"

    threads = [threading.Thread(target=keep_building, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        outcomes = []
        for number in range(30):
            time.sleep(0.037 * (number % 7))
            outcomes.append(in_child(work))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert set(outcomes) <= {"built", "refused"}
    print(outcomes)


def test_a_fork_starts_no_pool_where_there_was_none(run_python: Callable[..., Any]) -> None:
    """A pool's workers look for work for minutes on a busy machine, and the end of the process waits for them."""
    result = run_python(
        textwrap.dedent(
            """
            import os, tvm
            from tvm_ext import forks

            def threads():
                return set(os.listdir("/proc/self/task"))

            forks.watch()
            before = threads()
            if (child := os.fork()) == 0:
                os._exit(len(threads()) - 1)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(threads() - before))
            forks._runtime_function("NumThreads")()  # starts the pool
            print(forks._may_have_pool())
            """
        ),
        TVM_NUM_THREADS="2",
    )
    assert result.stdout.split() == ["0", "0", "True"], result.stderr
