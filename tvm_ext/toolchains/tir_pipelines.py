"""The TensorIR pipelines of this package, by which stock TVM lowers PrimFuncs to code: registered by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import tvm

from tvm_ext._tvm import Call, Expr, IRModule, PassContext, call_pure_extern, module_pass, register_intrin_lowering
from tvm_ext.analysis.launches import is_merged, lower_merged
from tvm_ext.options import BuildOptions
from tvm_ext.tir_passes.drop_argument_checks import DropArgumentChecks
from tvm_ext.tir_passes.flush_denormals import FlushDenormals
from tvm_ext.tir_passes.guard_indices import GuardIndices
from tvm_ext.tir_passes.keep_on_stack import KeepOnStack
from tvm_ext.tir_passes.lower_bfloat16 import ConvertBfloat16, LinkFunctions
from tvm_ext.tir_passes.name_device import NameDevice
from tvm_ext.tir_passes.outline_rtasks import OutlineRTasks
from tvm_ext.tir_passes.permute_tables import PermuteTables
from tvm_ext.tir_passes.pipelining.passes import AutoPipeline, InjectPipelines
from tvm_ext.tir_passes.pipelining.route import wishes_of

from .rocm_toolchain import LinkSync

_USED_BEFORE = "has been used before definition"  # of stock TVM's VarUseDefAnalyzer
_WITHOUT_SHARING = "tirx.disable_cse_tir"


def tir_pipeline() -> Any:
    """The registered TIR pipeline ``"tvm_ext"``: stock TVM's, with load-compute pipelines put into GPU kernels first.

    Kernels may come from anywhere: dlight, MetaSchedule, a user's own schedule. Kernels of `relay.build` have had their
    pipelines when they were constructed. Returns the triple that `tvm.tirx.build` expects: (pipeline, host
    finalisation, device finalisation).
    """
    stock, finalize_host, finalize_device = tvm.tirx.get_tir_pipeline("default")

    def run(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        options = BuildOptions.current()
        pipelines = [AutoPipeline(wishes=wishes_of(options)), InjectPipelines()]
        passes = [*(pipelines if options.enable_pipelining is not False else ()), GuardIndices()]
        return stock(tvm.transform.Sequential(passes)(mod))

    return module_pass(run, opt_level=0, name="tvm_ext.tir"), finalize_host, finalize_device


def cpu_pipeline() -> Any:
    """The registered TIR pipeline ``"tvm_ext.cpu"``: stock TVM's, with tiles' sums on the stack; a triple as above."""
    stock, finalize_host, finalize_device = tvm.tirx.get_tir_pipeline("default")
    before, behind = (
        [GuardIndices(), ConvertBfloat16()],
        [KeepOnStack(), DropArgumentChecks(), PermuteTables(), LinkFunctions(), FlushDenormals()],
    )
    passes = [*before, _sharing_soundly(stock), *behind]
    return tvm.transform.Sequential(passes, name="tvm_ext.cpu"), finalize_host, finalize_device


def _sharing_soundly(stock: Any) -> Any:
    """``stock``, but for its CommonSubexprElim where that binds a variable behind its first use.

    It counts no use inside of a Let, and replaces it there all the same. Worked example, of three stores in a row:
    ``a[i] = let t = f(x[i]) in t + c[i * 6]``, then two that read ``c[i * 6]`` alone: what they share is bound before
    the second. Stock TVM sees that itself, a pass later. LLVM finds the shared values of such kernels.
    """

    def run(mod: IRModule, context: PassContext) -> IRModule:
        try:
            return stock(mod)
        except tvm.error.InternalError as error:
            if _USED_BEFORE not in str(error):
                raise
        with PassContext(opt_level=context.opt_level, config={**context.config, _WITHOUT_SHARING: True}):
            return stock(mod)

    return module_pass(run, opt_level=0, name="tvm_ext.stock")


def rkernel_pipeline() -> Any:
    """The registered TIR pipeline ``"tvm_ext.rkernels"``: stock TVM's, for modules with rKernels; a triple as above.

    Merged kernels have passed through most of it before they were merged.
    """
    stock, finalize_host, finalize_device = tvm.tirx.get_tir_pipeline("default")
    before, behind = (
        [GuardIndices(), ConvertBfloat16()],
        [KeepOnStack(), NameDevice(), PermuteTables(), LinkFunctions(), FlushDenormals()],
    )
    passes = tvm.transform.Sequential([*before, stock, *behind], name="tvm_ext.rkernels")

    def finalize() -> Any:
        # Behind all of stock TVM's: a function's own thread numbers have no bounds that it could simplify by.
        return tvm.transform.Sequential([finalize_device(), OutlineRTasks()], name="tvm_ext.rkernels_device")

    return _apart_from_merged(passes), finalize_host, finalize


def rocm_pipeline() -> Any:
    """The registered TIR pipeline ``"tvm_ext.rocm"``: stock TVM's, with our functions for waiting; a triple as above.

    Bodies of a merged kernel stay in it: stock TVM makes a kernel of each function for AMD's GPUs.
    """
    stock, finalize_host, finalize_device = tvm.tirx.get_tir_pipeline("default")
    passes = tvm.transform.Sequential([GuardIndices(), stock], name="tvm_ext.rocm")

    def finalize() -> Any:
        return tvm.transform.Sequential([finalize_device(), LinkSync()], name="tvm_ext.rocm_device")

    return _apart_from_merged(passes), finalize_host, finalize


def _apart_from_merged(passes: tvm.transform.Pass) -> tvm.transform.Pass:
    """``passes`` for the functions of a module that were not merged of lowered ones; `lower_merged` for the others."""

    def run(mod: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        merged = {gv: func for gv, func in mod.functions_items() if is_merged(func)}
        if not merged:
            return passes(mod)
        result = lower_merged(IRModule(merged))
        others = {gv: func for gv, func in mod.functions_items() if gv not in merged}
        if others:
            result.update(passes(IRModule(others)))
        return result

    return module_pass(run, opt_level=0, name=f"{passes.info.name}_apart")


# --- Mathematical functions that stock TVM spells as C does when it writes OpenCL C: ``tanf`` where that is ``tan`` ---
FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "copysign", "hypot", "ldexp", "log1p", "nextafter",
    "tan",
)  # fmt: skip
"""Those for which TVM 0.27 has no rule of OpenCL's own, so that its rule for C applies. All take half, float and
double there, and vectors of them (OpenCL 1.2, section 6.12.2)."""

_LEVEL = 99  # wins over the default rules of C++, which have level 10


@cache
def enable_opencl_math() -> None:
    """Make TVM write `FUNCTIONS` in OpenCL's spelling, from now on; once per process."""
    for name in FUNCTIONS:
        register_intrin_lowering(f"tirx.{name}", "opencl", _as_opencl, _LEVEL)


def _as_opencl(call: Call) -> Expr:
    return call_pure_extern(call.ty, str(call.op.name).removeprefix("tirx."), *call.args)
