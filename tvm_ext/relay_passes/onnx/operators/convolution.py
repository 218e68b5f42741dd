"""Checks of convolutions and pools that ONNX's shape inference leaves out; output sizes of transposed convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from ..graph import attribute
from .context import Check, Context, Pen, Rule, operand, refusal, text_attribute

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def _check_conv(node: onnx.NodeProto, context: Context) -> None:
    shape, weight = _operands(node, context)
    group = _check_kernel(node, weight)
    if shape[1] != weight[1] * group or weight[0] % group:
        raise refusal(
            node,
            f"convolves {shape[1]} channels with a weight of shape {tuple(weight)} in {group} group(s)",
            "the weight is (filters, channels / group, ...), and group divides the filters",
        )
    _check_bias(node, context, weight[0])
    pads = _check_window(node, shape, weight[2:])
    _check_fits(node, shape, weight[2:], pads)


def _check_transposed(node: onnx.NodeProto, context: Context) -> None:
    shape, weight = _operands(node, context)
    group = _check_kernel(node, weight)
    if shape[1] != weight[0] or weight[0] % group:
        raise refusal(
            node,
            f"convolves {shape[1]} channels with a weight of shape {tuple(weight)} in {group} group(s)",
            "the weight is (channels, filters / group, ...), and group divides the channels",
        )
    _check_bias(node, context, weight[1] * group)
    _check_window(node, shape, weight[2:])
    for name in ("output_padding", "output_shape"):
        values = attribute(node, name, None)
        if values is not None and (len(values) != len(shape) - 2 or min(values) < 0):
            raise refusal(node, f"has the {name} {list(values)}", f"give {len(shape) - 2} numbers, none negative")


def _operands(node: onnx.NodeProto, context: Context) -> tuple[list[int], list[int]]:
    """Shapes of data and weight. -1: not known, and then equal to nothing that could be wrong."""
    weight = context.known_shape(node, operand(node, 1))
    rank = context.rank(node.input[0])
    if rank is None or rank != len(weight) or rank < 3:
        raise refusal(node, f"has data of rank {rank} and a weight of rank {len(weight)}", "both need the same, from 3")
    shape = [context.extent(node.input[0], axis) for axis in range(rank)]
    channels = shape[1]
    if channels is None:
        raise refusal(node, f"needs the channels of '{node.input[0]}'", "bind dynamic dimensions with shape={...}")
    return [-1 if extent is None else extent for extent in shape], list(weight)


def _check_kernel(node: onnx.NodeProto, weight: Sequence[int]) -> int:
    kernel = attribute(node, "kernel_shape", weight[2:])
    if list(kernel) != list(weight[2:]):
        raise refusal(
            node,
            f"has the kernel_shape {list(kernel)} and a weight of shape {tuple(weight)}",
            "leave kernel_shape out or make it the weight's",
        )
    group = int(attribute(node, "group", 1))
    if group < 1:
        raise refusal(node, f"has {group} groups", "group must be at least 1")
    return group


def _check_bias(node: onnx.NodeProto, context: Context, filters: int) -> None:
    name = operand(node, 2)
    shape = context.shape(name) if name else None
    if shape is not None and shape != (filters,):
        raise refusal(node, f"has a bias of shape {shape} for {filters} filters", "give one number for each filter")


def _check_pool(node: onnx.NodeProto, context: Context) -> None:
    rank = context.rank(node.input[0])
    if rank is None or rank < 3:
        raise refusal(node, f"pools a tensor of rank {rank}", "give its shape with shape={...}, of rank 3 or more")
    kernel = attribute(node, "kernel_shape", ())
    shape = [extent if extent is not None else -1 for extent in (context.extent(node.input[0], i) for i in range(rank))]
    _check_positive(node, "kernel_shape", kernel, rank - 2)
    pads = _check_window(node, shape, kernel)
    for extent, pad in zip([*kernel, *kernel], pads, strict=True):
        if pad >= max(extent, 1) * max([1, *attribute(node, "dilations", ())]):
            raise refusal(node, f"pads by {pads} for a kernel of {list(kernel)}", "pads must be less than the kernel")
    _check_fits(node, shape, kernel, pads)


def _check_window(node: onnx.NodeProto, shape: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Checks strides, dilations and padding, and returns the pads."""
    spatial = len(shape) - 2
    _check_positive(node, "kernel", kernel, spatial)
    for name in ("strides", "dilations"):
        _check_positive(node, name, attribute(node, name, [1] * spatial), spatial)
    pads = [int(pad) for pad in attribute(node, "pads", [0] * (2 * spatial))]
    if len(pads) != 2 * spatial or min(pads) < 0:
        raise refusal(node, f"has the pads {pads}", f"give {2 * spatial} numbers, none negative")
    mode = text_attribute(node, "auto_pad", "NOTSET")
    if mode not in _AUTO_PADS or (mode != "NOTSET" and any(pads)):
        raise refusal(
            node, f"has auto_pad '{mode}' and the pads {pads}", f"use one of {', '.join(_AUTO_PADS)}, or pads"
        )
    return pads


def _check_positive(node: onnx.NodeProto, name: str, values: Sequence[int], count: int) -> None:
    if len(values) != count or min(values, default=1) < 1:
        raise refusal(node, f"has the {name} {list(values)}", f"give {count} numbers, each at least 1")


def _check_fits(node: onnx.NodeProto, shape: Sequence[int], kernel: Sequence[int], pads: Sequence[int]) -> None:
    """Whether the window fits into the padded input at least once."""
    if text_attribute(node, "auto_pad", "NOTSET").startswith("SAME"):
        return
    dilations = attribute(node, "dilations", [1] * len(kernel))
    for axis, extent in enumerate(shape[2:]):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        padded = extent + pads[axis] + pads[axis + len(kernel)]
        if extent > 0 and padded < reach:
            raise refusal(node, f"has a window of {reach} on axis {axis + 2} of {padded}, padding included", "pad more")


def _transposed(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """`output_shape` and `auto_pad` become pads, as ONNX computes them.

    stride * (extent - 1) + output_padding + reach - output = begin + end; where that is negative, the output ends in
    zeros, which are padded before the bias is added.
    """
    mode = text_attribute(node, "auto_pad", "NOTSET")
    wanted = attribute(node, "output_shape", None)
    if wanted is None and mode == "NOTSET":
        return None
    kernel = context.known_shape(node, operand(node, 1))[2:]
    spatial = len(kernel)
    strides = attribute(node, "strides", [1] * spatial)
    dilations = attribute(node, "dilations", [1] * spatial)
    more = attribute(node, "output_padding", [0] * spatial)
    totals = []
    for axis in range(spatial):
        reach = (kernel[axis] - 1) * dilations[axis] + 1 + more[axis]
        if wanted is not None:
            extent = context.known_shape(node, node.input[0])[axis + 2]
            totals.append(strides[axis] * (extent - 1) + reach - wanted[axis])
        else:
            totals.append(0 if mode == "VALID" else reach - strides[axis])
    first = [max(total, 0) // 2 if mode == "SAME_UPPER" else (max(total, 0) + 1) // 2 for total in totals]
    pads = [*first, *(max(total, 0) - begin for total, begin in zip(totals, first, strict=True))]
    return _padded_transposed(node, context, pads, [max(-total, 0) for total in totals])


def _padded_transposed(
    node: onnx.NodeProto, context: Context, pads: list[int], missing: list[int]
) -> list[onnx.NodeProto]:
    pen = Pen(node=node, context=context)
    options = {
        item.name: onnx.helper.get_attribute_value(item)
        for item in node.attribute
        if item.name not in ("auto_pad", "output_shape", "pads")
    }
    if not any(missing):
        pen.add("ConvTranspose", *node.input, out=node.output[0], pads=pads, **options)
        return pen.nodes
    bias = operand(node, 2)
    y = pen.add("ConvTranspose", *node.input[:2], pads=pads, **options)
    ends = pen.integers(*([0] * (len(missing) + 4)), *missing)
    if context.opset < 11:
        raise refusal(node, "has an output_shape beyond its last element", "use operator set 11 or newer")
    if not bias:
        pen.add("Pad", y, ends, out=node.output[0])
        return pen.nodes
    column = pen.add("Reshape", bias, pen.integers(1, -1, *([1] * len(missing))))
    pen.add("Add", pen.add("Pad", y, ends), column, out=node.output[0])
    return pen.nodes


CHECKS: Mapping[str, Check] = {
    "Conv": _check_conv,
    "ConvTranspose": _check_transposed,
    "MaxPool": _check_pool,
    "AveragePool": _check_pool,
    "LpPool": _check_pool,
}
RULES: Mapping[str, Rule] = {"ConvTranspose": _transposed}
