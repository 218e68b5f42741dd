"""Whole models as lists of operators, computed by PyTorch or, for small ones, NumPy. No TVM in here.

A graph is JSON, `Case.attributes` of operator "graph"::

    {"nodes": [[name, operator, arguments, attributes], ...], "outputs": [name, ...]}

``operator`` is a Relax operator without "relax.", or "pick", one of a tuple; an argument is the name of an input of the
case or of an earlier node, or ``{"value": 1.0, "dtype": "float16"}``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cases import Case

OPERATOR = "graph"
Handler = Callable[..., Any]


def evaluate(
    case: Case, tensors: Sequence[Any], handlers: Mapping[str, Handler], constant: Callable[[Any, str], Any]
) -> tuple[Any, ...]:
    """The outputs of the graph of ``case`` for ``tensors``, its inputs in order.

    ``handlers`` compute a node from arguments and attributes; ``constant`` makes an argument of a value and a dtype.
    Raises NotImplementedError for an operator without a handler.
    """
    values = {item.name: tensor for item, tensor in zip(case.inputs, tensors, strict=True)}
    for name, operator, arguments, attributes in case.attributes["nodes"]:
        if operator not in handlers:
            raise NotImplementedError(f"operator {operator} has no reference here")
        operands = [
            constant(item["value"], item["dtype"]) if isinstance(item, dict) else values[item] for item in arguments
        ]
        values[name] = handlers[operator](*operands, **attributes)
    return tuple(values[name] for name in case.attributes["outputs"])


def reference(torch: Any, case: Case, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """In the floating-point type of ``tensors``, whatever the graph says: casts to floats and constants follow it."""
    wide = next(tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)
    return evaluate(case, tensors, torch_handlers(torch, wide), _torch_constants(torch, tensors[0].device, wide))


def peer(torch: Any, case: Case, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """In the graph's own types, operator by operator."""
    return evaluate(case, tensors, torch_handlers(torch, None), _torch_constants(torch, tensors[0].device, None))


def _torch_constants(torch: Any, device: Any, wide: Any) -> Callable[[Any, str], Any]:
    def constant(value: Any, dtype: str) -> Any:
        own = getattr(torch, dtype)
        # a number stays one: PyTorch then keeps the other operand's type, and copies nothing to the device
        return (
            value
            if not isinstance(value, list)
            else torch.tensor(value, dtype=wide if wide is not None and own.is_floating_point else own, device=device)
        )

    return constant


def torch_handlers(torch: Any, wide: Any) -> dict[str, Handler]:
    """By operator. ``wide`` stands in for every floating-point type that the graph names; None: nothing does."""
    functional = torch.nn.functional

    def cast(x: Any, dtype: str) -> Any:
        to = getattr(torch, dtype)
        return x.to(wide if wide is not None and to.is_floating_point else to)

    def take(table: Any, indices: Any, axis: int) -> Any:
        if not isinstance(indices, torch.Tensor):
            return table.select(axis, indices)
        picked = torch.index_select(table, axis, indices.reshape(-1))
        return picked.reshape(*table.shape[:axis], *indices.shape, *table.shape[axis + 1 :])

    def convolution(x: Any, w: Any, layouts: list[str], strides: Any, padding: Any, dilation: Any, groups: int) -> Any:
        data, kernel = layouts
        x, pads = _padded(torch, _to(x, data, "NCHW"), padding)
        y = functional.conv2d(x, _to(w, kernel, "OIHW"), None, strides, pads, dilation, groups)
        return _to(y, "NCHW", data)

    def max_pool(x: Any, layout: str, pool_size: Any, strides: Any, padding: Any) -> Any:
        x, pads = _padded(torch, _to(x, layout, "NCHW"), padding, -math.inf)
        return _to(functional.max_pool2d(x, pool_size, strides, pads), "NCHW", layout)

    def average_pool(x: Any, layout: str, pool_size: Any, strides: Any, padding: Any) -> Any:
        if any(padding):
            raise NotImplementedError("average pooling with padding has no reference here")
        return _to(functional.avg_pool2d(_to(x, layout, "NCHW"), pool_size, strides), "NCHW", layout)

    return {
        "add": lambda x, y: x + y,
        "subtract": lambda x, y: x - y,
        "multiply": lambda x, y: x * y,
        "divide": lambda x, y: x / y,
        "less": lambda x, y: x < y,
        "where": torch.where,
        "astype": cast,
        "take": take,
        "reshape": lambda x, shape: x.reshape(shape),
        "squeeze": lambda x, axis: x.reshape(without(x.shape, axis)),
        "permute_dims": _permuted,
        "expand_dims": lambda x, axis: x[tuple(None if i in axis else slice(None) for i in range(x.dim() + len(axis)))],
        "matmul": torch.matmul,
        "erf": torch.erf,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "concat": lambda *parts, axis: torch.cat(parts, axis),
        "strided_slice": sliced,
        "split": lambda x, parts, axis: torch.tensor_split(x, parts, axis),
        "pick": lambda parts, index: parts[index],
        "nn.relu": torch.relu,
        "nn.softmax": lambda x, axis: torch.softmax(x, axis),
        "nn.layer_norm": lambda x, g, b, epsilon: functional.layer_norm(x, x.shape[-1:], g, b, epsilon),
        "nn.conv2d": convolution,
        "nn.max_pool2d": max_pool,
        "nn.avg_pool2d": average_pool,
    }


def sliced(x: Any, axes: Sequence[int], begin: Sequence[int], end: Sequence[int], strides: Sequence[int]) -> Any:
    """A view of ``x``, of PyTorch or NumPy."""
    places = dict(zip(axes, zip(begin, end, strides, strict=True), strict=True))
    return x[tuple(slice(*places[axis]) if axis in places else slice(None) for axis in range(len(x.shape)))]


def without(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    """``shape`` without the extents of ``axes``."""
    dropped = {axis % len(shape) for axis in axes}
    return [extent for axis, extent in enumerate(shape) if axis not in dropped]


def _permuted(x: Any, axes: Sequence[int]) -> Any:
    """A view. Keys, [0, 2, 3, 1], are written as [0, 2, 1, 3] transposed, as modules of PyTorch do.

    torch.compile 2.13 takes a lone permutation before a product for such a transpose, and fails as it fuses attention.
    """
    *lead, last, other = axes
    return x.permute([*lead, other, last]).transpose(-2, -1) if last > other else x.permute(axes)


def _to(x: Any, layout: str, other: str) -> Any:
    """A view: strides tell the library how channels lie."""
    return x if layout == other else x.permute([layout.index(letter) for letter in other])


def _padded(torch: Any, x: Any, padding: Sequence[int], value: float = 0.0) -> tuple[Any, Any]:
    """``x`` and the pads (rows, columns) that are left to the operator: all of them where they are symmetric."""
    top, left, bottom, right = padding
    if (top, left) == (bottom, right):
        return x, (top, left)
    return torch.nn.functional.pad(x, (left, right, top, bottom), value=value), 0
