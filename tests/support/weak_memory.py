"""Every execution that C++'s memory model allows of a few small threads: for protocols that hardware does not stress.

A processor with strong ordering never shows what a forgotten order costs. Here each location keeps all values that were
stored to it, and each thread a view: for each location the oldest value that it may still read. A load may return any
value that is not older. An acquiring load of a releasing store's value takes over the view that its thread had. Loads
and stores that are sequentially consistent have one order among them: such a load returns nothing older than the last
such store of its location. Read-modify-writes read the newest value. (Loads before later stores of the same
thread, "load buffering", are not modelled.)

    thread A    Store("data", 1, RELAXED), Store("value", 1, RELEASE)
    thread B    Load("v", "value", ACQUIRE), Load("d", "data", RELAXED)

Where B sees value 1 it sees data 1; with RELAXED for either, perhaps data 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

RELAXED, ACQUIRE, RELEASE, ACQ_REL, SEQ_CST = "relaxed", "acquire", "release", "acq_rel", "seq_cst"
_ACQUIRES, _RELEASES = (ACQUIRE, ACQ_REL, SEQ_CST), (RELEASE, ACQ_REL, SEQ_CST)
MOST_STATES = 2_000_000

Registers = tuple[tuple[str, int], ...]
View = tuple[int, ...]
Message = tuple[int, View]  # a value, and the view that whoever acquires it takes over


@dataclass(frozen=True)
class Load:
    to: str
    location: str
    order: str


@dataclass(frozen=True)
class Store:
    location: str
    value: int
    order: str


@dataclass(frozen=True)
class Add:
    """A read-modify-write; ``to`` is what was there before."""

    to: str
    location: str
    amount: int
    order: str


@dataclass(frozen=True)
class Swap:
    """A compare-and-swap; ``to`` is 1 where it took place."""

    to: str
    location: str
    expected: int
    value: int
    order: str


@dataclass(frozen=True)
class Sleep:
    """futex(2): sleep until somebody wakes the location, if it holds what register ``seen`` holds."""

    location: str
    seen: str


@dataclass(frozen=True)
class Wake:
    location: str


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Jump:
    """To a label, where ``when`` holds of the registers."""

    to: str
    when: Callable[[dict[str, int]], bool] = lambda _: True


@dataclass(frozen=True)
class Demand:
    """What must hold of the registers here."""

    holds: Callable[[dict[str, int]], bool]
    what: str


Step = Load | Store | Add | Swap | Sleep | Wake | Label | Jump | Demand
Program = Sequence[Step]


@dataclass(frozen=True)
class _Thread:
    at: int
    registers: Registers
    view: View
    sleeps_on: int = -1
    jumps: int = 0

    def value(self, name: str) -> int:
        return dict(self.registers).get(name, 0)

    def moved(self, view: View | None = None, **registers: int) -> _Thread:
        known = {**dict(self.registers), **registers}
        return _Thread(self.at + 1, tuple(sorted(known.items())), view or self.view, -1, self.jumps)


State = tuple[tuple[_Thread, ...], tuple[tuple[Message, ...], ...], View]


class Checker:
    """Tries all executions of ``programs``; a thread that has jumped back ``most_jumps`` times is let go."""

    def __init__(self, programs: Sequence[Program], most_jumps: int = 4) -> None:
        self.programs = programs
        used = {step.location for program in programs for step in program if hasattr(step, "location")}
        self.places = {name: place for place, name in enumerate(sorted(used))}
        self.most_jumps = most_jumps

    def problem(self) -> str | None:
        """A word on the first execution found that sleeps for ever or breaks a demand; None where all are sound."""
        zeros = (0,) * len(self.places)
        threads = tuple(_Thread(0, (), zeros) for _ in self.programs)
        first: State = (threads, tuple(((0, zeros),) for _ in self.places), zeros)
        seen, stack = {first}, [first]
        while stack:
            state = stack.pop()
            successors = []
            for number in range(len(self.programs)):
                for result in self._steps(state, number):
                    if isinstance(result, str):
                        return result
                    successors.append(result)
            asleep = [number for number, thread in enumerate(state[0]) if thread.sleeps_on >= 0]
            if not successors and asleep:
                return f"thread {asleep[0]} sleeps for ever"
            for item in successors:
                if item not in seen:
                    seen.add(item)
                    stack.append(item)
            assert len(seen) < MOST_STATES, "too many states: shorten the programs"
        return None

    def _steps(self, state: State, number: int) -> Iterator[State | str]:
        threads, memory, sc = state
        thread, program = threads[number], self.programs[number]
        if thread.at == len(program) or thread.sleeps_on >= 0:
            return
        step = program[thread.at]
        if isinstance(step, Demand):
            if not step.holds(dict(thread.registers)):
                yield f"thread {number}: {step.what}"
                return
            yield _with(state, number, thread.moved())
        elif isinstance(step, Label):
            yield _with(state, number, thread.moved())
        elif isinstance(step, Jump):
            moved = self._jumped(thread, program, step)
            if moved is not None:
                yield _with(state, number, moved)
        elif isinstance(step, Wake):
            place = self.places[step.location]
            woken = tuple(item.moved() if item.sleeps_on == place else item for item in threads)
            yield _with((woken, memory, sc), number, thread.moved())
        elif isinstance(step, Sleep):
            place = self.places[step.location]
            if memory[place][-1][0] == thread.value(step.seen):
                yield _with(state, number, _Thread(thread.at, thread.registers, thread.view, place, thread.jumps))
            else:
                yield _with(state, number, thread.moved())
        elif isinstance(step, Load):
            yield from self._loads(state, number, step)
        else:
            yield self._written(state, number, step)

    def _jumped(self, thread: _Thread, program: Program, step: Jump) -> _Thread | None:
        if not step.when(dict(thread.registers)):
            return thread.moved()
        target = next(i for i, item in enumerate(program) if isinstance(item, Label) and item.name == step.to)
        jumps = thread.jumps + (target < thread.at)
        return None if jumps > self.most_jumps else _Thread(target, thread.registers, thread.view, -1, jumps)

    def _loads(self, state: State, number: int, step: Load) -> Iterator[State]:
        threads, memory, sc = state
        thread, place = threads[number], self.places[step.location]
        oldest = max(thread.view[place], sc[place] if step.order == SEQ_CST else 0)
        for stamp in range(oldest, len(memory[place])):
            value, published = memory[place][stamp]
            view = _raised(thread.view, place, stamp)
            if step.order in _ACQUIRES:
                view = _joined(view, published)
            yield _with(state, number, thread.moved(view, **{step.to: value}))

    def _written(self, state: State, number: int, step: Store | Add | Swap) -> State:
        threads, memory, sc = state
        thread, place = threads[number], self.places[step.location]
        before, published = memory[place][-1]
        registers: dict[str, int] = {}
        view = thread.view
        inherited = (0,) * len(view)
        if isinstance(step, Add | Swap):  # reads the newest value, whose view goes on with the one it writes
            inherited = published
            view = _joined(view, published) if step.order in _ACQUIRES else view
        if isinstance(step, Swap):
            registers[step.to] = int(before == step.expected)
            if before != step.expected:
                return _with(state, number, thread.moved(_raised(view, place, len(memory[place]) - 1), **registers))
        elif isinstance(step, Add):
            registers[step.to] = before
        value = before + step.amount if isinstance(step, Add) else step.value
        stamp = len(memory[place])
        view = _raised(view, place, stamp)
        attached = _joined(inherited, view if step.order in _RELEASES else _raised((0,) * len(view), place, stamp))
        changed = (*memory[:place], (*memory[place], (value, attached)), *memory[place + 1 :])
        sc = _raised(sc, place, stamp) if step.order == SEQ_CST else sc
        return _with((threads, changed, sc), number, thread.moved(view, **registers))


def _with(state: State, number: int, thread: _Thread) -> State:
    threads, memory, sc = state
    return (*threads[:number], thread, *threads[number + 1 :]), memory, sc


def _raised(view: View, place: int, stamp: int) -> View:
    return (*view[:place], max(view[place], stamp), *view[place + 1 :])


def _joined(one: View, other: View) -> View:
    return tuple(map(max, one, other))
