"""Many threads that import, build and run at once: each gets its own model and results; streams stay as they are."""

from __future__ import annotations

import collections
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.attack import libraries
from tests.support.small_models import onnx_model
from tvm_ext import relay
from tvm_ext.errors import ConcurrentUseError, ModelError

THREADS = 8
RUNS = 20
X = np.random.default_rng(0).standard_normal((6, 8)).astype("float32")


def model(number: int) -> onnx.ModelProto:
    """relu(x @ w) + ``number``, whose w and width differ between numbers; every fourth has an operator nobody knows."""
    weight = np.random.default_rng(number).standard_normal((8, 5 + number)).astype("float32")
    constants = {"w": weight, "c": np.full((1,), number, "float32")}
    last = helper.make_node("NoSuchOperator" if number % 4 == 3 else "Add", ["r", "c"], ["y"], name=f"last{number}")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Relu", ["p"], ["r"]), last]
    return onnx_model(nodes, {"x": X.shape}, constants=constants)


def expected(number: int) -> np.ndarray:
    weight = np.random.default_rng(number).standard_normal((8, 5 + number)).astype("float32")
    return np.maximum(X @ weight, 0) + number


def build_and_run(number: int) -> np.ndarray | str:
    try:
        mod, params = relay.frontend.from_onnx(model(number))
    except ModelError as error:
        return str(error)
    library = relay.build(mod, params=params, kernel_cache="off")
    return np.asarray(library.vm()["main"](X).numpy())


@pytest.mark.timeout(300)
def test_imports_and_builds_at_once() -> None:
    streams, error_stream = (sys.stdout, sys.stderr), os.fstat(2).st_ino
    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(build_and_run, range(2 * THREADS)))
    for number, result in enumerate(results):
        if number % 4 == 3:
            assert isinstance(result, str)
            assert "NoSuchOperator" in result
        else:
            assert not isinstance(result, str), result
            np.testing.assert_allclose(result, expected(number), rtol=1e-4, atol=1e-4)
    assert (sys.stdout, sys.stderr) == streams
    assert os.fstat(2).st_ino == error_stream


def test_an_operator_that_fails_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Stock TVM's importer prints the operands of a node that it cannot convert."""
    node = helper.make_node("Reshape", ["x", "shape"], ["y"], name="reshape_me")
    model = onnx_model([node], {"x": (4, 6)}, constants={"shape": np.array([5, 7], "int64")})
    with pytest.raises(ModelError, match="reshape_me"):
        relay.frontend.from_onnx(model)
    assert capfd.readouterr().out == ""


# --- one library in many threads -------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["built", "loaded"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> relay.Library:
    library = libraries.build()
    return library if request.param == "built" else libraries.loaded(library, tmp_path_factory.mktemp("threads"))


def in_threads(work: Callable[[int], list[str]], threads: int = THREADS) -> list[str]:
    """All that ``work(0)``, ``work(1)``, ... answer, each in a thread of its own; they start at once."""
    start = threading.Barrier(threads)

    def begin(number: int) -> list[str]:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return [text for texts in pool.map(begin, range(threads)) for text in texts]


def test_an_instance_for_each_thread(library: relay.Library) -> None:
    def work(number: int) -> list[str]:
        module = library["default"]()
        for _ in range(RUNS):
            module.set_input("x", libraries.value(number))
            module.run()
        return ["right" if libraries.is_right(module.get_output(0), number) else "wrong"]

    assert set(in_threads(work)) == {"right"}


def test_one_virtual_machine_for_all_threads(library: relay.Library) -> None:
    machine = library.vm()
    main = machine["main"]

    def work(number: int) -> list[str]:
        results = [main(libraries.value(number)), *(machine["main"](libraries.value(number)) for _ in range(RUNS))]
        return ["right" if libraries.is_right(result, number) else "wrong" for result in results]

    assert set(in_threads(work)) == {"right"}


def sequence_of(module: relay.GraphModule, number: int) -> str:
    """Set, run and read as one thread would; "refused" where an error of ours says that another came between."""
    try:
        module.set_input("x", libraries.value(number))
        module.run()
        result = module.get_output(0)
    except ConcurrentUseError:
        return "refused"
    return "right" if libraries.is_right(result, number) else "wrong"


def test_one_graph_module_for_all_threads_is_right_or_refuses(library: relay.Library) -> None:
    module = library["default"]()
    results = in_threads(lambda number: [sequence_of(module, number) for _ in range(RUNS)])
    assert set(results) <= {"right", "refused"}
    assert sequence_of(module, 0) == "right"  # and afterwards it is as good as before


def test_graph_modules_made_of_another_do_not_share_a_machine(library: relay.Library) -> None:
    first = library["default"]()
    others = [relay.GraphModule(first) for _ in range(THREADS)]
    assert len({id(module.vm) for module in (first, *others)}) == THREADS + 1
    results = in_threads(lambda number: [sequence_of(others[number], number) for _ in range(RUNS)])
    assert set(results) == {"right"}


def test_the_stateful_calls_of_a_machine_are_right_or_refuse(library: relay.Library) -> None:
    machine = library.vm()

    def once(number: int) -> str:
        try:
            machine.set_input("main", libraries.value(number))
            machine.invoke_stateful("main")
            result = machine.get_outputs("main")
        except ConcurrentUseError:
            return "refused"
        return "right" if libraries.is_right(result, number) else "wrong"

    assert set(in_threads(lambda number: [once(number) for _ in range(RUNS)])) <= {"right", "refused"}


def test_a_call_that_overlaps_another_is_refused(library: relay.Library) -> None:
    module, running, end = library["default"](), threading.Event(), threading.Event()

    def stay(*_: Any) -> int:
        running.set()
        end.wait(60)
        return 0

    module.vm.set_instrument(stay)
    with ThreadPoolExecutor(1) as other:
        run = other.submit(module.run, x=libraries.value(1))
        assert running.wait(60)
        for call in (module.run, module.benchmark, module.get_output, lambda: module.set_input("x", X)):
            with pytest.raises(
                ConcurrentUseError, match=r"used by another thread.\n  remedy: give each thread its own"
            ):
                call()
        end.set()
        run.result()
    assert libraries.is_right(module.get_output(0), 1)


A, B, MAIN = "A", "B", "main"
SEQUENCES = [
    # Both sides work together: what a thread set was used, or it never set or ran itself.
    ([(A, "set"), (B, "run"), (A, "get")], ""),
    ([(A, "set"), (A, "run"), (B, "get"), (A, "get")], ""),
    ([(A, "set"), (B, "run"), (B, "set"), (A, "run"), (A, "get")], ""),
    ([(MAIN, "set"), (A, "set"), (A, "run"), (A, "get"), (B, "set"), (B, "run"), (B, "get"), (MAIN, "get")], ""),
    (
        [
            (MAIN, "set"),
            (MAIN, "run"),
            (MAIN, "set"),
            (A, "run"),
            (MAIN, "get"),
            (MAIN, "set"),
            (B, "run"),
            (MAIN, "get"),
        ],
        "",
    ),
    # One comes between the other's calls.
    ([(A, "set"), (B, "set"), (B, "run"), (B, "get"), (A, "run")], "'x'"),
    ([(A, "set"), (B, "set"), (A, "run")], "'x'"),
    ([(A, "set"), (A, "run"), (B, "set"), (B, "run"), (A, "get")], "outputs"),
    ([(A, "set"), (A, "run"), (A, "get"), (B, "run"), (A, "get")], "outputs"),
]


@pytest.mark.parametrize(("calls", "refused"), SEQUENCES)
def test_who_comes_between_two_calls(calls: list[tuple[str, str]], refused: str) -> None:
    """The last call of a sequence is refused, with a word of the reason, or nothing is."""
    module = _plain_library()["default"]()
    actions = {
        "set": lambda thread: module.set_input("x", libraries.value(ord(thread[0]))),
        "run": lambda _: module.run(),
        "get": lambda _: module.get_output(0),
    }
    threads = {name: ThreadPoolExecutor(1) for name in (A, B, MAIN)}
    last_set = ""
    for index, (thread, action) in enumerate(calls):
        answer = threads[thread].submit(actions[action], thread)
        if refused and index == len(calls) - 1:
            with pytest.raises(ConcurrentUseError, match=refused):
                answer.result(60)
        else:
            result = answer.result(60)
            last_set = thread if action == "set" else last_set
            assert action != "get" or libraries.is_right(result, ord(last_set[0]))
    for pool in threads.values():
        pool.shutdown()


@functools.cache
def _plain_library() -> relay.Library:
    return libraries.build()


def test_an_instance_is_small_and_shares_constants() -> None:
    """An instance of 4 MB of constants that has run takes less than an eighth of them (measured: 1 kB, and outputs)."""
    size, count = 1024, 16
    library = libraries.build(size)
    machines = [library.vm() for _ in range(2 + count)]
    for machine in machines[:2]:
        machine["main"](libraries.value(0, size))
    before = resident_bytes()
    for machine in machines[2:]:
        assert machine["main"](libraries.value(0, size)).shape == (size, size)
    taken = (resident_bytes() - before) / count
    output = 4 * size * size  # which a machine keeps until its next run
    assert taken - output < 4 * size * size / 8


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_building_and_running(library: relay.Library, tmp_path: Path) -> None:
    """Eight threads: all run one library, through instances and one machine of all, and every other one also builds."""
    shared, end = library.vm(), time.monotonic() + 60
    counts: collections.Counter[str] = collections.Counter()

    def once(thread: int, module: relay.GraphModule, turn: int) -> Iterator[str]:
        number = thread * 1000 + turn
        yield "run " + sequence_of(module, number)
        yield "shared " + ("right" if libraries.is_right(shared["main"](libraries.value(number)), number) else "wrong")
        if thread % 2:
            size = 16 + turn % 40
            other = libraries.build(size, turn)
            if turn % 4 == 0:
                folder = tmp_path / f"{thread}-{turn}"
                folder.mkdir()
                other = libraries.loaded(other, folder)
            result = other.vm()["main"](libraries.value(turn, size))
            yield "build " + ("right" if libraries.is_right(result, turn, size, turn) else "wrong")

    def work(thread: int) -> list[str]:
        module, turn, texts = library["default"](), 0, []
        while time.monotonic() < end:
            texts += once(thread, module, turn)
            turn += 1
        return texts

    counts.update(in_threads(work))
    print(dict(counts))
    assert set(counts) == {"run right", "shared right", "build right"}
    assert min(counts.values()) >= THREADS
