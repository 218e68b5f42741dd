"""Operators for tensor cores, their kernels, and how to run those: for the tests of `mma_tiles`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from tvm import te, tirx, topi

from tvm_ext.analysis.computations import Computation, read_operator
from tvm_ext.analysis.tensor_expr import TensorExpr
from tvm_ext.devices import device_db
from tvm_ext.ir.build_ir import sequence
from tvm_ext.ir.simt_ir import SimtKernel
from tvm_ext.records.rprogram import RProgram
from tvm_ext.tir_passes.emit.mma_tiles.emit import emit_mma_tile, supports_mma
from tvm_ext.tir_passes.plan.canonical import canonical_computation
from tvm_ext.tir_passes.roller.construct_mma import construct_mma
from tvm_ext.verify import simt

Array = np.ndarray[Any, Any]
Reference = Callable[..., Array]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Parts:
    """An operator as its emitter is given it."""

    params: tuple[Any, ...]
    prologue: tuple[Computation, ...]
    anchor: Computation
    expr: TensorExpr
    epilogue: tuple[Computation, ...]


def matmul(
    m: int, n: int, k: int, *, dtype: str = "float16", out: str = "", ta: bool = False, tb: bool = False, batch: int = 0
) -> tuple[Any, Reference]:
    """``C = A @ B`` (each transposed or not, batched or not) and its reference in float64."""
    lead = [batch] if batch else []
    out = out or dtype
    a = te.placeholder((*lead, k, m) if ta else (*lead, m, k), dtype, "A")
    b = te.placeholder((*lead, n, k) if tb else (*lead, k, n), dtype, "B")
    depth = te.reduce_axis((0, k), "k")

    def element(*at: Any) -> Any:
        outer, (i, j) = at[:-2], at[-2:]
        x = a(*outer, depth, i) if ta else a(*outer, i, depth)
        y = b(*outer, j, depth) if tb else b(*outer, depth, j)
        return te.sum(x * y if out == dtype else x.astype(out) * y.astype(out), axis=depth)

    func = te.create_prim_func([a, b, te.compute((*lead, m, n), element, "C")])
    return func, lambda x, y: (x.swapaxes(-1, -2) if ta else x) @ (y.swapaxes(-1, -2) if tb else y)


def fused_matmul(m: int, n: int, k: int, dtype: str = "float16") -> tuple[Any, Reference]:
    """``tanh(A @ B + bias) + residual``, all of it in one function."""
    a, b = te.placeholder((m, k), dtype, "A"), te.placeholder((k, n), dtype, "B")
    bias, residual = te.placeholder((n,), dtype, "bias"), te.placeholder((m, n), dtype, "residual")
    depth = te.reduce_axis((0, k), "k")
    product = te.compute((m, n), lambda i, j: te.sum(a[i, depth] * b[depth, j], axis=depth), "product")
    result = te.compute((m, n), lambda i, j: te.tanh(product[i, j] + bias[j]) + residual[i, j], "C")
    return te.create_prim_func([a, b, bias, residual, result]), lambda x, y, c, r: np.tanh(x @ y + c) + r


def gelu_matmul(m: int, n: int, k: int, out: str = "float16") -> tuple[Any, Reference]:
    """``gelu(A @ B + bias)`` in float32, by the error function; stock TVM has no vector form of it."""
    a, b = te.placeholder((m, k), "float16", "A"), te.placeholder((k, n), "float16", "B")
    bias = te.placeholder((n,), "float16", "bias")
    depth = te.reduce_axis((0, k), "k")

    def product(i: Any, j: Any) -> Any:
        return te.sum(a[i, depth].astype("float32") * b[depth, j].astype("float32"), axis=depth)

    def gelu(i: Any, j: Any) -> Any:
        x = total[i, j] + bias[j].astype("float32")
        return (x * 0.5 * (1.0 + tirx.erf(x * 0.7071067811865476))).astype(out)

    total = te.compute((m, n), product, "product")
    func = te.create_prim_func([a, b, bias, te.compute((m, n), gelu, "C")])

    def reference(x: Array, y: Array, c: Array) -> Array:
        z = x @ y + c
        return np.asarray(z * 0.5 * (1.0 + np.vectorize(math.erf)(z * math.sqrt(0.5))))

    return func, reference


def cast_matmul(m: int, n: int, k: int) -> tuple[Any, Reference]:
    """``half(A) @ B`` of a float32 A, which is rounded while it is copied."""
    a, b = te.placeholder((m, k), "float32", "A"), te.placeholder((k, n), "float16", "B")
    rounded = te.compute((m, k), lambda i, j: a[i, j].astype("float16"), "rounded")
    depth = te.reduce_axis((0, k), "k")
    product = te.compute((m, n), lambda i, j: te.sum(rounded[i, depth] * b[depth, j], axis=depth), "C")
    return te.create_prim_func([a, b, product]), lambda x, y: x.astype("float16").astype("float64") @ y


@dataclass(frozen=True, kw_only=True, slots=True)
class Conv:
    """A convolution of (n, h, w, c) by f filters of r x s, with bias and ReLU. ``layout`` names data, then weights."""

    n: int = 2
    h: int = 8
    w: int = 8
    c: int = 32
    f: int = 32
    r: int = 3
    s: int = 3
    stride: int = 1
    pad: int = 1
    dilation: int = 1
    layout: str = "NHWC OHWI"

    @property
    def out(self) -> tuple[int, int]:
        reach = (self.r - 1) * self.dilation + 1, (self.s - 1) * self.dilation + 1
        return tuple(
            (size + 2 * self.pad - k) // self.stride + 1 for size, k in zip((self.h, self.w), reach, strict=True)
        )  # type: ignore[return-value]

    def reference(self, x: Array, w: Array, bias: Array) -> Array:
        x, w = _to("NHWC", self.layout.split()[0], x), _to("OHWI", self.layout.split()[1], w)
        x = np.pad(x, ((0, 0), (self.pad,) * 2, (self.pad,) * 2, (0, 0)))
        oh, ow = self.out
        y = np.zeros((self.n, oh, ow, self.f))
        for r in range(self.r):
            for s in range(self.s):
                rows = slice(r * self.dilation, r * self.dilation + (oh - 1) * self.stride + 1, self.stride)
                columns = slice(s * self.dilation, s * self.dilation + (ow - 1) * self.stride + 1, self.stride)
                y += x[:, rows, columns] @ w[:, r, s].T
        result: Array = np.maximum(y + bias, 0)
        return _to(self.layout.split()[0], "NHWC", result)


def _to(wanted: str, given: str, array: Array) -> Array:
    moved: Array = array.transpose([given.index(axis) for axis in wanted])
    return moved


def conv2d(shape: Conv, dtype: str = "float16") -> tuple[Any, Reference]:
    """The convolution with its padding computation, and its reference."""
    data, weights = shape.layout.split()
    sizes = {"N": shape.n, "H": shape.h, "W": shape.w, "C": shape.c}
    taps = {"O": shape.f, "H": shape.r, "W": shape.s, "I": shape.c}
    x = te.placeholder([sizes[axis] for axis in data], dtype, "X")
    w = te.placeholder([taps[axis] for axis in weights], dtype, "W")
    bias = te.placeholder((shape.f,), dtype, "bias")
    around = [shape.pad if axis in "HW" else 0 for axis in data]
    padded = topi.nn.pad(x, around, around, name="padded") if shape.pad else x
    axes = {"H": te.reduce_axis((0, shape.r), "ry"), "W": te.reduce_axis((0, shape.s), "rx")}
    axes["I"] = te.reduce_axis((0, shape.c), "rc")
    result = {"N": shape.n, "H": shape.out[0], "W": shape.out[1], "C": shape.f}

    def element(*at: Any) -> Any:
        place = dict(zip(data, at, strict=True))
        source = {"N": place["N"], "C": axes["I"]}
        source |= {axis: place[axis] * shape.stride + axes[axis] * shape.dilation for axis in "HW"}
        tap = {**axes, "O": place["C"]}
        order = [axes[axis] for axis in ("HWI" if data == "NHWC" else "IHW")]
        return te.sum(padded(*(source[i] for i in data)) * w(*(tap[i] for i in weights)), axis=order)

    y = te.compute([result[axis] for axis in data], element, "Y")

    def consumer(*at: Any) -> Any:
        return tirx.max(y(*at) + bias(at[data.index("C")]), tirx.const(0, dtype))

    return te.create_prim_func([x, w, bias, te.compute(y.shape, consumer, "Z")]), shape.reference


def parts_of(func: Any) -> Parts:
    operator = read_operator(func, "operator")
    at = next(i for i, computation in enumerate(operator.computations) if computation.is_reduction)
    prologue, epilogue = operator.computations[:at], operator.computations[at + 1 :]
    anchor, expr = canonical_computation(
        operator.computations[at], "operator", params=operator.params, prologue=prologue, epilogue=epilogue
    )
    return Parts(params=operator.params, prologue=prologue, anchor=anchor, expr=expr, epilogue=epilogue)


def programs_of(func: Any, device: str, k: int = 10) -> tuple[RProgram, ...]:
    expr = parts_of(func).expr
    assert supports_mma(expr, device_db.lookup(device)) is None
    return construct_mma(expr, device_db.lookup(device), k=k).programs


def emitted(func: Any, device: str, program: RProgram | None = None) -> tuple[Any, SimtKernel]:
    """The function with the kernel of ``program`` (by default the first) as its body, and the kernel."""
    parts = parts_of(func)
    spec = device_db.lookup(device)
    program = program or programs_of(func, device)[0]
    kernel = emit_mma_tile(parts.anchor, parts.expr, parts.prologue, parts.epilogue, program, spec, parts.params)
    made = tirx.PrimFunc(list(parts.params), sequence(*kernel.statements))
    return made.with_attrs({"global_symbol": "main", "s_tir": True, "tirx.noalias": True}), kernel


def numpy_dtype(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def random_inputs(func: Any, seed: int = 0) -> dict[str, Array]:
    """Fresh data for all parameters but the last one, which is the output."""
    generator = np.random.default_rng(seed)
    found = {}
    for param in list(func.params)[:-1]:
        shape, dtype = [int(size) for size in param.ty.shape], numpy_dtype(str(param.ty.dtype))
        integers = dtype.kind in "iu"
        found[param.name] = (generator.integers(-8, 8, shape) if integers else generator.standard_normal(shape)).astype(
            dtype
        )
    return found


def interpret(made: Any, inputs: dict[str, Array], device: str, *, blocks: Any = None) -> Any:
    """Run the lowered function in the SIMT interpreter; no finding is accepted."""
    report = simt.run(simt.lower(made, device), inputs, device=device, blocks=blocks)
    assert report.ok, [str(finding) for finding in report.findings][:3]
    return report
