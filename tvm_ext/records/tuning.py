"""What searches move in: the tiles of kernels, of each kind of kernel its own."""

from __future__ import annotations

from dataclasses import dataclass

from .persistent import PanelPlan
from .serialise import to_json


class SearchedTiles:
    """A record of tiles that searches move in."""

    __slots__ = ()

    @property
    def configuration(self) -> str:
        """By which a store of measurements knows it."""
        return to_json(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTile(SearchedTiles):
    """The tiles of a CPU kernel: all that its emitter takes from an rProgram.

    All but ``vector`` have one entry for each spatial axis of the expression in canonical form, in its order.
    ``vector`` is the axis (its position) along which registers lie. ``register`` is a register tile's size in elements;
    ``inner`` the register tiles in a block of the L1 cache, ``outer`` those in a task (a block of the L2 cache, which
    one thread computes). ``order`` has the axes of the loops over tiles, outermost first. Reductions stay whole.

    Worked example, C[128, 768] += A[128, 768] * B[768, 768]: register (5, 80), inner (3, 1), outer (9, 1), order (1, 0)
    is 15 x 80 in L1, 45 x 80 a task, and all rows beneath one panel of B before the next panel.
    """

    vector: int
    register: tuple[int, ...]
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        axes = range(len(self.register))
        if not len(self.inner) == len(self.outer) == len(self.register) or self.vector not in axes:
            raise ValueError(f"{self} does not say the same number of axes everywhere")
        if sorted(self.order) != list(axes):
            raise ValueError(f"the loops' order {self.order} is none of {len(self.register)} axes")
        if min((*self.register, *self.inner, *self.outer)) < 1:
            raise ValueError(f"{self} has an empty tile")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTile(SearchedTiles):
    """How a CPU's window kernel (depthwise convolution, pooling) goes over its planes.

    A task computes ``band`` output rows of one plane, in register tiles of ``rows`` rows by ``vectors`` registers of
    ``width`` elements. ``flat``: registers run on from row to row, ``rows`` is 1. ``forks``: cores divide the tasks.
    """

    band: int
    rows: int
    vectors: int
    width: int
    flat: bool
    forks: bool

    def __post_init__(self) -> None:
        if min(self.band, self.rows, self.vectors, self.width) < 1:
            raise ValueError(f"{self} has an empty tile")


@dataclass(frozen=True, kw_only=True, slots=True)
class WinogradTile(SearchedTiles):
    """How a CPU computes a 3x3 convolution in Winograd's form.

    A tile is ``outputs`` x ``outputs``. A task has ``tiles`` of them, and one of ``parts`` of the filters. Register
    tiles are ``rows`` tiles by ``vectors`` vectors of filters.
    """

    outputs: int
    tiles: int
    parts: int
    rows: int
    vectors: int

    def __post_init__(self) -> None:
        if min(self.outputs, self.tiles, self.parts, self.rows, self.vectors) < 1 or self.tiles % self.rows:
            raise ValueError(f"{self} has an empty tile, or one that is cut")


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelTiles(SearchedTiles):
    """How a CPU computes a chain panel by panel: its panels, and the tiles of each product in one, first to last."""

    panels: PanelPlan
    tiles: tuple[CpuTile, ...]

    @property
    def levels(self) -> tuple[int, ...]:
        """All its numbers but the axes, which follow from how many sizes there are."""
        inside = [(tile.vector, *tile.register, *tile.inner, *tile.outer, *tile.order) for tile in self.tiles]
        return (*self.panels.sizes, *(number for numbers in inside for number in numbers))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTiles(SearchedTiles):
    """How a CPU goes over rows (softmax, normalisations, reductions).

    ``forks``: cores divide the rows. ``registers``: of a reduction along a row, the SIMD registers of partial results
    that do not wait for each other.
    """

    forks: bool
    registers: int

    def __post_init__(self) -> None:
        if self.registers < 1:
            raise ValueError(f"{self} has no partial results")


@dataclass(frozen=True, kw_only=True, slots=True)
class JointTiles(SearchedTiles):
    """What is chosen of a kernel of several parts: the configuration of each, in their order; "" is construction's.

    Parts with the same key have the same configuration, and one entry.
    """

    parts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTile(SearchedTiles):
    """The tiles of a GPU's product or convolution, and the versions of what it loads ahead (ALCOP, Table 2).

    On ``matrix`` units ``block`` is a threadblock's (rows, columns, depth) of the product that the operator is, and
    ``inner`` a warp's (rows, columns). On vector units both have one entry for each axis of the expression in canonical
    form: a thread's elements, and the threadblock's tile with the reduction of one step. ``splits`` blocks share the
    reduction of one tile. ``shared_stages`` and ``register_stages`` are versions of shared memory's tiles and of the
    fragments in registers (1: not pipelined).

    Worked example: 128 x 128 x 64 by warps of 64 x 32 are eight warps.
    """

    matrix: bool
    inner: tuple[int, ...]
    block: tuple[int, ...]
    splits: int = 1
    shared_stages: int = 1
    register_stages: int = 1

    def __post_init__(self) -> None:
        if min((*self.inner, *self.block, self.splits, self.shared_stages, self.register_stages), default=0) < 1:
            raise ValueError(f"{self} has an empty tile")
        if self.matrix and (len(self.inner), len(self.block)) != (2, 3):
            raise ValueError(f"{self} is no tile of rows, columns and depth by warps of rows and columns")
        if not self.matrix and len(self.inner) != len(self.block):
            raise ValueError(f"{self} does not say the same number of axes twice")
        if self.shared_stages == 1 and self.register_stages > 1:
            raise ValueError(f"{self} loads fragments ahead of tiles that are not there")

    def __str__(self) -> str:
        block, inner = ("x".join(map(str, sizes)) for sizes in (self.block, self.inner))
        split = f", reduction shared by {self.splits}" if self.splits > 1 else ""
        stages = f"{self.shared_stages} x {self.register_stages} stages"
        return f"{block} by {'warps' if self.matrix else 'threads'} of {inner}{split}, {stages}"
