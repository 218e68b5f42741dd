"""Asks the CUDA compiler about a kernel while another candidate can still be taken."""

from __future__ import annotations

from collections.abc import Callable

from tvm_ext._tvm import PrimFunc, Target, tvm
from tvm_ext.errors import CompileError, IllegalRewrite

from .cuda_toolchain import CompiledCuda, compile_cuda


def refuse_bad_machine_code(
    func: PrimFunc, target: Target, compile_source: Callable[..., CompiledCuda] = compile_cuda
) -> None:
    """Raise IllegalRewrite where the compiler refuses ``func``'s kernels, takes too long, or spills registers.

    ``func`` is thread-bound, ``target`` a CUDA target, whose ``arch`` is compiled for. Without a compiler it raises
    UnsupportedEnvironmentError.
    """
    with Target(target):
        library = tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target=target)
    source = "\n".join(str(module.inspect_source()) for module in library.mod.imports)
    try:
        compiled = compile_source(source, [str(target.attrs["arch"])])
    except CompileError as error:
        raise IllegalRewrite(f"the CUDA compiler fails: {error.problem}") from error
    for use in compiled.uses:
        spilled = use.spill_store_bytes + use.spill_load_bytes
        if spilled:
            raise IllegalRewrite(f"kernel {use.name} spills {spilled} bytes of its {use.register_count} registers")
