"""Exporting an executable as one shared library that also carries a text: its signature and report."""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tvm_ffi

from tvm_ext.errors import ExportError, TvmExtError
from tvm_ext.support import weights
from tvm_ext.support.files import check_space, produce_atomically, temporary_folder, write_objects
from tvm_ext.support.stderr_filter import CONSTANT_SCOPES, without_lines
from tvm_ext.toolchains import host_compiler

if TYPE_CHECKING:
    from tvm_ext._tvm import Executable, Module

METADATA_FUNCTION = "tvm_ext_metadata"
_PIECE_LENGTH = 1000  # a choice: characters of one string literal; C++ compilers need not take more than 65,536
_SHOWN_LINES = 15  # a choice: of a linker's last words
_REPLACED = "copy the file before it is replaced, or export the model where it was built"

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_ELF_HEADER = struct.Struct("<40xQ10xHH2x")
"""Of a 64-bit ELF file: offset of the section table (at byte 40), size and number of its entries (at 58 and 60)."""

_SEAL = b"\ntvm_ext library, SHA-256 of what precedes: "
_SEAL_BYTES = len(_SEAL) + 64 + 1
"""An exported library ends in `_SEAL`, the digest in hexadecimal and a newline, behind what loaders look at."""
_CHUNK_BYTES = 1 << 20  # a choice: bytes read at a time

_METADATA_SOURCE = """
#include <tvm/ffi/c_api.h>
static const char text[] =
{literal};
#ifdef __cplusplus
extern "C"
#endif
TVM_FFI_DLL_EXPORT int __tvm_ffi_{function}(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {{
  TVMFFIByteArray view;
  view.data = text;
  view.size = {size};
  return TVMFFIStringFromByteArray(&view, result);
}}
"""


def export_executable(
    executable: Executable,
    metadata: str,
    path: Path,
    size_bytes: int,
    objects: Sequence[bytes] = (),
    architectures: Sequence[str] = (),
    on_load: str = "",
    **compiler: Any,
) -> None:
    """Write ``executable`` to the shared library ``path``, in which function `METADATA_FUNCTION` returns ``metadata``.

    ``objects`` are object files that belong to it, as their content, ``on_load`` is C source of its own. With
    ``architectures`` (``"sm_80"``) its CUDA modules are machine code for these; ``compiler`` are settings of
    `cuda_export.embed_machine_code`.

    Atomic; raises ExportError where the compiler fails or the file, of about ``size_bytes``, cannot be written.
    """
    if path.suffix not in (".so", ".dylib", ".dll"):
        raise ExportError(f"{path.name!r} is not the name of a shared library.", f"call it {path.stem}.so")
    parts = weights.split(executable.mod)
    with temporary_folder("export") as folder:
        check_space(folder, size_bytes)  # the object files
        if parts is not None:
            executable, on_load = type(executable)(parts.module), on_load + parts.loader_source
            compiler = {**compiler, "executable_kind": parts.loader_kind}
        addons = [str(compile_metadata(metadata, folder, on_load)), *write_objects(objects, folder)]
        if parts is not None:
            addons.append(str(weights.loader_object()))
        pack = {"fpack_imports": _packer(architectures, folder, compiler)}

        def produce(temporary: Path) -> None:
            _link(executable, addons, temporary, size_bytes, folder, pack)
            if parts is not None:
                parts.append_to(temporary)
            seal(temporary)

        produce_atomically(path, produce)


def check_library(path: Path, name: Path | None = None) -> str:
    """`check_complete`, then `check_seal` of ``path``, which errors call ``name``; the digest."""
    check_complete(path, name)
    return check_seal(path, name)


def export_again(source: Path, path: str | Path, digest: str) -> None:
    """Copy the exported library ``source``, which must still have ``digest``; raises ExportError."""

    def copy(temporary: Path) -> None:
        if not source.is_file():
            raise ExportError(f"{source}, which this library was loaded from, is gone.", _REPLACED)
        shutil.copyfile(source, temporary)
        if check_library(temporary, source) != digest:
            raise ExportError(f"{source} is another library than the one that was loaded from it.", _REPLACED)

    produce_atomically(path, copy)


def check_complete(path: Path, name: Path | None = None) -> None:
    """Raise ExportError for a shared library that was cut off, e.g. by an interrupted copy.

    The loader maps a file without looking at its length: touching what is missing ends the process (SIGBUS). In an ELF
    file the last thing, behind all segments, is the table of sections, whose place and size stand in the header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_ELF_HEADER.size)
    if len(header) < _ELF_HEADER.size or not header.startswith(_ELF64_LITTLE):
        return  # another format, or no library at all: the loader says so
    section_table, entry_size, entry_count = _ELF_HEADER.unpack(header)
    needed = section_table + entry_size * entry_count
    if size < needed:
        raise ExportError(
            f"{name or path} was cut off: it has {size} of at least {needed} bytes.", "copy or export it again"
        )


def seal(path: Path) -> None:
    """Append the digest of the library ``path`` to it, which `check_seal` compares."""
    digest = _digest((path, 0, path.stat().st_size))
    with path.open("ab") as file:
        file.write(_SEAL + digest.encode() + b"\n")


def check_seal(path: Path, name: Path | None = None) -> str:
    """The digest that the library ``path`` carries; "" for a library of somebody else, which carries none.

    A copy of the code alone (`weights.copy_code`) has that of the library, whose weights it is checked with.

    Loading a library whose bytes have changed runs whatever they have become. Raises ExportError where the digest is
    not that of the file, or one of ours has lost it.
    """
    with path.open("rb") as file:
        parted = weights.find(file)
    code_bytes, sealed = (parted.offset, parted.file) if parted and parted.file else (0, path)
    size = sealed.stat().st_size - _SEAL_BYTES
    with sealed.open("rb") as file:
        file.seek(max(0, size))
        tail = file.read()
    if size < 0 or not tail.startswith(_SEAL):
        if _mentions(path, METADATA_FUNCTION.encode()):
            raise ExportError(
                f"{name or path} was cut off or stripped: it has lost its digest.", "copy or export it again"
            )
        return ""
    digest = _digest((path, 0, code_bytes), (sealed, code_bytes, size))
    if tail[len(_SEAL) :] != digest.encode() + b"\n":
        raise ExportError(
            f"{name or path} is not what was exported: its digest does not fit.", "copy or export it again"
        )
    return digest


def _digest(*parts: tuple[Path, int, int]) -> str:
    """Of files from an offset to another, one after the other."""
    digest = hashlib.sha256()
    for path, start, end in parts:
        with path.open("rb") as file:
            file.seek(start)
            while start < end and (chunk := file.read(min(end - start, _CHUNK_BYTES))):
                digest.update(chunk)
                start += len(chunk)
    return digest.hexdigest()


def _mentions(path: Path, word: bytes) -> bool:
    with path.open("rb") as file:
        before = b""
        while chunk := file.read(_CHUNK_BYTES):
            if word in before + chunk:
                return True
            before = chunk[-len(word) :]
    return False


def compile_metadata(metadata: str, folder: Path, on_load: str = "") -> Path:
    """An object file of ``on_load`` and `METADATA_FUNCTION`; raises ExportError where the compiler fails."""
    source, result = folder / "metadata.cc", folder / "metadata.o"
    text = _METADATA_SOURCE.format(literal=c_literal(metadata), size=len(metadata), function=METADATA_FUNCTION)
    source.write_text(on_load + text)
    includes = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    _compile(lambda: host_compiler.create_shared(str(result), [str(source)], ["-c", *includes]))
    return result


def c_literal(text: str) -> str:
    """``text`` as a C string literal, one piece per line. JSON as Python writes it is printable ASCII, so that only two
    characters need escaping: ``{"a":"b\\n"}`` becomes ``"{\\"a\\":\\"b\\\\n\\"}"``.
    """
    assert text.isascii(), "JSON as Python writes it"
    assert text.isprintable(), "JSON on one line"
    pieces = (text[start : start + _PIECE_LENGTH] for start in range(0, max(len(text), 1), _PIECE_LENGTH))
    return "\n".join('"' + piece.replace("\\", "\\\\").replace('"', '\\"') + '"' for piece in pieces)


def _packer(architectures: Sequence[str], folder: Path, compiler: Mapping[str, Any]) -> Callable[..., str]:
    """What TVM's ``export_library`` calls to put constants, and machine code for ``architectures``, into the library.

    TVM itself has LLVM make an object file of them, which for 100 MB takes a second in which nothing can interrupt it.
    """
    from tvm_ext.toolchains.cuda_export import (
        write_imports,  # needs TVM's compiler, which a receiver of libraries may not have
    )

    def pack(module: Module, _is_system_library: bool, prefix: str, _workspace: str) -> str:
        # TVM takes every module of a target that names an optimisation level for one of a system library.
        assert not prefix, f"symbols are exported as they are, without the prefix {prefix}"
        return str(write_imports(module, architectures, folder, **compiler))

    return pack


def _link(
    executable: Executable, addons: list[str], path: Path, size_bytes: int, folder: Path, pack: Mapping[str, Any]
) -> None:
    check_space(path.parent, size_bytes)
    with without_lines(CONSTANT_SCOPES):
        settings = {"addons": addons, "workspace_dir": str(folder), "fcompile": host_compiler.create_shared, **pack}
        _compile(lambda: executable.export_library(str(path), **settings))


def _compile(action: Callable[[], None]) -> None:
    """Run ``action``, with a compiler's failure turned into an ExportError. TVM reports it as a plain RuntimeError."""
    try:
        action()
    except TvmExtError:
        raise
    except RuntimeError as error:
        reason = "\n".join(str(error).strip().splitlines()[-_SHOWN_LINES:])
        remedy = "install a working C++ compiler (g++ or clang++), free some disk space"
        raise ExportError(f"the C++ compiler failed: {reason}", remedy) from error
