"""What torch says of the nodes of a program's graph, and its tensors as TVM's."""

from __future__ import annotations

from typing import Any

import tvm

from tvm_ext._tvm import Tensor
from tvm_ext.errors import ModelError, UnsupportedEnvironmentError


def require_torch(what: str) -> Any:
    """The module torch; raises UnsupportedEnvironmentError where it is missing, which importing ``what`` needs."""
    try:
        import torch
    except ImportError as error:
        raise UnsupportedEnvironmentError(f"importing {what} needs torch.", "pip install 'tvm-ext[models]'") from error
    return torch


def name_of(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target))


def where(node: Any) -> str:
    """The node's name, with the line of the user's program that made it."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return f"{node.name} ({lines[-1]})" if lines else str(node.name)


def is_number(node: Any) -> bool:
    import torch

    number = int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
    return node.op == "call_function" and isinstance(node.meta.get("val"), number)


def can_evaluate(node: Any) -> bool:
    """Whether an operator's result follows from its operands: nothing random, nothing left as it was in memory."""
    import torch

    tags = getattr(node.target, "tags", None)
    if node.op != "call_function" or tags is None or torch.Tag.nondeterministic_seeded in tags:
        return name_of(node) == "getitem"
    return not node.target._schema.is_mutable and not name_of(node).startswith("empty")


def tensors_in(value: Any) -> list[Any]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if hasattr(item, "shape")]


def schema_operands(node: Any) -> list[Any]:
    """An operand for each argument of the operator's schema, with its defaults."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [*node.args, *node.kwargs.values()]
    rest = schema.arguments[len(node.args) :]
    return [*node.args, *(node.kwargs.get(item.name, item.default_value) for item in rest)]


def dtype_name(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith("complex") or not (name == "bool" or name[-1].isdigit()) or "float8" in name:
        raise ModelError(f"the program has a tensor of {name}", "real numbers and integers can be imported")
    return name


def tensor_over_torch(value: Any) -> Tensor:
    """A tensor in torch's memory where that is row-major and at a cache line; else a copy."""
    value = value.detach().to_dense().cpu() if value.layout is not _strided() else value.detach().cpu()
    if not value.is_contiguous() or value.data_ptr() % 64:
        value = value.contiguous().clone()
    return tvm.runtime.from_dlpack(value)


def _strided() -> Any:
    import torch

    return torch.strided
