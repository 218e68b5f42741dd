"""What the CUDA assembler says of each kernel (``ptxas -v``).

ptxas knows what no plan does: the registers it needed, and the bytes it had to move to memory ("spill") for want of
them. It writes both on its error stream, a few lines per kernel and architecture.

The container of CUDA machine code ("fatbin"), and the bytes in which TVM's CUDA module is kept in a library.

Both are plain structures without a library that reads them on a machine without a GPU. A fatbin is a header and a list
of images, each with its own header; all numbers are little-endian::

    offset 0   u32  magic 0xBA55ED50     u16 version 1     u16 header size 16     u64 size of all that follows
    image +0   u16  kind: 1 PTX, 2 ELF ("cubin")           u16 version 0x0101     u32 size of this header (64)
          +8   u64  size of the image, padded to 8         +16 u32 compressed size, 0 if it is not compressed
          +24  u16 minor, u16 major of the ELF's format    +28 u32 architecture (80 for sm_80)
          +48  u64 flags

The driver takes the image of its device's architecture, or of an earlier minor revision of the same major one, or
compiles PTX.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<architecture>sm_\w+)'")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_CUMULATIVE = re.compile(r"(?P<bytes>\d+) bytes cumulative stack size")
_REGISTERS = re.compile(r"Used (?P<count>\d+) registers")
_SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")
_BARRIERS = re.compile(r"used (?P<count>\d+) barriers")
_CONSTANT = re.compile(r"(?P<bytes>\d+) bytes cmem\[0\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """What one kernel takes on one architecture, per thread (registers, stack, spills) and per threadblock (shared).

    ``shared_bytes`` counts static shared memory alone: what a launch asks for beyond it ("dynamic") is not known here.
    """

    name: str
    architecture: str
    register_count: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barrier_count: int
    constant_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


def parse_report(text: str) -> tuple[KernelUse, ...]:
    """The kernels in ptxas' messages ``text``, in its order; what is not about a kernel is passed over."""
    starts = list(_ENTRY.finditer(text))
    bounds = [match.start() for match in starts] + [len(text)]
    pieces = [text[match.end() : end] for match, end in zip(starts, bounds[1:], strict=True)]
    return tuple(_parse_kernel(match, piece) for match, piece in zip(starts, pieces, strict=True))


def _parse_kernel(entry: re.Match[str], text: str) -> KernelUse:
    # The kernel's own properties come first. Those of functions that were not inlined follow; the kernel runs them.
    functions = list(_STACK.finditer(text))
    cumulative = _number(_CUMULATIVE, text)
    return KernelUse(
        name=entry["name"],
        architecture=entry["architecture"],
        register_count=_number(_REGISTERS, text),
        shared_bytes=_number(_SHARED, text),
        stack_bytes=cumulative or max((int(found["stack"]) for found in functions[:1]), default=0),
        spill_store_bytes=sum(int(found["stores"]) for found in functions),
        spill_load_bytes=sum(int(found["loads"]) for found in functions),
        barrier_count=_number(_BARRIERS, text),
        constant_bytes=_number(_CONSTANT, text),
    )


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0


def table(uses: Sequence[KernelUse]) -> str:
    """``uses`` as aligned text, one line each, for people."""
    width = max([len(use.name) for use in uses], default=0)
    rows = (
        f"{use.name:<{width}} {use.architecture:<7} {use.register_count:>3} registers {use.shared_bytes:>6} B shared "
        f"{use.spill_store_bytes + use.spill_load_bytes:>5} B spilled"
        for use in uses
    )
    return "\n".join(rows)


MAGIC = 0xBA55ED50  # as CUDA 13's own tool writes it
HEADER = struct.Struct("<IHHQ")
IMAGE = struct.Struct("<HHIQIIHHI8xQ16x")
_IMAGE_VERSION = 0x0101  # as CUDA 13's own tool writes it
_ELF_FORMAT = (8, 1)  # minor, major; as CUDA 13's own tool writes it
_FLAGS_64_BIT_LINUX = 0x11  # as CUDA 13's own tool writes it
_ALIGNMENT = 8  # bytes; an ELF file of 64 bits begins there


def write_fatbin(cubins: Sequence[tuple[int, bytes]]) -> bytes:
    """A fatbin of ``cubins``, each with its architecture (70 for sm_70)."""
    body = b"".join(_entry(architecture, cubin) for architecture, cubin in cubins)
    return HEADER.pack(MAGIC, 1, HEADER.size, len(body)) + body


def _entry(architecture: int, cubin: bytes) -> bytes:
    padded = cubin + bytes(-len(cubin) % _ALIGNMENT)
    header = IMAGE.pack(
        2, _IMAGE_VERSION, IMAGE.size, len(padded), 0, 0, *_ELF_FORMAT, architecture, _FLAGS_64_BIT_LINUX
    )
    return header + padded
