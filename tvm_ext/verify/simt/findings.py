"""What the interpreter finds wrong: records that name kernel, buffer, element, threads, loops and statement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal[
    "read-write race",
    "write-write race",
    "loop-carried hazard",
    "cross-block race",
    "barrier divergence",
    "warp divergence",
    "out of bounds",
    "uninitialised read",
    "unlanded copy",
    "copy overlap",
    "block deadlock",
    "endless launch",
    "wrong arrival count",
    "mbarrier deadlock",
    "mbarrier misuse",
    "wrong byte count",
    "missing proxy fence",
    "misaligned access",
    "unwritten output",
    "device limit",
]

Loops = tuple[tuple[str, int], ...]
"""(loop variable, value), outermost first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One defect of a kernel, at its first occurrence; ``count`` accesses (or threads) had it.

    ``element`` is the index in ``buffer``; ``threads`` are in words, the one that noticed first. ``statement`` is the
    text of the access, ``other`` of the one that it conflicts with (races), empty where there is none.
    """

    kind: Kind
    kernel: str
    buffer: str = ""
    element: int | None = None
    threads: tuple[str, ...] = ()
    loops: Loops = ()
    statement: str = ""
    other: str = ""
    other_loops: Loops = ()
    detail: str = ""
    count: int = 1

    def __str__(self) -> str:
        where = f" of {self.buffer}[{self.element}]" if self.element is not None else f" of {self.buffer}"
        lines = [f"{self.kernel}: {self.kind}{where if self.buffer else ''}{_by(self.threads)} (x{self.count})"]
        lines += [f"  {self.detail}"] if self.detail else []
        lines += [f"  at {self.statement}{_in(self.loops)}"] if self.statement else []
        lines += [f"  after {self.other}{_in(self.other_loops)}"] if self.other else []
        return "\n".join(lines)


def _by(threads: tuple[str, ...]) -> str:
    return f" by {' and '.join(threads)}" if threads else ""


def _in(loops: Loops) -> str:
    return f"   [{', '.join(f'{name}={value}' for name, value in loops)}]" if loops else ""


class Findings:
    """Collects findings, one for each kind, buffer and pair of statements; later ones only count."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Finding] = {}

    def add(self, key: tuple[object, ...], count: int, make: Callable[[], Finding]) -> None:
        """Count ``count`` occurrences of ``key``; its record is made by ``make`` the first time."""
        known = self._found.get(key)
        if known is None:
            self._found[key] = replace(make(), count=count)
        else:
            self._found[key] = replace(known, count=known.count + count)

    def all(self) -> tuple[Finding, ...]:
        """In the order of their first occurrence."""
        return tuple(self._found.values())
