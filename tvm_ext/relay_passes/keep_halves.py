"""Weights that are 16-bit numbers stay so in memory, where a product of few rows waits for them.

Such a product takes as long as its weights take from memory. Where all values of a float32 constant are those of
bfloat16 or float16, as of a checkpoint in either, half the bytes say the same: the kernel widens them in registers, and
each product is what it was.
"""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np

from tvm_ext._tvm import Call, Constant, Expr, IRModule, TeTensor, relax, te
from tvm_ext.analysis.relax_values import dtype_of, operator_name, static_shape
from tvm_ext.devices.dot_instructions import has_features
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.records.precision import PRECISION, NarrowedProduct, PrecisionRecord
from tvm_ext.records.serialise import to_json
from tvm_ext.support.arrays import Array

from .composites import OwnTime
from .narrowed_time import alone, not_faster
from .rewriting import CallRewriter, call_pass

MOST_ROWS = 4
"""Products of more rows take as long as their arithmetic, which widening adds to."""

LEAST_BYTES = 1 << 18
"""Of weights: what is smaller lies in a core's own caches."""


@call_pass("tvm_ext.KeepHalves")
class KeepHalves(CallRewriter):
    """Rewrite float32 ``matmul`` of up to `MOST_ROWS` rows by constants of 16-bit values, where ``own_time`` says that
    reading half the bytes is faster on ``device``, a CPU. They are left in module attribute `PRECISION`.
    """

    def prepare(self, device: DeviceSpec, own_time: OwnTime) -> None:
        self.types, self.own_time = _widened_types(device), own_time
        self.faster: dict[tuple[object, ...], bool] = {}
        self.products: list[NarrowedProduct] = []

    def run(self) -> IRModule:
        result = relax.transform.DeadCodeElimination()(super().run())
        record = PrecisionRecord(products=tuple(self.products))
        return result.with_attr(PRECISION, to_json(record)) if self.products else result

    def rewritten(self, call: Call) -> Expr:
        if operator_name(call) != "relax.matmul" or {dtype_of(value) for value in (call, *call.args)} != {"float32"}:
            return call
        data, weights = call.args
        shape = static_shape(data)
        if not isinstance(weights, Constant) or isinstance(data, Constant) or not shape or prod(shape[:-1]) > MOST_ROWS:
            return call
        values = weights.value.numpy()
        narrow = self._narrow(values) if values.ndim == 2 and values.nbytes >= LEAST_BYTES else None
        if narrow is None or not self._is_faster(shape, values, narrow):
            return call
        result = (*shape[:-1], values.shape[1])
        kept = NarrowedProduct(kind="matmul", data=shape, weights=values.shape, result=result, exact=dtype_of(narrow))
        self.products.append(kept)
        return self.builder_.call_te(product, data, narrow, primfunc_name_hint="matmul")

    def _narrow(self, values: Array) -> Constant | None:
        """``values`` in the first type that holds each of them exactly."""
        for name, kind in self.types:
            with np.errstate(over="ignore"):
                short: Array = values.astype(kind)
            if np.array_equal(short.astype(np.float32), values):  # never of NaN
                return relax.const(short, name)
        return None

    def _is_faster(self, shape: tuple[int, ...], values: Array, narrow: Constant) -> bool:
        key = (shape, values.shape, dtype_of(narrow))
        if key not in self.faster:
            wide = alone(shape, "float32", lambda _, data: relax.op.matmul(data, relax.const(values)))
            own = alone(shape, "float32", lambda builder, data: builder.call_te(product, data, narrow))
            times = [self.own_time(mod) for mod in (wide, own)]
            self.faster[key] = None not in times and not not_faster(*(time or 0.0 for time in times))
        return self.faster[key]


def product(x: TeTensor, weights: TeTensor) -> TeTensor:
    """x (..., K) by weights (K, N) of 16 bits, widened: float32 throughout."""
    *rows, depth = x.shape
    k = te.reduce_axis((0, depth), "k")

    def element(*at: Expr) -> Expr:
        *row, column = at
        return te.sum(x(*row, k) * weights[k, column].astype("float32"), axis=k)

    return te.compute((*rows, weights.shape[1]), element, name="matmul")


def _widened_types(device: DeviceSpec) -> list[tuple[str, type]]:
    """What vectors of ``device`` widen: bfloat16 by a shift, float16 by an instruction."""
    has_half = any(has_features(device.target, (name,)) for name in ("f16c", "neon"))
    return [("bfloat16", ml_dtypes.bfloat16), *([("float16", np.float16)] if has_half else [])]
