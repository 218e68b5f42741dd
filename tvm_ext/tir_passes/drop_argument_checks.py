"""Takes stock TVM's checks of arguments out of kernels that nothing calls with a tensor from outside."""

from __future__ import annotations

from typing import Any

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, prim_func_pass, structural_mutate, tirx
from tvm_ext.records.choice import TRUSTED_ARGUMENTS

_KERNEL = "compute_scope"
"""What stock MakePackedAPI puts around a kernel's own body, whose assertions stay: indices, divisors, guards."""


@prim_func_pass(opt_level=0, name="tvm_ext.DropArgumentChecks")
class DropArgumentChecks:
    """Behind stock TVM's pipeline: of functions with `TRUSTED_ARGUMENTS`, drop the assertions before their body."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        trusted = func.attrs and TRUSTED_ARGUMENTS in func.attrs
        return func.with_body(structural_mutate(func.body, _RULES)) if trusted else func


def _enter(statement: tirx.AttrStmt, mutator: Any) -> Any:
    return statement if statement.attr_key == _KERNEL else mutator.default_mutate(statement)


def _dropped(_statement: tirx.AssertStmt, _mutator: Any) -> Any:
    return tirx.Evaluate(tirx.const(0, "int32"))


_RULES = [(tirx.AttrStmt, _enter), (tirx.AssertStmt, _dropped)]
