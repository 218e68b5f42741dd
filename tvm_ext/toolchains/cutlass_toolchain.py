"""From the source of a CUTLASS kernel (`byoc_cutlass.emit`) to an object file, by nvcc as for our own kernels."""

from __future__ import annotations

from tvm_ext.byoc_cutlass._cutlass import include_folders
from tvm_ext.support.kernel_cache import KernelCache

from .cuda_toolchain import CompiledCuda, compile_cuda


def compile_gemm(
    source: str, architecture: str, *, cache: KernelCache | None = None, time_limit_s: float | None = None
) -> CompiledCuda:
    """An object file of ``source`` for ``architecture``, "sm_80" or "sm_90a": kernels and entry points.

    ``cache`` keeps it under the digest of source, options and compiler; the source names the headers' version. Raises
    as `compile_cuda`, and UnsupportedEnvironmentError where the package is absent or of another version.
    """
    flags = [item for path in include_folders() for item in ("-I", str(path))]
    return compile_cuda(
        source,
        (architecture,),
        cache=cache,
        time_limit_s=time_limit_s,
        extra_flags=("-w", "-DNDEBUG", *flags),
        output="object",
    )
