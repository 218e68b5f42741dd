from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import tvm

from tests.unit.rammer_runtime.tables import chain, expected, kernels, needs_runtime, refused, run
from tvm_ext.rammer_runtime import native

pytestmark = needs_runtime

INPUTS = tuple(np.random.default_rng(0).standard_normal((2, 64)).astype("float32") * np.float32(1e-3))
LENGTH = 20


@pytest.fixture(autouse=True)
def _no_limits():
    yield
    native.set_thread_limit(None)
    native.set_wait_limit(None)


@pytest.mark.parametrize("units", [1, 2, 3, 8])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_table_computes_what_it_says_on_any_number_of_threads(units, threads):
    native.set_thread_limit(threads)
    module = native.make_module(chain(LENGTH, units), [kernels()])
    for _ in range(20):
        np.testing.assert_array_equal(run(module, "chain", INPUTS), expected(*INPUTS, LENGTH))


def test_an_exported_table_runs_after_loading(tmp_path: Path):
    native.make_module(chain(LENGTH, 2), [kernels()]).export_library(str(tmp_path / "table.so"))
    loaded = tvm.runtime.load_module(str(tmp_path / "table.so"))
    assert loaded.kind == "tvm_ext.rammer"
    np.testing.assert_array_equal(run(loaded, "chain", INPUTS), expected(*INPUTS, LENGTH))


def test_threads_run_one_module_at_once():
    module = native.make_module(chain(LENGTH, 2), [kernels()])
    wrong = []

    def work(seed: int) -> None:
        inputs = tuple(np.random.default_rng(seed).standard_normal((2, 64)).astype("float32"))
        wanted = expected(*inputs, LENGTH)
        wrong.extend(seed for _ in range(100) if not np.array_equal(run(module, "chain", inputs), wanted))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_that_throws_ends_the_run_and_the_next_one_works(threads):
    native.set_thread_limit(threads)
    module = native.make_module(refused(3), [kernels()])
    tensor = tvm.runtime.tensor(np.zeros(1024, "float32"))
    for _ in range(50):
        with pytest.raises(RuntimeError, match=r"rTask 3 is refused\n  in entry 0 of vEU 1 \(picked, kernel picky"):
            module["refused"](tensor)
    sound = native.make_module(refused(4), [kernels()])
    sound["refused"](tensor)
    assert tensor.numpy()[:5].tolist() == [1, 2, 0, 0, 5]


def test_a_recorded_run_says_when_each_entry_ran():
    table = chain(LENGTH, 2)
    module = native.make_module(table, [kernels()])
    native.record(module)
    run(module, "chain", INPUTS)
    rows = native.recorded(module)
    assert [(row.unit, row.entry) for row in rows] == [
        (unit, place) for unit, stream in enumerate(table.streams) for place in range(len(stream))
    ]
    assert all(0 < row.start_ns <= row.end_ns for row in rows)
    of = {(row.unit, row.entry): row for row in rows}
    for unit, stream in enumerate(table.streams):
        for place, entry in enumerate(stream):
            for other, count in entry.waits:
                assert of[other, count - 1].end_ns <= of[unit, place].start_ns


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([np.zeros(64, "float32")] * 2, "takes 3 tensors, and was given 2"),
        (
            [np.zeros(64, "float32"), np.zeros(63, "float32"), np.zeros(64, "float32")],
            "argument 1 of chain must be 256",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, reason):
    module = native.make_module(chain(LENGTH, 2), [kernels()])
    with pytest.raises((TypeError, ValueError), match=reason):
        module["chain"](*map(tvm.runtime.tensor, arguments))


def test_a_kernel_that_no_library_has_is_an_error():
    with pytest.raises(RuntimeError, match="kernel axpy of chain is in none of the libraries"):
        run(native.make_module(chain(LENGTH, 2), []), "chain", INPUTS)
