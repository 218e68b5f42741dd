"""Products, and the tiles and stages that they can have on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_ext.records.serialise import to_json


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
