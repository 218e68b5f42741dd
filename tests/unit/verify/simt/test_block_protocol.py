"""How blocks wait for each other: every order of small schedules, every execution of the memory model, and mutants."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.baseline_policies import BASELINES
from tests.support.block_interleavings import BlockWalk
from tests.support.simt.persistent_kernels import (
    ENTRY,
    WAIT,
    PersistentKernel,
    Tables,
    expected,
    static_tables,
    ticket_tables,
)
from tests.support.weak_memory import (
    ACQUIRE,
    RELAXED,
    RELEASE,
    Add,
    Checker,
    Demand,
    Jump,
    Label,
    Load,
    Program,
    Store,
    Swap,
)  # fmt: skip
from tests.unit.verify.simt.test_persistent import DEVICE, FIGURE_9, PROGRAM, entry, operator
from tvm_ext.ir.device_sync import ORDERS, SyncOrders
from tvm_ext.records.rtasks import RTaskGraph, VDevice
from tvm_ext.relay_passes.wavefronts.policies import schedule
from tvm_ext.verify import simt

LATE_EPOCHS = ((1 << 31) - 1, (1 << 32) - 1)


# --- every order of blocks ------------------------------------------------------------------------------------------
@functools.cache
def small_graph(seed: int) -> RTaskGraph:
    """Up to 5 operators of 12 rTasks together, most of which need others."""
    generator = random.Random(seed)
    operators, left = [], 12
    for number in range(generator.randint(2, 5)):
        tasks = generator.randint(1, min(4, left))
        left -= tasks
        needed = sorted(generator.sample(range(number), generator.randint(min(number, 1), min(number, 2))))
        operators.append(operator(tasks, *needed))
        if not left:
            break
    return RTaskGraph(operators=tuple(operators))


def static_walks(graph: RTaskGraph, units: int) -> Iterator[BlockWalk]:
    device = VDevice(name="few", unit_count=units)
    for policy in list(BASELINES)[:2]:
        made = schedule(graph, lambda need: device, policy)
        if len(made.programs) == 1:
            yield BlockWalk(tables=static_tables(made.programs[0], graph), graph=graph, blocks=units)


def ticket_walk(graph: RTaskGraph, blocks: int, order: tuple[int, ...] | None = None) -> BlockWalk:
    return BlockWalk(tables=ticket_tables(graph, blocks, order), graph=graph, blocks=blocks, tickets=True)


@pytest.mark.parametrize("seed", range(6))
def test_streams_are_sound_in_every_order_where_all_blocks_are_resident(seed: int) -> None:
    for units in (1, 2, 4):
        for walk in static_walks(small_graph(seed), units):
            assert walk.faults() == set()
            assert all(replace(walk, epoch=epoch).faults() == set() for epoch in LATE_EPOCHS[units % 2 :])


@pytest.mark.parametrize("seed", range(6))
def test_tickets_are_sound_in_every_order_with_any_number_of_resident_blocks(seed: int) -> None:
    for blocks, resident in ((1, 0), (3, 1), (3, 2), (2, 0)):
        walk = replace(ticket_walk(small_graph(seed), blocks), resident=resident)
        assert walk.faults() == set()
        assert replace(walk, epoch=LATE_EPOCHS[resident % 2]).faults() == set()


def without_wait(tables: Tables, row: int) -> Tables:
    """``row`` asks for nothing: less than what was there before the run."""
    waits = tables.waits.copy()
    waits[row * WAIT + 2] = 0
    return replace(tables, waits=waits)


def wait_rows(walk: BlockWalk) -> list[int]:
    return sorted({row for entry in range(len(walk.tables.arrivals)) for row in walk.rows_of(entry)})


@pytest.mark.parametrize("seed", range(3))
def test_no_wait_of_a_stream_can_be_left_out(seed: int) -> None:
    """Schedules have no redundant waits: each is missed in some order."""
    count = 0
    for walk in static_walks(small_graph(seed), 3):
        for row in wait_rows(walk):
            assert "too early" in replace(walk, tables=without_wait(walk.tables, row)).faults()
            count += 1
    assert count


def implied(graph: RTaskGraph) -> set[tuple[int, int]]:
    """(operator, predecessor) where another predecessor waits for this one."""
    reach: list[set[int]] = []
    for item in graph.operators:
        reach.append(set(item.predecessors).union(*(reach[p] for p in item.predecessors)))
    return {
        (number, p)
        for number, item in enumerate(graph.operators)
        for p in item.predecessors
        if any(p in reach[other] for other in item.predecessors)
    }


@pytest.mark.parametrize("seed", [1, 2])
def test_waits_of_tickets_are_needed_to_the_last_arrival(seed: int) -> None:
    graph = small_graph(seed)
    walk = ticket_walk(graph, 3)
    for number, item in enumerate(graph.operators):
        first = next(at for at in range(len(walk.tables.arrivals)) if walk.tables.entries[at * ENTRY] == number)
        for row, predecessor in zip(walk.rows_of(first), item.predecessors, strict=True):
            waits = walk.tables.waits.copy()
            waits[row * WAIT + 2] -= 1
            faults = replace(walk, tables=replace(walk.tables, waits=waits)).faults()
            assert faults == (set() if (number, predecessor) in implied(graph) else {"too early"})


def test_tickets_out_of_order_get_stuck() -> None:
    order = (2, 0, 1)
    assert "stuck" in replace(ticket_walk(FIGURE_9, 3, order), resident=1).faults()
    assert "stuck" in ticket_walk(FIGURE_9, 2, order).faults()
    kernel = PersistentKernel(tables=ticket_tables(FIGURE_9, 2, order), blocks=2, tickets=True)
    run = simt.run(simt.lower(kernel.function(), DEVICE), kernel.inputs(), device=DEVICE)
    assert "block deadlock" in {finding.kind for finding in run.findings}


def test_streams_with_fewer_resident_blocks_get_stuck() -> None:
    walk = BlockWalk(tables=static_tables(PROGRAM, FIGURE_9), graph=FIGURE_9, blocks=2)
    assert walk.faults() == set()
    assert replace(walk, resident=1).faults() == {"stuck"}


@pytest.mark.parametrize("tickets", [False, True])
@pytest.mark.parametrize("epoch", [0, *LATE_EPOCHS])
def test_an_epoch_off_by_one_is_caught(epoch: int, tickets: bool) -> None:
    tables = ticket_tables(FIGURE_9, 2) if tickets else static_tables(PROGRAM, FIGURE_9)
    walk = BlockWalk(tables=tables, graph=FIGURE_9, blocks=2, tickets=tickets, epoch=epoch)
    assert walk.faults() == set()
    assert replace(walk, epoch_shift=1).faults() == {"stuck"}
    assert replace(walk, epoch_shift=-1).faults() == {"too early"}


# --- the interpreter agrees -----------------------------------------------------------------------------------------
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", [0, 3])
def test_the_interpreter_runs_them_and_misses_what_the_model_misses(seed: int) -> None:
    graph = small_graph(seed)
    (walk, *_) = [*static_walks(graph, 3), ticket_walk(graph, 3)][seed % 2 :: 2]
    kernel = PersistentKernel(tables=walk.tables, blocks=3, tickets=walk.tickets)
    kernels = simt.lower(kernel.function(), DEVICE)
    for number in range(3):
        how = simt.Concurrency(order="random", seed=number, resident=1 + number if walk.tickets else None)
        run = simt.run(kernels, kernel.inputs(number), device=DEVICE, concurrency=how)
        assert run.ok and np.array_equal(run.outputs["arena"], expected(graph))
    row = next(
        row for row in wait_rows(walk) if replace(walk, tables=without_wait(walk.tables, row)).faults() == {"too early"}
    )
    inputs = {**kernel.inputs(), **without_wait(walk.tables, row).arrays()}
    found = set()
    for number in range(4):
        how = simt.Concurrency(order="random", seed=number)
        found |= {f.kind for f in simt.run(kernels, inputs, device=DEVICE, concurrency=how).findings}
    assert "cross-block race" in found


def test_a_launch_for_each_wave_needs_no_waits_and_one_for_two_does() -> None:
    """Levels of Figure 9: its first two operators, then the third."""
    steps = {"waits": False, "arrives": False}
    waves = ((entry(0, 0, 2),), (entry(1, 0, 4),)), ((entry(2, 0, 1),), (entry(2, 1, 2),))
    arena = np.ma.masked_all(len(expected(FIGURE_9)), np.float32)
    for streams in waves:
        tables = static_tables(replace(PROGRAM, streams=streams), FIGURE_9)
        kernel = PersistentKernel(tables=tables, blocks=2).mutant(**steps)
        run = simt.run(simt.lower(kernel.function(), DEVICE), {**kernel.inputs(), "arena": arena}, device=DEVICE)
        assert run.ok
        arena = np.ma.masked_array(run.outputs["arena"], ~run.written["arena"])
    assert np.array_equal(np.ma.getdata(arena), expected(FIGURE_9))
    both = PersistentKernel(tables=static_tables(PROGRAM, FIGURE_9), blocks=2).mutant(**steps)
    run = simt.run(simt.lower(both.function(), DEVICE), both.inputs(), device=DEVICE)
    assert "cross-block race" in {finding.kind for finding in run.findings}


# --- the memory model -----------------------------------------------------------------------------------------------
Programs = Callable[[SyncOrders], list[Program]]
BY_NAME = {"acquire": ACQUIRE, "release": RELEASE, "relaxed": RELAXED}


def wait_for(orders: SyncOrders, counter: str, count: int) -> Program:
    load = Load("seen", counter, BY_NAME[orders.wait])
    return (Label(counter), load, Jump(counter, lambda it: it["seen"] < count))


def arrive_at(orders: SyncOrders, counter: str) -> Program:
    return (Add("_", counter, 1, BY_NAME[orders.arrive]),)


def reads(data: str) -> Program:
    return (Load(data, data, RELAXED), Demand(lambda it: it[data] == 1, f"it does not see {data}"))


def chain(orders: SyncOrders) -> list[Program]:
    """Block 1 waits for block 0, block 2 for block 1 alone, and reads what both stored."""
    return [
        (Store("x", 1, RELAXED), *arrive_at(orders, "first")),
        (*wait_for(orders, "first", 1), Store("y", 1, RELAXED), *arrive_at(orders, "second")),
        (*wait_for(orders, "second", 1), *reads("x"), *reads("y")),
    ]


def several(orders: SyncOrders, count: int = 2) -> list[Program]:
    """Two blocks arrive at one counter, a third waits for both."""
    return [
        (Store("x", 1, RELAXED), *arrive_at(orders, "counter")),
        (Store("y", 1, RELAXED), *arrive_at(orders, "counter")),
        (*wait_for(orders, "counter", count), *reads("x"), *reads("y")),
    ]


@pytest.mark.parametrize("programs", [chain, several])
def test_stores_are_seen_behind_a_wait_in_every_execution(programs: Programs) -> None:
    assert Checker(programs(ORDERS), most_jumps=1).problem() is None


@pytest.mark.parametrize("programs", [chain, several])
@pytest.mark.parametrize("weaker", [{"wait": "relaxed"}, {"arrive": "relaxed"}], ids=str)
def test_weaker_orders_are_caught(programs: Programs, weaker: dict[str, Any]) -> None:
    assert "does not see" in str(Checker(programs(replace(ORDERS, **weaker)), most_jumps=1).problem())


def test_a_wait_for_one_of_two_is_caught() -> None:
    assert "does not see" in str(Checker(several(ORDERS, 1), most_jumps=1).problem())


def settling(number: int, blocks: int) -> Program:
    """`settle` in run 0, of a block with no patience at all; then it looks at what the others have found."""
    others = [other for other in range(blocks) if other != number]
    return (
        Load("seen", "chosen", RELAXED),
        Add("before", "arrived", 1, RELAXED),
        Jump("decided", lambda it: it["seen"] > 0),
        Jump("last", lambda it: it["before"] == blocks - 1),
        Load("seen", "chosen", RELAXED),
        Jump("decided", lambda it: it["seen"] > 0),
        Swap("mine", "chosen", 0, 2, RELAXED),
        Jump("swapped"),
        Label("last"),
        Swap("mine", "chosen", 0, 1, RELAXED),
        Label("swapped"),
        Add("seen", "chosen", 0, RELAXED),  # what the compare-and-swap found or left
        Label("decided"),
        Jump("streams", lambda it: it["seen"] == 1),
        Store(f"by_ticket{number}", 1, RELAXED),
        *(Load(f"by_stream{other}", f"by_stream{other}", RELAXED) for other in others),
        Demand(lambda it: not any(it[f"by_stream{other}"] for other in others), "blocks walk in two ways"),
        Jump("end"),
        Label("streams"),
        Store(f"by_stream{number}", 1, RELAXED),
        *(Load(f"by_ticket{other}", f"by_ticket{other}", RELAXED) for other in others),
        Demand(lambda it: not any(it[f"by_ticket{other}"] for other in others), "blocks walk in two ways"),
        Label("end"),
    )


@pytest.mark.parametrize("blocks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_blocks_settle_on_one_way_in_every_execution(blocks: int) -> None:
    assert Checker([settling(number, blocks) for number in range(blocks)]).problem() is None


def test_a_block_that_trusts_its_own_count_is_caught() -> None:
    """The last to come says that all are there, though another's patience has ended before."""
    programs = [settling(number, 2) for number in range(2)]
    trusting = [
        Load("seen", "one", RELAXED) if step == Add("seen", "chosen", 0, RELAXED) else step for step in programs[1]
    ]
    problem = Checker([(Store("one", 1, RELAXED),), programs[0], trusting]).problem()
    assert "two ways" in str(problem)
