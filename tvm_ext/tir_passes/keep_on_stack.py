"""Keeps the sums of register tiles on the stack, where LLVM can hold them in registers and forget them afterwards.

Stock TVM puts less than 1 KiB on the stack and asks its workspace pool for anything larger, so for the sums of a tile
of 16 registers and more. LLVM sees memory that others may read there: it holds the sums in registers, and their last
values through all that follows in the function, to write them at its end. What follows has the other registers: of
the second product of a chain, 16 sums, a third lay in memory.
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import AllocBuffer, IRModule, PassContext, PrimFunc, prim_func_pass, structural_map, tirx

KEPT = "disable_lower_builtin"
"""Annotation of an allocation that stock TVM leaves to LLVM. Its StorageRewrite, which comes before, drops it."""

STACK_BYTES = 4096
"""The largest buffer that is kept: ample for all registers of a processor. A thread's stack has megabytes."""


@prim_func_pass(opt_level=0, name="tvm_ext.KeepOnStack")
class KeepOnStack:
    """Behind stock TVM's pipeline, before what ends it: mark the small local buffers of every function for a CPU."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        target = func.attrs.get("target") if func.attrs else None
        is_for_cpu = target is not None and str(target.kind.name) == "llvm"
        return func.with_body(structural_map(func.body, (AllocBuffer, _kept))) if is_for_cpu else func


def _kept(statement: AllocBuffer) -> AllocBuffer:
    buffer = statement.buffer
    sizes = [getattr(size, "value", None) for size in buffer.ty.shape]
    known = [int(size) for size in sizes if size is not None]
    if buffer.scope() != "local" or len(known) < len(sizes):
        return statement
    dtype = buffer.ty.dtype.dtype  # of registers: StorageRewrite counts in them
    if prod(known) * int(dtype.bits) * int(dtype.lanes) > 8 * STACK_BYTES:
        return statement
    return AllocBuffer(buffer, {**dict(statement.annotations), KEPT: tirx.const(True, "bool")})
