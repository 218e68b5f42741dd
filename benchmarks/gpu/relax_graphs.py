"""The benchmark's products in Relax, as templates of CUTLASS read them; which of their inputs lie otherwise there.

Filters of convolutions are OHWI; factors of integers and of pairs lie along the reduction. `arranged` says what that
makes of a case's own inputs, and `padded` gives channels the width of whole copies (Bolt §3.2.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from cases import Case, Tensor
from manifest import Arranged

from tvm_ext._tvm import IRModule, relax
from tvm_ext.support.arithmetic import ceil_div

OHWI, TRANSPOSED = (3, 0, 1, 2), (1, 0)
"""Axes of filters that lie as HWIO, and of a matrix."""
ACCESS = 8
"""Halves of the widest copy, to which channels are padded."""
NARROWEST_TILE = 32
"""Columns of the first product of a pair."""
CHAIN = "chain"
PRODUCTS = frozenset({"matmul", "batch_matmul", "conv2d", "depthwise", "activated_matmul", "activated_conv2d", CHAIN})
"""Operators that `graph` takes."""


def graph(case: Case) -> IRModule:
    """The case in Relax: the bias added, the activation spelt as networks spell it."""
    forms = arranged(case)
    shapes = {item.name: forms[item.name].shape if item.name in forms else item.shape for item in case.inputs}
    params = [relax.Var(item.name, relax.TensorType(shapes[item.name], item.dtype)) for item in case.inputs]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(_value(builder, case, params))
        builder.emit_func_output(result)
    return builder.get()


def arranged(case: Case, given: Case | None = None) -> dict[str, Arranged]:
    """The inputs of ``case`` that its graph reads in another form than they have in ``given`` (the case itself)."""
    found = {}
    for item, own in zip(case.inputs, (given or case).inputs, strict=True):
        axes = _axes(case, item)
        form = Arranged(axes=axes, shape=tuple(item.shape[axis] for axis in axes))
        if form != Arranged(axes=tuple(range(len(own.shape))), shape=own.shape):
            found[item.name] = form
    return found


def _axes(case: Case, item: Tensor) -> tuple[int, ...]:
    """Filters are the four-dimensional inputs called w, w0, ...."""
    if item.name.startswith("w") and len(item.shape) == 4 and case.attributes.get("layout") != "NCHW":
        return OHWI
    if item.name.startswith("w") and len(item.shape) == 2 and _is_transposed(case):
        return TRANSPOSED
    return tuple(range(len(item.shape)))


def _is_transposed(case: Case) -> bool:
    """Whether second factors lie along the reduction, as matrix units read integers and narrow tiles are covered."""
    return case.operator == CHAIN or case.inputs[0].dtype == "int8"


def padded(case: Case) -> Case | None:
    """The case with zeros in its channels up to whole copies; None where they are whole, or nothing has channels.

    Of a pair of matrix products what lies between gets as many columns as the narrowest tile.
    """
    axis = {"activated_conv2d": 2, "conv2d": 2, CHAIN: -2}.get(case.operator)
    if axis is None or case.attributes.get("layout") == "NCHW" or case.inputs[0].shape[-1] % ACCESS == 0:
        return None
    x, w, *rest = case.inputs
    channels = ceil_div(x.shape[-1], ACCESS) * ACCESS
    x, w = _widened(x, -1, channels), _widened(w, axis, channels)
    if case.operator == CHAIN and not case.attributes["bias"]:
        columns = ceil_div(w.shape[-1], NARROWEST_TILE) * NARROWEST_TILE
        w, rest = _widened(w, -1, columns), [_widened(rest[0], 0, columns), *rest[1:]]
    return replace(case, inputs=(x, w, *rest))


def _widened(item: Tensor, axis: int, extent: int) -> Tensor:
    shape = list(item.shape)
    shape[axis] = extent
    return replace(item, shape=tuple(shape))


# --- values ----------------------------------------------------------------------------------------------------------
def _value(builder: Any, case: Case, params: list[Any]) -> Any:
    """The call of the last operator."""
    if case.operator == CHAIN:
        return _chain(builder, case, iter(params))
    value = _product(builder, case, case.operator, case.attributes, *params[:2])
    for bias in params[2:]:
        value = relax.op.add(builder.emit(value), bias)
    activation = case.attributes.get("activation") or ("relu" if case.attributes.get("epilogue") else "")
    return _activated(builder, builder.emit(value), activation) if activation else value


def _chain(builder: Any, case: Case, params: Iterator[Any]) -> Any:
    value = next(params)
    for number, settings in enumerate(case.attributes["links"]):
        value = builder.emit(value) if number else value
        value = _product(builder, case, settings["kind"], settings, value, next(params))
        if case.attributes["bias"]:
            value = relax.op.add(builder.emit(value), next(params))
        value = relax.op.nn.relu(builder.emit(value))
    return value


def _product(builder: Any, case: Case, kind: str, settings: Mapping[str, Any], x: Any, w: Any) -> Any:
    if not kind.endswith("conv2d") and kind != "depthwise":
        out = "int32" if case.inputs[0].dtype == "int8" else None
        w = builder.emit(relax.op.permute_dims(w)) if _is_transposed(case) else w
        return relax.op.matmul(x, w, out_dtype=out)
    last = settings["layout"] == "NHWC"
    return relax.op.nn.conv2d(
        x, w, strides=settings["stride"], padding=list(settings["pads"]), dilation=settings["dilation"],
        groups=settings["groups"], data_layout="NHWC" if last else "NCHW", kernel_layout="OHWI" if last else "OIHW",
    )  # fmt: skip


def _activated(builder: Any, value: Any, activation: str) -> Any:
    def number(constant: float) -> Any:
        return relax.const(constant, "float16")

    match activation:
        case "relu" | "gelu":
            return getattr(relax.op.nn, activation)(value)
        case "softplus":
            small = builder.emit(relax.op.exp(builder.emit(relax.op.negative(builder.emit(relax.op.abs(value))))))
            logarithm = builder.emit(relax.op.log(builder.emit(relax.op.add(small, number(1.0)))))
            return relax.op.add(builder.emit(relax.op.maximum(value, number(0.0))), logarithm)
        case "hardswish":
            moved = builder.emit(relax.op.add(value, number(3.0)))
            gate = builder.emit(relax.op.minimum(builder.emit(relax.op.maximum(moved, number(0.0))), number(6.0)))
            return relax.op.divide(builder.emit(relax.op.multiply(value, gate)), number(6.0))
    raise AssertionError(activation)
