"""Which tensors a lowered kernel writes: by stores, or by calls that store for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tvm_ext._tvm import BufferStore, Call, DeclBuffer, Expr, Node, TensorLoad, Var, nodes_in
from tvm_ext.analysis.device_code import called_name, op_name
from tvm_ext.analysis.launches import DeviceKernel

from . import device_sync


def written_parameters(kernel: DeviceKernel) -> set[str]:
    """Tensors that a kernel may write: stored to, or handed to a call that stores."""
    sources: dict[int, str] = {hash(p): name for p, name in zip(kernel.function.params, kernel.arguments, strict=False)}
    found: set[str] = set()

    def called(node: Node) -> None:
        for position in _storing_arguments(node):
            found.update(sources[hash(v)] for v in _addressed(node.args[position]) if hash(v) in sources)

    for view in nodes_in(kernel.function.body, DeclBuffer, "pre"):
        for variable in nodes_in(view.data, Var):
            if hash(variable) in sources:
                sources[hash(view.buffer)] = sources[hash(variable)]
    stored = (hash(store.buffer) for store in nodes_in(kernel.function.body, BufferStore))
    found.update(sources[buffer] for buffer in stored if buffer in sources)
    for call in nodes_in(kernel.function.body, Call):
        called(call)
    return found


def _addressed(address: Expr) -> list[Var]:
    """The pointers and buffers that ``address`` is made of."""
    return [*nodes_in(address, Var), *(load.source for load in nodes_in(address, TensorLoad))]


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
