"""The right values of a kernel: its operator, unscheduled, on this machine's CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm.script import from_source

from tvm_ext._tvm import IF_THEN_ELSE, BufferStore, Call, Expr, PrimFunc, TensorLoad, nodes_in, tirx
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.support.arrays import Array
from tvm_ext.tir_passes.expressions.exact_floats import keep_floats_outside_reductions, pass_nan_on

from .simt import own_name
from .simt.number_types import storage_dtype

HALF_TYPES = ("bfloat16", "float16")
TEXT_ATTRIBUTES = ("global_symbol", "s_tir", "tirx.noalias")
MASKING = 4096.0  # a choice: constants of models' arithmetic are below, those that stand for -infinity above


@dataclass(frozen=True, slots=True)
class CpuReference:
    """A reference for `verify`: an operator that is not scheduled, run on this machine's CPU."""

    operator: PrimFunc

    def __call__(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        _, target = device_for_target("llvm")
        wide = _without_halves(self.operator)
        wide = wide.with_body(pass_nan_on(keep_floats_outside_reductions(wide.body)))
        library = tvm.compile(wide.with_attr("global_symbol", "main"), target=target)
        tensors = []
        for name, param in zip(self._names, wide.params, strict=True):
            shape, dtype = tuple(int(size) for size in param.ty.shape), storage_dtype(str(param.ty.dtype))
            value = arrays[name].astype(dtype) if name in arrays else np.zeros(shape, dtype)
            tensors.append(tvm.runtime.tensor(value))
        library(*tensors)
        return {name: tensor.numpy() for name, tensor in zip(self._names, tensors, strict=True) if name not in arrays}

    @property
    def _names(self) -> list[str]:
        names: list[str] = []
        for param in self.operator.params:
            names.append(own_name(str(param.name), names))
        return names

    @property
    def types(self) -> frozenset[str]:
        """The dtypes that the operator rounds to: of its arithmetic and casts, not of what it only reads or moves."""
        found = nodes_in(self.operator.body, (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Cast, Call))
        return frozenset({dtype_of(node) for node in found if not _is_choice(node)})

    @property
    def mask_value(self) -> float:
        """The least of the operator's large constants, by which models mask (-10000, -65504); infinite without any."""
        return min(map(_mask_value, nodes_in(self.operator.body, tirx.FloatImm)), default=np.inf)

    def masks(self) -> dict[str, Array]:
        """Zeros and ones for the tensors that large constants multiply: ``(1 - mask) * -65504``, by name.

        Normal values would overflow, or leave nothing of what is masked.
        """
        products = nodes_in(self.operator.body, tirx.Mul)
        large = [node for node in products if any(_mask_value(factor) < np.inf for factor in (node.a, node.b))]
        read = {load.source for node in large for load in nodes_in(node, TensorLoad)}
        for made in reversed(nodes_in(self.operator.body, BufferStore)):
            if made.buffer in read:
                read |= {load.source for load in nodes_in(made.value, TensorLoad)}
        generator = np.random.default_rng(0)
        return {
            name: generator.integers(0, 2, tuple(map(int, param.ty.shape))).astype(storage_dtype(str(param.ty.dtype)))
            for name, param in zip(self._names, self.operator.params, strict=True)
            if param in read
        }


def _mask_value(expr: Expr) -> float:
    """The size of a large constant, infinite for any other expression."""
    size = abs(float(expr.value)) if isinstance(expr, tirx.FloatImm) else np.inf
    return size if size >= MASKING else np.inf


def _is_choice(node: Expr) -> bool:
    return isinstance(node, Call) and bool(node.op.same_as(IF_THEN_ELSE))


def cpu_reference(function: PrimFunc) -> CpuReference:
    """A reference for `verify`: ``function``, an operator that is not scheduled, run on this machine's CPU.

    Its parameters are matched with the kernel's by their names. Halves are computed and summed in float32, and floats
    are no reals here either: stock TVM's ``max(sqrt(x), c)`` is c where the root is NaN.
    """
    return CpuReference(function)


def _without_halves(function: PrimFunc) -> PrimFunc:
    """``function`` with float32 in place of float16 and bfloat16, by way of its text.

    A sum of 3072 products rounded to a half after every step is off by a percent, more than a wrong kernel may be.
    """
    for key in dict(function.attrs or {}):
        if key not in TEXT_ATTRIBUTES:  # some do not print as text that can be read again
            function = function.without_attr(key)
    text = str(function)
    if not any(name in text for name in HALF_TYPES):
        return function
    for name in HALF_TYPES:
        text = text.replace(name, "float32")
    return from_source(text)
