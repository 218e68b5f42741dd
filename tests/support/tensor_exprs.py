"""Tensor expressions of common operators, made directly: for construction without TVM, in tests and benchmarks.

All are row-major; a convolution reads an input that is padded already, as after TVM's own padding computation.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from math import prod
from pathlib import Path

from tvm_ext.analysis.tensor_expr import Access, Axis, AxisKind, LinearIndex, TensorExpr
from tvm_ext.support.arithmetic import ceil_div

Term = tuple[str, int]
ITEMSIZE_BYTES = {"float64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


def access(
    tensor: str,
    shape: Sequence[int],
    dims: Sequence[str | Sequence[Term]],
    dtype: str = "float32",
    *,
    constant: bool = False,
) -> Access:
    """An access whose every dimension is an axis name or a list of (axis, coefficient) terms."""
    indices = tuple(LinearIndex(terms=((dim, 1),) if isinstance(dim, str) else tuple(dim)) for dim in dims)
    return Access(
        tensor=tensor,
        shape=tuple(shape),
        dtype=dtype,
        itemsize_bytes=ITEMSIZE_BYTES[dtype],
        indices=indices,
        is_constant=constant,
    )


def axes(kind: AxisKind, **extents: int) -> tuple[Axis, ...]:
    """Axes of one kind from name=extent."""
    return tuple(Axis(name=name, extent=extent, kind=kind) for name, extent in extents.items())


def matmul(
    m: int, n: int, k: int, dtype: str = "float32", *, constant: bool = False, transpose_b: bool = False
) -> TensorExpr:
    """``C[i, j] += A[i, k] * B[k, j]``, or ``B[j, k]`` where transposed."""
    b = access("B", (n, k) if transpose_b else (k, n), "jk" if transpose_b else "kj", dtype, constant=constant)
    return TensorExpr(
        name=f"matmul_{m}_{n}_{k}",
        axes=(*axes("spatial", i=m, j=n), *axes("reduce", k=k)),
        inputs=(access("A", (m, k), "ik", dtype), b),
        output=access("C", (m, n), "ij", dtype),
        combiner="sum",
        flops_per_point=2.0,
    )


def _windows(n: int, c: int, oh: int, ow: int, kernel: tuple[int, int], stride: int) -> Access:
    """The NCHW input of an operator over windows, padded to (oh-1)*stride + kernel rows, and columns alike."""
    rows, columns = (("h", stride), ("r", 1)), (("w", stride), ("s", 1))
    padded = (n, c, (oh - 1) * stride + kernel[0], (ow - 1) * stride + kernel[1])
    return access("X", padded, ("n", "c", rows, columns))


def conv2d(
    n: int, c: int, oh: int, ow: int, f: int, kernel: tuple[int, int], stride: int = 1, *, constant: bool = False
) -> TensorExpr:
    """NCHW convolution with an output of ``oh`` x ``ow`` over a padded input of (oh-1)*stride + kernel rows."""
    r, s = kernel
    return TensorExpr(
        name=f"conv2d_{n}_{c}_{oh}_{ow}_{f}_{r}_{s}_s{stride}",
        axes=(*axes("spatial", n=n, f=f, h=oh, w=ow), *axes("reduce", c=c, r=r, s=s)),
        inputs=(_windows(n, c, oh, ow, kernel, stride), access("W", (f, c, r, s), "fcrs", constant=constant)),
        output=access("Y", (n, f, oh, ow), "nfhw"),
        combiner="sum",
        flops_per_point=2.0,
    )


def depthwise_conv2d(n: int, c: int, oh: int, ow: int, kernel: tuple[int, int], stride: int = 1) -> TensorExpr:
    """NCHW depthwise convolution, one filter a channel."""
    r, s = kernel
    return TensorExpr(
        name=f"depthwise_{n}_{c}_{oh}_{ow}_{r}_{s}_s{stride}",
        axes=(*axes("spatial", n=n, c=c, h=oh, w=ow), *axes("reduce", r=r, s=s)),
        inputs=(_windows(n, c, oh, ow, kernel, stride), access("W", (c, r, s), "crs")),
        output=access("Y", (n, c, oh, ow), "nchw"),
        combiner="sum",
        flops_per_point=2.0,
    )


def pool2d(n: int, c: int, oh: int, ow: int, kernel: tuple[int, int], stride: int = 1) -> TensorExpr:
    """NCHW sum pooling."""
    r, s = kernel
    return TensorExpr(
        name=f"pool_{n}_{c}_{oh}_{ow}_{r}_{s}_s{stride}",
        axes=(*axes("spatial", n=n, c=c, h=oh, w=ow), *axes("reduce", r=r, s=s)),
        inputs=(_windows(n, c, oh, ow, kernel, stride),),
        output=access("Y", (n, c, oh, ow), "nchw"),
        combiner="sum",
        flops_per_point=1.0,
    )


def elementwise(*shape: int) -> TensorExpr:
    """``Y[...] = f(X[...])`` with one operation an element."""
    names = [f"d{i}" for i in range(len(shape))]
    return TensorExpr(
        name="elementwise_" + "_".join(map(str, shape)),
        axes=axes("spatial", **dict(zip(names, shape, strict=True))),
        inputs=(access("X", shape, names),),
        output=access("Y", shape, names),
        combiner=None,
        flops_per_point=1.0,
    )


def reduce_sum(rows: int, columns: int) -> TensorExpr:
    """``Y[i] += X[i, k]``."""
    return TensorExpr(
        name=f"sum_{rows}_{columns}",
        axes=(*axes("spatial", i=rows), *axes("reduce", k=columns)),
        inputs=(access("X", (rows, columns), "ik"),),
        output=access("Y", (rows,), "i"),
        combiner="sum",
        flops_per_point=1.0,
    )


def roller_operators(path: Path) -> list[tuple[str, TensorExpr]]:
    """(id, expression) of every row of Roller's operator table (`benchmarks/workloads/README.md`)."""
    with path.open(newline="", encoding="utf-8") as file:
        return [(row["id"], _roller_operator(row)) for row in csv.DictReader(file)]


def _roller_operator(row: dict[str, str]) -> TensorExpr:
    kind = row["op"]
    if kind == "MatMul":
        return matmul(int(row["M"]), int(row["N_mm"]), int(row["K"]))
    if kind.startswith("Elementwise"):
        return elementwise(*map(int, row["shape"].split("x")))
    if kind == "ReduceMean":
        shape = tuple(map(int, row["shape"].split("x")))
        kept = len(shape) - len(row["axis"].strip("[]").split(","))
        return reduce_sum(prod(shape[:kept]), prod(shape[kept:]))
    n, c, height, width, r, s, stride = (int(row[key]) for key in ("N", "C", "H", "W", "KH", "KW", "stride"))
    same = row["padding"] == "SAME"
    oh = ceil_div(height, stride) if same else (height - r) // stride + 1
    ow = ceil_div(width, stride) if same else (width - s) // stride + 1
    if kind == "Conv2D":
        return conv2d(n, c, oh, ow, int(row["F"]), (r, s), stride)
    make = depthwise_conv2d if kind == "DepthwiseConv" else pool2d
    return make(n, c, oh, ow, (r, s), stride)
