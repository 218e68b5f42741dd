"""Waiting and waking (``csrc/rammer/wait_cell.h``) in every execution that the memory model allows, and its mutants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.weak_memory import (
    ACQ_REL,
    ACQUIRE,
    RELAXED,
    RELEASE,
    SEQ_CST,
    Add,
    Checker,
    Demand,
    Jump,
    Label,
    Load,
    Program,
    Sleep,
    Store,
    Swap,
    Wake,
)

HEADER = Path(__file__).resolve().parents[3] / "tvm_ext" / "csrc" / "rammer" / "wait_cell.h"
ORDERS = dict(re.findall(r"#define RAMMER_(\w+) std::memory_order_(\w+)", HEADER.read_text()))


def waiter(orders: dict[str, str], looks_again: bool = True, event_first: bool = True) -> Program:
    """`WaitCell::Wait` for the value 1 without spinning, then what the publisher wrote before."""
    event = Load("seen", "event", ACQUIRE)
    announce = Add("_", "parked", 1, orders["ANNOUNCE"])
    again = (Load("value", "value", orders["LOOK_AGAIN"]), Jump("awake", lambda it: it["value"] == 1))
    return (
        Label("look"),
        Load("value", "value", orders["OBSERVE"]),
        Jump("done", lambda it: it["value"] == 1),
        *((event, announce) if event_first else (announce,)),
        *(again if looks_again else ()),
        *(() if event_first else (event,)),
        Sleep("event", "seen"),
        Label("awake"),
        Add("_", "parked", -1, RELAXED),
        Jump("look"),
        Label("done"),
        Load("data", "data", RELAXED),
        Demand(lambda it: it["data"] == 1, "it goes on before it can see what the other one wrote"),
    )


def publisher(orders: dict[str, str], raises_event: bool = True) -> Program:
    """`WaitCell::Publish` after other data."""
    return (
        Store("data", 1, RELAXED),
        Store("value", 1, orders["PUBLISH"]),
        Load("parked", "parked", orders["LOOK_FOR_PARKED"]),
        Jump("done", lambda it: it["parked"] == 0),
        *((Add("_", "event", 1, SEQ_CST),) if raises_event else ()),
        Wake("event"),
        Label("done"),
    )


def test_the_orders_are_read_from_the_source():
    assert set(ORDERS) == {"PUBLISH", "LOOK_FOR_PARKED", "ANNOUNCE", "LOOK_AGAIN", "OBSERVE"}


@pytest.mark.parametrize(("waiters", "most_jumps"), [(1, 6), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_no_wake_up_is_lost_and_no_data_seen_too_early(waiters, most_jumps):
    assert Checker([publisher(ORDERS), *[waiter(ORDERS)] * waiters], most_jumps).problem() is None


@pytest.mark.parametrize(
    ("name", "order", "problem"),
    [
        ("PUBLISH", RELAXED, "before it can see"),
        ("PUBLISH", RELEASE, "sleeps for ever"),
        ("LOOK_FOR_PARKED", RELAXED, "sleeps for ever"),
        ("LOOK_FOR_PARKED", ACQUIRE, "sleeps for ever"),
        ("ANNOUNCE", RELAXED, "sleeps for ever"),
        ("ANNOUNCE", ACQ_REL, "sleeps for ever"),
        ("LOOK_AGAIN", RELAXED, "sleeps for ever"),
        ("LOOK_AGAIN", ACQUIRE, "sleeps for ever"),
        ("OBSERVE", RELAXED, "before it can see"),
    ],
)
def test_every_weaker_order_is_caught(name, order, problem):
    orders = {**ORDERS, name: order}
    assert problem in str(Checker([publisher(orders), waiter(orders)]).problem())


@pytest.mark.parametrize(
    "mutant",
    [
        [publisher(ORDERS), waiter(ORDERS, looks_again=False)],
        [publisher(ORDERS), waiter(ORDERS, event_first=False)],
        [publisher(ORDERS, raises_event=False), waiter(ORDERS)],
    ],
    ids=["does not look again", "reads the event after its last look", "wakes without raising the event"],
)
def test_every_missing_step_is_caught(mutant):
    assert "sleeps for ever" in str(Checker(mutant).problem())


def giver(orders: dict[str, str], wakes: bool = True) -> Program:
    """`Instance::GiveBack` of a stream, after moving its cursor."""
    return (
        Store("cursor", 1, RELAXED),
        Store("owner", 0, orders["PUBLISH"]),
        Load("parked", "parked", orders["LOOK_FOR_PARKED"]),
        Jump("done", lambda it: it["parked"] == 0 or not wakes),
        Add("_", "event", 1, SEQ_CST),
        Wake("event"),
        Label("done"),
    )


def taker(orders: dict[str, str]) -> Program:
    """`Instance::AwaitLong`: sleeps while somebody leases the stream, then leases it and reads the cursor."""
    return (
        Label("look"),
        Swap("mine", "owner", 0, 2, ACQUIRE),
        Jump("done", lambda it: it["mine"] == 1),
        Load("seen", "event", ACQUIRE),
        Add("_", "parked", 1, orders["ANNOUNCE"]),
        Load("owner", "owner", orders["LOOK_AGAIN"]),
        Jump("awake", lambda it: it["owner"] == 0),
        Sleep("event", "seen"),
        Label("awake"),
        Add("_", "parked", -1, RELAXED),
        Jump("look"),
        Label("done"),
        Load("cursor", "cursor", RELAXED),
        Demand(lambda it: it["cursor"] == 1, "it walks a stream from where another one has been"),
    )


def leased(orders: dict[str, str], **how: bool) -> list[Program]:
    """The giver leases first; the taker starts when it has."""
    first = (Swap("_", "owner", 0, 1, ACQUIRE), Store("leased", 1, RELEASE))
    waits = (Label("wait"), Load("leased", "leased", ACQUIRE), Jump("wait", lambda it: it["leased"] == 0))
    return [(*first, *giver(orders, **how)), (*waits, *taker(orders))]


def test_a_stream_that_is_given_back_is_taken():
    assert Checker(leased(ORDERS)).problem() is None


@pytest.mark.parametrize("name", ["PUBLISH", "LOOK_FOR_PARKED", "ANNOUNCE", "LOOK_AGAIN"])
def test_weaker_orders_of_a_lease_are_caught(name):
    assert Checker(leased({**ORDERS, name: RELAXED})).problem() is not None


def test_a_lease_that_is_given_back_in_silence_is_caught():
    assert "sleeps for ever" in str(Checker(leased(ORDERS, wakes=False)).problem())


def test_work_is_done_by_the_worker_or_by_the_caller():
    """`Team`: the caller posts, and takes back what no worker has begun."""
    caller = (
        Store("job", 1, RELAXED),
        Store("gate", 1, ORDERS["PUBLISH"]),
        Swap("taken_back", "gate", 1, 0, ACQ_REL),
        Jump("end", lambda it: it["taken_back"] == 0),
        Add("done", "done", 1, RELAXED),
        Demand(lambda it: it["done"] == 0, "both did it"),
        Label("end"),
    )
    worker = (
        Swap("mine", "gate", 1, 2, ACQ_REL),
        Jump("end", lambda it: it["mine"] == 0),
        Load("job", "job", RELAXED),
        Demand(lambda it: it["job"] == 1, "the worker does not see the job"),
        Add("done", "done", 1, RELAXED),
        Demand(lambda it: it["done"] == 0, "both did it"),
        Label("end"),
    )
    assert Checker([caller, worker]).problem() is None
    unordered = [Swap("mine", "gate", 1, 2, RELAXED), *worker[1:]]
    assert "does not see" in str(Checker([caller, unordered]).problem())


def arrival(orders: dict[str, str], mine: str, other: str, wakes: bool = True) -> Program:
    """`ParallelBarrier` of two tasks, which then read what the other one wrote before."""
    return (
        Store(mine, 1, RELAXED),
        Add("_", "value", 1, orders["PUBLISH"]),
        Load("parked", "parked", orders["LOOK_FOR_PARKED"]),
        Jump("look", lambda it: it["parked"] == 0 or not wakes),
        Add("_", "event", 1, SEQ_CST),
        Wake("event"),
        Label("look"),
        Load("value", "value", orders["OBSERVE"]),
        Jump("done", lambda it: it["value"] == 2),
        Load("seen", "event", ACQUIRE),
        Add("_", "parked", 1, orders["ANNOUNCE"]),
        Load("value", "value", orders["LOOK_AGAIN"]),
        Jump("awake", lambda it: it["value"] == 2),
        Sleep("event", "seen"),
        Label("awake"),
        Add("_", "parked", -1, RELAXED),
        Jump("look"),
        Label("done"),
        Load("data", other, RELAXED),
        Demand(lambda it: it["data"] == 1, "it passes the barrier before it can see what the other one wrote"),
    )


def barrier(orders: dict[str, str], **how: bool) -> list[Program]:
    return [arrival(orders, "a", "b", **how), arrival(orders, "b", "a", **how)]


def test_tasks_pass_a_barrier_together():
    assert Checker(barrier(ORDERS), 2).problem() is None


@pytest.mark.parametrize(("name", "problem"), [("PUBLISH", "passes the barrier"), ("LOOK_AGAIN", "sleeps for ever")])
def test_weaker_orders_of_a_barrier_are_caught(name, problem):
    assert problem in str(Checker(barrier({**ORDERS, name: RELAXED}), 2).problem())


def test_an_arrival_in_silence_is_caught():
    assert "sleeps for ever" in str(Checker(barrier(ORDERS, wakes=False), 2).problem())
