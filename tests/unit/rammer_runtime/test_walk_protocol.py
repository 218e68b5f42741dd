"""Who walks which stream (``csrc/rammer/walker.cc``), in every order in which threads can take their steps.

Threads of the model do what `Instance::Walk` says: finish their own streams, walk one that nobody leases while they
wait for it, and thread 0 all that is left. That threads wake is the subject of test_wait_protocol.py; here one that
waits goes on as soon as it may.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

Waits = tuple[tuple[int, int], ...]
Streams = Sequence[Sequence[Waits]]  # of each entry, (unit, count)
Frame = tuple[str, int, int]  # what a thread does, innermost last: ("advance" or "await", unit, until so many)


@dataclass(frozen=True)
class Walk:
    """``stacks``: of each thread. ``plans``: which streams it still has to finish. None: it never runs."""

    finished: tuple[int, ...]
    owners: tuple[int, ...]  # -1: nobody
    stacks: tuple[tuple[Frame, ...], ...]
    plans: tuple[tuple[int, ...] | None, ...]


def first(streams: Streams, threads: int, running: int) -> Walk:
    units = range(len(streams))
    own = [tuple(units[thread::threads]) + (tuple(units) if thread == 0 else ()) for thread in range(threads)]
    plans = tuple(plan if thread < running else None for thread, plan in enumerate(own))
    return Walk((0,) * len(streams), (-1,) * len(streams), ((),) * threads, plans)


def steps(streams: Streams, walk: Walk, helps: bool) -> Iterator[Walk]:
    for thread, plan in enumerate(walk.plans):
        if plan is None:
            continue
        stack = walk.stacks[thread]
        if stack:
            yield from _go_on(streams, walk, thread, helps)
        elif plan:
            frame: Frame = ("await", plan[0], len(streams[plan[0]]))
            yield replace(_pushed(walk, thread, frame), plans=_put(walk.plans, thread, plan[1:]))


def _go_on(streams: Streams, walk: Walk, thread: int, helps: bool) -> Iterator[Walk]:
    what, unit, until = walk.stacks[thread][-1]
    popped = replace(walk, stacks=_put(walk.stacks, thread, walk.stacks[thread][:-1]))
    if what == "await":
        if walk.finished[unit] >= until:
            yield popped
        elif walk.owners[unit] < 0 and (helps or len(walk.stacks[thread]) == 1):
            yield replace(_pushed(walk, thread, ("advance", unit, until)), owners=_put(walk.owners, unit, thread))
        return  # somebody else leases it: nothing to do
    if walk.finished[unit] >= until:
        yield replace(popped, owners=_put(walk.owners, unit, -1))
        return
    waits = streams[unit][walk.finished[unit]]
    missing = next(((other, count) for other, count in waits if walk.finished[other] < count), None)
    if missing is not None:
        yield _pushed(walk, thread, ("await", *missing))
    else:
        assert walk.owners[unit] == thread, "an entry is run by a thread that does not lease its stream"
        yield replace(walk, finished=_put(walk.finished, unit, walk.finished[unit] + 1))


def _pushed(walk: Walk, thread: int, frame: Frame) -> Walk:
    return replace(walk, stacks=_put(walk.stacks, thread, (*walk.stacks[thread], frame)))


def _put(items, place, item):
    return (*items[:place], item, *items[place + 1 :])


def stuck(streams: Streams, threads: int, running: int, helps: bool = True) -> Walk | None:
    """A state that can be reached, in which no thread can do anything and not all entries have finished."""
    start = first(streams, threads, running)
    seen, todo = {start}, [start]
    while todo:
        walk = todo.pop()
        following = list(steps(streams, walk, helps))
        if not following and any(count < len(stream) for count, stream in zip(walk.finished, streams, strict=True)):
            return walk
        new = set(following) - seen
        seen |= new
        todo.extend(new)
    return None


def draw(seed: int) -> Streams:
    """Entries in a topological order, each waiting for up to two earlier ones of other streams."""
    generator = random.Random(seed)
    units, entries = generator.randint(1, 4), generator.randint(1, 12)
    streams: list[list[Waits]] = [[] for _ in range(units)]
    for _ in range(entries):
        unit = generator.randrange(units)
        others = [other for other in range(units) if other != unit and streams[other]]
        chosen = generator.sample(others, min(len(others), generator.randint(0, 2)))
        streams[unit].append(tuple((other, generator.randint(1, len(streams[other]))) for other in chosen))
    return streams


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_order_of_steps_comes_to_the_end(threads):
    for seed in range(40):
        streams = draw(seed)
        for running in range(1, threads + 1):  # workers that the system never lets run among them
            assert stuck(streams, threads, running) is None, (seed, running, streams)


def test_without_help_a_worker_that_never_runs_is_waited_for():
    crossed = [[(), ((1, 1),)], [((0, 1),)]]
    assert stuck(crossed, 2, 1) is None
    assert stuck(crossed, 2, 1, helps=False) is not None


def test_a_circle_would_be_stuck():
    assert stuck([[((1, 1),)], [((0, 1),)]], 2, 2) is not None
