"""What the GPU benchmark runs: operators as plain records, which both machines understand. Standard library alone.

A `Case` says what to compute and on which shapes. `programs.py` makes a TensorIR function of it, `references.py` the
same computation in PyTorch and, for small ones, NumPy. Random inputs follow from the case's seed on the machine that
has the GPU, so that a bundle carries none.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Shape = tuple[int, ...]
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A dense array: name, shape, dtype, mean and deviation of its normally distributed values (0, 0: not an input).

    Integers are drawn from -4 to 4, or from 0 to ``below`` exclusively.
    """

    name: str
    shape: Shape
    dtype: str
    scale: float = 1.0
    mean: float = 0.0
    below: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Of integers: the lowest, and the one behind the highest."""
        return (0, self.below) if self.below else (-4, 5)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operator.

    ``operator`` is a key of `programs.PROGRAMS` and `references.REFERENCES`; ``attributes`` are its strides, pads, ...;
    ``terms`` how many products or summands go into one result, which bounds the error. ``operator`` "graph" is a whole
    model, whose operators ``attributes`` list (`graph_references`), with the ``tolerance`` of its outputs.
    """

    id: str
    group: str
    operator: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    attributes: Mapping[str, Any] = field(default_factory=dict)
    flops: float = 0.0
    terms: int = 1
    seed: int = 0
    tolerance: float = 0.0

    @property
    def bytes(self) -> int:
        """What has to be moved at least."""
        return sum(item.size_bytes for item in (*self.inputs, self.output))

    @property
    def allowed_error(self) -> float:
        """Of the whole output, relative by norm: u (a sqrt(K) + b), see docs/testing.md; 0 for integers."""
        if self.tolerance:
            return self.tolerance
        roundoff = max((UNIT_ROUNDOFF.get(item.dtype, 0.0) for item in (*self.inputs, self.output)), default=0.0)
        wide = roundoff == UNIT_ROUNDOFF["float32"]
        return roundoff * ((2.0 if wide else 0.5) * math.sqrt(self.terms) + (16.0 if wide else 3.0))

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Case:
        """The inverse of `to_record`, after a way through JSON. Raises KeyError or TypeError for another record."""
        tensors = [Tensor(**{**item, "shape": tuple(item["shape"])}) for item in (*record["inputs"], record["output"])]
        return cls(**{**record, "inputs": tuple(tensors[:-1]), "output": tensors[-1]})


# --- builders -----------------------------------------------------------------------------------------------------
def matmul(
    id: str,
    m: int,
    n: int,
    k: int,
    dtype: str = "float32",
    *,
    group: str = "matmul",
    epilogue: str = "",
    batch: int = 1,
) -> Case:
    """y[m, n] = x[m, k] · w[k, n], float32 (or int32) sums; ``epilogue`` "bias_relu" adds a row and clips at 0."""
    out = "int32" if dtype == "int8" else dtype
    lead = (batch,) if batch > 1 else ()
    inputs = [Tensor(name="x", shape=(*lead, m, k), dtype=dtype), Tensor(name="w", shape=(*lead, k, n), dtype=dtype)]
    if epilogue:
        inputs.append(Tensor(name="b", shape=(n,), dtype=out))
    return Case(
        id=id, group=group, operator="batch_matmul" if lead else "matmul", inputs=tuple(inputs),
        output=Tensor(name="y", shape=(*lead, m, n), dtype=out, scale=0.0),
        attributes={"epilogue": epilogue}, flops=2.0 * batch * m * n * k, terms=k,
    )  # fmt: skip


def elementwise(id: str, shape: Shape, *, group: str = "elementwise", dtype: str = "float32") -> Case:
    x, y = Tensor(name="x", shape=shape, dtype=dtype), Tensor(name="y", shape=shape, dtype=dtype, scale=0.0)
    return Case(id=id, group=group, operator="relu", inputs=(x,), output=y, flops=float(math.prod(shape)))


def rows(id: str, operator: str, shape: Shape, *, group: str = "rows", dtype: str = "float32") -> Case:
    """``operator`` "softmax" or "layer_norm" over the last axis."""
    inputs = [Tensor(name="x", shape=shape, dtype=dtype)]
    if operator == "layer_norm":
        inputs += [Tensor(name=name, shape=shape[-1:], dtype=dtype) for name in ("g", "b")]
    y = Tensor(name="y", shape=shape, dtype=dtype, scale=0.0)
    flops = 5.0 * math.prod(shape)
    return Case(id=id, group=group, operator=operator, inputs=tuple(inputs), output=y, flops=flops, terms=shape[-1])


def convolution(
    id: str, x: Shape, w: Shape, *, stride: int, pads: tuple[int, int, int, int], dilation: int = 1, groups: int = 1,
    layout: str = "NCHW", dtype: str = "float32", group: str = "conv2d",
) -> Case:  # fmt: skip
    """``x`` NCHW and ``w`` OIHW, or ``x`` NHWC and ``w`` HWIO; ``pads`` (top, left, bottom, right)."""
    n, height, width = (x[0], x[2], x[3]) if layout == "NCHW" else x[:3]
    (kh, kw), filters = (w[2:], w[0]) if layout == "NCHW" else (w[:2], w[3])
    fan_in = w[1] * kh * kw if layout == "NCHW" else w[2] * kh * kw
    oh = (height + pads[0] + pads[2] - (kh - 1) * dilation - 1) // stride + 1
    ow = (width + pads[1] + pads[3] - (kw - 1) * dilation - 1) // stride + 1
    shape = (n, filters, oh, ow) if layout == "NCHW" else (n, oh, ow, filters)
    return Case(
        id=id, group=group, operator="depthwise" if groups > 1 else "conv2d",
        inputs=(Tensor(name="x", shape=x, dtype=dtype), Tensor(name="w", shape=w, dtype=dtype)),
        output=Tensor(name="y", shape=shape, dtype=dtype, scale=0.0),
        attributes={"stride": stride, "pads": list(pads), "dilation": dilation, "groups": groups, "layout": layout},
        flops=2.0 * math.prod(shape) * fan_in, terms=fan_in,
    )  # fmt: skip


# --- lists --------------------------------------------------------------------------------------------------------
def gemms(dtype: str) -> Iterator[Case]:
    """Squares, and the products of BERT-base and BERT-large at 4,096 tokens."""
    for size in (512, 1024, 2048, 4096, 8192):
        yield matmul(f"gemm_{dtype}_{size}", size, size, size, dtype, group=f"gemm_{dtype}")
    for m, n, k in ((4096, 768, 768), (4096, 3072, 768), (4096, 768, 3072), (4096, 1024, 1024), (4096, 4096, 1024)):
        yield matmul(f"gemm_{dtype}_{m}x{n}x{k}", m, n, k, dtype, group=f"gemm_{dtype}")


def fused() -> Iterator[Case]:
    """Operators with an epilogue, attention's batched products, and rows."""
    yield matmul("gemm_bias_relu", 4096, 3072, 768, "float16", group="fused", epilogue="bias_relu")
    yield matmul("attention_scores", 128, 128, 64, "float16", group="fused", batch=384)
    yield matmul("attention_values", 128, 64, 128, "float16", group="fused", batch=384)
    for dtype in ("float32", "float16"):
        yield rows(f"softmax_{dtype}", "softmax", (384 * 128, 128), dtype=dtype)
        yield rows(f"layer_norm_{dtype}", "layer_norm", (4096, 768), dtype=dtype)
        yield elementwise(f"relu_{dtype}", (128, 64, 112, 112), dtype=dtype)


def nhwc_convolutions() -> Iterator[Case]:
    """3 x 3 convolutions of ResNet-50 at batch 32, half precision, channels last."""
    for size, channels in ((56, 64), (28, 128), (14, 256), (7, 512)):
        x, w = (32, size, size, channels), (3, 3, channels, channels)
        yield convolution(
            f"conv_nhwc_{size}", x, w, stride=1, pads=(1, 1, 1, 1), layout="NHWC", dtype="float16", group="conv_float16"
        )


def roller(workload: Path) -> Iterator[Case]:
    """The operators of ``roller_ops.csv``, float32."""
    with workload.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield _roller(row)


def _roller(row: Mapping[str, str]) -> Case:
    kind = row["op"]
    group = f"roller_{kind.split('(')[0].lower()}"
    if kind == "MatMul":
        return matmul(row["id"], int(row["M"]), int(row["N_mm"]), int(row["K"]), group=group)
    if kind.startswith("Elementwise"):
        return elementwise(row["id"], _numbers(row["shape"]), group=group)
    if kind == "ReduceMean":
        return _roller_reduction(row, group)
    return _roller_pool(row, group) if kind == "AvgPool" else _roller_convolution(row, group)


def _roller_window(row: Mapping[str, str]) -> tuple[dict[str, int], tuple[int, int, int, int]]:
    """The row's numbers, and its pads (top, left, bottom, right)."""
    keys = ("N", "C", "H", "W", "F", "KH", "KW", "stride", "dilation")
    numbers = {key: int(row[key] or 1) for key in keys}
    if row["padding"] != "SAME":
        return numbers, (0, 0, 0, 0)
    stride, dilation = numbers["stride"], numbers["dilation"]
    top, bottom = _same(numbers["H"], numbers["KH"], stride, dilation)
    left, right = _same(numbers["W"], numbers["KW"], stride, dilation)
    return numbers, (top, left, bottom, right)


def _roller_convolution(row: Mapping[str, str], group: str) -> Case:
    number, pads = _roller_window(row)
    depthwise = row["op"] == "DepthwiseConv"
    x = (number["N"], number["C"], number["H"], number["W"])
    kernel = (number["KH"], number["KW"])
    w = (number["C"], 1, *kernel) if depthwise else (number["F"], number["C"], *kernel)
    return convolution(
        row["id"], x, w, stride=number["stride"], pads=pads, dilation=number["dilation"],
        groups=number["C"] if depthwise else 1, group=group,
    )  # fmt: skip


def _roller_pool(row: Mapping[str, str], group: str) -> Case:
    """Average over the part of the window that lies inside."""
    number, pads = _roller_window(row)
    n, c, kernel, stride = number["N"], number["C"], (number["KH"], number["KW"]), number["stride"]
    sizes = (number["H"] + pads[0] + pads[2], number["W"] + pads[1] + pads[3])
    output = (n, c, *((size - k) // stride + 1 for size, k in zip(sizes, kernel, strict=True)))
    return Case(
        id=row["id"], group=group, operator="average_pool",
        inputs=(Tensor(name="x", shape=(n, c, number["H"], number["W"]), dtype="float32"),),
        output=Tensor(name="y", shape=output, dtype="float32", scale=0.0),
        attributes={"kernel": list(kernel), "stride": stride, "pads": list(pads)},
        flops=float(math.prod(output) * math.prod(kernel)), terms=math.prod(kernel),
    )  # fmt: skip


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """TensorFlow's SAME: 83 by steps of 2 in windows of 5 gives 42 outputs, which span 87: 2 before, 2 after."""
    missing = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return missing // 2, missing - missing // 2


def _roller_reduction(row: Mapping[str, str], group: str) -> Case:
    shape, axes = _numbers(row["shape"]), _numbers(row["axis"])
    axes = tuple(sorted(axis % len(shape) for axis in axes))
    output = tuple(size for axis, size in enumerate(shape) if axis not in axes)
    return Case(
        id=row["id"], group=group, operator="sum", inputs=(Tensor(name="x", shape=shape, dtype="float32"),),
        output=Tensor(name="y", shape=output, dtype="float32", scale=0.0), attributes={"axes": list(axes)},
        flops=float(math.prod(shape)), terms=math.prod(shape[axis] for axis in axes),
    )  # fmt: skip


def _numbers(text: str) -> Shape:
    return tuple(int(part) for part in text.strip("[]() ").replace(",", " ").replace("x", " ").split())


def all_cases(workload: Path) -> list[Case]:
    """Every case, those first that matter most where time runs short."""
    return [
        *gemms("float16"), *fused(), *nhwc_convolutions(), *gemms("float32"), *gemms("int8"), *roller(workload),
    ]  # fmt: skip
