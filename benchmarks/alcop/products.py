"""Products and convolutions as the products that tensor cores compute."""

from __future__ import annotations

from tvm_ext.cost.gpu_columns import TunedProduct


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
