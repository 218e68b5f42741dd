"""What searches over tiles are about: a product and its tiles and stages on tensor cores; the tiles of CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass

from .persistent import PanelPlan
from .serialise import to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedProduct:
    """A (batched) matrix product, or the one that a convolution's windows make (im2col).

    ``input_bytes`` are those of the operator's inputs: a convolution's windows read a pixel for each of their taps, a
    cache that holds the inputs reads it from memory once. ``output_itemsize`` in bytes.
    """

    batch: int
    rows: int
    columns: int
    depth: int
    dtype: str
    itemsize: int
    output_itemsize: int
    input_bytes: int

    def __post_init__(self) -> None:
        sizes = self.batch, self.rows, self.columns, self.depth, self.itemsize, self.output_itemsize, self.input_bytes
        if min(sizes) < 1:
            raise ValueError(f"a product of {self.batch} x {self.rows} x {self.columns} x {self.depth} has no elements")

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.columns * self.depth


@dataclass(frozen=True, kw_only=True, slots=True)
class TileCandidate:
    """A threadblock's tile, a warp's, and the versions of shared memory and of fragments (1: not pipelined)."""

    rows: int
    columns: int
    depth: int
    warp_rows: int
    warp_columns: int
    shared_stages: int
    register_stages: int

    @property
    def configuration(self) -> str:
        """By which a store of measurements knows it."""
        return to_json(self)

    def __str__(self) -> str:
        block, warp = f"{self.rows}x{self.columns}x{self.depth}", f"{self.warp_rows}x{self.warp_columns}"
        return f"{block} by warps of {warp}, {self.shared_stages} x {self.register_stages} stages"


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTile:
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

    @property
    def configuration(self) -> str:
        """By which a store of measurements knows it."""
        return to_json(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTile:
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

    @property
    def configuration(self) -> str:
        """By which a store of measurements knows it."""
        return to_json(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class PanelTiles:
    """How a CPU computes a chain panel by panel: its panels, and the tiles of each product in one, first to last."""

    panels: PanelPlan
    tiles: tuple[CpuTile, ...]

    @property
    def configuration(self) -> str:
        """By which a store of measurements knows it."""
        return to_json(self)

    @property
    def levels(self) -> tuple[int, ...]:
        """All its numbers but the axes, which follow from how many sizes there are."""
        inside = [(tile.vector, *tile.register, *tile.inner, *tile.outer, *tile.order) for tile in self.tiles]
        return (*self.panels.sizes, *(number for numbers in inside for number in numbers))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTiles:
    """How a CPU goes over rows (softmax, normalisations, reductions).

    ``forks``: cores divide the rows. ``registers``: of a reduction along a row, the SIMD registers of partial results
    that do not wait for each other.
    """

    forks: bool
    registers: int

    def __post_init__(self) -> None:
        if self.registers < 1:
            raise ValueError(f"{self} has no partial results")

    @property
    def configuration(self) -> str:
        """By which a store of measurements knows it."""
        return to_json(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class JointTiles:
    """What is chosen of a kernel of several parts: the configuration of each, in their order; "" is construction's.

    Parts with the same key have the same configuration, and one entry.
    """

    parts: tuple[str, ...]

    @property
    def configuration(self) -> str:
        """By which a store of measurements knows it."""
        return to_json(self)


def product_of_matmul(
    rows: int, columns: int, depth: int, *, batch: int = 1, dtype: str = "float16", itemsize: int = 2, output: int = 4
) -> TunedProduct:
    """A (batched) product whose elements take ``itemsize`` bytes, its results ``output``."""
    return TunedProduct(
        batch=batch,
        rows=rows,
        columns=columns,
        depth=depth,
        dtype=dtype,
        itemsize=itemsize,
        output_itemsize=output,
        input_bytes=batch * (rows + columns) * depth * itemsize,
    )


def product_of_convolution(
    image: tuple[int, int, int, int],
    kernel: tuple[int, int],
    channels: int,
    *,
    stride: int = 1,
    padding: int = 0,
    dtype: str = "float16",
    itemsize: int = 2,
    output: int = 4,
) -> TunedProduct:
    """A convolution of an NHWC ``image`` to so many ``channels``.

    Worked example: 64 x 56 x 56 x 64 by 3 x 3 with a padding of 1 to 64 channels is 200704 x 64 with a depth of 576,
    whose rows read 231 MB of windows where the image has 26 MB.
    """
    count, height, width, inner = image
    rows, columns = ((size + 2 * padding - k) // stride + 1 for size, k in zip((height, width), kernel, strict=True))
    taps = kernel[0] * kernel[1]
    return TunedProduct(
        batch=1,
        rows=count * rows * columns,
        columns=channels,
        depth=taps * inner,
        dtype=dtype,
        itemsize=itemsize,
        output_itemsize=output,
        input_bytes=(count * height * width * inner + taps * inner * channels) * itemsize,
    )
