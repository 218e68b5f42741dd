"""Roller's own kernels to be pipelined: the operators of ALCOP's evaluation, scaled down to a few blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tvm_ext._tvm import te, topi
from tvm_ext.devices.device_db import lookup
from tvm_ext.options import BuildOptions
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.construct_kernels import construct_kernel

from .kernels import A100, H200, T4, V100, PipeliningKernel
from .schedules import half_product

SUMS = "float32"


def single_product(m: int, n: int, k: int) -> Any:
    """``C = A @ B`` in float32, unscheduled."""
    a, b = te.placeholder((m, k), SUMS, "A"), te.placeholder((k, n), SUMS, "B")
    axis = te.reduce_axis((0, k), "k")
    return te.create_prim_func([a, b, te.compute((m, n), lambda i, j: te.sum(a[i, axis] * b[axis, j], axis=axis), "C")])


def applied_product(m: int, n: int, k: int, function: Callable[[Any], Any], to: str, *, turned: bool = False) -> Any:
    """``f(A) @ B``, ``A @ f(B)`` or both, of float16, summed to float32; ``turned``: B is stored [n, k]."""
    a = te.placeholder((m, k), "float16", "A")
    b = te.placeholder((n, k) if turned else (k, n), "float16", "B")
    r = te.reduce_axis((0, k), "k")
    left = te.compute(a.shape, lambda i, j: function(a[i, j]), "F") if "a" in to else a
    right = te.compute(b.shape, lambda i, j: function(b[i, j]), "G") if "b" in to else b

    def element(i: Any, j: Any) -> Any:
        other = right[j, r] if turned else right[r, j]
        return te.sum(left[i, r].astype(SUMS) * other.astype(SUMS), axis=r)

    return te.create_prim_func([a, b, te.compute((m, n), element, "C")])


def batched_product(batch: int, m: int, n: int, k: int) -> Any:
    """``C[b] = A[b] @ B[b]`` of float16, summed to float32, unscheduled."""
    a, b = te.placeholder((batch, m, k), "float16", "A"), te.placeholder((batch, k, n), "float16", "B")
    axis = te.reduce_axis((0, k), "k")

    def element(s: Any, i: Any, j: Any) -> Any:
        return te.sum(a[s, i, axis].astype(SUMS) * b[s, axis, j].astype(SUMS), axis=axis)

    return te.create_prim_func([a, b, te.compute((batch, m, n), element, "C")])


def convolution(x: tuple[int, ...], w: tuple[int, ...], stride: int, pad: int) -> Any:
    """NHWC or NDHWC times HWIO or DHWIO, float16 to float32, unscheduled."""
    a, b = te.placeholder(x, "float16", "X"), te.placeholder(w, "float16", "W")
    axes = len(x) - 2
    make = topi.nn.conv2d_nhwc if axes == 2 else topi.nn.conv3d_ndhwc
    groups = [] if axes == 2 else [1]
    c = make(a, b, [stride] * axes, [pad] * axes, [1] * axes, *groups, out_dtype=SUMS)
    return te.create_prim_func([a, b, c])


def convolution_reference(stride: int, pad: int) -> Callable[[Array, Array], Array]:
    """The convolution of any number of axes, channels last, in float64."""

    def reference(x: Array, w: Array) -> Array:
        axes = tuple(range(1, x.ndim - 1))
        padded = np.pad(x.astype(np.float64), [(0, 0), *[(pad, pad)] * len(axes), (0, 0)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[: len(axes)], axis=axes)
        step = (slice(None), *[slice(None, None, stride)] * len(axes))
        # windows: batch, places, channels, offsets
        inner = [x.ndim - 1, *range(x.ndim, x.ndim + len(axes))]
        order = [len(axes), *range(len(axes))]
        return np.asarray(np.tensordot(windows[step], w.astype(np.float64), axes=(inner, order)))

    return reference


def constructed(make: Callable[[], Any], name: str, device: str) -> Any:
    """Roller's kernel of an unscheduled function for ``device``."""
    return construct_kernel(make(), name, lookup(device), BuildOptions(enable_pipelining=False))


def _kernel(name: str, make: Callable[[], Any], reference: Any, device: str, **rest: Any) -> PipeliningKernel:
    label = f"{name}_{device.removeprefix('nvidia-')}"
    return PipeliningKernel(
        name=label, make=partial(constructed, make, label, device), reference=reference, devices=(device,), **rest
    )


def product_of_arrays(a: Array, b: Array) -> Array:
    return np.asarray(np.matmul(a.astype(np.float64), b.astype(np.float64)))


def constructed_kernels() -> tuple[PipeliningKernel, ...]:
    """mma on A100 and H200, wmma on V100 and T4, float32 on all; few and odd numbers of reduction steps."""
    half, single = product_of_arrays, product_of_arrays
    tensor = [
        (f"roller_half_{m}x{n}x{k}", partial(half_product, m, n, k), half, device)
        for device in (A100, H200, V100, T4)
        for m, n, k in ((64, 64, 160), (64, 32, 64), (48, 80, 56))
    ]
    vector = [
        (f"roller_single_{m}x{n}x{k}", partial(single_product, m, n, k), single, device)
        for device in (A100, H200, V100, T4)
        for m, n, k in ((64, 64, 72), (33, 65, 17), (96, 65, 68), (128, 128, 40))
    ]
    images = [
        (
            f"roller_conv2d_stride{stride}", partial(convolution, (1, 9, 9, 16), (3, 3, 16, 32), stride, 1),
            convolution_reference(stride, 1), device,
        )
        for device in (A100, V100)
        for stride in (1, 2)
    ]  # fmt: skip
    others = [
        ("roller_batched", partial(batched_product, 2, 32, 32, 96), product_of_arrays, A100),
        (
            "roller_conv3d", partial(convolution, (1, 3, 5, 5, 16), (3, 3, 3, 16, 16), 1, 1),
            convolution_reference(1, 1), A100,
        ),
    ]  # fmt: skip
    return tuple(_kernel(*case) for case in (*tensor, *vector, *images, *others))


# --- ALCOP's list -----------------------------------------------------------------------------------------------------
def scaled_operator(row: dict[str, str], number: int, device: str) -> PipeliningKernel:
    """A row of ``alcop_ops.csv`` with at most 64 rows and columns, and 1 to 5 times 32 products a sum.

    Worked example: row 3, 1024 x 768 x 3072, becomes 64 x 64 x 128; a convolution keeps kernel, stride and padding,
    its images become 7 x 7 and its channels at most 16.
    """
    sizes = {key: int(value) for key, value in row.items() if value and value.isdigit()}
    name = f"alcop_{number}_{row['op']}".lower()
    if row["op"].endswith("MatMul"):
        m, n, k = min(sizes["M"], 64), min(sizes["N"], 64), 32 * (1 + number % 5)
        batch = min(sizes.get("B_or_N", 1), 2)
        make = partial(batched_product, batch, m, n, k) if batch > 1 else partial(half_product, m, n, k)
        return _kernel(name, make, product_of_arrays, device)
    stride, pad = sizes["stride"], sizes["padding"]
    inner, outer = min(sizes["CI"], 16), min(sizes["CO"], 16 if "3D" in row["op"] else 32)
    window = (sizes["KH"], sizes["KW"]) if "2D" in row["op"] else (sizes["KD"], sizes["KH"], sizes["KW"])
    image = (7 + number % 3, 7) if "2D" in row["op"] else (3, 5, 4 + number % 2)
    make = partial(convolution, (1, *image, inner), (*window, inner, outer), stride, pad)
    return _kernel(name, make, convolution_reference(stride, pad), device)
