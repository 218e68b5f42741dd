"""Large tensors of an exported library: behind its code in the same file, so that loading copies them once.

An exported file is::

    ELF file | zeros to a page | tensors, each at a cache line | mark | digest (`runtime.export.seal`)

The mark is a line ``tvm_ext weights ID OFFSET BYTES CONSTANTS FILE``. ID is the library's own, drawn at random.
CONSTANTS counts those of the executable, of which the tensors are some. FILE is where the tensors are: ``here``, or the
file that a copy of the code alone was made of. In the executable each tensor is a shape (``csrc/weights/form.h``), and
its kind is `loader_kind`: TVM's loader then calls ``csrc/weights/load.cc``, which is linked into the library. That
works in any process that has TVM's runtime, without this package.
"""

from __future__ import annotations

import ctypes
import re
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import tvm_ffi

from tvm_ext import _native

if TYPE_CHECKING:
    from tvm_ext._tvm import Module, Tensor

SMALLEST_BYTES = 4096  # a choice: what is smaller stays in the executable, which is read as a whole
_ALIGNMENT, _PAGE = 64, 4096  # bytes: a cache line is what TVM's own tensors are aligned to
_TAIL = 4096  # bytes at a file's end that the mark is looked for in, there and in load.cc
_HERE = "here"
_MARK = re.compile(rb"\ntvm_ext weights ([0-9a-f]{32}) (\d{1,18}) (\d{1,18}) (\d{1,18}) ([^\n]+)\n")
_LOADER_OBJECT = "tvm_ext_weights_loader.o"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A mark: ``size_bytes`` of tensors at ``offset`` in ``file``, or where the mark is (None)."""

    identity: str
    offset: int
    size_bytes: int
    constant_count: int
    file: Path | None = None

    def mark(self) -> bytes:
        numbers = f"{self.offset} {self.size_bytes} {self.constant_count}"
        return f"\ntvm_ext weights {self.identity} {numbers} {self.file or _HERE}\n".encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitExecutable:
    """An executable to be exported: the ``module`` without its large ``tensors``, and how to load the two."""

    module: Module
    constant_count: int
    tensors: Sequence[Tensor]
    identity: str

    @property
    def loader_kind(self) -> str:
        """What TVM's loader takes the executable for."""
        return f"tvm_ext.{self.identity}"

    @property
    def loader_source(self) -> str:
        """C++ source that tells `loader_object` its name."""
        name = f"ffi.Module.load_from_bytes.{self.loader_kind}"
        return f'extern "C" __attribute__((visibility("hidden"))) const char tvm_ext_loader_name[] = "{name}";\n'

    def append_to(self, path: Path) -> None:
        """Write the tensors behind the linked library ``path``, and the mark."""
        with path.open("r+b") as file:
            offset = -(-file.seek(0, 2) // _PAGE) * _PAGE
            end = offset
            for tensor in self.tensors:
                size = tensor.numel() * tvm_ffi.dtype(tensor.dtype).itemsize
                file.seek(end)
                file.write((ctypes.c_char * size).from_address(tensor.data_ptr()))
                last = end + size
                end = -(-last // _ALIGNMENT) * _ALIGNMENT
            mark = Weights(
                identity=self.identity, offset=offset, size_bytes=last - offset, constant_count=self.constant_count
            )
            file.write(mark.mark())


def loader_object() -> Path:
    """The object file that `SplitExecutable.loader_source` goes with."""
    library = _native.library_path(_native.WEIGHTS_LIBRARY)
    assert library is not None, "it has split the executable"
    return library.with_name(_LOADER_OBJECT)


def split(executable: Module) -> SplitExecutable | None:
    """A Relax ``executable`` without its large tensors; None where it has none, or this installation no loader.

    Any other module has none.
    """
    if executable.kind != "relax.VMExecutable" or not _native.can_load(_native.WEIGHTS_LIBRARY):
        return None
    module, count, tensors = tvm_ffi.get_global_func("tvm_ext.weights.split")(executable, SMALLEST_BYTES, _ALIGNMENT)
    if not tensors:
        return None
    return SplitExecutable(module=module, constant_count=count, tensors=tensors, identity=secrets.token_hex(16))


def find(file: BinaryIO) -> Weights | None:
    """What an open library says of its weights; None where it has no (whole) mark."""
    size = file.seek(0, 2)
    file.seek(max(0, size - _TAIL))
    marks = _MARK.findall(file.read())
    if not marks:
        return None
    identity, offset, size_bytes, count, name = marks[-1]
    weights = Weights(
        identity=identity.decode(),
        offset=int(offset),
        size_bytes=int(size_bytes),
        constant_count=int(count),
        file=None if name == _HERE.encode() else Path(name.decode()),
    )
    is_whole = weights.file is not None or weights.offset + weights.size_bytes <= size
    return weights if is_whole else None


def copy_code(source: BinaryIO, target: BinaryIO) -> None:
    """Copy a library without its weights, which are read from ``source``, as long as that is open."""
    weights = find(source)
    source.seek(0)
    if weights is None or weights.file is not None:
        shutil.copyfileobj(source, target)
    else:
        target.write(source.read(weights.offset))
        target.write(replace(weights, file=Path(f"/proc/self/fd/{source.fileno()}")).mark())
