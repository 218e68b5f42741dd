"""Where a build's time went, and what the kernel cache saved, as plain records that travel in the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

PROVING = "proof that a batch may be divided"
BINDING = "binding parameters"
CONSTRUCTING = "graph passes and kernels"
LOWERING = "lowering to the VM"
TUNING = "tuning"
VERIFYING = "interpreting the kernels"
GENERATING = "code generation"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheUse:
    """What the kernel cache did for one build; ``notes`` says what was wrong with it, if anything.

    ``duplicates`` counts kernels that equalled another one of the same build up to names, and shared its construction.
    """

    folder: str | None = None  # None: switched off
    hits: int = 0
    misses: int = 0
    duplicates: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTimes:
    """Code generation by kernel on ``threads`` threads; the two processor times are summed over them.

    ``lowering_s`` is TensorIR passes and LLVM's optimiser, ``objects_s`` LLVM's machine code, both processor time;
    ``link_s`` is elapsed. All zero where TVM compiled the module as a whole.
    """

    threads: int = 1
    compiled: int = 0  # kernels; the others came from the cache
    lowering_s: float = 0.0
    objects_s: float = 0.0
    link_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCode:
    """What a library has of its GPU kernels: source in ``language`` alone, or machine code for ``architectures``.

    ``compiler`` made the machine code ("nvcc 13.0.88"), ``size_bytes`` of it in ``seconds`` (0.0: the cache had it).
    ``spills`` are bytes that kernels keep in memory for want of registers, by kernel. ``note``: why it is only source.
    """

    language: str
    architectures: tuple[str, ...] = ()  # empty: source
    compiler: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    spills: tuple[tuple[str, int], ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of a build in elapsed seconds; phases do not overlap."""

    name: str
    seconds: float


@dataclass(slots=True)
class Stopwatch:
    """Phases of something that is under way: `split` ends one, and the next begins."""

    phases: list[Phase] = field(default_factory=list)
    _start: float = field(default_factory=time.perf_counter)

    def split(self, name: str) -> None:
        now = time.perf_counter()
        self.phases.append(Phase(name=name, seconds=now - self._start))
        self._start = now

    @property
    def seconds(self) -> float:
        """Of all phases together."""
        return sum(phase.seconds for phase in self.phases)
