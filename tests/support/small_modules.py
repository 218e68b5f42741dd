"""Relax modules of a few operators, for tests that build one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm_ext._tvm import IRModule, relax


def inputs_of(*shapes: Sequence[int], dtype: str = "float32") -> list[Any]:
    """Variables ``x0``, ``x1``, ... of the given shapes."""
    return [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]


def module_of(inputs: Sequence[Any], *outputs: Any) -> IRModule:
    """``main(*inputs)`` that returns ``outputs``, which may be calls within calls: each gets a binding of its own."""
    builder = relax.BlockBuilder()
    with builder.function("main", list(inputs)):
        with builder.dataflow():
            results = [builder.emit_output(item) for item in outputs]
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))
    return builder.get()
