"""The functions by which blocks of a launch wait for each other (`ir.device_sync`), and the launch that they belong to.

Before each of them, a block gives up its turn (`turns`): these are the places where the order of blocks matters. A wait
that nothing can end is a finding that names counter and value, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tvm_ext.errors import InputError
from tvm_ext.ir import device_sync
from tvm_ext.support.arrays import Array

from .between_blocks import WRAP, Counter, has_come
from .block_clocks import Knowledge
from .compile_expr import compile_expression
from .findings import Finding
from .local_memory import View
from .machine import Closure, Engine, Site
from .memory import AddressableMemory, GlobalMemory, Request
from .number_types import storage_dtype
from .scope import Scope
from .turns import BlockTurns, Concurrency
from .values import NEVER_WRITTEN, Value, apply, in_lanes
from .warp_calls import Pointer, compile_pointer

if TYPE_CHECKING:
    from tvm_ext._tvm import Expr

_COUNTER = storage_dtype("int32")


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """How a counter is first spoken of in a launch: the run, its rise in one, and where."""

    epoch: int
    per_run: int
    machine: Engine
    site: Site
    counter: Counter


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """What a block waits for."""

    machine: Engine
    site: Site
    lane: int
    element: int
    target: int
    counter: Counter

    def detail(self) -> str:
        value, block = self.counter.value, int(self.machine.lanes.blocks[0])
        missing = (self.target - value) % WRAP
        return (
            f"block {block} waits for {self.site.buffer}[{self.element}] to reach {self.target}: it is at {value}, "
            f"{missing} short, and no block goes on that could raise it"
        )


class SyncLaunch:
    """What the blocks of one launch share while they run at once: turns, and counters by memory slot and element."""

    def __init__(self, blocks: Sequence[int], how: Concurrency) -> None:
        self.how = how
        self._places = {block: position for position, block in enumerate(blocks)}
        self._counters: dict[tuple[int, int], Counter] = {}
        self._uses: dict[tuple[int, int], _Use] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._machines: dict[int, Engine] = {}
        self._stopped = False
        self._turns: BlockTurns | None = None

    def run(self, machines: Callable[[int], Engine], body: Callable[[Engine], None]) -> None:
        """``body`` with each block's machine, to the end or until no block can go on."""

        def runs(block: int) -> Callable[[], None]:
            def run() -> None:
                machine = machines(block)
                self.join(machine)
                body(machine)

            return run

        self._turns = BlockTurns([(block, runs(block)) for block in self._places], self.how)
        self._turns.run(self._stuck)
        if not self._stopped:
            self._check_rises()

    def join(self, m: Engine) -> None:
        """The one block of ``m`` belongs to this launch."""
        m.launch = self
        self._machines[int(m.lanes.blocks[0])] = m
        knowledge = m.clock.between = Knowledge(m.lanes, m.clock.block_marks, self._places)
        m.at_barrier.append(knowledge.meet)

    def _stuck(self, endless: bool) -> None:
        assert self._turns is not None
        self._stopped = True
        resident, absent = self._turns.resident, self._turns.not_begun
        if endless:
            record = next(iter(self._machines.values())).record
            detail = f"blocks {_few(resident)} still run after {self._turns.turns} turns"
            finding = Finding(kind="endless launch", kernel=record.kernel, detail=detail)
            record.findings.add((record.kernel, "endless launch"), 1, lambda: finding)
            return
        room = f"; {len(resident)} are on the device, and blocks {_few(absent)} have not begun" if absent else ""
        for block in resident:
            waiting = self._waiting[block]
            m = waiting.machine
            threads, detail = (m.lanes.name(int(m.lanes.identity[waiting.lane])),), waiting.detail() + room
            m.tell("block deadlock", waiting.site, element=waiting.element, threads=threads, detail=detail)

    def _check_rises(self) -> None:
        """Each counter must have come to where the next run begins."""
        for (_, element), use in self._uses.items():
            wanted = (use.epoch + 1) * use.per_run % WRAP
            if use.counter.value != wanted:
                rise = (use.counter.value - use.counter.first) % WRAP
                detail = (
                    f"it has risen by {rise} to {use.counter.value}; with {use.per_run} in each run, run "
                    f"{use.epoch % WRAP} ends at {wanted}"
                )
                use.machine.tell("wrong arrival count", use.site, element=element, detail=detail)

    def expect(self, m: Engine, site: Site, slot: int, element: int, epoch: int, per_run: int) -> None:
        """Somebody counts on the counter's rise by ``per_run`` in each run, and on this being run ``epoch``."""
        use = self._uses.setdefault(
            (slot, element), _Use(epoch, per_run, m, site, self.counter(m, site, slot, element))
        )
        if (use.epoch, use.per_run) != (epoch, per_run):
            detail = f"run {epoch} of {per_run} each here, run {use.epoch} of {use.per_run} elsewhere in this launch"
            m.tell("wrong arrival count", site, element=element, detail=detail)

    # --- the functions --------------------------------------------------------------------------------------------
    def pause(self, m: Engine, may_go_on: Callable[[], bool] | None = None, *, gives_up: bool = False) -> None:
        """The others' turn."""
        assert self._turns is not None
        self._turns.pause(int(m.lanes.blocks[0]), may_go_on, gives_up=gives_up)

    def counter(self, m: Engine, site: Site, slot: int, element: int) -> Counter:
        """The counter at a place of a memory; its first value is what is there."""
        key = (slot, element)
        if key not in self._counters:
            memory: AddressableMemory = m.memory[slot]
            value = int(memory.typed(_COUNTER)[element])
            self._counters[key] = Counter(value % WRAP, len(self._places) + 1)
            if memory.origin is not None and memory.origin[element] == NEVER_WRITTEN:
                m.tell("uninitialised read", site, element=element, detail="a counter that nobody has set")
        return self._counters[key]

    def wait(self, m: Engine, site: Site, slot: int, lane: int, element: int, target: int) -> None:
        counter = self.counter(m, site, slot, element)
        block = int(m.lanes.blocks[0])
        self._waiting[block] = _Waiting(m, site, lane, element, target, counter)
        self.pause(m, lambda: has_come(counter.value, target))
        del self._waiting[block]
        released = counter.reached(target)
        assert released is not None, "a wait that is over has been for a value that was there"
        if self.how.orders.wait == "acquire":
            assert m.clock.between is not None
            m.clock.between.acquire(lane, released)

    def add(self, m: Engine, view: View, slot: int, lane: int, element: int, amount: int, *, releases: bool) -> int:
        """Raise a counter; what it was before."""
        counter = self.counter(m, view.site, slot, element)
        event = m.event(view.site)
        assert m.clock.between is not None
        before = counter.add(amount, m.clock.between.released(lane, event) if releases else None)
        memory: GlobalMemory = m.memory[slot]
        request = Request(lane=np.array([lane]), element=np.array([[element]]), vector=False)
        memory.change(m, view, request, _signed(counter.value), event)
        return before


def _few(blocks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(blocks)[:8])) + (" ..." if len(blocks) > 8 else "")


def _signed(value: int) -> int:
    """A number modulo 2^32 as an int32 has it."""
    value %= WRAP
    return value - WRAP if value >= WRAP // 2 else value


# --- calls ----------------------------------------------------------------------------------------------------------
class _SyncCall:
    """A call's compiled arguments: a pointer to an int32 in global memory, and numbers."""

    def __init__(self, scope: Scope, arguments: list[Expr], count: int) -> None:
        if len(arguments) != count:
            raise InputError(f"{scope.kernel}: a call between blocks has {len(arguments)} arguments, not {count}")
        self.pointer: Pointer = compile_pointer(scope, arguments[0])
        binding = self.pointer.binding
        if binding.scope not in ("global", "") or binding.dtype != _COUNTER:
            raise InputError(f"{scope.kernel}: {binding.name} has no counters: they are int32 in global memory")
        self.slot = binding.slot
        self.view = View(site=scope.site(binding.name), dtype=binding.dtype)
        self._numbers = [compile_expression(scope, argument) for argument in arguments[1:]]

    def lanes(self, m: Engine) -> Sequence[tuple[int, int, list[int]]]:
        """(lane, element, numbers) for each active lane."""
        memory: AddressableMemory = m.memory[self.slot]
        request = memory.request(m, self.view, self.pointer.index(m))
        values = [
            in_lanes(m.decided(number(m), self.view.site, "a counter's value"), m.lanes.count, 1)[request.lane]
            for number in self._numbers
        ]
        return [
            (int(lane), int(request.element[row, 0]), [int(value[row]) for value in values])
            for row, lane in enumerate(request.lane)
        ]


Compiled = Callable[["Scope", "list[Expr]"], Closure]
LaneStep = Callable[[SyncLaunch, Engine, _SyncCall, int, int, "list[int]"], int]
"""What a call does for one lane: at a counter's element, with the numbers of the call; its value there."""


def _lane_by_lane(count: int, step: LaneStep, *, pauses: bool = True, has_value: bool = False) -> Compiled:
    """A call of ``count`` arguments that does ``step`` for one lane after another.

    With ``pauses``, once the other blocks have had their turn; a wait gives up its own.
    """

    def compiled(scope: Scope, arguments: list[Expr]) -> Closure:
        call = _SyncCall(scope, arguments, count)

        def run(m: Engine) -> Value:
            launch: SyncLaunch = m.launch
            if pauses:
                launch.pause(m)
            found = [step(launch, m, call, lane, element, numbers) for lane, element, numbers in call.lanes(m)]
            return m.as_lanes(np.array(found, _COUNTER)) if has_value else 0

        return run

    return compiled


def _wait(launch: SyncLaunch, m: Engine, call: _SyncCall, lane: int, element: int, numbers: list[int]) -> int:
    epoch, per_run, count = numbers
    launch.expect(m, call.view.site, call.slot, element, epoch, per_run)
    launch.wait(m, call.view.site, call.slot, lane, element, (epoch * per_run + count) % WRAP)
    return 0


def _arrive(launch: SyncLaunch, m: Engine, call: _SyncCall, lane: int, element: int, numbers: list[int]) -> int:
    (amount,) = numbers
    releases = launch.how.orders.arrive == "release"
    return launch.add(m, call.view, call.slot, lane, element, amount, releases=releases)


def _take(launch: SyncLaunch, m: Engine, call: _SyncCall, lane: int, element: int, numbers: list[int]) -> int:
    epoch, per_run = numbers
    launch.expect(m, call.view.site, call.slot, element, epoch, per_run)
    return _signed(launch.add(m, call.view, call.slot, lane, element, 1, releases=False) - epoch * per_run)


def _settle(launch: SyncLaunch, m: Engine, call: _SyncCall, lane: int, element: int, numbers: list[int]) -> int:
    epoch, blocks = numbers
    launch.expect(m, call.view.site, call.slot, element, epoch, blocks)
    chosen = launch.counter(m, call.view.site, call.slot, element + 1)
    undecided = 2 * epoch % WRAP

    def is_chosen() -> bool:
        return 0 < (chosen.value - undecided) % WRAP < WRAP // 2

    before = launch.add(m, call.view, call.slot, lane, element, 1, releases=False)
    is_last = (before + 1 - (epoch + 1) * blocks) % WRAP == 0
    if not is_last:
        launch.pause(m, is_chosen, gives_up=True)
    if not is_chosen():
        found = undecided + (1 if is_last else 2)
        launch.add(m, call.view, call.slot, lane, element + 1, (found - chosen.value) % WRAP, releases=False)
    return chosen.value & 1


def _read_epoch(scope: Scope, arguments: list[Expr]) -> Closure:
    call = _SyncCall(scope, arguments, 1)
    return lambda m: m.memory[call.slot].read(m, call.view, call.pointer.index(m))


def _end_run(scope: Scope, arguments: list[Expr]) -> Closure:
    call = _SyncCall(scope, arguments, 1)

    def run(m: Engine) -> Value:
        memory: AddressableMemory = m.memory[call.slot]
        index = call.pointer.index(m)
        memory.write(m, call.view, index, apply(_next, memory.read(m, call.view, index)))
        return 0

    return run


def _next(value: Array) -> Array:
    """One more, which wraps."""
    return np.asarray(np.add(value, 1, dtype=_COUNTER))


def install(scope: Scope) -> None:
    """Make these calls known to ``scope``."""
    scope.special_externs.update({
        device_sync.WAIT: _lane_by_lane(4, _wait, pauses=False), device_sync.ARRIVE: _lane_by_lane(2, _arrive),
        device_sync.TAKE: _lane_by_lane(3, _take, has_value=True),
        device_sync.SETTLE: _lane_by_lane(3, _settle, has_value=True),
        device_sync.READ_EPOCH: _read_epoch, device_sync.END_RUN: _end_run,
    })  # fmt: skip
