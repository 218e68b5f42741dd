"""The container of CUDA machine code ("fatbin"), and the bytes in which TVM's CUDA module is kept in a library.

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

import struct
from collections.abc import Sequence

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
