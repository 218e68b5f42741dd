"""Loading shared libraries of kernels, with TVM's runtime alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import tvm_ffi

from . import thread_pool

if TYPE_CHECKING:
    from tvm_ext._tvm import Module


def load_library(path: Path) -> Module:
    """The module in the shared library ``path``, which is unloaded with the last that refers to it.

    `tvm.runtime.load_module` keeps every library for as long as the process lives, five mappings and 0.1 MB each.
    """
    module = tvm_ffi.load_module(path, keep_module_alive=False)
    thread_pool.adopt(path)
    return module
