"""Checks of convolutions and pools that ONNX's shape inference leaves out; output sizes of transposed convolutions."""

from __future__ import annotations

from collections.abc import Sequence

from .context import Pen, rule

_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


@rule("Conv")
def _check_conv(pen: Pen) -> None:
    shape, weight, group = _operands(pen)
    _check_channels(pen, shape[1] == weight[1] * group, weight, "filters", "channels")
    _check_bias(pen, weight[0])
    pads = _check_window(pen, shape, weight[2:])
    _check_fits(pen, shape, weight[2:], pads)


@rule("ConvTranspose")
def _check_transposed(pen: Pen) -> None:
    shape, weight, group = _operands(pen)
    _check_channels(pen, shape[1] == weight[0], weight, "channels", "filters")
    _check_bias(pen, weight[1] * group)
    _check_window(pen, shape, weight[2:])
    for name in ("output_padding", "output_shape"):
        values = pen.attribute(name, None)
        if values is not None and (len(values) != len(shape) - 2 or min(values) < 0):
            raise pen.refusal(f"has the {name} {list(values)}", f"give {len(shape) - 2} numbers, none negative")
    strides, dilations, more = _steps(pen, len(shape) - 2)
    if any(n >= max(pair) for n, *pair in zip(more, strides, dilations, strict=True)):
        raise pen.refusal(
            f"has the output_padding {more}", f"each must be below its stride {strides} or its dilation {dilations}"
        )


def _steps(pen: Pen, spatial: int) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and what is added behind the output."""
    defaults = (("strides", 1), ("dilations", 1), ("output_padding", 0))
    strides, dilations, more = (list(pen.attribute(name, [value] * spatial)) for name, value in defaults)
    return strides, dilations, more


def _check_channels(pen: Pen, is_same: bool, weight: Sequence[int], first: str, second: str) -> None:
    group = pen.integer("group", 1)
    if not is_same or weight[0] % group:
        raise pen.refusal(
            f"convolves {pen.extent(pen.x, 1)} channels with a weight of shape {tuple(weight)} in {group} group(s)",
            f"the weight is ({first}, {second} / group, ...), and group divides the {first}",
        )


def _operands(pen: Pen) -> tuple[list[int], list[int], int]:
    """Shapes of data and weight, and the groups. -1: not known, and then equal to nothing that could be wrong."""
    weight = pen.known_shape(pen.operand(1))
    rank = pen.rank(pen.x)
    if rank is None or rank != len(weight) or rank < 3:
        raise pen.refusal(f"has data of rank {rank} and a weight of rank {len(weight)}", "both need the same, from 3")
    shape = [pen.extent(pen.x, axis) for axis in range(rank)]
    if shape[1] is None:
        raise pen.refusal(f"needs the channels of '{pen.x}'", "bind dynamic dimensions with shape={...}")
    kernel, group = list(pen.attribute("kernel_shape", weight[2:])), pen.integer("group", 1)
    if kernel != list(weight[2:]):
        raise pen.refusal(
            f"has the kernel_shape {kernel} and a weight of shape {tuple(weight)}",
            "leave kernel_shape out or make it the weight's",
        )
    if group < 1:
        raise pen.refusal(f"has {group} groups", "group must be at least 1")
    return [-1 if extent is None else extent for extent in shape], list(weight), group


def _check_bias(pen: Pen, filters: int) -> None:
    name = pen.operand(2)
    shape = pen.shape(name) if name else None
    if shape is not None and shape != (filters,):
        raise pen.refusal(f"has a bias of shape {shape} for {filters} filters", "give one number for each filter")


@rule("MaxPool", "AveragePool", "LpPool")
def _check_pool(pen: Pen) -> None:
    rank = pen.rank(pen.x)
    if rank is None or rank < 3:
        raise pen.refusal(f"pools a tensor of rank {rank}", "give its shape with shape={...}, of rank 3 or more")
    kernel = pen.attribute("kernel_shape", ())
    shape = [extent if extent is not None else -1 for extent in (pen.extent(pen.x, i) for i in range(rank))]
    _check_positive(pen, "kernel_shape", kernel, rank - 2)
    pads = _check_window(pen, shape, kernel)
    for extent, pad in zip([*kernel, *kernel], pads, strict=True):
        if pad >= max(extent, 1) * max([1, *pen.attribute("dilations", ())]):
            raise pen.refusal(f"pads by {pads} for a kernel of {list(kernel)}", "pads must be less than the kernel")
    _check_fits(pen, shape, kernel, pads)


def _check_window(pen: Pen, shape: Sequence[int], kernel: Sequence[int]) -> list[int]:
    """Checks strides, dilations and padding, and returns the pads."""
    spatial = len(shape) - 2
    _check_positive(pen, "kernel", kernel, spatial)
    for name in ("strides", "dilations"):
        _check_positive(pen, name, pen.attribute(name, [1] * spatial), spatial)
    pads = [int(pad) for pad in pen.attribute("pads", [0] * (2 * spatial))]
    if len(pads) != 2 * spatial or min(pads) < 0:
        raise pen.refusal(f"has the pads {pads}", f"give {2 * spatial} numbers, none negative")
    mode = pen.text("auto_pad", "NOTSET")
    if mode not in _AUTO_PADS or (mode != "NOTSET" and any(pads)):
        raise pen.refusal(f"has auto_pad '{mode}' and the pads {pads}", f"use one of {', '.join(_AUTO_PADS)}, or pads")
    return pads


def _check_positive(pen: Pen, name: str, values: Sequence[int], count: int) -> None:
    if len(values) != count or min(values, default=1) < 1:
        raise pen.refusal(f"has the {name} {list(values)}", f"give {count} numbers, each at least 1")


def _check_fits(pen: Pen, shape: Sequence[int], kernel: Sequence[int], pads: Sequence[int]) -> None:
    """Whether the window fits into the padded input at least once."""
    if pen.text("auto_pad", "NOTSET").startswith("SAME"):
        return
    dilations = pen.attribute("dilations", [1] * len(kernel))
    for axis, extent in enumerate(shape[2:]):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        padded = extent + pads[axis] + pads[axis + len(kernel)]
        if extent > 0 and padded < reach:
            raise pen.refusal(f"has a window of {reach} on axis {axis + 2} of {padded}, padding included", "pad more")


@rule("ConvTranspose")
def _transposed(pen: Pen) -> None:
    """`output_shape`, `auto_pad` and an `output_padding` of a stride or more become pads and zeros behind.

    What `output_padding` adds are elements that the pads behind would cut; beyond these there are only zeros, to which
    the bias is added. Worked example: stride 1, dilation 3, pads 1 and 1, output_padding 2: pads 1 and 0, then a zero.
    """
    mode, wanted = pen.text("auto_pad", "NOTSET"), pen.attribute("output_shape", None)
    spatial = len(pen.known_shape(pen.operand(1))) - 2
    strides, _, more = _steps(pen, spatial)
    pads, missing = list(pen.attribute("pads", [0] * (2 * spatial))), [0] * spatial
    if wanted is not None or mode != "NOTSET":
        pads, missing = _pads_asked_for(pen, mode, wanted)
    elif all(n < stride for n, stride in zip(more, strides, strict=True)):
        return
    behind = pads[spatial:]
    left = [max(n - pad, 0) for n, pad in zip(more, behind, strict=True)]
    pads[spatial:] = [max(pad - n, 0) for n, pad in zip(more, behind, strict=True)]
    if any(n >= stride for n, stride in zip(left, strides, strict=True)):
        missing, left = [sum(pair) for pair in zip(missing, left, strict=True)], [0] * spatial
    _padded_transposed(pen, missing, pads=pads, output_padding=left)


def _pads_asked_for(pen: Pen, mode: str, wanted: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """The pads of `output_shape` and `auto_pad`, as ONNX computes them, and how many zeros come behind.

    stride * (extent - 1) + output_padding + reach - output = begin + end; where that is negative, the output ends in
    zeros.
    """
    kernel = pen.known_shape(pen.operand(1))[2:]
    strides, dilations, more = _steps(pen, len(kernel))
    totals = []
    for axis in range(len(kernel)):
        reach = (kernel[axis] - 1) * dilations[axis] + 1 + more[axis]
        if wanted is not None:
            extent = pen.known_shape(pen.x)[axis + 2]
            totals.append(strides[axis] * (extent - 1) + reach - wanted[axis])
        else:
            totals.append(0 if mode == "VALID" else reach - strides[axis])
    first = [max(total, 0) // 2 if mode == "SAME_UPPER" else (max(total, 0) + 1) // 2 for total in totals]
    behind = [max(total, 0) - begin for total, begin in zip(totals, first, strict=True)]
    return [*first, *behind], [max(-total, 0) for total in totals]


def _padded_transposed(pen: Pen, missing: list[int], **shape: list[int]) -> None:
    options = pen.options("auto_pad", "output_shape") | shape
    if not any(missing):
        pen.add("ConvTranspose", *pen.input, out=pen.out, **options)
        return
    y = pen.add("ConvTranspose", *pen.input[:2], **options)
    ends = pen.integers(*([0] * (len(missing) + 4)), *missing)
    if pen.opset < 11:
        raise pen.refusal("has an output beyond its last element", "use operator set 11 or newer")
    y = pen.add("Pad", y, ends)
    if pen.operand(2):
        y = pen.add("Add", y, pen.add("Reshape", pen.operand(2), pen.integers(1, -1, *([1] * len(missing)))))
    pen.give(y)
