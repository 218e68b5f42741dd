"""What is in a container of CUDA machine code, which only a driver reads otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tvm_ext.toolchains.cuda_fatbin import HEADER, IMAGE, MAGIC

_KINDS: dict[int, Literal["ptx", "elf"]] = {1: "ptx", 2: "elf"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """One image of a fatbin: ``architecture`` 80 is sm_80; a ``kind`` that is not known is kept as its number."""

    kind: str
    architecture: int
    size_bytes: int


def read_fatbin(content: bytes) -> tuple[Image, ...]:
    """The images in ``content``; raises ValueError where it is no whole fatbin."""
    if len(content) < HEADER.size or HEADER.unpack_from(content)[0] != MAGIC:
        raise ValueError("this is no fatbin: it does not start with the container's magic number")
    _, _, header_bytes, size = HEADER.unpack_from(content)
    if header_bytes + size > len(content):
        raise ValueError(f"the fatbin was cut off: it has {len(content)} of {header_bytes + size} bytes")
    return tuple(_images(content, header_bytes, header_bytes + size))


def _images(content: bytes, start: int, end: int) -> Iterator[Image]:
    while start + IMAGE.size <= end:
        kind, _, header_bytes, size, _, _, _, _, architecture, _ = IMAGE.unpack_from(content, start)
        if not header_bytes:
            return
        yield Image(kind=_KINDS.get(kind, str(kind)), architecture=architecture, size_bytes=size)
        start += header_bytes + size
