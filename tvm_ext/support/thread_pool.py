"""Parallel loops of kernels on this package's own threads instead of TVM's pool.

A loop's library reaches the pool through a data symbol that the loader sets; `adopt` sets it anew. What differs:

* Workers keep off the core that the caller runs on; a caller that the system has moved is noticed at its next loop.
  TVM binds a worker and lets the caller run on the same core, where the two take turns of milliseconds.
* A part of a loop whose worker does not get to run is run by the caller. A worker that loses its core in the middle of
  its part gets the caller's.
* Workers belong to nobody: a thread that calls takes a team for one loop. Where loops of callers on
  other cores keep all cores busy, it runs its loop alone. TVM starts a pool for each thread that ever called.
* They look for work for 2 ms before they sleep, TVM's for 80 to 160 ms.
* In a child process after a fork they are made anew.

How many threads a loop has is what TVM would take: ``TVM_NUM_THREADS``, ``runtime.config_threadpool``. A thread that
chose its workers' cores with the latter keeps TVM's pool.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import tvm_ffi

from tvm_ext import _native, forks
from tvm_ext.options import uses_own_threads

LIBRARY = "tvm_ext_rammer"


def adopt(path: Path) -> bool:
    """Have the loops of the library ``path``, which must be loaded, run on own threads, unless TVM's are asked for.

    False: they go on to run on TVM's, as they do where the native part is missing or broken; or there are none.
    """
    return (
        uses_own_threads() and _is_ready() and bool(tvm_ffi.get_global_func("tvm_ext.rammer.adopt_library")(str(path)))
    )


@functools.cache
def _is_ready() -> bool:
    if not _native.can_load(LIBRARY):
        return False
    tvm_ffi.get_global_func("tvm_ext.rammer.follow_tvm")(ctypes.c_void_p(forks.address_of_max_concurrency()))
    return True
