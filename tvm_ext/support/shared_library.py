"""Loading shared libraries of kernels by their content, with TVM's runtime alone.

The dynamic linker knows a library by its name. It returns the old one for a name that it has mapped, whatever the file
holds by now, and what is written into a mapped file appears in running code. So a copy is mapped that nobody else can
open, under a name that was never used: a file in memory, or a temporary one where memory cannot be run.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import tvm_ffi

from .files import temporary_folder
from .weights import copy_code

if TYPE_CHECKING:
    from tvm_ext._tvm import Module

LIBRARY_SYMBOL = "__tvm_ffi__library_bin"
"""Where TVM's loader finds constants and device code, behind their number of bytes. It copies them."""

_LONGEST_NAME = 249  # memfd_create(2)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # flags of fallocate(2)
_numbers = itertools.count(1)

_loading = threading.Lock()
"""One load at a time: a copy registers its loader (``csrc/weights/load.cc``) in place of that of another copy of the
library, and takes it away when it is unloaded. Between a copy's registration and its look-up no other may come."""


def _forget_loads() -> None:
    global _loading
    _loading = threading.Lock()  # the thread that held the former one is not in a fork's child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loads)


def load_library(path: Path, *, own_threads: bool = True) -> Module:
    """The module in the shared library ``path`` as it is now, which is unloaded with the last that refers to it.

    `tvm.runtime.load_module` keeps every library for as long as the process lives, five mappings and 0.1 MB each.
    Its parallel loops run on TVM's threads without ``own_threads``.
    """
    with private_copy(path) as copy:
        return load_copy(copy, own_threads=own_threads)


def load_copy(copy: Path, *, own_threads: bool = True) -> Module:
    """`load_library` of what `private_copy` gave."""
    with _loading:
        module: Module = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(str(copy), "so")
    if own_threads:
        from . import thread_pool  # GPUs' kernels need none, in processes that have TVM's runtime alone

        thread_pool.adopt(copy)
    return module


@contextlib.contextmanager
def private_copy(path: Path) -> Iterator[Path]:
    """A copy of the file ``path`` under a name that no library was loaded by; gone afterwards, what is mapped apart.

    Weights (`weights.find`) are not copied: what loads the copy reads them from the file.
    """
    with path.open("rb") as source, _memory_file(path.name) if _memory_runs() else _disk_file(path.name) as copy:
        with copy.open("wb") as target:
            copy_code(source, target)
        yield copy


@contextlib.contextmanager
def _memory_file(name: str) -> Iterator[Path]:
    """A file in memory, which ``/proc/PID/maps`` shows as ``/memfd:name``."""
    assert sys.platform == "linux"
    descriptor = os.memfd_create(os.fsdecode(os.fsencode(name)[:_LONGEST_NAME]))
    try:
        yield _new_name(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_file(name: str) -> Iterator[Path]:
    with temporary_folder("load") as folder:
        yield folder / name


@functools.cache
def _memory_runs() -> bool:
    """Whether a file in memory can be opened by name and mapped as code: not without /proc, not in every sandbox."""
    if sys.platform != "linux":
        return False
    try:
        with os.fdopen(os.memfd_create("probe"), "wb") as file:
            file.truncate(mmap.PAGESIZE)
            mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
            return _new_name(file.fileno()).is_file()
    except OSError:
        return False


def _new_name(descriptor: int) -> Path:
    """A name of the open file that no call gave before: number 5, 0b101, is ``fd/../task/../fd/../`` on the way."""
    detours = "".join("fd/../" if bit == "1" else "task/../" for bit in f"{next(_numbers):b}")
    return Path(f"/proc/self/{detours}fd/{descriptor}")
