"""Small kernels for the tests of the interpreter, and ways to break them after lowering."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tvm_ext._tvm import BufferStore, PrimFunc, structural_map, tirx
from tvm_ext.ir.build_ir import index, load, store
from tvm_ext.ir.simt_ir import launch
from tvm_ext.verify import simt

DEVICE = "nvidia-a100"


def tensors(*names: str, size: int = 64, dtype: str = "float32") -> list[Any]:
    return [tirx.decl_buffer([index(size)], dtype, name) for name in names]


def function(params: Sequence[Any], *statements: Any) -> Any:
    func = PrimFunc(list(params), tirx.stmt_seq(*statements))
    return func.with_attr("global_symbol", "main").with_attr("s_tir", True).with_attr("tirx.noalias", True)


def kernel(
    body: Callable[[Any, Any], Any], *, names: Sequence[str] = ("A", "B"), size: int = 64, threads: int = 64,
    blocks: int = 1, dtype: str = "float32",
) -> tuple[Callable[..., Any], list[Any]]:  # fmt: skip
    """(a function that makes the PrimFunc with ``body(block, thread)``, its buffers)."""
    buffers = tensors(*names, size=size, dtype=dtype)
    return (lambda: function(buffers, launch(blocks, threads, body))), buffers


def lowered(func: Any, target: Any = DEVICE) -> tuple[simt.DeviceKernel, ...]:
    return simt.lower(func, target)


def run(kernels: Sequence[simt.DeviceKernel], **arrays: Any) -> simt.SimtRun:
    return simt.run(kernels, arrays, device=DEVICE)


def kinds(result: simt.SimtRun) -> set[str]:
    return {finding.kind for finding in result.findings}


def barriers(function: Any) -> int:
    found: list[Any] = []
    structural_map(
        function.body, (tirx.Evaluate, lambda node: (found.append(node), node)[1] if _is_barrier(node) else node)
    )
    return len(found)


def without_barrier(kernels: Sequence[simt.DeviceKernel], which: int) -> tuple[simt.DeviceKernel, ...]:
    """The first kernel without its barrier number ``which``."""
    seen = [-1]

    def drop(node: Any) -> Any:
        if not _is_barrier(node):
            return node
        seen[0] += 1
        return tirx.Evaluate(tirx.IntImm("int32", 0)) if seen[0] == which else node

    return _changed(kernels, (tirx.Evaluate, drop))


def shifted_stores(kernels: Sequence[simt.DeviceKernel], buffer: str, by: int) -> tuple[simt.DeviceKernel, ...]:
    """The first kernel with every store to ``buffer`` ``by`` elements later."""

    def shift(node: Any) -> Any:
        if str(node.buffer.name) != buffer:
            return node
        return BufferStore(node.buffer, node.value, [node.indices[0] + tirx.IntImm("int32", by)])

    return _changed(kernels, (BufferStore, shift))


def _is_barrier(node: Any) -> bool:
    return str(getattr(getattr(node.value, "op", None), "name", "")) == "tirx.tvm_storage_sync"


def _changed(kernels: Sequence[simt.DeviceKernel], change: Any) -> tuple[simt.DeviceKernel, ...]:
    first = kernels[0]
    func = first.function.with_body(structural_map(first.function.body, change))
    return (dataclasses.replace(first, function=func), *kernels[1:])


def numbers(size: int = 64, dtype: str = "float32") -> Any:
    return np.arange(size).astype(dtype)


__all__ = ["load", "store"]
