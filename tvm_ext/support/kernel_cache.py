"""The cache of compiled kernels: one file per kernel, found by content, shared by builds and processes.

An entry holds what a build needs of a kernel: its `KernelChoice`, the parameters it takes and its machine code. It is
found by the digest of everything that decides these (`kernel_key`), so nothing in the cache ever has to be invalidated.
A build never fails because of the cache: what is wrong with it becomes a note, and the kernel is made anew.

Machine code that is loaded runs as whoever builds. So nothing is read that somebody else could have put there: folders
and entries must belong to the user and be writable by nobody else (`files.read_own`).
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_ext import options
from tvm_ext._tvm import PassContext, PrimFunc, save_json, tirx, tvm, tvm_ffi
from tvm_ext.errors import ExportError, OptionError
from tvm_ext.records.build_profile import CacheUse
from tvm_ext.records.serialise import from_json, to_json

from .files import UntrustedFileError, make_own_folder, read_own, write_atomically

SCHEMA = 1  # of the files; a change makes the old ones unknown
SUFFIX = ".kernel"
SIZE_LIMIT_BYTES = 512 << 20
"""ResNet-50's kernels take 0.9 MB and DenseNet-121's 5 MB, so this holds a hundred models of the larger kind."""
ENTRY_LIMIT_BYTES = 64 << 20  # a CUDA module of a whole model has a few; a thousandth of it is a usual kernel
KEPT_FRACTION = 0.8  # of the limit, after entries were dropped: the next drop is then some builds away
ABANDONED_AFTER_S = 3600.0  # a temporary file as old as this belongs to a process that was killed

KERNEL_KEY = "tvm_ext.kernel_key"
"""PrimFunc attribute of a scheduled kernel: the key of its entry."""

SEALED = "tvm_ext.sealed"
"""PrimFunc attribute of a kernel without a body: its machine code comes from the cache."""

_MAGIC = b"tvm_ext kernel"
_SOURCES = ("*.py", "*.cuh", "*.h")
_SOURCES_LEFT_OUT = ("bench/", "cli/", "relay_passes/", "reports/", "verify/")  # folders that no kernel depends on


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelParam:
    """A parameter of a kernel as its callers see it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRecord:
    """What an entry says of a kernel beside its code. ``choice`` is a `KernelChoice` as JSON."""

    symbol: str  # the global symbol that the code defines
    choice: str
    params: tuple[KernelParam, ...]


@dataclass(frozen=True, slots=True)
class CachedKernel:
    """An entry: the record, and the kernel's object file (as a linker takes it)."""

    record: KernelRecord
    code: bytes


@dataclass(slots=True)
class KernelCache:
    """The cache as one build uses it; ``folder`` None is a cache that is switched off: always empty, keeps nothing.

    Safe for several threads and processes at once: entries appear whole (`os.replace`) and carry a checksum; two builds
    that write the same entry write the same content.
    """

    folder: Path | None
    limit_bytes: int = SIZE_LIMIT_BYTES
    hits: int = 0
    misses: int = 0
    duplicates: int = 0
    notes: dict[str, str] = field(default_factory=dict)  # by kind: each is said once
    found: dict[str, CachedKernel] = field(default_factory=dict)  # what `get` gave, by key
    on_construction: Callable[[str, PrimFunc], None] | None = None  # of a kernel's name and the kernel, as it is made

    @classmethod
    def for_build(cls, build_options: options.BuildOptions) -> KernelCache:
        """The cache that ``build_options.kernel_cache`` and the environment ask for; one that is off where they err."""
        try:
            return cls(options.kernel_cache_directory(build_options.kernel_cache))
        except OptionError as error:
            cache = cls(None)
            cache.note("folder", f"no kernel cache: {error.problem}")
            return cache

    @property
    def is_on(self) -> bool:
        return self.folder is not None

    def switch_off(self) -> None:
        """From here on find nothing and keep nothing; what was found counts as missed, for nobody uses it."""
        self.folder = None
        self.hits, self.misses = 0, self.misses + self.hits
        self.found.clear()

    def get(self, key: str) -> CachedKernel | None:
        """The entry under ``key``; None where there is none, or (with a note) none that can be used."""
        found = self._read(self.folder, key) if self.folder is not None else None
        if found is None:
            self.misses += 1
        else:
            self.hits += 1
            self.found[key] = found
        return found

    def put(self, key: str, kernel: CachedKernel) -> None:
        """Keep ``kernel`` under ``key``; a note, not an error, where that fails."""
        if self.folder is None or "writing" in self.notes:
            return
        path = _path(self.folder, key)
        try:
            make_own_folder(self.folder)
            make_own_folder(path.parent)
            write_atomically(path, encode(kernel), durable=False, private=True)
        except (OSError, ExportError) as error:
            self.note("writing", f"kernels cannot be kept in {self.folder}: {getattr(error, 'problem', error)}")

    def use(self) -> CacheUse:
        """What happened so far, for the report."""
        folder = None if self.folder is None else str(self.folder)
        notes = tuple(self.notes.values())
        return CacheUse(folder=folder, hits=self.hits, misses=self.misses, duplicates=self.duplicates, notes=notes)

    def trim(self) -> int:
        """Drop the entries that were not used for longest until the rest fits the limit; answers how many."""
        return drop_oldest(self.folder, self.limit_bytes) if self.folder is not None else 0

    def note(self, kind: str, text: str) -> None:
        """Report ``text``, once a build for each ``kind``: as a warning now, in the build report later."""
        if kind not in self.notes:
            self.notes[kind] = text
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def reject(self, key: str, reason: str) -> None:
        """Take back what `get` gave under ``key``, whose content does not fit the kernel that was asked for."""
        self.found.pop(key, None)
        self.hits, self.misses = self.hits - 1, self.misses + 1
        self.note("corrupt", f"an entry of the kernel cache is ignored and made anew: {key} ({reason})")

    def _read(self, folder: Path, key: str) -> CachedKernel | None:
        path = _path(folder, key)
        try:
            content = read_own(folder, path.relative_to(folder).parts, ENTRY_LIMIT_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UntrustedFileError as error:
            self.note("untrusted", _untrusted(folder, error))
            return None
        except OSError as error:
            self.note("reading", f"the kernel cache {self.folder} cannot be read: {error.strerror or error}")
            return None
        try:
            found = decode(content)
        except ValueError as error:
            self.note("corrupt", f"a corrupt entry of the kernel cache is ignored and made anew: {path} ({error})")
            return None
        _mark_used(path)
        return found


def _untrusted(folder: Path, error: OSError) -> str:
    return (
        f"nothing is read from the kernel cache {folder}, for {error}: the machine code in it would run as you. "
        f"Delete it, or make it yours alone: chmod -R go-w {folder}"
    )


def encode(kernel: CachedKernel) -> bytes:
    """The entry's file: one line (magic, schema, SHA-256 of the rest, length of the record), record, code."""
    record = to_json(kernel.record).encode()
    body = record + kernel.code
    return b"%s %d %s %d\n%s" % (_MAGIC, SCHEMA, hashlib.sha256(body).hexdigest().encode(), len(record), body)


def decode(content: bytes) -> CachedKernel:
    """The entry in a file's ``content``; raises ValueError with the reason where it is not a whole one."""
    header, _, body = content.partition(b"\n")
    words = header.removeprefix(_MAGIC).split()
    if not header.startswith(_MAGIC) or len(words) != 3:
        raise ValueError("not an entry of this cache")
    if words[0] != b"%d" % SCHEMA:
        raise ValueError(f"schema {words[0].decode(errors='replace')} instead of {SCHEMA}")
    if hashlib.sha256(body).hexdigest().encode() != words[1] or not words[2].isdigit():
        raise ValueError("its checksum does not fit")
    length = int(words[2])
    return CachedKernel(from_json(KernelRecord, body[:length].decode()), body[length:])


def kernel_key(func: PrimFunc, name: str, context: str) -> str:
    """SHA-256 of everything that decides a kernel: its unscheduled PrimFunc, its name, and ``context``.

    The PrimFunc counts with names and attributes, the indices of constant parameters among them.
    """
    return _digest(context, name, save_json(func))


def params_of(func: PrimFunc) -> tuple[KernelParam, ...] | None:
    """The parameters of ``func``; None where one is no buffer of fixed shape, which the cache does not describe."""
    found = []
    for param in func.params:
        shape = getattr(getattr(param, "ty", None), "shape", None)
        if shape is None or not all(isinstance(extent, tirx.IntImm) for extent in shape):
            return None
        found.append(KernelParam(name=str(param.name), shape=tuple(map(int, shape)), dtype=str(param.ty.dtype)))
    return tuple(found)


def misfit(func: PrimFunc, entry: CachedKernel, packed: Mapping[int, tuple[int, ...]]) -> str:
    """Why ``entry`` cannot be the kernel of ``func``, "" where it can: its parameters must be those of ``func``.

    ``packed`` gives the shapes of parameters, by index, that the kernel takes in another layout.
    """
    wanted = params_of(func)
    assert wanted is not None, "kernels with other parameters are not looked up"
    if len(wanted) != len(entry.record.params):
        return f"it takes {len(entry.record.params)} parameters instead of {len(wanted)}"
    for index, (ours, theirs) in enumerate(zip(wanted, entry.record.params, strict=True)):
        if (theirs.shape, theirs.dtype) != (packed.get(index, ours.shape), ours.dtype):
            return f"parameter {ours.name} is {theirs.shape} {theirs.dtype}"
    return ""


def seal(func: PrimFunc, entry: CachedKernel, key: str, attributes: Mapping[str, Any]) -> PrimFunc:
    """A PrimFunc that stands for the kernel in ``entry``: its parameters, and the attributes of ``func`` and more.

    In place of a body it calls a function that does not exist, so that compiling it by mistake cannot go unnoticed.
    """
    params = [tirx.decl_buffer(param.shape, param.dtype, param.name, data_alignment=1) for param in entry.record.params]
    body = tirx.Evaluate(tirx.call_extern("int32", f"tvm_ext_sealed_{key}"))
    kept = {**(func.attrs or {}), **attributes, KERNEL_KEY: key, SEALED: True}
    return PrimFunc(params, body, func.ret_type).with_attrs(kept)


def build_context(*parts: str) -> str:
    """Digest of what all kernels of a build depend on: versions, our sources, pass settings, and ``parts``."""
    current = PassContext.current()
    settings = sorted((str(key), str(value)) for key, value in current.config.items())
    disabled = sorted(map(str, current.disabled_pass))
    versions = (str(SCHEMA), str(tvm.__version__), str(tvm_ffi.__version__), SOURCES)
    return _digest(*versions, repr(settings), repr(disabled), str(current.opt_level), *parts)


def source_digest(package: Path) -> str:
    """Digest of the sources that make kernels, so that a changed emitter finds none of the old ones' work."""
    digest = hashlib.sha256()
    for path in sorted(path for kind in _SOURCES for path in package.rglob(kind)):
        name = path.relative_to(package).as_posix()
        if not name.startswith(_SOURCES_LEFT_OUT):
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


SOURCES = source_digest(Path(__file__).resolve().parents[1])
"""Taken at import: the sources that this process runs, even where they are edited while it does."""


def entries(folder: Path) -> list[tuple[Path, int, float]]:
    """Path, size in bytes and time of last use of every entry in ``folder``, the one unused for longest first."""
    found = [(path, state) for path, state in _files(folder) if path.suffix == SUFFIX and path.name[0] != "."]
    return sorted(((path, state.st_size, state.st_mtime) for path, state in found), key=lambda item: item[2])


def drop_oldest(folder: Path, limit_bytes: int) -> int:
    """Delete entries, oldest use first, where all together exceed ``limit_bytes``; answers how many.

    Temporary files that killed builds left behind go as well. What another process deletes first is no error.
    """
    for path, state in _files(folder):
        if path.name.startswith(".") and time.time() - state.st_mtime > ABANDONED_AFTER_S:
            _delete(path)
    found = entries(folder)
    total = sum(size for _, size, _ in found)
    goal = total if total <= limit_bytes else KEPT_FRACTION * limit_bytes
    dropped = 0
    for path, size, _ in found:
        if total <= goal:
            break
        dropped += _delete(path)
        total -= size
    return dropped


def clear(folder: Path) -> int:
    """Delete all entries (and temporary files); answers how many entries there were."""
    count = len(entries(folder))
    for path, _ in _files(folder):
        if path.suffix == SUFFIX:
            _delete(path)
    return count


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key[2:]}{SUFFIX}"


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files in the cache's two-letter folders; those that vanish while we look are left out."""
    for path in folder.glob(f"[0-9a-f][0-9a-f]/*{SUFFIX}"):
        state = _state(path)
        if state is not None:
            yield path, state


def _state(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _mark_used(path: Path) -> None:
    """Set the file's time to now; in a folder that is shared read-only the time of writing has to do."""
    try:
        os.utime(path)
    except OSError:
        return


def _delete(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _digest(*parts: str) -> str:
    """SHA-256 of ``parts``, each with its length before it, so that no two lists of parts read the same."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode()
        digest.update(b"%d:" % len(content) + content)
    return digest.hexdigest()
