"""Operators with float64 references, and the GPU kernels that Roller's programs give for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import te, tirx, topi

from tvm_ext.analysis.computations import Computation, read_operator, reads
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices import device_db
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.ir.build_ir import sequence
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.records.rprogram import RProgram, RTile
from tvm_ext.tir_passes.emit.simt_tiles.emit import emit_simt_tile
from tvm_ext.tir_passes.plan.canonical import canonical_computation
from tvm_ext.tir_passes.plan.plan_kernels import TileGroup, plan, simplify
from tvm_ext.tir_passes.roller.construct import construct
from tvm_ext.verify.verification import Verification, verify

Array = Any
V100, A100, H200, MI50 = (device_db.lookup(name) for name in ("nvidia-v100", "nvidia-a100", "nvidia-h200", "amd-mi50"))


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A TE function, inputs first, and what its inputs give in float64."""

    func: Any
    reference: Callable[..., Array]


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """What `emit_simt_tile` is given, but for the program."""

    computation: Computation
    expr: TensorExpr
    prologue: tuple[Computation, ...]
    epilogue: tuple[Computation, ...]
    params: tuple[Any, ...]


def anchor_of(func: Any) -> Anchor:
    operator = simplify(read_operator(func, "operator"))
    group = next(g for g in plan(operator) if isinstance(g, TileGroup))
    computation, expr = canonical_computation(group.anchor, "operator", epilogue=group.epilogue, params=operator.params)
    prologue = tuple(s for s in operator.computations if not s.is_reduction and reads(group.anchor.value, s.target))
    return Anchor(
        computation=computation, expr=expr, prologue=prologue, epilogue=group.epilogue, params=operator.params
    )


def emit(anchor: Anchor, program: RProgram, device: DeviceSpec = V100) -> SimtKernel:
    return emit_simt_tile(
        anchor.computation, anchor.expr, anchor.prologue, anchor.epilogue, program, device, anchor.params
    )


def best_program(anchor: Anchor, device: DeviceSpec = V100) -> RProgram:
    return construct(anchor.expr, device, k=10, tensor_core=False).programs[0]


def with_tiles(program: RProgram, upper: dict[str, int], lower: dict[str, int]) -> RProgram:
    """``program`` with other sizes of the register tile and of the threadblock tile."""
    tiles = dict(program.tiles)
    names = tiles["L1"].axes

    def tile(old: RTile, sizes: dict[str, int]) -> RTile:
        return RTile(axes=names, shape=tuple(sizes.get(n, old.sizes.get(n, 1)) for n in names))

    return replace(program, tiles=(("L0", tile(tiles["L0"], upper)), ("L1", tile(tiles["L1"], lower))))


def function(anchor: Anchor, kernel: SimtKernel) -> Any:
    attrs = {"global_symbol": "main", "s_tir": True, "tirx.noalias": True}
    return tirx.PrimFunc(list(anchor.params), sequence(*kernel.statements)).with_attrs(attrs)


def kernel_of(func: Any, device: DeviceSpec = V100) -> tuple[Any, SimtKernel]:
    """The thread-bound function of the best program, and its plan."""
    anchor = anchor_of(func)
    kernel = emit(anchor, best_program(anchor, device), device)
    return function(anchor, kernel), kernel


def random_inputs(func: Any, seed: int = 0) -> list[Array]:
    generator = np.random.default_rng(seed)
    arrays = []
    for param in func.params[:-1]:
        shape, dtype = [int(s) for s in param.ty.shape], str(param.ty.dtype)
        whole = generator.integers(-8, 8, shape)
        arrays.append(whole.astype(dtype) if "int" in dtype else generator.standard_normal(shape).astype(dtype))
    return arrays


def verified(operator: Operator, device: DeviceSpec = V100, func: Any = None) -> Verification:
    """The operator's kernel in the SIMT interpreter, against the float64 reference."""
    func = kernel_of(operator.func, device)[0] if func is None else func
    arrays = random_inputs(operator.func)
    inputs = {param.name: array for param, array in zip(func.params[:-1], arrays, strict=True)}
    output = func.params[-1].name
    expected = operator.reference(*(array.astype(np.float64) for array in arrays))
    return verify(func, device, inputs=inputs, reference=lambda _: {output: expected})


# --- operators -----------------------------------------------------------------------------------------------------
def matmul(
    m: int,
    n: int,
    k: int,
    dtype: str = "float32",
    *,
    out: str = "",
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Operator:
    out = out or dtype
    a = te.placeholder((k, m) if transpose_a else (m, k), dtype, "A")
    b = te.placeholder((n, k) if transpose_b else (k, n), dtype, "B")
    r = te.reduce_axis((0, k), "k")

    def product(i: Any, j: Any) -> Any:
        left, right = a[r, i] if transpose_a else a[i, r], b[j, r] if transpose_b else b[r, j]
        left, right = (left, right) if out == dtype else (left.astype(out), right.astype(out))
        return te.sum(left * right, axis=r)

    func = te.create_prim_func([a, b, te.compute((m, n), product, "C")])
    return Operator(func=func, reference=lambda x, y: (x.T if transpose_a else x) @ (y.T if transpose_b else y))


def batch_matmul(batch: int, m: int, n: int, k: int, *, transpose_b: bool = False) -> Operator:
    a = te.placeholder((batch, m, k), "float32", "A")
    b = te.placeholder((batch, n, k) if transpose_b else (batch, k, n), "float32", "B")
    func = te.create_prim_func([a, b, topi.nn.batch_matmul(a, b, transpose_b=transpose_b)])
    return Operator(func=func, reference=lambda x, y: x @ (y.transpose(0, 2, 1) if transpose_b else y))


def convolved(x: Array, w: Array, stride: int, pad: int, dilation: int = 1, groups: int = 1) -> Array:
    """Any-dimensional convolution of channel-first ``x`` by the definition, in the arrays' own dtype."""
    spatial = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *[(pad, pad)] * spatial])
    reach = [(size - 1) * dilation + 1 for size in w.shape[2:]]
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, x.ndim)))
    skip = (slice(None), slice(None), *[slice(None, None, stride)] * spatial, *[slice(None, None, dilation)] * spatial)
    windows = windows[skip]
    n, c, *rest = windows.shape
    windows = windows.reshape(n, groups, c // groups, *rest)
    w = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    out, taps = "xyz"[:spatial], "rst"[:spatial]
    result = np.einsum(f"ngc{out}{taps},gfc{taps}->ngf{out}", windows, w, optimize=True)
    return result.reshape(n, -1, *result.shape[3:])


def conv2d(
    n: int, c: int, size: tuple[int, int], f: int, kernel: tuple[int, int], stride: int = 1, pad: int = 0,
    dilation: int = 1, groups: int = 1,
) -> Operator:  # fmt: skip
    x = te.placeholder((n, c, *size), "float32", "X")
    w = te.placeholder((f, c // groups, *kernel), "float32", "W")
    if groups == 1:
        y = topi.nn.conv2d_nchw(x, w, stride, pad, dilation)
    else:
        y = topi.nn.group_conv2d_nchw(x, w, stride, pad, dilation, groups)
    return Operator(
        func=te.create_prim_func([x, w, y]), reference=lambda a, b: convolved(a, b, stride, pad, dilation, groups)
    )


def conv2d_nhwc(n: int, c: int, size: tuple[int, int], f: int, kernel: tuple[int, int], pad: int) -> Operator:
    x, w = te.placeholder((n, *size, c), "float32", "X"), te.placeholder((*kernel, c, f), "float32", "W")

    def reference(a: Array, b: Array) -> Array:
        return convolved(a.transpose(0, 3, 1, 2), b.transpose(3, 2, 0, 1), 1, pad).transpose(0, 2, 3, 1)

    return Operator(func=te.create_prim_func([x, w, topi.nn.conv2d_nhwc(x, w, 1, pad, 1)]), reference=reference)


def depthwise(n: int, c: int, size: tuple[int, int], kernel: int, stride: int, pad: int) -> Operator:
    x = te.placeholder((n, c, *size), "float32", "X")
    w = te.placeholder((c, 1, kernel, kernel), "float32", "W")
    func = te.create_prim_func([x, w, topi.nn.depthwise_conv2d_nchw(x, w, stride, pad, 1)])
    return Operator(func=func, reference=lambda a, b: convolved(a, b, stride, pad, groups=c))


def conv1d(n: int, c: int, width: int, f: int, kernel: int, stride: int, pad: int) -> Operator:
    x, w = te.placeholder((n, c, width), "float32", "X"), te.placeholder((f, c, kernel), "float32", "W")
    func = te.create_prim_func([x, w, topi.nn.conv1d_ncw(x, w, stride, pad, 1)])
    return Operator(func=func, reference=lambda a, b: convolved(a, b, stride, pad))


def conv3d(n: int, c: int, size: tuple[int, int, int], f: int, kernel: int, pad: int) -> Operator:
    x, w = te.placeholder((n, c, *size), "float32", "X"), te.placeholder((f, c, *[kernel] * 3), "float32", "W")
    func = te.create_prim_func([x, w, topi.nn.conv3d_ncdhw(x, w, 1, pad, 1, 1)])
    return Operator(func=func, reference=lambda a, b: convolved(a, b, 1, pad))


OPERATORS = {
    "square": matmul(64, 64, 32),
    "primes": matmul(31, 37, 29),
    "a single row": matmul(1, 200, 300),
    "a single column": matmul(100, 1, 300),
    "a single product": matmul(32, 32, 1),
    "tiny": matmul(3, 5, 7),
    "b transposed": matmul(48, 72, 40, transpose_b=True),
    "a transposed": matmul(48, 72, 40, transpose_a=True),
    "double": matmul(32, 32, 32, "float64"),
    "half": matmul(32, 64, 64, "float16"),
    "half to float": matmul(32, 48, 64, "float16", out="float32"),
    "bytes": matmul(32, 64, 64, "int8", out="int32"),
    "batch": batch_matmul(3, 33, 20, 24),
    "batch, b transposed": batch_matmul(2, 19, 23, 29, transpose_b=True),
    "3x3": conv2d(1, 8, (14, 14), 16, (3, 3), 1, 1),
    "3x3 stride 2": conv2d(1, 8, (29, 29), 16, (3, 3), 2),
    "3x5, odd": conv2d(2, 7, (11, 13), 5, (3, 5)),
    "7x7 stride 2, 3 channels": conv2d(1, 3, (24, 24), 8, (7, 7), 2, 3),
    "dilated": conv2d(1, 8, (16, 16), 8, (3, 3), 1, 2, 2),
    "1x1": conv2d(2, 24, (7, 7), 40, (1, 1)),
    "1x1 stride 2": conv2d(2, 16, (14, 14), 24, (1, 1), 2),
    "groups": conv2d(1, 8, (10, 10), 16, (3, 3), 1, 1, 1, 4),
    "nhwc": conv2d_nhwc(1, 16, (9, 9), 16, (3, 3), 1),
    "depthwise": depthwise(2, 5, (15, 15), 3, 1, 1),
    "depthwise stride 2": depthwise(1, 7, (21, 21), 5, 2, 2),
    "1-d": conv1d(2, 16, 50, 24, 5, 2, 2),
    "3-d": conv3d(1, 4, (6, 8, 10), 8, 3, 1),
}
