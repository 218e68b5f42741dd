"""The benchmark's cases in PyTorch: what results are checked against, and the libraries' own times. No TVM in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import graph_references
from cases import Case

WIDE_FLOPS_LIMIT = 2e11
"""Up to here the reference is computed in float64; beyond, in float32 without TF32, whose own error is then allowed."""


def peer(torch: Any, case: Case) -> Callable[[Sequence[Any]], Any]:
    """``case`` as one would write it in PyTorch: a function of the input tensors."""
    return lambda tensors: _PEERS[case.operator](torch, case, *tensors)


def reference(torch: Any, case: Case, tensors: Sequence[Any]) -> Any:
    """The exact result of ``tensors``: in float64, for large cases in float32, never in TF32. A model's is a tuple."""
    wide = torch.float64 if case.flops <= WIDE_FLOPS_LIMIT or case.inputs[0].dtype == "int8" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if case.operator == graph_references.OPERATOR:
        floats = [tensor.to(wide) if tensor.dtype.is_floating_point else tensor for tensor in tensors]
        return graph_references.reference(torch, case, floats)
    return _PEERS[case.operator](torch, case, *(tensor.to(wide) for tensor in tensors))


def _matmul(torch: Any, case: Case, x: Any, w: Any, *bias: Any) -> Any:
    if x.dtype == torch.int8:
        return torch._int_mm(x, w) if x.dim() == 2 else _unsupported("batched int8 products")
    y = torch.matmul(x, w)
    return torch.relu(y + bias[0]) if bias else y


def _unsupported(what: str) -> Any:
    raise NotImplementedError(f"PyTorch has no {what}")


def _convolution(torch: Any, case: Case, x: Any, w: Any) -> Any:
    settings = case.attributes
    top, left, bottom, right = settings["pads"]
    last = settings["layout"] == "NHWC"
    if last:
        x, w = x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)  # views: the strides tell cuDNN that channels are last
    pads: Any = (top, left)
    if (top, left) != (bottom, right):
        x, pads = torch.nn.functional.pad(x, (left, right, top, bottom)), 0
    y = torch.nn.functional.conv2d(x, w, None, settings["stride"], pads, settings["dilation"], settings["groups"])
    return y.permute(0, 2, 3, 1) if last else y


def _chain(torch: Any, case: Case, x: Any, *factors: Any) -> Any:
    rest = iter(factors)
    for settings in case.attributes["links"]:
        one = _convolution if settings["kind"] == "conv2d" else _matmul
        x = one(torch, replace(case, attributes=settings), x, next(rest))
        x = torch.relu(x + next(rest) if case.attributes["bias"] else x)
    return x


def _activated(torch: Any, case: Case, x: Any, w: Any, bias: Any) -> Any:
    one = _convolution if case.operator.endswith("conv2d") else _matmul
    return _ACTIVATIONS[case.attributes["activation"]](torch.nn.functional)(one(torch, case, x, w) + bias)


_ACTIVATIONS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "relu": lambda functional: functional.relu,
    "gelu": lambda functional: functional.gelu,
    "hardswish": lambda functional: functional.hardswish,
    "softplus": lambda functional: functional.softplus,
}


def _average_pool(torch: Any, case: Case, x: Any) -> Any:
    kernel, stride, (top, left, bottom, right) = (case.attributes[name] for name in ("kernel", "stride", "pads"))
    pool = torch.nn.functional.avg_pool2d
    if (top, left) == (bottom, right):
        return pool(x, kernel, stride, (top, left), count_include_pad=False)
    pad = torch.nn.functional.pad
    inside = pad(torch.ones_like(x[:1, :1]), (left, right, top, bottom))
    return pool(pad(x, (left, right, top, bottom)), kernel, stride) / pool(inside, kernel, stride)


def _layer_norm(torch: Any, case: Case, x: Any, gamma: Any, beta: Any) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5)


_PEERS: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "batch_matmul": _matmul,
    "conv2d": _convolution,
    "depthwise": _convolution,
    "average_pool": _average_pool,
    "relu": lambda torch, _case, x: torch.relu(x),
    "chain": _chain,
    "activated_matmul": _activated,
    "activated_conv2d": _activated,
    "sum": lambda torch, case, x: torch.sum(x, dim=tuple(case.attributes["axes"])),
    "softmax": lambda torch, _case, x: torch.softmax(x, dim=-1),
    "layer_norm": _layer_norm,
    graph_references.OPERATOR: lambda torch, case, *tensors: graph_references.peer(torch, case, tensors),
}
