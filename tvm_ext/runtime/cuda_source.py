"""CUDA source that TVM's runtime wants compiled goes to the compiler that everything else here is compiled by.

With CUDA's runtime loaded, stock TVM compiles source as soon as a module is built or opened: by NVRTC, as far as there
is a Python module for it, whether or not its library loads, or by nvcc with ``--use_fast_math``. What was built here
then came out differently, or not at all, for a package that some other one had brought along. Within
`own_cuda_compiler` the compiler and its options are `toolchains.cuda_toolchain`'s. Imports tvm-ffi alone, for there are
processes that have TVM's runtime and no compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import tvm_ffi

from tvm_ext.errors import UnsupportedEnvironmentError

_CALLBACK = "tvm_callback_cuda_compile"
_stock: list[Any] = []
_ours: ContextVar[bool] = ContextVar("tvm_ext_own_cuda_compiler", default=False)


@contextlib.contextmanager
def own_cuda_compiler() -> Iterator[None]:
    """Let what this thread builds and opens meanwhile be compiled by our compiler, stock TVM's where there is none.

    Whatever runs outside, in other threads too, is stock TVM's as ever.
    """
    _take_over()
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


def _take_over() -> None:
    """Put `_compile` in the place of stock TVM's function, once; nothing in a process without a compiler."""
    found = tvm_ffi.get_global_func(_CALLBACK, allow_missing=True)
    if found is not None and not _stock:
        _stock.append(found)
        tvm_ffi.register_global_func(_CALLBACK, _compile, override=True)


def _compile(source: str) -> Any:
    """Machine code of ``source`` for the current target, or for the first device where there is none."""
    if not _ours.get():
        return _stock[0](source)
    from tvm_ext.toolchains.cuda_export import compile_for_target  # needs TVM's compiler

    try:
        return bytearray(compile_for_target(str(source)))
    except UnsupportedEnvironmentError:
        return _stock[0](source)
