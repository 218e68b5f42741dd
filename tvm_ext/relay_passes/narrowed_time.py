"""How long a product takes in float32 and in bfloat16 by the models of time: what `precision="auto"` chooses by."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tvm_ext._tvm import BlockBuilder, Call, Expr, IRModule, Var, relax
from tvm_ext.analysis.relax_values import operator_name, static_shape
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import BETWEEN_CORES, Machine
from tvm_ext.support.arithmetic import ceil_div

from .composites import OwnTime
from .layout.blocked import ConvWindow, blocked_shape, convolution

if TYPE_CHECKING:
    from tvm_ext.records.precision import NarrowedProduct

LEAST_GAIN = 1.05
"""By how much bfloat16 has to be faster, conversion of the data included: the models err by more than a few percent."""


def not_faster(wide_us: float, narrow_us: float) -> str:
    """Why a product stays float32 that is expected to take ``wide_us``, in bfloat16 ``narrow_us``; empty for a gain."""
    faster = narrow_us * LEAST_GAIN <= wide_us
    return "" if faster else f"{wide_us:.3g} us are expected, in bfloat16 {narrow_us:.3g}"


class ExpectedGain:
    """Says why a product of bfloat16 is not worth it, by ``own_time`` of both; each form of a product is timed once."""

    def __init__(self, device: DeviceSpec, group: int, own_time: OwnTime) -> None:
        self.device, self.group, self.own_time = device, group, own_time
        self.known: dict[Any, str] = {}

    def __call__(self, product: NarrowedProduct, call: Call) -> str:
        key: Any = product if operator_name(call) == "relax.matmul" else (product, str(call.attrs))
        if key not in self.known:
            self.known[key] = self._why_not(call)
        return self.known[key]

    def _why_not(self, call: Call) -> str:
        wide, narrow = (self.own_time(self._module(call, dtype)) for dtype in ("float32", "bfloat16"))
        if wide is None or narrow is None:
            return "the models of time do not know its kernels"
        return not_faster(wide, narrow + self._conversion_us(call))

    def _conversion_us(self, call: Call) -> float:
        """Of a kernel that rounds the data: where others read them too, it joins none."""
        machine, count = Machine(self.device), prod(static_shape(call.args[0]) or ())
        return machine.launch_us + count * 6 / machine.held_rate(count * 4, BETWEEN_CORES) * 1e6

    def _module(self, call: Call, dtype: str) -> IRModule:
        """``call`` alone, its data an input; a convolution in blocks of channels where it has whole ones."""
        weights = call.args[1].value.numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        shape = static_shape(call.args[0]) or ()
        if operator_name(call) == "relax.matmul":
            return alone(
                shape, dtype, lambda _, data: relax.op.matmul(data, relax.const(weights, dtype), out_dtype="float32")
            )
        lanes, groups = self.device.teu_lanes, int(call.attrs.groups)
        n, channels, height, width = shape
        if channels % lanes == 0:
            shape = blocked_shape(shape, lanes)
        elif dtype == "bfloat16" and groups == 1:
            outer = ceil_div(channels, self.group)
            shape = (n, outer, height, width, self.group)
            weights = np.pad(weights, ((0, 0), (0, outer * self.group - channels), (0, 0), (0, 0)))
        is_blocked = weights.shape[0] % lanes == 0
        compute = convolution(ConvWindow.of(call.attrs), groups, lanes, blocked_output=is_blocked)
        return alone(
            shape,
            dtype,
            lambda builder, data: builder.call_te(
                compute, data, relax.const(weights, dtype), primfunc_name_hint="conv2d"
            ),
        )


def alone(shape: tuple[int, ...], dtype: str, made: Callable[[BlockBuilder, Var], Expr]) -> IRModule:
    """A module of one operator on an input."""
    builder, data = BlockBuilder(), Var("data", relax.TensorType(shape, dtype))
    with builder.function("main", [data]):
        with builder.dataflow():
            result = builder.emit_output(made(builder, data))
        builder.emit_func_output(result)
    return builder.get()
