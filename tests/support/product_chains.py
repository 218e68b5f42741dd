"""Chains of products with epilogues, their references in float64, and their persistent GPU kernels, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from tvm import te, tirx, topi

from tvm_ext.analysis.computations import read_operator
from tvm_ext.cost.gpu_chain import ChainTile
from tvm_ext.devices import device_db
from tvm_ext.ir.build_ir import sequence
from tvm_ext.tir_passes.emit.gpu_chains.emit import emit_chain
from tvm_ext.tir_passes.plan.gpu_chain import ChainGroup, with_chains
from tvm_ext.tir_passes.plan.plan_gpu_kernels import plan_for_gpu, simplify_for_gpu

Array = np.ndarray[Any, Any]
EPILOGUES = ("", "relu", "bias", "bias_relu", "bias_gelu", "tanh", "residual")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One product of a chain: its columns, what follows it, whether its factor is stored as [columns, depth]."""

    columns: int
    epilogue: str = "bias_relu"
    transposed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Products:
    """``rows`` x ``depth`` times the layers' factors; ``wide`` products are float32 up to the end of each epilogue."""

    rows: int
    depth: int
    layers: tuple[Layer, ...]
    dtype: str = "float16"
    wide: bool = True
    transposed_input: bool = False

    @property
    def depths(self) -> tuple[int, ...]:
        return (self.depth, *(layer.columns for layer in self.layers[:-1]))


def chain(rows: int, *sizes: int, epilogue: str = "bias_relu", dtype: str = "float16", **about: Any) -> Products:
    """``rows`` x sizes[0], then products of sizes[1], sizes[2], ... columns, each with the same epilogue."""
    layers = tuple(Layer(columns=size, epilogue=epilogue) for size in sizes[1:])
    return Products(rows=rows, depth=sizes[0], layers=layers, dtype=dtype, **about)


def function_of(case: Products) -> Any:
    """One unscheduled PrimFunc with the products and their epilogues as computations."""
    shape = (case.depth, case.rows) if case.transposed_input else (case.rows, case.depth)
    x = te.placeholder(shape, case.dtype, "X")
    params, value = [x], topi.transpose(x) if case.transposed_input else x
    for number, (layer, depth) in enumerate(zip(case.layers, case.depths, strict=True)):
        value, own = _layer(case, value, layer, depth, number)
        params += own
    return te.create_prim_func([*params, value])


def _layer(case: Products, x: Any, layer: Layer, depth: int, number: int) -> tuple[Any, list[Any]]:
    shape = (layer.columns, depth) if layer.transposed else (depth, layer.columns)
    w = te.placeholder(shape, case.dtype, f"W{number}")
    total = _product(x, w, layer, f"product{number}", "float32" if case.wide else case.dtype)
    value, params = with_epilogue(total, layer.epilogue, case.dtype, number)
    return value if case.dtype == str(value.dtype) else topi.cast(value, case.dtype), [w, *params]


def _product(x: Any, w: Any, layer: Layer, name: str, dtype: str) -> Any:
    depth = te.reduce_axis((0, x.shape[1]), f"k_{name}")

    def element(i: Any, j: Any) -> Any:
        y = w(j, depth) if layer.transposed else w(depth, j)
        return te.sum(_cast(x(i, depth), dtype) * _cast(y, dtype), axis=depth)

    return te.compute((x.shape[0], layer.columns), element, name)


def _cast(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else value.astype(dtype)


def with_epilogue(total: Any, epilogue: str, dtype: str, number: int) -> tuple[Any, list[Any]]:
    """``total`` behind ``epilogue``, and the tensors that this reads."""
    own = str(total.dtype)
    params = []
    if epilogue.startswith("bias"):
        bias = te.placeholder(total.shape[-1:], dtype, f"bias{number}")
        params.append(bias)
        total = _added(total, lambda at: _cast(bias(at[-1]), own))
    if epilogue == "residual":
        residual = te.placeholder(total.shape, dtype, f"residual{number}")
        params.append(residual)
        total = _added(total, lambda at: _cast(residual(*at), own))
    return _activated(total, epilogue), params


def _added(total: Any, other: Callable[[Any], Any]) -> Any:
    return te.compute(total.shape, lambda *at: total(*at) + other(at), "added")


def _activated(x: Any, epilogue: str) -> Any:
    if epilogue.endswith("relu"):
        return topi.nn.relu(x)
    if epilogue.endswith("gelu"):
        root = tirx.const(math.sqrt(0.5), str(x.dtype))
        return te.compute(x.shape, lambda *at: x(*at) * (tirx.erf(x(*at) * root) + 1.0) * 0.5, "gelu")
    return topi.tanh(x) if epilogue == "tanh" else x


def reference_of(case: Products, inputs: dict[str, Array]) -> Array:
    """The chain in float64, its values between products too."""
    wide = {name: array.astype("float64") for name, array in inputs.items()}
    value = wide["X"].T if case.transposed_input else wide["X"]
    for number, layer in enumerate(case.layers):
        w = wide[f"W{number}"]
        value = value @ (w.T if layer.transposed else w)
        value = applied(value, layer.epilogue, wide.get(f"bias{number}"), wide.get(f"residual{number}"))
    return value


def convolution_chain(
    batch: int, size: int, channels: tuple[int, ...], *, stride: int = 1, dtype: str = "float16", kernel: int = 3
) -> Any:
    """A ``kernel`` x ``kernel`` NHWC convolution, padded, with bias and ReLU, then 1 x 1 ones; one PrimFunc."""
    value = x = te.placeholder((batch, size, size, channels[0]), dtype, "X")
    params = [x]
    for number, (inner, outer) in enumerate(pairwise(channels)):
        side, step = (kernel, stride) if number == 0 else (1, 1)
        w = te.placeholder((side, side, inner, outer), dtype, f"W{number}")
        total = topi.nn.conv2d_nhwc(value, w, step, side // 2, 1, "float32")
        value, own = with_epilogue(total, "bias_relu", dtype, number)
        value = value if dtype == "float32" else topi.cast(value, dtype)
        params += [w, *own]
    return te.create_prim_func([*params, value])


def applied(value: Array, epilogue: str, bias: Array | None = None, residual: Array | None = None) -> Array:
    """The epilogue in NumPy."""
    for other in (bias, residual):
        if other is not None:
            value = value + other
    if epilogue.endswith("relu"):
        value = np.maximum(value, 0)
    if epilogue.endswith("gelu"):
        value = value * (np.vectorize(math.erf)(value * math.sqrt(0.5)) + 1) / 2
    return np.tanh(value) if epilogue == "tanh" else value


def inputs_of(func: Any, seed: int = 0) -> dict[str, Array]:
    """Random inputs by name; factors so scaled that values keep their size through a chain."""
    generator = np.random.default_rng(seed)
    found = {}
    for param in list(func.params)[:-1]:
        shape, name = [int(size) for size in param.ty.shape], str(param.ty.dtype)
        dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
        scale = 1 / math.sqrt(math.prod(shape) / max(shape)) if param.name.startswith("W") else 1.0
        found[param.name] = (generator.standard_normal(shape) * scale).astype(dtype)
    return found


# ---- kernels --------------------------------------------------------------------------------------------------------


def group_of(func: Any, device: str, *, always: bool = True) -> ChainGroup | list[str]:
    """The one chain that ``func`` is, or why it is none."""
    operator = simplify_for_gpu(read_operator(func, "operator"))
    groups, reasons = with_chains(plan_for_gpu(operator), operator, device_db.lookup(device), always=always)
    return groups[0] if len(groups) == 1 and isinstance(groups[0], ChainGroup) else reasons


def kernel_of(func: Any, device: str, wanted: Callable[[ChainTile], bool] = lambda _: True) -> tuple[Any, ChainTile]:
    """The kernel of ``func`` in the best tile that is ``wanted``, and that tile."""
    operator = simplify_for_gpu(read_operator(func, "operator"))
    group = with_chains(plan_for_gpu(operator), operator, device_db.lookup(device), always=True)[0][0]
    assert isinstance(group, ChainGroup)
    tile = next(tile for tile, _ in group.ranked if wanted(tile))
    kernel = emit_chain(group, tile, device_db.lookup(device), operator.params)
    made = tirx.PrimFunc(list(operator.params), sequence(*kernel.statements))
    return made.with_attrs({"global_symbol": "main", "s_tir": True, "tirx.noalias": True}), tile
