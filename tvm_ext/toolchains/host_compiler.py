"""The compiler and linker of this machine: what joins object files."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import tvm

from tvm_ext.errors import UnsupportedEnvironmentError
from tvm_ext.support.limited_process import run_to_end

_WITH_LIBRARY: set[str] = set()
"""Paths of compilers that link kernels only with the C++ library; each is asked once a process."""


def compiler() -> str:
    """The C++ compiler's path; raises UnsupportedEnvironmentError where there is none."""
    found = tvm.support.cc.get_cc()
    if found is None:
        raise UnsupportedEnvironmentError("there is no C++ compiler on the PATH.", "install g++ or clang++")
    return str(found)


def link_kernels(output: str, objects: Sequence[str]) -> None:
    """`create_shared` without the C++ library, which kernels do not need: 12 ms of processor time instead of 35.

    As usual where that has failed: a compiler may have a library of another name in libgcc's place.
    """
    path = str(tvm.support.cc.get_cc())
    if path in _WITH_LIBRARY:
        create_shared(output, objects)
        return
    try:
        create_shared(output, [*objects, "-lm", "-lgcc"], ["-nostdlib"])
    except RuntimeError:
        create_shared(output, objects)
        _WITH_LIBRARY.add(path)


def create_shared(output: str, objects: Sequence[str], options: Sequence[str] = ()) -> None:
    """Make the shared library ``output``; TVM's function of this name, for its ``fcompile``, that Ctrl-C ends.

    ``options`` may be ``-c``: it then is an object file. Raises RuntimeError with what the compiler printed.
    """
    path = tvm.support.cc.get_cc()
    if path is None:
        raise RuntimeError("there is no C++ compiler on the PATH")
    command = [path, "-shared", "-fPIC", "-o", output, *options, *objects]
    try:
        status, text = run_to_end(command)
    except OSError as error:
        raise RuntimeError(f"`{path}` cannot be started: {error.strerror or error}") from error
    if status:
        raise RuntimeError(f"Compilation error:\n{text}\nCommand line: {shlex.join(command)}")
