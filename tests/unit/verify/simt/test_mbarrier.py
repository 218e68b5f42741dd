"""Bulk copies and mbarriers: sound kernels are not accused, and each mistake in them has its finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.verify.simt.bulk_kernels import HOPPER, ROW, STEPS, Matmul, Row, Step, copy_row, first_thread, meet
from tests.unit.verify.simt.small_kernels import barriers, without_barrier
from tvm_ext._tvm import ptx_call, tirx
from tvm_ext.errors import InputError
from tvm_ext.ir.build_ir import index, load, sequence, store
from tvm_ext.ir.bulk_ir import (
    announce_bytes,
    arrive,
    copy_in_bulk,
    fence_generic_stores,
    fence_initialised_mbarriers,
    initialise_mbarrier,
    invalidate_mbarrier,
    shared_pointer,
    wait_for_phase,
)
from tvm_ext.verify import simt


def run_row(changes: dict[str, Step | None] | None = None) -> simt.SimtRun:
    kernels = simt.lower(copy_row(changes), HOPPER)
    return simt.run(kernels, {"A": np.arange(ROW, dtype="float32")}, device=HOPPER)


def run_matmul(kernel: Matmul, k: int = 160) -> tuple[simt.SimtRun, float]:
    """(the run, largest error of C against float64)"""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((64, k)).astype(kernel.dtype)
    b = rng.standard_normal((k, 32)).astype(kernel.dtype)
    result = simt.run(simt.lower(kernel.function(k=k), HOPPER), {"A": a, "B": b}, device=HOPPER)
    return result, float(np.abs(result.outputs["C"] - a.astype("float64") @ b.astype("float64")).max())


def found(result: simt.SimtRun) -> set[str]:
    return {finding.kind for finding in result.findings}


def text(result: simt.SimtRun) -> str:
    return "\n".join(str(finding) for finding in result.findings)


def test_a_row_arrives() -> None:
    result = run_row()
    assert result.ok, text(result)
    np.testing.assert_array_equal(result.outputs["B"], np.arange(ROW, dtype="float32"))
    (copied,) = result.counters.select(scope="global", store=False)
    assert (copied.requests, copied.width_bytes, copied.sectors, copied.useful_bytes) == (1, 256, 8, 256)


def wait(parity: int) -> Step:
    return lambda r: wait_for_phase(r.barriers, index(0), index(parity))


def announce(size_bytes: int) -> Step:
    return lambda r: first_thread(r.thread, announce_bytes(r.barriers, index(0), size_bytes))


def copy(size_bytes: int, offset: int = 0) -> Step:
    return lambda r: first_thread(r.thread, r.copy(size_bytes, offset))


def everybody(step: str) -> Step:
    """The step without its condition that only the first thread does it."""
    return lambda r: STEPS[step](r).then_case


def zeros(r: Row) -> Any:
    return store(r.tile, tirx.const(0, "float32"), [r.thread])


def zeros_fenced(r: Row) -> Any:
    return sequence(zeros(r), fence_generic_stores())


def second_copy(r: Row) -> Any:
    """One more row, to the other half of the tile and for the second mbarrier, which nobody waits for."""
    more = copy_in_bulk(r.tile, index(ROW), r.a, [index(0)], 4 * ROW, r.pointer(1))
    return first_thread(r.thread, announce_bytes(r.barriers, index(1), 4 * ROW), more)


def both(r: Row) -> Any:
    return first_thread(r.thread, *(initialise_mbarrier(r.barriers, index(i), 1) for i in (0, 1)))


def overwrite(r: Row) -> Any:
    stored = store(r.barriers, tirx.const(1, "uint64"), [index(0)])
    return sequence(first_thread(r.thread, stored), meet())


def gone(r: Row) -> Any:
    return sequence(meet(), first_thread(r.thread, invalidate_mbarrier(r.barriers, index(0))), meet())


MISTAKES: dict[str, tuple[dict[str, Step | None], str, str]] = {
    # what is wrong: (the changed steps, the kind that must be found, words of its detail)
    "nothing announced": ({"announce": None}, "mbarrier deadlock", "1 of 1 arrivals are missing"),
    "too few announced": ({"announce": announce(128)}, "wrong byte count", "128 bytes more are copied"),
    "too many announced": ({"announce": announce(512)}, "wrong byte count", "256 of the bytes announced are never"),
    "nothing copied": ({"copy": None}, "wrong byte count", "256 of the bytes announced are never"),
    "no wait": ({"wait": None}, "unlanded copy", "before its cp.async"),
    "parity of the next phase": ({"wait": wait(1)}, "unlanded copy", "before its cp.async"),
    "one thread waits": (
        {"wait": lambda r: first_thread(r.thread, STEPS["wait"](r))}, "unlanded copy", "has not waited for the copy",
    ),
    "never initialised": ({"initialise": None, "fence": None}, "mbarrier misuse", "never initialised"),
    "all initialise": ({"initialise": everybody("initialise")}, "mbarrier misuse", "64 threads initialise"),
    "no barrier behind": ({"meet": None}, "read-write race", "read after write"),
    "no fence behind": ({"fence": None}, "missing proxy fence", "initialised it without a fence"),
    "all announce": ({"announce": everybody("announce")}, "mbarrier misuse", "63 arrivals more than the 1 expected"),
    "all copy": ({"copy": everybody("copy")}, "write-write race", ""),
    "24 bytes": ({"copy": copy(24)}, "misaligned access", "no multiple of 16"),
    "to byte 8": ({"copy": copy(256, 2)}, "misaligned access", "at byte 8"),
    "stored before": ({"fence": lambda r: sequence(STEPS["fence"](r), zeros(r))}, "missing proxy fence", "stored here"),
    "fenced by another": (
        {"fence": lambda r: sequence(STEPS["fence"](r), zeros(r), first_thread(r.thread, fence_generic_stores()))},
        "missing proxy fence", "thread 1 of block 0 stored here",
    ),
    "stored while on its way": ({"copy": lambda r: sequence(STEPS["copy"](r), zeros(r))}, "copy overlap", "on its way"),
    "stored after another's wait": (
        {"wait": lambda r: sequence(first_thread(r.thread, STEPS["wait"](r)), zeros(r))}, "copy overlap", "not waited",
    ),
    "left behind": ({"initialise": both, "second": second_copy}, "unlanded copy", "when its block ends"),
    "overwritten": ({"overwrite": overwrite, "wait again": wait(0)}, "mbarrier misuse", "overwritten"),
    "used for something else": (
        {"later": lambda r: sequence(meet(), overwrite(r))}, "mbarrier misuse", "without mbarrier.inval",
    ),
    "initialised again": (
        {"later": lambda r: sequence(meet(), STEPS["initialise"](r))}, "mbarrier misuse", "initialised again",
    ),
    "waited for when it is gone": ({"later": gone, "wait again": wait(0)}, "mbarrier misuse", "never initialised"),
    "source moved on": ({"copy": lambda r: sequence(copy(256)(r), r.copy(256, 32))}, "copy overlap", ""),
}  # fmt: skip


def copied_again(r: Row) -> Any:
    return first_thread(r.thread, fence_initialised_mbarriers(), r.copy())


SOUND: dict[str, dict[str, Step | None]] = {
    "stored before, and fenced by all": {"fence": lambda r: sequence(STEPS["fence"](r), zeros_fenced(r))},
    "fenced by the one that copies, behind a barrier": {
        "fence": lambda r: sequence(STEPS["fence"](r), zeros(r)),
        "copy": lambda r: first_thread(r.thread, fence_generic_stores(), r.copy()),
    },
    "the wait of one, then a barrier": {
        "wait": lambda r: sequence(first_thread(r.thread, STEPS["wait"](r)), meet()),
    },
    "copied before it is announced": {
        "announce": None,
        "copy": lambda r: first_thread(r.thread, r.copy(), announce_bytes(r.barriers, index(0), 4 * ROW)),
    },
    "in two pieces": {
        "copy": lambda r: first_thread(
            r.thread, r.copy(128), copy_in_bulk(r.tile, index(32), r.a, [index(32)], 128, r.pointer())
        ),
    },
    "waited for twice": {"again": wait(0)},
    "stored behind the wait": {
        "again": lambda r: sequence(store(r.tile, load(r.tile, [r.thread]), [r.thread])),
    },
    "two phases": {
        "again": lambda r: sequence(
            meet(), first_thread(r.thread, announce_bytes(r.barriers, index(0), 4 * ROW), r.copy()), wait(1)(r)
        ),
    },
    "used for something else when it is gone": {"later": lambda r: sequence(gone(r), overwrite(r))},
    "initialised anew when it is gone": {
        "later": lambda r: sequence(gone(r), STEPS["initialise"](r), meet()),
        "again": lambda r: sequence(STEPS["announce"](r), copied_again(r), wait(0)(r)),
    },
    "another mbarrier": {
        "initialise": both,
        "second": second_copy,
        "second wait": lambda r: wait_for_phase(r.barriers, index(1), index(0)),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name: str) -> None:
    changes, kind, words = MISTAKES[name]
    result = run_row(changes)
    assert [f for f in result.findings if f.kind == kind and words in f.detail], text(result)


@pytest.mark.parametrize("name", SOUND)
def test_sound_variants_are_not_accused(name: str) -> None:
    result = run_row(SOUND[name])
    assert result.ok, text(result)
    np.testing.assert_array_equal(result.outputs["B"], np.arange(ROW, dtype="float32"))


def test_a_second_phase_needs_the_first_to_be_over() -> None:
    """Announced again while the first bytes are on their way: one phase counts both, and one arrival is too many."""
    result = run_row({"copy": lambda r: first_thread(r.thread, r.copy(), announce_bytes(r.barriers, index(0), 256))})
    assert "mbarrier misuse" in found(result)


def test_a_wait_for_threads_that_come_later_is_a_deadlock() -> None:
    def waits_first(r: Row) -> Any:
        free = first_thread(r.thread, initialise_mbarrier(r.barriers, index(1), ROW))
        order = (wait_for_phase(r.barriers, index(1), index(0)), arrive(r.barriers, index(1)))
        return sequence(free, meet(), *order)

    def arrives_first(r: Row) -> Any:
        free = first_thread(r.thread, initialise_mbarrier(r.barriers, index(1), ROW))
        return sequence(free, meet(), arrive(r.barriers, index(1)), wait_for_phase(r.barriers, index(1), index(0)))

    (finding,) = [f for f in run_row({"other": waits_first}).findings if f.kind == "mbarrier deadlock"]
    assert "64 of 64 arrivals are missing" in finding.detail
    assert run_row({"other": arrives_first}).ok


def test_an_mbarrier_orders_what_was_done_before_the_arrivals() -> None:
    """A reversal through shared memory, with an mbarrier in place of the block's barrier."""

    def reversal(r: Row, *, waits: bool) -> Any:
        start = first_thread(r.thread, initialise_mbarrier(r.barriers, index(1), ROW))
        put = store(r.tile, load(r.tile, [r.thread]), [index(2 * ROW - 1) - r.thread])
        wait = [wait_for_phase(r.barriers, index(1), index(0))] if waits else []
        return sequence(start, meet(), put, arrive(r.barriers, index(1)), *wait)

    def result(*, waits: bool) -> simt.SimtRun:
        function = copy_row({
            "turn": lambda r: reversal(r, waits=waits),
            "write": lambda r: store(r.b, load(r.tile, [index(ROW) + r.thread]), [r.thread]),
        })  # fmt: skip
        kernels = simt.lower(function, HOPPER)
        assert barriers(kernels[0].function) == 3, "stock ThreadSync, which knows no mbarriers, adds the third"
        arrays = {"A": np.arange(ROW, dtype="float32")}
        return simt.run(without_barrier(kernels, 2), arrays, device=HOPPER)

    sound = result(waits=True)
    assert sound.ok, text(sound)
    np.testing.assert_array_equal(sound.outputs["B"], np.arange(ROW, dtype="float32")[::-1])
    assert found(result(waits=False)) == {"read-write race"}


def test_a_form_that_is_not_known_is_refused() -> None:
    def multicast(r: Row) -> Any:
        name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        place, size, mask = tirx.address_of(load(r.a, [index(0)])), tirx.IntImm("uint32", 256), tirx.IntImm("uint16", 3)
        return tirx.Evaluate(ptx_call(name, shared_pointer(r.tile, index(0)), place, size, r.pointer(), mask))

    with pytest.raises(InputError, match="with 4 operands only"):
        run_row({"copy": multicast})


# --- pipelines ----------------------------------------------------------------------------------------------------
PIPELINES = [
    Matmul(stages=stages, release=release, scope=scope, dtype=dtype)
    for stages, release, scope, dtype in (
        (2, "barrier", "shared", "float32"),
        (3, "barrier", "shared.dyn", "float16"),
        (4, "barrier", "shared", "float16"),
        (2, "mbarrier", "shared.dyn", "float32"),
        (3, "mbarrier", "shared", "float16"),
        (5, "mbarrier", "shared", "float16"),
    )
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kernel", PIPELINES, ids=str)
def test_pipelines_are_not_accused(kernel: Matmul) -> None:
    for k in (32, 224):
        result, error = run_matmul(kernel, k)
        assert result.ok, text(result)
        assert error < 1e-4


BROKEN = {
    "no wait": ({"waits": False}, {"unlanded copy"}),
    "parity of the other phase": ({"parity_shift": 1}, {"unlanded copy"}),
    "slots not handed back": ({"releases": False}, {"loop-carried hazard", "read-write race"}),
    "half announced": ({"announced_tiles": 0}, {"unlanded copy", "wrong byte count"}),
    "twice announced": ({"announced_tiles": 2}, {"wrong byte count"}),
    "slot in use": ({"shift": 1}, {"unlanded copy", "read-write race", "loop-carried hazard", "wrong byte count"}),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("release", ["barrier", "mbarrier"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_pipelines_are_caught(name: str, release: str) -> None:
    change, kinds = BROKEN[name]
    broken = replace(PIPELINES[1 if release == "barrier" else 4], **change)  # type: ignore[arg-type]
    result, _ = run_matmul(broken)
    assert found(result) & kinds, text(result)
