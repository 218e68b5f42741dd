"""What to do where a compiler or a linker cannot be started, takes too long, or fails."""

from __future__ import annotations

from tvm_ext.support.limited_process import Remedies

INSTALL_CUDA = "install it with `pip install tvm-ext[cuda]`, or a CUDA toolkit, or set TVM_EXT_NVCC to its path"
_MORE_SECONDS = "set TVM_EXT_NVCC_TIME_LIMIT_S to more seconds, or check that the compiler works by itself"
_REPORT = "the next candidate may compile; please report this kernel"
_NO_FILE = "No such file or directory"


def _of_nvcc(text: str) -> str:
    if _NO_FILE in text and ("cc1plus" in text or "gcc" in text or "g++" in text):
        return "install a C++ compiler (g++): nvcc preprocesses with it"
    if "cannot open source file" in text or "No such file" in text:
        return "install the headers that are missing: `pip install tvm-ext[cuda]` brings all of them, in one version"
    if "Unsupported .version" in text or "PTX .version" in text:
        return "install all of NVIDIA's compiler packages in one version: `pip install tvm-ext[cuda]`"
    return _REPORT


def _of_nvrtc(text: str) -> str:
    if "No such file" in text or "cannot open" in text:
        return "install what is missing: `pip install tvm-ext[cuda12]` brings NVRTC, ptxas and headers in one version"
    return _REPORT


def _of_host(text: str) -> str:
    if "No space left on device" in text:
        return "free some space in the folder of temporary files, or set TMPDIR to another one"
    if _NO_FILE in text or "cannot find" in text:
        return "install what is missing: g++ with its C++ library, binutils, and the headers of `apache-tvm-ffi`"
    return "check that the C++ compiler and the linker work by themselves; if they do, please report this command"


def _of_amd_linker(_text: str) -> str:
    return "install another version of ld.lld; if that one refuses it, too, please report this kernel"


NVCC = Remedies(start=INSTALL_CUDA, limit=_MORE_SECONDS, failure=_of_nvcc)
NVRTC = Remedies(start="install it with `pip install tvm-ext[cuda12]`", limit=_MORE_SECONDS, failure=_of_nvrtc)
HOST = Remedies(
    start="install a C++ compiler (g++ or clang++) and your system's package binutils",
    limit="try again when the machine and its disk are less busy, or check that the linker works by itself",
    failure=_of_host,
)
"""Of the C++ compiler, linker and binutils of this machine."""

AMD_LINKER = Remedies(
    start="install ld.lld with `pip install tvm-ext[rocm]`, from your system's package lld, or with ROCm",
    limit="try again when the machine is less busy, or check that ld.lld works by itself",
    failure=_of_amd_linker,
)
