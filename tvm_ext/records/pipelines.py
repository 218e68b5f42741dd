"""Which buffers of a kernel are loaded ahead of their use: ALCOP's plan and its refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PIPELINE_PLAN = "tvm_ext.pipeline_plan"
"""PrimFunc attribute: which buffers are loaded ahead of their use, a `PipelinePlan` as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinedBuffer:
    """A buffer that is loaded some iterations of ``loop`` before it is used (ALCOP §2.1, §3.1).

    ``level`` is 0 for shared memory, 1 for registers that are loaded from it. ``stages`` is the number of versions:
    one is used while the others are loaded. ``copy_bytes`` is the width of one asynchronous copy (4, 8 or
    16), None where loads go through registers. ``tile_bytes`` is the size of one version, of a block for shared
    memory and of a thread for registers.
    """

    name: str
    scope: str
    loop: str
    level: int
    stages: int
    tile_bytes: int
    copy_bytes: int | None = None

    def __post_init__(self) -> None:
        assert self.stages >= 1, self


PipelineRule = Literal[
    "asynchronous copy",  # ALCOP §2.1, rule 1
    "sequential loop",  # rule 2
    "synchronisation",  # rule 3
    "resources",  # shared memory, registers or trip counts leave no room for a second stage
    "already pipelined",
    "switched off",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRefusal:
    """A buffer that is loaded where it is used, by which rule, and why."""

    buffer: str
    scope: str
    rule: PipelineRule
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinePlan:
    """What `AutoPipeline` decided for one function; ``notes`` say what was reduced or chosen, and why.

    ``moved`` names buffers whose element-wise function is computed by their users instead of by what loads them, so
    that the copy is a pure one (ALCOP §2.2, Figure 5, case 2). ``bulk_copies``: tiles come by Hopper's bulk copies
    where those are legal; the notes name the loops where they are not.
    """

    buffers: tuple[PipelinedBuffer, ...] = ()
    moved: tuple[str, ...] = ()
    replaces_stock: bool = False  # stock TVM's pipeline annotations, which the function has, are not carried out
    refusals: tuple[PipelineRefusal, ...] = ()
    notes: tuple[str, ...] = ()
    bulk_copies: bool = False

    def __str__(self) -> str:
        if not self.buffers:
            return "not pipelined"
        stages = ", ".join(f"{buffer.name} in {buffer.stages} stages of {buffer.loop}" for buffer in self.buffers)
        return f"{stages}, by bulk copies" if self.bulk_copies else stages
