"""Asks the CUDA compiler about a kernel while another candidate can still be taken."""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import RKERNEL_PIPELINE, PrimFunc, Target, tvm
from tvm_ext.errors import CompileError, IllegalRewrite, OptionError, UnsupportedEnvironmentError
from tvm_ext.options import BuildOptions, cuda_settings
from tvm_ext.records.merged import CompiledUse
from tvm_ext.support.kernel_cache import KernelCache

from .cuda_toolchain import CompiledCuda, compile_cuda
from .rocm_toolchain import rocm_use

MERGED_FACTOR = 10.0
"""A merged kernel holds the bodies of many: so many times the limit of one kernel may compiling it take."""


def refuse_bad_machine_code(
    func: PrimFunc, target: Target, compile_source: Callable[..., CompiledCuda] = compile_cuda
) -> None:
    """Raise IllegalRewrite where the compiler refuses ``func``'s kernels, takes too long, or spills registers.

    ``func`` is thread-bound, ``target`` a CUDA target, whose ``arch`` is compiled for. Without a compiler it raises
    UnsupportedEnvironmentError.
    """
    source = _source(func, target)
    try:
        compiled = compile_source(source, [str(target.attrs["arch"])])
    except CompileError as error:
        raise IllegalRewrite(f"the CUDA compiler fails: {error.problem}") from error
    for use in compiled.uses:
        spilled = use.spill_store_bytes + use.spill_load_bytes
        if spilled:
            raise IllegalRewrite(f"kernel {use.name} spills {spilled} bytes of its {use.register_count} registers")


def _source(func: PrimFunc, target: Target) -> str:
    """The CUDA C++ of ``func``'s kernels."""
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    with Target(target):
        library = tvm.tirx.build(module, target=target, pipeline=RKERNEL_PIPELINE)
    return "\n".join(str(item.inspect_source()) for item in library.imports)


def compiled_use(func: PrimFunc) -> CompiledUse | str:
    """What the compiler says of ``func``, a function of one launch, for the current target; else why it does not.

    Results are kept in the cache of builds.
    """
    target = Target.current()
    if str(target.kind.name) == "rocm":
        return rocm_use(func)
    source = _source(func, target)
    try:
        cache = KernelCache.for_build(BuildOptions.current())
        limit_s = MERGED_FACTOR * cuda_settings().time_limit_s
        compiled = compile_cuda(source, [str(target.attrs["arch"])], cache=cache, time_limit_s=limit_s)
    except (UnsupportedEnvironmentError, OptionError, CompileError) as error:
        return f"unknown registers: {error.problem.rstrip('.')}"
    use = max(compiled.uses, key=lambda use: use.register_count)
    return CompiledUse(
        registers=use.register_count,
        spill_bytes=use.spill_store_bytes + use.spill_load_bytes,
        shared_bytes=use.shared_bytes,
    )
