"""Tells lowered rKernels which device their workspaces are of: what tensors among the parameters would say.

Behind stock TVM's MakePackedAPI: its StorageRewrite lifts allocations out of whatever stands around them before.
"""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, prim_func_pass, tirx
from tvm_ext.records.rtask_split import RKERNEL

_CPU = 1
"""DLPack's number for this kind of device."""


@prim_func_pass(opt_level=0, name="tvm_ext.NameDevice")
class NameDevice:
    """Put the device's kind and number around the body of every rKernel; other functions stay as they are."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        if not (func.attrs and func.attrs.get(RKERNEL)):
            return func
        body = func.body
        for key, value in (("device_type", _CPU), ("device_id", 0)):
            body = tirx.AttrStmt(tirx.IntImm("int32", 0), key, tirx.IntImm("int32", value), body)
        return func.with_body(body)
