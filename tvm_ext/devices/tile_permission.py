"""Leave to use tile registers (Intel AMX), which Linux gives a process that asks for it: without, they end it (SIGILL).

Threads have it, too, and forked processes. It is refused under Linux before 5.16, where a seccomp filter forbids the
call, and where a signal handler's stack is too small for 8 KiB of tiles.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys

_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM = 158, 0x1023
"""Linux for x86-64: asm/unistd_64.h and asm/prctl.h."""

_XTILEDATA = 18
"""Intel's number of the tiles' state."""


@functools.cache
def tile_refusal() -> str:
    """Ask once for this process; why it may use no tiles, or nothing where it may."""
    if sys.platform != "linux":
        return f"{sys.platform} has no such call"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def tile_request() -> str:
    """C or C++ source by which a shared library asks when it is loaded, by whatever program, and says if it may not."""
    call = f"syscall({_ARCH_PRCTL}, {_ARCH_REQ_XCOMP_PERM:#x}, {_XTILEDATA})"
    return f"""#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void tvm_ext_ask_for_tiles(void) {{
  if ({call}) perror("This library is built for Intel AMX, and running it ends the process: Linux gives no tiles");
}}
"""
