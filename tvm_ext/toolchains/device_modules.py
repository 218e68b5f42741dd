"""The modules inside an exported library, as bytes: reading them, and putting machine code in place of CUDA source.

Stock TVM embeds a CUDA module's *source* where no CUDA driver is installed, for the receiver to compile. A library
keeps its modules in the symbol ``__tvm_ffi__library_bin``; with u64 for a little-endian 64-bit number, "string" and
"bytes" for a u64 length and that many bytes::

    u64 size of what follows
    u64 count, u64 offsets[count]       module i imports the modules children[offsets[i]:offsets[i + 1]]
    u64 count, u64 children[count]
    per module: string kind, and unless that is "_lib" (the library's own code): bytes

A CUDA module's bytes are::

    string format: "cuda" (source), "ptx", "cubin", "fatbin"
    u64 count, and per kernel: string name, then its description: string name,
        u64 count, u32 dtypes[count]; u64 count, strings (launch parameters); u64 count, i32 marks[count]
    bytes code

(tvm/src/runtime/module.cc and metadata.h of 0.27; a test compares with what TVM's CUDA runtime reads.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm_ext.errors import ExportError

OWN_CODE = "_lib"
_COUNT = struct.Struct("<Q")
_ASSEMBLY = """\
    .section .rodata
    .balign 64
    .globl {symbol}
{symbol}:
    .incbin "{file}"
    .section .note.GNU-stack,"",%progbits
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModule:
    """A module of a library: ``kind`` ("cuda", "relax.VMExecutable", ...), its own bytes (none for the host code)."""

    kind: str
    content: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LibraryModules:
    """All modules of a library; ``offsets`` and ``children`` say which imports which, see above."""

    offsets: tuple[int, ...]
    children: tuple[int, ...]
    modules: tuple[DeviceModule, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelInfo:
    """A kernel's launch: ``arguments`` are DLPack dtypes as they stand in the file, ``launch`` e.g. "blockIdx.x"."""

    name: str
    arguments: tuple[int, ...]
    launch: tuple[str, ...]
    marks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaModule:
    """A CUDA module: ``code`` is source text for ``format`` "cuda", else machine code."""

    format: str
    kernels: tuple[KernelInfo, ...]
    code: bytes


class _Reader:
    """Reads ``data`` from its start; raises ExportError at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._at = 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise ExportError("the modules of a library were cut off.", "export it again, with the supported TVM")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        return int(_COUNT.unpack(self.take(_COUNT.size))[0])

    def numbers(self, kind: str) -> tuple[int, ...]:
        code = struct.Struct(f"<{self.number()}{kind}")
        return code.unpack(self.take(code.size))

    def blob(self) -> bytes:
        return bytes(self.take(self.number()))

    def text(self) -> str:
        return self.blob().decode()

    @property
    def is_done(self) -> bool:
        return self._at == len(self._data)


def _blob(content: bytes) -> bytes:
    return _COUNT.pack(len(content)) + content


def _numbers(values: tuple[int, ...], kind: str) -> bytes:
    return _COUNT.pack(len(values)) + struct.pack(f"<{len(values)}{kind}", *values)


def read_library(data: bytes) -> LibraryModules:
    """The modules in the symbol's bytes ``data``; raises ExportError where they are not whole."""
    reader = _Reader(_Reader(data).blob())
    offsets, children = reader.numbers("Q"), reader.numbers("Q")
    modules = []
    for _ in range(len(offsets) - 1):
        kind = reader.text()
        modules.append(DeviceModule(kind=kind, content=b"" if kind == OWN_CODE else reader.blob()))
    if not reader.is_done:
        raise ExportError("the modules of a library have an unknown form.", "use the supported TVM (`tvm-ext doctor`)")
    return LibraryModules(offsets=offsets, children=children, modules=tuple(modules))


def write_library(library: LibraryModules) -> bytes:
    """The symbol's bytes, the inverse of `read_library`."""
    parts = [_numbers(library.offsets, "Q"), _numbers(library.children, "Q")]
    for module in library.modules:
        parts.append(_blob(module.kind.encode()))
        if module.kind != OWN_CODE:
            parts.append(_blob(module.content))
    return _blob(b"".join(parts))


def read_cuda(content: bytes) -> CudaModule:
    """A CUDA module's own bytes; raises ExportError where they are not whole."""
    reader = _Reader(content)
    form = reader.text()
    kernels = []
    for _ in range(reader.number()):
        reader.blob()  # the key is the name
        name, arguments = reader.text(), reader.numbers("I")
        launch = tuple(reader.text() for _ in range(reader.number()))
        kernels.append(KernelInfo(name=name, arguments=arguments, launch=launch, marks=reader.numbers("i")))
    return CudaModule(format=form, kernels=tuple(kernels), code=reader.blob())


def write_cuda(module: CudaModule) -> bytes:
    """The inverse of `read_cuda`."""
    parts = [_blob(module.format.encode()), _COUNT.pack(len(module.kernels))]
    for kernel in module.kernels:
        launch = b"".join(_blob(item.encode()) for item in kernel.launch)
        parts += [_blob(kernel.name.encode()), _blob(kernel.name.encode()), _numbers(kernel.arguments, "I")]
        parts += [_COUNT.pack(len(kernel.launch)), launch, _numbers(kernel.marks, "i")]
    return b"".join([*parts, _blob(module.code)])


def replace_source(data: bytes, compile_source: Callable[[str], bytes]) -> bytes:
    """``data`` with every CUDA source in it replaced by the fatbin that ``compile_source`` makes of it."""
    library = read_library(data)
    modules = tuple(_replaced(module, compile_source) for module in library.modules)
    return write_library(replace(library, modules=modules))


def as_kind(data: bytes, old: str, new: str) -> bytes:
    """``data`` with the modules of kind ``old`` for TVM's loader to take for ``new``."""
    library = read_library(data)
    modules = tuple(replace(own, kind=new) if own.kind == old else own for own in library.modules)
    return write_library(replace(library, modules=modules))


def _replaced(module: DeviceModule, compile_source: Callable[[str], bytes]) -> DeviceModule:
    if module.kind != "cuda":
        return module
    cuda = read_cuda(module.content)
    if cuda.format != "cuda":
        return module  # machine code already: this process has a CUDA driver
    image = compile_source(cuda.code.decode())
    return replace(module, content=write_cuda(replace(cuda, format="fatbin", code=image)))


def assembly(symbol: str, file_name: str) -> str:
    """Assembly that defines ``symbol`` as the bytes of ``file_name``. A C array of a model's weights takes minutes."""
    return _ASSEMBLY.format(symbol=symbol, file=file_name)
