"""Makes parallel loops serial, for a device of one core.

A kernel that divides its work among the threads of TVM's pool asks for them whatever the device it was built for: a
library built for one core would start a thread on every core of the machine that runs it. What Roller emits looks at
the device itself, the fallback and stock TVM's own kernels (cumsum) do not.
"""

from __future__ import annotations

from tvm_ext._tvm import For, ForKind, IRModule, PassContext, PrimFunc, Stmt, prim_func_pass, structural_map


@prim_func_pass(opt_level=0, name="tvm_ext.SerialiseLoops")
class SerialiseLoops:
    """Turn every parallel loop of every TensorIR function into a serial one."""

    def transform_function(self, func: PrimFunc, _mod: IRModule, _ctx: PassContext) -> PrimFunc:
        return func.with_body(structural_map(func.body, (For, _serial)))


def _serial(loop: For) -> Stmt:
    if loop.kind != ForKind.PARALLEL:
        return loop
    return For(
        loop.loop_var, loop.min, loop.extent, ForKind.SERIAL, loop.body, annotations=loop.annotations, step=loop.step
    )
