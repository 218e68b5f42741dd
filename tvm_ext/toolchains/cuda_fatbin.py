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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tvm_ext.errors import CompileError

MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_IMAGE = struct.Struct("<HHIQIIHHI8xQ16x")
_KINDS: dict[int, Literal["ptx", "elf"]] = {1: "ptx", 2: "elf"}
_IMAGE_VERSION = 0x0101
_ELF_FORMAT = (8, 1)  # minor, major; as CUDA 13's own tool writes it
_FLAGS_64_BIT_LINUX = 0x11
_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One image of a fatbin: ``architecture`` 80 is sm_80; a ``kind`` that is not known is kept as its number."""

    kind: str
    architecture: int
    size_bytes: int


def read_fatbin(content: bytes) -> tuple[Image, ...]:
    """The images in ``content``; raises CompileError where it is no whole fatbin."""
    if len(content) < _HEADER.size or _HEADER.unpack_from(content)[0] != MAGIC:
        raise CompileError("this is no fatbin: it does not start with the container's magic number.", "compile again")
    _, _, header_bytes, size = _HEADER.unpack_from(content)
    if header_bytes + size > len(content):
        whole = header_bytes + size
        raise CompileError(
            f"the fatbin was cut off: it has {len(content)} of {whole} bytes.", "copy or compile it again"
        )
    return tuple(_images(content, header_bytes, header_bytes + size))


def _images(content: bytes, start: int, end: int) -> Iterator[Image]:
    while start + _IMAGE.size <= end:
        kind, _, header_bytes, size, _, _, _, _, architecture, _ = _IMAGE.unpack_from(content, start)
        if not header_bytes:
            return
        yield Image(kind=_KINDS.get(kind, str(kind)), architecture=architecture, size_bytes=size)
        start += header_bytes + size


def write_fatbin(cubins: Sequence[tuple[int, bytes]]) -> bytes:
    """A fatbin of ``cubins``, each with its architecture (70 for sm_70)."""
    body = b"".join(_entry(architecture, cubin) for architecture, cubin in cubins)
    return _HEADER.pack(MAGIC, 1, _HEADER.size, len(body)) + body


def _entry(architecture: int, cubin: bytes) -> bytes:
    padded = cubin + bytes(-len(cubin) % _ALIGNMENT)
    header = _IMAGE.pack(
        2, _IMAGE_VERSION, _IMAGE.size, len(padded), 0, 0, *_ELF_FORMAT, architecture, _FLAGS_64_BIT_LINUX
    )
    return header + padded
