"""Marks for tests that need a compiler which a machine may lack."""

from __future__ import annotations

import shutil

import pytest

from tvm_ext.errors import TvmExtError
from tvm_ext.toolchains.cuda_toolchain import find_nvcc


def has_nvcc() -> bool:
    """Whether there is a CUDA compiler, the system's or the extra's."""
    try:
        find_nvcc()
    except TvmExtError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no CUDA compiler (nvcc) is installed")
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is installed")
