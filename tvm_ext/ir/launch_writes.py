"""Which tensors a lowered kernel writes: by stores, or by calls that store for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tvm_ext._tvm import BufferStore, Call, DeclBuffer, Expr, Node, TensorLoad, Var, structural_walk
from tvm_ext.analysis.device_code import called_name, op_name
from tvm_ext.analysis.launches import DeviceKernel

from . import device_sync


def written_parameters(kernel: DeviceKernel) -> set[str]:
    """Tensors that a kernel may write: stored to, or handed to a call that stores."""
    sources: dict[int, str] = {hash(p): name for p, name in zip(kernel.function.params, kernel.arguments, strict=False)}
    found: set[str] = set()

    def declared(node: Node) -> None:
        variables: list[Var] = []
        structural_walk(node.data, [(Var, variables.append)], order="pre")
        for variable in variables:
            if hash(variable) in sources:
                sources[hash(node.buffer)] = sources[hash(variable)]

    def called(node: Node) -> None:
        for position in _storing_arguments(node):
            found.update(sources[hash(v)] for v in _addressed(node.args[position]) if hash(v) in sources)

    structural_walk(kernel.function.body, [(DeclBuffer, declared)], order="pre")
    structural_walk(
        kernel.function.body,
        [
            (BufferStore, lambda n: found.update({sources[hash(n.buffer)]} if hash(n.buffer) in sources else ())),
            (Call, called),
        ],
        order="pre",
    )
    return found


def _addressed(address: Expr) -> list[Var]:
    """The pointers and buffers that ``address`` is made of."""
    found: list[Var] = []
    structural_walk(address, [(Var, found.append), (TensorLoad, lambda node: found.append(node.source))], order="pre")
    return found


def _storing_arguments(call: Call) -> Sequence[int]:
    """Which arguments of ``call`` are addresses that it writes to."""
    name = called_name(call)
    if op_name(call) == device_sync.CALL and name not in device_sync.ALL:
        declared = re.search(rf"\bvoid {re.escape(name)}\(([^)]*)\)", str(call.args[-1].value))
        parameters = declared[1].split(",") if declared else []
        return [place for place, kind in enumerate(parameters, 1) if "*" in kind and "const" not in kind.split()]
    position = 1 if name in device_sync.WRITING else _STORING_CALLS.get(op_name(call))
    return () if position is None else (position,)


_STORING_CALLS = {
    "tirx.mma_store_legacy": 2, "tirx.mma_store": 2, "tirx.tvm_store_matrix_sync": 5, "tirx.s_tir.cp_async_raw": 0,
}  # fmt: skip
"""Calls that write through a pointer: which argument it is."""


def written_tensors(kernels: Sequence[DeviceKernel]) -> set[str]:
    """Names of the tensors that any of the kernels may write."""
    return set().union(*map(written_parameters, kernels))
