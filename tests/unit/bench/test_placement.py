"""Threads on cores of their own: the plan, the pinning, and that nobody stays pinned."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from benchmarks import _peers
from tvm_ext.bench import compare as bench_module
from tvm_ext.bench import contenders, environment, models
from tvm_ext.bench.compare import bench
from tvm_ext.bench.environment import Placement, on_main_core, place_threads

CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

needs_affinity = pytest.mark.skipif(not CORES, reason="the system knows no affinity")
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core: there is nothing to choose")


@pytest.fixture(autouse=True)
def _nobody_stays_pinned() -> Iterator[None]:
    yield
    if CORES:
        assert os.sched_getaffinity(0) == CORES


def _machine(monkeypatch: pytest.MonkeyPatch, allowed: set[int], bound: set[int]) -> None:
    """The caller may use ``allowed``; a thread is bound to each core of ``bound``."""
    monkeypatch.setattr(environment, "_affinity", lambda _thread: set(allowed))
    monkeypatch.setattr(environment, "_bound_cores", lambda: set(bound))


@pytest.mark.parametrize(
    ("allowed", "bound", "threads", "expected"),
    [
        ({0, 1}, {1}, 2, (0, (1,))),
        ({0, 1}, {0}, 2, (1, (0,))),
        ({0, 1}, set(), 2, (0, (1,))),
        ({0, 1}, {1}, 1, (0, ())),
        ({0, 1, 2, 3}, {1, 2, 3}, 4, (0, (1, 2, 3))),
        ({0, 1, 2, 3}, {3}, 3, (0, (3, 1))),  # the pool's core first
        ({4, 5, 6}, {0, 5}, 2, (4, (5,))),  # core 0 is not ours
        ({0, 1}, {0, 1}, 2, (0, (1,))),  # every core has a bound thread: any will do
        ({0, 1}, {1}, 3, None),  # more threads than cores
        ({2}, set(), 1, None),
        (set(), set(), 1, None),  # a system without affinity
    ],
)
def test_a_core_for_each_thread(
    monkeypatch: pytest.MonkeyPatch,
    allowed: set[int],
    bound: set[int],
    threads: int,
    expected: tuple[int, tuple[int, ...]] | None,
) -> None:
    _machine(monkeypatch, allowed, bound)
    wanted = None if expected is None else Placement(main_core=expected[0], worker_cores=expected[1])
    assert place_threads(threads) == wanted


def test_a_placement_says_where_and_counts_from_one_for_onnx_runtime() -> None:
    placed = Placement(main_core=0, worker_cores=(1, 3))
    assert str(placed) == "main thread on core 0, workers on 1, 3"
    assert placed.onnx_runtime_affinities == "2;4"
    assert str(Placement(main_core=2, worker_cores=())) == "main thread on core 2"


@needs_affinity
def test_the_caller_keeps_to_its_core_and_is_let_go_afterwards() -> None:
    core = max(CORES)
    with on_main_core(Placement(main_core=core, worker_cores=())):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == CORES


@needs_affinity
def test_the_caller_is_let_go_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), on_main_core(Placement(main_core=min(CORES), worker_cores=())):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == CORES


@needs_two_cores
def test_other_threads_are_left_alone() -> None:
    found: list[set[int]] = []
    ready, go = threading.Event(), threading.Event()

    def look() -> None:
        ready.set()
        go.wait(60)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=look)
    thread.start()
    ready.wait(60)
    with on_main_core(Placement(main_core=min(CORES), worker_cores=())):
        go.set()
        thread.join(60)
    assert found == [CORES]


@pytest.mark.parametrize("placed", [None, Placement(main_core=1000, worker_cores=())])
def test_nothing_happens_without_a_placement_or_where_the_core_is_refused(placed: Placement | None) -> None:
    with on_main_core(placed):
        assert not CORES or os.sched_getaffinity(0) == CORES


def test_a_system_without_affinity_places_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert place_threads(1) is None
    assert place_threads(2) is None


@needs_two_cores
def test_the_threads_of_all_contenders_are_placed_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the clock sees it: the caller on one core, each session's worker bound beside it, nobody else moved."""
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is one of the peers")
    while_timed: list[tuple[set[int], list[set[int]]]] = []
    measure: Callable[..., object] = bench_module._measure

    def spy(*arguments: object) -> object:
        others = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task") if name not in before]
        while_timed.append((os.sched_getaffinity(0), others))
        return measure(*arguments)

    monkeypatch.setattr(bench_module, "_measure", spy)
    before = set(os.listdir("/proc/self/task"))  # parked threads of earlier builds stay bound to their cores
    result = bench("mlp", peers=["onnxruntime"], rounds=1)
    placed = place_threads(result.environment.threads)
    assert result.environment.placement == str(placed or "unbound")
    ((caller, others),) = while_timed
    if placed is None:
        assert caller == CORES
        return
    assert caller == {placed.main_core}
    bound = [min(cores) for cores in others if len(cores) == 1]
    assert set(placed.worker_cores) <= set(bound)
    assert placed.main_core not in bound


def _product(placed: Placement | None, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    contender = _peers.prepare_numpy_matmul(left, right, 2, placed)
    contender.run()
    (product,) = contender.outputs()
    return product


def test_numpy_is_right_and_takes_the_threads_it_is_given() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="NumPy's threads are set with it")
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal(shape).astype("float32") for shape in ((300, 200), (200, 250)))
    with threadpoolctl.threadpool_limits(user_api="blas"):  # puts the number of threads back
        product = _product(None, left, right)
        counts = {item["num_threads"] for item in threadpoolctl.threadpool_info() if item["user_api"] == "blas"}
    assert counts == {2}
    np.testing.assert_allclose(product, left.astype("float64") @ right.astype("float64"), rtol=1e-4, atol=1e-4)


@needs_two_cores
def test_workers_of_openblas_are_bound() -> None:
    """Its one worker, bound to one core and then to another: a thread more on the latter, one less on the former."""
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="NumPy's threads are set with it")
    first, second = sorted(CORES)[:2]
    square = np.ones((256, 256), "float32")
    libraries = [item for item in threadpoolctl.threadpool_info() if item["internal_api"] == "openblas"]
    if not libraries:
        pytest.skip("NumPy has another BLAS here")

    def bound() -> tuple[int, int]:
        threads = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
        return threads.count({first}), threads.count({second})

    with threadpoolctl.threadpool_limits(user_api="blas"):
        _product(Placement(main_core=first, worker_cores=(second,)), square, square)
        before = bound()
        if not _peers.place_openblas(libraries[0]["filepath"], Placement(main_core=second, worker_cores=(first,))):
            pytest.skip("this OpenBLAS has no entry that binds its workers")
        assert bound() == (before[0] + 1, before[1] - 1)


def test_onnx_runtime_computes_the_same_when_bound() -> None:
    pytest.importorskip("onnxruntime", reason="ONNX Runtime is one of the peers")
    model = models.build_model("mlp")
    inputs = models.random_inputs(model)
    outputs = []
    for placed in (None, place_threads(2)):
        contender = contenders.prepare_onnx_runtime(model, inputs, 2, placed)
        contender.run()
        outputs.append(contender.outputs())
        assert contender.close() == ""
    for free, bound in zip(*outputs, strict=True):
        np.testing.assert_array_equal(free, bound)
