"""3-D convolutions as 2-D ones: slices become images, and the slices under a window's taps become channels.

Kernels for images are there in blocked layouts and in Winograd's form; a 3-D one would be a third of each. Worked
example: 3 x 3 x 3 taps over 32 channels of 8 slices, 56 x 56, padded by one: 8 images of 96 channels, those of three
neighbouring slices, under 3 x 3 taps. Writing every slice three times takes the time of about 90 operations an element,
of the convolution's 2 * 9 * filters.

Poolings, element-wise operators, concatenations of channels and means between convolutions work on slices, too, so that
values are turned around once at the ends of a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

import numpy as np

from tvm_ext._tvm import Call, Constant, DataflowBlock, Expr, Var, VarBinding, relax
from tvm_ext.analysis.relax_values import dtype_of, is_tensor, operator_name, static_shape
from tvm_ext.devices.hal import DeviceSpec

from ..rewriting import CallRewriter, call_pass
from .blocked import shape_of
from .depth import DepthWindow, over_depth
from .graph import ELEMENT_WISE

LEAST_PRODUCTS = 90
"""Multiply-adds with each joined element from which on joining pays: half its time is gained (see the module)."""


@call_pass("tvm_ext.FoldDepth")
class FoldDepth(CallRewriter):
    """Rewrite float32 ``nn.conv3d`` with constant weights, and what follows it, over (depth * batch, c, h, w).

    Left alone: layouts other than NCDHW/OIDHW, grouped convolutions over several slices, dynamic shapes, and windows
    over several slices that have few filters, or no whole blocks of them, unless their data are slices already.

    A folded call's own variable becomes its result turned back, which is dead code between folded calls.
    """

    def prepare(self, device: DeviceSpec) -> None:
        self.block = device.teu_lanes
        self.folded: dict[Var, Expr] = {}  # by the original variable: its slices, inside one dataflow block
        self.binding: Var | None = None

    def visit_dataflow_block_(self, block: DataflowBlock) -> DataflowBlock:
        self.folded = {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding: VarBinding) -> None:
        self.binding = binding.var
        super().visit_var_binding_(binding)

    def visit_call_(self, call: Call) -> Expr:
        variable, shape = self.binding, static_shape(call)
        rule = self._rule(call) if shape is not None and dtype_of(call) == "float32" else None
        slices = rule(call) if rule is not None else None
        if slices is None or shape is None:
            return self.visit_expr_post_order(call)
        self.folded[variable] = self.builder_.emit(slices)
        return self._unfolded(self.folded[variable], shape)

    def _rule(self, call: Call) -> Callable[[Call], Expr | None] | None:
        name = operator_name(call) or ""
        if name in ELEMENT_WISE:
            return self._element_wise
        return {
            "relax.nn.conv3d": self._convolution,
            "relax.nn.max_pool3d": self._pool,
            "relax.nn.avg_pool3d": self._pool,
            "relax.nn.adaptive_avg_pool3d": self._mean,
            "relax.mean": self._mean,
            "relax.concat": self._concat,
        }.get(name)

    # --- between both forms ------------------------------------------------------------------------------------------
    def _fold(self, value: Expr) -> Expr:
        """(batch, channels, depth, height, width) as slices."""
        if value not in self.folded:
            batch, channels, depth, *rest = static_shape(value) or ()
            turned = self.builder_.emit(relax.op.permute_dims(self.visit_expr(value), (2, 0, 1, 3, 4)))
            self.folded[value] = self.builder_.emit(relax.op.reshape(turned, (depth * batch, channels, *rest)))
        return self.folded[value]

    def _unfolded(self, slices: Expr, shape: Sequence[int]) -> Expr:
        batch, channels, depth, *rest = shape
        split = self.builder_.emit(relax.op.reshape(slices, (depth, batch, channels, *rest)))
        return relax.op.permute_dims(split, (1, 2, 0, 3, 4))

    # --- a method for each kind of operator: the slices of its result, or None where it stays as it is ---------------
    def _convolution(self, call: Call) -> Expr | None:
        attrs, (data, weight) = call.attrs, call.args
        layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout)
        if layouts != ("NCDHW", "OIDHW", "NCDHW") or not isinstance(weight, Constant) or static_shape(data) is None:
            return None
        if (dtype_of(data), dtype_of(weight)) != ("float32", "float32"):
            return None
        filters, depth, taps, *window = weight.value.shape
        strides, groups = [int(stride) for stride in attrs.strides], int(attrs.groups)
        products = filters * prod(window) // prod(strides[1:])
        gains = products >= LEAST_PRODUCTS if taps > 1 else prod(window) > 1  # 1x1x1 is as good where it is
        if (taps > 1 and groups > 1) or not (data in self.folded or (gains and filters % self.block == 0)):
            return None
        pads = [int(pad) for pad in attrs.padding]
        is_slice = taps == strides[0] == 1 and pads[0] == pads[3] == 0
        slices = self._fold(data) if is_slice else self.builder_.emit(self._windowed(call, taps, "join"))
        array = weight.value.numpy().transpose(0, 2, 1, 3, 4).reshape(filters, taps * depth, *window)
        return relax.op.nn.conv2d(
            slices,
            relax.const(np.ascontiguousarray(array), "float32"),
            strides=strides[1:],
            padding=(*pads[1:3], *pads[4:6]),
            dilation=[int(step) for step in attrs.dilation][1:],
            groups=groups,
        )

    def _windowed(
        self, call: Call, taps: int, combine: Literal["join", "max", "mean"], value: Expr | None = None
    ) -> Expr | None:
        """The slices of ``value``, of the call's data at first, under its window over depth."""
        data, attrs = call.args[0], call.attrs
        window = DepthWindow(
            batch=shape_of(data)[0], taps=taps, stride=int(attrs.strides[0]), dilation=int(attrs.dilation[0]),
            before=int(attrs.padding[0]), outputs=shape_of(call)[2], combine=combine,
        )  # fmt: skip
        if combine != "join" and not window.fits(shape_of(data)[2]):
            return None
        return over_depth(self.builder_, self._fold(data) if value is None else value, window)

    def _pool(self, call: Call) -> Expr | None:
        """Over each slice first, then over depth."""
        attrs, data = call.attrs, call.args[0]
        if data not in self.folded or (attrs.layout, attrs.out_layout) != ("NCDHW", "NCDHW"):
            return None
        largest = operator_name(call) == "relax.nn.max_pool3d"
        pads, sizes = [int(pad) for pad in attrs.padding], [int(size) for size in attrs.pool_size]
        pooled = (relax.op.nn.max_pool2d if largest else relax.op.nn.avg_pool2d)(
            self._fold(data),
            sizes[1:],
            list(attrs.strides)[1:],
            (*pads[1:3], *pads[4:6]),
            list(attrs.dilation)[1:],
            attrs.ceil_mode,
            attrs.count_include_pad,
        )
        if sizes[0] == 1 and int(attrs.strides[0]) == 1:
            return pooled if pads[0] == pads[3] == 0 else None
        return self._windowed(call, sizes[0], "max" if largest else "mean", self.builder_.emit(pooled))

    def _mean(self, call: Call) -> Expr | None:
        """Over all of a channel: of each slice, then of the slices, which are a view."""
        data, shape = call.args[0], static_shape(call.args[0])
        if data not in self.folded or shape is None:
            return None
        if operator_name(call) == "relax.mean":
            whole = call.attrs.axis is not None and sorted(int(axis) % 5 for axis in call.attrs.axis) == [2, 3, 4]
            if not whole or not call.attrs.keepdims:
                return None
        elif shape_of(call)[2:] != (1, 1, 1):
            return None
        means = self.builder_.emit(relax.op.mean(self._fold(data), axis=[2, 3], keepdims=True))
        split = self.builder_.emit(relax.op.reshape(means, (shape[2], shape[0] * shape[1])))
        mean = self.builder_.emit(relax.op.mean(split, axis=[0]))
        return relax.op.reshape(mean, (shape[0], shape[1], 1, 1))

    def _concat(self, call: Call) -> Expr | None:
        parts = tuple(getattr(call.args[0], "fields", ()))
        if call.attrs.axis is None or int(call.attrs.axis) != 1 or not parts or set(parts) - set(self.folded):
            return None
        return relax.op.concat([self._fold(part) for part in parts], axis=1)

    def _element_wise(self, call: Call) -> Expr | None:
        shape = shape_of(call)
        tensors = [argument for argument in call.args if is_tensor(argument)]
        if any(dtype_of(tensor) != "float32" for tensor in tensors) or not any(
            tensor in self.folded for tensor in tensors if static_shape(tensor) == shape
        ):
            return None
        operands = [self._operand(argument, shape) if is_tensor(argument) else argument for argument in call.args]
        if any(operand is None for operand in operands):
            return None
        return Call(call.op, operands, call.attrs, call.ty_args)

    def _operand(self, value: Expr, shape: Sequence[int]) -> Expr | None:
        """An operand over slices: one that is the same for every image may have a value for each channel."""
        own = static_shape(value)
        if own is None or own == tuple(shape):
            return None if own is None or isinstance(value, Constant) else self._fold(value)
        whole = (1,) * (5 - len(own)) + own
        if whole[0] != 1 or whole[2] != 1:
            return None
        per_channel = (1, whole[1], *whole[3:])
        if isinstance(value, Constant):
            return relax.const(value.value.numpy().reshape(per_channel), "float32") if own else value
        return self.builder_.emit(relax.op.reshape(self.visit_expr(value), per_channel)) if own else value
