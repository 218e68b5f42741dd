"""Decisions that cross stages, as frozen records which print, compare, hash and round-trip through JSON."""

from __future__ import annotations

import json
import types
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

CHOICE = "tvm_ext.choice"
"""PrimFunc attribute: the function's `KernelChoice` as JSON."""

CONSTANT_PARAMS = "tvm_ext.constant_params"
"""PrimFunc attribute: indices of the parameters that are compile-time constants at every call of the function."""

Path = Literal["rtile", "rows", "fallback", "stock", "check"]
"""How an operator's kernel was made: in tiles of an rProgram, row by row, by the stated fallback, or by stock TVM.

"rtile" is an operator of which at least one stage runs in tiles; beside it others may run row by row. In "rows" all do:
the loops follow from the tensors' shapes, and an rProgram, where there is one, says no more than what to expect.
"check" only looks at run-time values, before others use them.
"""

OWN_PATHS: tuple[Path, ...] = ("rtile", "rows", "check")
"""The paths whose kernels this package emits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RTile:
    """A tile over the loop axes of a tensor expression (paper §3.1, Figure 3).

    ``shape[i]`` is the tile's size along ``axes[i]`` in elements, which may exceed the axis' extent by padding
    bounded by ε. ``storage_padding`` gives per tensor the elements added to the leading (innermost) dimension of its
    stored data tile so that reads do not conflict on memory banks.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    storage_padding: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.shape), self
        assert all(size >= 1 for size in self.shape), self

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.axes, self.shape, strict=True))

    def replace(self, axis: str, size: int) -> RTile:
        shape = tuple(size if name == axis else old for name, old in zip(self.axes, self.shape, strict=True))
        return RTile(axes=self.axes, shape=shape, storage_padding=self.storage_padding)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}={s}" for a, s in zip(self.axes, self.shape, strict=True)) + "]"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """One memory layer's share of a predicted time (paper §3.3)."""

    layer: str  # the layer that is loaded from
    footprint_bytes: float  # of the tile held in the layer above
    traffic_bytes: float  # moved over the whole operator
    time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the micro-performance model says of an rProgram; ``bound`` names the resource that binds."""

    time_s: float
    compute_s: float
    layers: tuple[LayerCost, ...]
    bound: str  # "compute", or the name of a memory layer, or "launch"

    @property
    def busy_s(self) -> float:
        """Time of the busiest resource, without the launch: what there is to divide among units."""
        return max(self.compute_s, *(cost.time_s for cost in self.layers), 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RProgram:
    """A hierarchical rTile configuration for one operator on one device (paper §3.2, Figures 6 and 7).

    ``tiles`` lists (layer name, rTile held in that layer) from the highest layer down, without the lowest layer,
    which holds the whole tensors. ``vector_axis`` is the axis whose neighbours sit in one SIMD register (CPU) or in
    neighbouring lanes of a warp (GPU). ``unit_count`` is the number of execution units the program is scaled out to,
    ``epsilon`` the padding bound under which it was found.
    """

    device: str
    expr_digest: str
    tiles: tuple[tuple[str, RTile], ...]
    vector_axis: str | None
    unit_count: int
    partition_count: int
    epsilon: float
    shrunk: bool
    prediction: Prediction

    def tile(self, layer: str) -> RTile:
        return dict(self.tiles)[layer]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantPack:
    """How a compile-time constant is laid out for a kernel, so that its data tiles are contiguous in the order of use.

    The packed tensor has the given ``extents``; its element ``[i0, i1, ...]`` is the constant's row-major element
    ``offset + sum(i_d * strides[d])``, and 0 beyond the constant's end.

    Worked example: ``W[j, k]`` of shape (48, 32), used as ``B[k, j]`` with j split into panels of 16, is packed with
    extents (3, 32, 16) and strides (16*32, 1, 32): panel, k, j within the panel.
    """

    param_index: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    offset: int = 0

    def __post_init__(self) -> None:
        assert len(self.extents) == len(self.strides)
        assert all(extent >= 1 for extent in self.extents)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPlan:
    """What an emitter planned for its largest launch, to be compared with the compiler's report of it.

    ``launches`` counts kernels one after another; ``register_count`` is in 32-bit registers of a thread.
    """

    launches: int
    blocks: int
    threads: int
    shared_bytes: int
    register_count: int


PIPELINE_PLAN = "tvm_ext.pipeline_plan"
"""PrimFunc attribute: which buffers are loaded ahead of their use, a `PipelinePlan` as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelinedBuffer:
    """A buffer that is loaded some iterations of ``loop`` before it is used (ALCOP §2.1, §3.1).

    ``level`` is 0 for shared memory, 1 for registers that are loaded from it. ``stages`` is the number of versions,
    one of which is used while the others are loaded. ``copy_bytes`` is the width of one asynchronous copy (4, 8 or
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

    @property
    def by_name(self) -> dict[str, PipelinedBuffer]:
        return {item.name: item for item in self.buffers}

    def __str__(self) -> str:
        if not self.buffers:
            return "not pipelined"
        stages = ", ".join(f"{item.name} in {item.stages} stages of {item.loop}" for item in self.buffers)
        return f"{stages}, by bulk copies" if self.bulk_copies else stages


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelChoice:
    """Which path an operator took and why; ``reason`` is never empty (house rule: no silent fallback).

    ``gpu`` has one entry for each group of stages that became GPU kernels, in order; a CPU's kernels have none.
    ``pipeline`` says which of a GPU kernel's buffers are loaded ahead of their use; None where that was not asked.
    """

    operator: str
    path: Path
    reason: str
    device: str
    flops: float = 0.0
    bytes: float = 0.0
    program: RProgram | None = None
    packs: tuple[ConstantPack, ...] = ()
    gpu: tuple[GpuPlan, ...] = ()
    pipeline: PipelinePlan | None = None

    def __post_init__(self) -> None:
        assert self.reason, f"{self.operator}: a choice must say why"


LAYOUT = "tvm_ext.layout"
"""Module attribute: what was decided about layouts, a `LayoutRecord` as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutChain:
    """Connected operators for which channel-blocked layouts were considered together, and what was decided.

    ``saved_elements`` is the estimated gain, in the time of moving so many elements once.
    """

    operators: tuple[str, ...]
    blocked_count: int
    transform_count: int
    saved_elements: float
    reason: str


CHANNELS_LAST = 0
"""`LayoutRecord.block` of the layout NHWC, whose channels are last and in no blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutRecord:
    """All chains of a module, in blocks of ``block`` channels."""

    block: int
    chains: tuple[LayoutChain, ...]

    @property
    def blocked_count(self) -> int:
        return sum(chain.blocked_count for chain in self.chains)

    @property
    def transform_count(self) -> int:
        return sum(chain.transform_count for chain in self.chains)


T = TypeVar("T")


def to_json(record: object) -> str:
    """The record as one line of JSON; `from_json` with the record's class gives it back."""
    assert is_dataclass(record)
    assert not isinstance(record, type)
    return json.dumps(asdict(record), separators=(",", ":"))


def from_json(kind: type[T], text: str) -> T:
    """Rebuild a record of class ``kind`` from `to_json`'s text; raises ValueError where it does not fit."""
    try:
        value = _build(kind, json.loads(text))
    except (AttributeError, TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error
    assert isinstance(value, kind)
    return value


def _build(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        unknown = set(value) - {item.name for item in fields(kind)}
        if unknown:
            raise TypeError(f"unknown fields {sorted(unknown)}")
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})
    if origin is tuple:
        kinds = get_args(kind)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(_build(kinds[0], item) for item in value)
        return tuple(_build(k, item) for k, item in zip(kinds, value, strict=True))
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        return _build(next(k for k in get_args(kind) if k is not type(None)), value)
    return _leaf(kind, value)


def _leaf(kind: Any, value: Any) -> Any:
    """``value`` itself; raises TypeError where JSON held something else than a field of ``kind`` takes."""
    if get_origin(kind) is Literal:
        fits = value in get_args(kind)
    elif kind is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    else:
        fits = type(value) is kind if kind in (str, int, bool) else True
    if not fits:
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    return value
