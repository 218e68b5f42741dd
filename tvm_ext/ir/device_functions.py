"""Calls of device functions that a module holds beside its kernels, and what such a function says at its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_ext._tvm import Expr, Stmt, Var, ir, tirx

from .device_sync import CALL

_TYPES = {"int32": "int", "int64": "int64_t", "bool": "bool"}
"""In CUDA C++ what a function of `call_outlined` takes by value, as stock TVM prints it."""

_HEAD = "static __device__ __forceinline__ int"

_THREAD = f"""
{_HEAD} tvm_ext_thread() {{ return (int)threadIdx.x; }}
"""

_IN_MEMORY = f"""
{_HEAD} tvm_ext_is_{{0}}(const void* data) {{{{ __builtin_assume(__is{{1}}(data)); return 0; }}}}
"""
_MEMORIES = {"global": "Global", "shared": "Shared", "shared.dyn": "Shared"}


def pointer(name: str, scope: str) -> Var:
    """A ``void*`` parameter to memory of ``scope``."""
    return Var(name, ir.PointerType(ir.PrimType("void"), scope))


def call_outlined(name: str, parameters: Sequence[Var], arguments: Sequence[Expr]) -> Stmt:
    """Call the module's function ``name``, which is not inlined: the text that comes with the call declares it so.

    A definition, which stock TVM prints without an attribute, has those of the declaration before it.
    """
    types = ", ".join(_c_type(parameter) for parameter in parameters)
    declared = f'\nextern "C" __device__ __noinline__ void {name}({types});\n'
    return tirx.Evaluate(tirx.call_intrin("void", CALL, name, *arguments, declared))


def _c_type(parameter: Var) -> str:
    return "void*" if isinstance(parameter.ty, ir.PointerType) else _TYPES[str(parameter.ty.dtype)]


def thread_number() -> Expr:
    """The thread's number in a 1-D block, in a function that has no launch of its own."""
    return tirx.call_intrin("int32", CALL, "tvm_ext_thread", _THREAD)


def says_memory(data: Var) -> Stmt:
    """Tell the compiler in which memory ``data`` is: a load of it is one of that memory then."""
    scope = str(data.ty.storage_scope)
    name = _MEMORIES[scope]
    return tirx.Evaluate(
        tirx.call_intrin("int32", CALL, f"tvm_ext_is_{name.lower()}", data, _IN_MEMORY.format(name.lower(), name))
    )
