"""Batch normalisation of a convolution's result goes into the convolution's weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

_NORMS = ("_native_batch_norm_legit_no_training.default", "batch_norm.default")


def fold_norms(graph: Any, state: MutableMapping[str, Any]) -> None:
    """Rewrites ``graph``; ``state`` (placeholder -> tensor) gains weights and biases, each in the type that it had."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target.__name__ not in _NORMS:
            continue
        conv, *values = node.args[:5]
        if _name(conv) != "convolution.default" or len(conv.users) != 1 or conv.args[6] or values[2] is None:
            continue
        tensors = [None if value is None else state.get(value.name) for value in (conv.args[1], conv.args[2], *values)]
        if any(value is not None and tensor is None for value, tensor in zip(conv.args[1:3], tensors, strict=False)):
            continue
        if any(value is not None and tensor is None for value, tensor in zip(values, tensors[2:], strict=True)):
            continue
        if node.target.__name__.startswith("batch_norm") and node.args[5]:
            continue
        epsilon = node.args[6 if node.target.__name__.startswith("_") else 7]
        _fold(graph, state, node, conv, tensors, epsilon)
    graph.eliminate_dead_code()


def _name(node: Any) -> str:
    return str(getattr(getattr(node, "target", None), "__name__", "")) if getattr(node, "op", "") else ""


def _fold(
    graph: Any, state: MutableMapping[str, Any], norm: Any, conv: Any, tensors: list[Any], epsilon: float
) -> None:
    weight, bias, gamma, beta, mean, variance = (0.0 if item is None else item.detach().double() for item in tensors)
    scale: Any = (variance + epsilon) ** -0.5 * (1.0 if tensors[2] is None else gamma)
    shift: Any = beta + (bias - mean) * scale
    new = {f"{conv.name}_weight": weight * scale.reshape(-1, *[1] * (tensors[0].ndim - 1)), f"{conv.name}_bias": shift}
    first = next(iter(graph.nodes))
    made = []
    for name, value in new.items():
        with graph.inserting_before(first):
            placeholder = graph.placeholder(name)
        state[placeholder.name] = value.to(tensors[0].dtype)
        placeholder.meta["val"] = state[placeholder.name]
        made.append(placeholder)
    conv.args = (conv.args[0], *made, *conv.args[3:])
    readers = (
        [user for user in norm.users if _name(user) == "getitem"] if norm.target.__name__.startswith("_") else [norm]
    )
    for reader in readers:
        if reader is norm or reader.args[1] == 0:
            reader.replace_all_uses_with(conv)
