"""Turns of blocks that run at once: each is a thread of its own, of which one runs at a time.

A block gives up its turn where it synchronises with others; between two such places nothing that it does can be seen
by others without a race, which is found whatever the order (`between_blocks`). Who is next, an order says, which is the
same each time for one seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tvm_ext.errors import InputError
from tvm_ext.ir.device_sync import ORDERS, SyncOrders

_EARLY = 0.1
"""How often a random order ends a block's patience though others go on."""

TurnOrder = Literal["forward", "backward", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Concurrency:
    """How the blocks of a persistent kernel run at once.

    ``resident`` of them are on the device at a time (None: all); another begins when one has ended. ``order`` says who
    goes on, and who begins: "forward", the first that can, until it has to wait; "backward", the last; "random", drawn
    anew at every turn from ``seed``. ``most_turns``: then the kernel is taken not to end. ``orders`` are those of the
    device functions.
    """

    resident: int | None = None
    order: TurnOrder = "forward"
    seed: int = 0
    most_turns: int = 1_000_000
    orders: SyncOrders = ORDERS

    def __post_init__(self) -> None:
        if self.resident is not None and self.resident < 1:
            raise InputError(f"{self.resident} blocks can be on the device at a time", "one or more")


class _EndedError(Exception):
    """Takes a block's thread down when the others have got stuck."""


@dataclass(slots=True, eq=False)
class _Block:
    number: int
    run: Callable[[], None]
    ends: Future[None] | None = None
    may_go_on: Callable[[], bool] | None = None
    gives_up: bool = False
    has_ended: bool = False


class BlockTurns:
    """Runs ``bodies``, by block number, in the turns that ``how`` says."""

    def __init__(self, bodies: Sequence[tuple[int, Callable[[], None]]], how: Concurrency) -> None:
        self._how = how
        self._random = np.random.default_rng(how.seed)
        self._waiting = [_Block(number, run) for number, run in bodies]  # to begin
        self._resident: list[_Block] = []
        self._goes: dict[int, threading.Semaphore] = {number: threading.Semaphore(0) for number, _ in bodies}
        self._back = threading.Semaphore(0)
        self._stops = False
        self._threads = ThreadPoolExecutor(len(bodies) or 1, "tvm_ext-block")
        self.turns = 0

    @property
    def not_begun(self) -> list[int]:
        """The blocks that found no room yet."""
        return [block.number for block in self._waiting]

    @property
    def resident(self) -> list[int]:
        """The blocks on the device that have not ended."""
        return [block.number for block in self._resident]

    def run(self, when_stuck: Callable[[bool], None]) -> None:
        """To the end of all blocks, or of their progress: ``when_stuck(endless)`` is called, and they are taken down.

        Raises what a block raises.
        """
        try:
            while self._waiting or self._resident:
                self._admit()
                able = [block for block in self._resident if block.may_go_on is None or block.may_go_on()]
                if not able or self._is_early():
                    able += [block for block in self._resident if block.gives_up and block not in able]
                if not able or self.turns >= self._how.most_turns:
                    when_stuck(bool(able))
                    return
                self._turn(self._choose(able))
        finally:
            self._take_down()

    def pause(self, block: int, may_go_on: Callable[[], bool] | None = None, *, gives_up: bool = False) -> None:
        """The running block gives up its turn, until ``may_go_on()``; with ``gives_up``, or until its patience ends.

        That ends where no block can go on, and in random order now and then before.
        """
        state = next(item for item in self._resident if item.number == block)
        state.may_go_on, state.gives_up = may_go_on, gives_up
        self._back.release()
        self._goes[block].acquire()
        if self._stops:
            raise _EndedError
        state.may_go_on, state.gives_up = None, False

    def _is_early(self) -> bool:
        waits = self._how.order == "random" and any(block.gives_up for block in self._resident)
        return waits and self._random.random() < _EARLY

    def _admit(self) -> None:
        room = len(self._waiting) if self._how.resident is None else self._how.resident - len(self._resident)
        for _ in range(min(room, len(self._waiting))):
            block = self._choose(self._waiting)
            self._waiting.remove(block)
            self._resident.append(block)
            block.ends = self._threads.submit(self._body, block)

    def _choose(self, able: list[_Block]) -> _Block:
        if self._how.order == "random":
            return able[int(self._random.integers(len(able)))]
        pick = min if self._how.order == "forward" else max
        return pick(able, key=lambda block: block.number)

    def _turn(self, block: _Block) -> None:
        self.turns += 1
        self._goes[block.number].release()
        self._back.acquire()
        if block.has_ended:
            self._resident.remove(block)
            assert block.ends is not None, "a block that ends has begun"
            block.ends.result()

    def _body(self, block: _Block) -> None:
        self._goes[block.number].acquire()
        try:
            if not self._stops:
                with np.errstate(all="ignore"):  # a setting of each thread
                    block.run()
        except _EndedError:
            return
        finally:
            block.has_ended = True
            self._back.release()

    def _take_down(self) -> None:
        self._stops = True
        for block in self._resident:
            self._goes[block.number].release()
        self._threads.shutdown()
