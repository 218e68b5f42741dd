"""Loading TVM's CUDA runtime where stock TVM leaves it out.

``libtvm_runtime_cuda.so`` is a library of its own, which stock TVM loads when it is imported - unless only the runtime
is used (``TVM_USE_RUNTIME_LIB=1``, or no compiler in the wheel), or ``libcudart.so.13`` is not on the loader's path,
which is so for the one that Python packages bring (PyTorch's, ``nvidia-cuda-runtime``). It then says that "a loader of
that name is not registered" when a library with CUDA kernels is opened. Imports the standard library and tvm-ffi alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import tvm_ffi

from tvm_ext.errors import UnsupportedEnvironmentError

CUDA_LOADER = "ffi.Module.load_from_bytes.cuda"
_RUNTIME = "libtvm_runtime_cuda.so"
_CUDART = "libcudart.so.13"
_DRIVER = "libcuda.so.1"
_INSTALL_DRIVER = "install an NVIDIA driver of version 580 or later, or build the model for 'llvm' to run it on the CPU"
_kept: list[ctypes.CDLL] = []  # a library that is collected would be unloaded


def load_cuda_runtime(why: str = "") -> None:
    """Make TVM able to open CUDA modules; nothing where it already is.

    Raises UnsupportedEnvironmentError naming what is missing: the driver, the CUDA runtime, or TVM's part; the error
    begins with ``why`` it is needed.
    """
    if cuda_is_loaded():
        return
    cudart = [_CUDART, *map(str, _package_files(_CUDART))]
    _load_first(why, _CUDART, cudart, "install it: `pip install nvidia-cuda-runtime==13.*`")
    runtime = [str(folder / "lib" / _RUNTIME) for folder in _tvm_folders()]
    _load_first(why, _RUNTIME, runtime, _INSTALL_DRIVER)
    if not cuda_is_loaded():
        raise UnsupportedEnvironmentError(
            f"{why}{_RUNTIME} was loaded but registers no CUDA.", "install the supported TVM"
        )


def cuda_is_loaded() -> bool:
    """Whether TVM can open CUDA modules; what it compiles for CUDA then becomes machine code at once."""
    return tvm_ffi.get_global_func(CUDA_LOADER, allow_missing=True) is not None


def _load_first(why: str, name: str, places: list[str], remedy: str) -> None:
    reasons = []
    for place in places:
        reason = _try(place, ctypes.RTLD_GLOBAL if name == _CUDART else ctypes.RTLD_LOCAL)
        if reason is None:
            return
        reasons.append(reason)
    if any(_DRIVER in reason for reason in reasons):
        raise UnsupportedEnvironmentError(f"{why}this machine has no CUDA driver ({_DRIVER}).", _INSTALL_DRIVER)
    said = "; ".join(reasons) or "it was not found"
    raise UnsupportedEnvironmentError(f"{why}{name} cannot be loaded: {said}.", remedy)


def _try(place: str, mode: int) -> str | None:
    """Load the library ``place``; the loader's complaint where that fails."""
    try:
        _kept.append(ctypes.CDLL(place, mode=mode))
    except OSError as error:
        return str(error)
    return None


def _package_files(name: str) -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, spec.submodule_search_locations or () if spec else ()):
        yield from root.glob(f"cu13/lib/{name}")
        yield from root.glob(f"cuda_runtime/lib/{name}")


def _tvm_folders() -> tuple[Path, ...]:
    spec = importlib.util.find_spec("tvm")
    return tuple(map(Path, spec.submodule_search_locations or ())) if spec else ()
