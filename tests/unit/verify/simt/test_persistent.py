"""Blocks that wait for each other: sound persistent kernels are not accused, and each mistake has its finding."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.simt.persistent_kernels import PersistentKernel, Tables, expected, static_tables, ticket_tables
from tvm_ext.errors import InputError
from tvm_ext.ir.device_sync import SyncOrders
from tvm_ext.records.rtasks import RKernel, ROperator, RTaskGraph, RTaskProgram, ScheduleEntry, VDevice
from tvm_ext.verify import simt
from tvm_ext.verify.simt import Concurrency
from tvm_ext.verify.simt.turns import BlockTurns

DEVICE = "nvidia-a100"
ORDERS = [
    Concurrency(order="forward"),
    Concurrency(order="backward"),
    *(Concurrency(order="random", seed=s) for s in (1, 2)),
]


SEEDS = [Concurrency(order="random", seed=seed) for seed in range(4)]


def operator(tasks: int, *predecessors: int) -> ROperator:
    kernel = RKernel(name=f"of_{tasks}", task_count=tasks, task_s=1e-6)
    return ROperator(name="o", kernels=(kernel,), predecessors=predecessors)


def entry(number: int, begin: int, end: int, *waits: tuple[int, int]) -> ScheduleEntry:
    return ScheduleEntry(operator=number, kernel=0, begin=begin, end=end, waits=waits)


# Figure 9 of the paper: a product, a ReLU beside it, and a convolution of both.
FIGURE_9 = RTaskGraph(operators=(operator(2), operator(4), operator(2, 0, 1)))
PROGRAM = RTaskProgram(
    device=VDevice(name="two", unit_count=2),
    streams=((entry(0, 0, 2), entry(2, 0, 1, (1, 1))), (entry(1, 0, 4), entry(2, 1, 2, (0, 1)))),
)
STATIC = PersistentKernel(tables=static_tables(PROGRAM, FIGURE_9), blocks=2)
TICKETS = PersistentKernel(tables=ticket_tables(FIGURE_9, 3), blocks=3, tickets=True)


@functools.cache
def lowered(kernel: PersistentKernel) -> tuple[simt.DeviceKernel, ...]:
    return simt.lower(kernel.function(), DEVICE)


def run(
    kernel: PersistentKernel, how: Concurrency | None = None, *, epoch: int = 0, runs: int = 1
) -> tuple[simt.SimtRun, list[str]]:
    """(the last run, what was found in any), each on the state that the one before left, and on a poisoned arena."""
    kernels, inputs, found = lowered(kernel), kernel.inputs(epoch), []
    for _ in range(runs):
        result = simt.run(kernels, inputs, device=DEVICE, concurrency=how)
        inputs["state"] = result.outputs["state"]
        found += [finding.kind for finding in result.findings]
    return result, found


def is_right(result: simt.SimtRun, graph: RTaskGraph = FIGURE_9) -> bool:
    return np.array_equal(result.outputs["arena"], expected(graph))


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", [STATIC, TICKETS], ids=["static", "tickets"])
@pytest.mark.parametrize("how", ORDERS, ids=lambda how: f"{how.order}-{how.seed}")
def test_a_sound_kernel_is_right_in_every_order(kernel: PersistentKernel, how: Concurrency) -> None:
    result, found = run(kernel, how, runs=2)
    assert not found and is_right(result)
    assert (result.outputs["state"][-kernel.blocks :] == 2).all()


@pytest.mark.parametrize("kernel", [STATIC, TICKETS], ids=["static", "tickets"])
@pytest.mark.parametrize("epoch", [(1 << 31) - 1, (1 << 32) - 1])
def test_counters_wrap(kernel: PersistentKernel, epoch: int) -> None:
    result, found = run(kernel, Concurrency(order="random"), epoch=epoch)
    assert not found and is_right(result)


@pytest.mark.parametrize(("resident", "order"), [(1, "forward"), (2, "backward"), (2, "random")])
def test_tickets_need_no_resident_blocks(resident: int, order: Any) -> None:
    result, found = run(TICKETS, Concurrency(resident=resident, order=order), runs=2)
    assert not found and is_right(result)


def test_streams_of_blocks_that_have_no_room_are_a_deadlock_that_says_who_waits_for_what() -> None:
    result, found = run(STATIC, Concurrency(resident=1))
    assert found[0] == "block deadlock"
    text = str(result.findings[0])
    assert "block deadlock of state[1] by thread 0 of block 0" in text
    assert "block 0 waits for state[1] to reach 1: it is at 0, 1 short" in text
    assert "1 are on the device, and blocks 1 have not begun" in text
    assert "tvm_ext_wait_until" in text and "source_code" not in text


STEPS = {
    "no waits": ({"waits": False}, "cross-block race"),
    "no barrier behind a wait": ({"meets_behind_wait": False}, "cross-block race"),
    "no barrier before an arrival": ({"meets_before_arrival": False}, "cross-block race"),
    "no arrivals": ({"arrives": False}, "block deadlock"),
    "all threads arrive": ({"arrives_once": False}, "wrong arrival count"),
    "an epoch too late": ({"epoch_shift": 1}, "block deadlock"),
    "an epoch too early": ({"epoch_shift": -1}, "cross-block race"),
    "an epoch that stands still": ({"ends_run": False}, "wrong arrival count"),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", STEPS)
def test_every_broken_step_is_found_in_every_order(name: str) -> None:
    steps, kind = STEPS[name]
    mutant, runs = STATIC.mutant(**steps), 2 if "ends_run" in steps else 1
    for how in ORDERS[1:3]:
        assert kind in run(mutant, how, runs=runs)[1], how


@pytest.mark.parametrize("name", STEPS)
def test_every_broken_step_is_found_with_tickets(name: str) -> None:
    """In some order: where one block takes all tickets, nothing is handed on."""
    steps, kind = STEPS[name]
    mutant, runs = TICKETS.mutant(**steps), 2 if "ends_run" in steps else 1
    assert any(kind in run(mutant, how, runs=runs)[1] for how in SEEDS)


@pytest.mark.parametrize("kernel", [STATIC, TICKETS], ids=["static", "tickets"])
@pytest.mark.parametrize("orders", [SyncOrders(wait="relaxed"), SyncOrders(arrive="relaxed")], ids=str)
def test_weaker_orders_are_found_though_values_are_right(kernel: PersistentKernel, orders: SyncOrders) -> None:
    result, found = run(kernel, Concurrency(order="random", orders=orders))
    assert set(found) == {"cross-block race"} and is_right(result)


def test_a_counter_that_nobody_set_is_found() -> None:
    inputs = STATIC.inputs()
    del inputs["state"]
    result = simt.run(lowered(STATIC), inputs, device=DEVICE)
    assert any(f.kind == "uninitialised read" and f.buffer == "state" for f in result.findings)


def spoilt(tables: Tables, place: int, value: int) -> Tables:
    waits = tables.waits.copy()
    waits[place] = value
    return replace(tables, waits=waits)


def test_a_wait_for_less_is_found_where_it_came_early_too() -> None:
    """Operator 2 waits for 3 of the 4 rTasks of operator 1: by the time that it looks, all 4 have ended."""
    count = 5  # of the second wait
    assert TICKETS.tables.waits[count] == 4
    mutant = replace(TICKETS, tables=spoilt(TICKETS.tables, count, 3))
    result, found = run(mutant, Concurrency(order="forward"))
    assert is_right(result) or "uninitialised read" in found
    assert any("cross-block race" in run(mutant, how)[1] for how in SEEDS)


def test_a_launch_that_does_not_end_is_a_finding() -> None:
    result, found = run(STATIC, Concurrency(most_turns=3))
    assert found[0] == "endless launch" and "after 3 turns" in str(result.findings[0])


def test_no_blocks_at_all_are_refused() -> None:
    with pytest.raises(InputError, match="0 blocks can be on the device at a time"):
        Concurrency(resident=0)


def test_an_arena_may_be_filled_in_part() -> None:
    """What a masked array masks is poison; nobody has to write it."""
    kernels, inputs = lowered(STATIC), STATIC.inputs()
    size = STATIC.tables.rows * STATIC.threads
    inputs["arena"] = np.ma.masked_array(np.zeros(size, "float32"), np.ones(size, bool))
    assert simt.run(kernels, inputs, device=DEVICE).ok
    stuck = simt.run(kernels, inputs, device=DEVICE, concurrency=Concurrency(resident=1))
    assert {finding.kind for finding in stuck.findings} == {"block deadlock"}


def test_what_a_block_raises_is_raised() -> None:
    def fails() -> None:
        raise InputError("block 1 is unknown")

    turns = BlockTurns([(0, lambda: turns.pause(0, lambda: False)), (1, fails)], Concurrency())
    with pytest.raises(InputError, match="block 1 is unknown"):
        turns.run(lambda endless: None)
