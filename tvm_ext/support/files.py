"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tvm_ext.errors import ExportError


def write_atomically(path: str | Path, content: bytes, *, durable: bool = True, private: bool = False) -> None:
    """Replace the file ``path`` by ``content``; raises ExportError, and leaves the old file, where that fails."""
    produce_atomically(path, lambda temporary: temporary.write_bytes(content), durable=durable, private=private)


def produce_atomically(
    path: str | Path, produce: Callable[[Path], object], *, durable: bool = True, private: bool = False
) -> None:
    """Let ``produce`` write a temporary file beside ``path``, then move it into place once it is on the disk.

    A kill or a full disk at any moment leaves either the old file or the new one under ``path``. The temporary name
    ends in the same suffix (linkers and loaders look at it) and starts with a dot. Without ``durable`` nobody waits for
    the disk: after a power cut the file may be torn, which is for files that carry a checksum and can be made again.
    A ``private`` file is the user's alone; others get the mode that any new file has.

    Raises ExportError where the folder is missing or not writable, the disk is full, or ``produce`` fails to write.
    """
    path = Path(path)
    with _temporary_beside(path, private) as temporary:
        try:
            produce(temporary)
            if durable:
                _flush(temporary)
            os.replace(temporary, path)
            if durable:
                _flush(path.parent)
        except ExportError:
            raise
        except OSError as error:
            raise ExportError(f"cannot write {path}: {error.strerror or error}.", _remedy(error)) from error


class UntrustedFileError(OSError):
    """A file or folder that somebody else can change, or that is no plain file or folder; the text says which."""


def read_own(folder: Path, parts: Sequence[str], limit_bytes: int) -> bytes:
    """The content of the file ``parts`` (folders, then a name) below ``folder``, if only this user can have written it.

    The folders and the file must belong to this user and be writable by nobody else; symbolic links are not followed
    below ``folder``, and what is no plain file (a FIFO, a device) is not opened for longer than it takes to see that.

    Raises UntrustedFileError where one of these does not hold, or the file has more than ``limit_bytes``; OSError where
    it cannot be read, FileNotFoundError where it does not exist.
    """
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_own(os.fstat(at), str(folder), stat.S_ISDIR)
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = inner
            _check_own(os.fstat(at), part, stat.S_ISDIR)
        # O_NONBLOCK: opening a FIFO that nobody writes to would wait for ever.
        handle = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    with os.fdopen(handle, "rb") as file:
        state = os.fstat(file.fileno())
        _check_own(state, parts[-1], stat.S_ISREG)
        if state.st_size > limit_bytes:
            raise UntrustedFileError(f"{parts[-1]} has {state.st_size} bytes, more than {limit_bytes}")
        return file.read(limit_bytes + 1)


def _check_own(state: os.stat_result, name: str, kind: Callable[[int], bool]) -> None:
    if not kind(state.st_mode):
        raise UntrustedFileError(f"{name} is {'no plain file' if kind is stat.S_ISREG else 'no folder'}")
    if state.st_uid != os.geteuid():
        raise UntrustedFileError(f"{name} belongs to another user (number {state.st_uid})")
    if state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UntrustedFileError(f"{name} can be changed by others (mode {stat.S_IMODE(state.st_mode):o})")


def make_own_folder(path: Path) -> None:
    """Make the folder ``path``, and what is missing above it, for this user alone; one that exists stays as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)


def check_space(folder: Path, size_bytes: int) -> None:
    """Raise ExportError unless ``size_bytes`` more fit into ``folder`` now, by having them set aside for a moment.

    For writers that end the process where the disk is full, as LLVM does for object files.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        megabytes = size_bytes / 1e6
        raise ExportError(
            f"{folder} has no room for {megabytes:.1f} MB: {error.strerror or error}.", _remedy(error)
        ) from error


@contextlib.contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """An empty folder that is gone afterwards. What killed processes left of theirs is removed on the way.

    It is moved away before it is emptied, so that a thread that nobody waits for opens nothing more in it. (Python's
    TemporaryDirectory would also be removed by the end of a child that was forked meanwhile.)

    Raises OSError where none can be made.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{kind}-{os.getpid()}-"))
    _TEMPORARY.add(folder)
    try:
        yield folder
    finally:
        _remove_folder(folder)
        _TEMPORARY.discard(folder)


def _remove_folder(folder: Path) -> None:
    gone = folder.with_name(f"{folder.name}_gone")
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
    # What cannot be removed, because a loaded library lies in it say, is no reason to fail.
    shutil.rmtree(gone, ignore_errors=True)


_TEMPORARY: set[Path] = set()
"""Files and folders that are there for a while."""


def remove_temporary() -> None:
    """Remove what this process has made for a while, for an end that leaves no time to whoever made it."""
    for path in tuple(_TEMPORARY):
        if path.is_dir():
            _remove_folder(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


_FOLDER = "tvm_ext-"
_ABANDONED = re.compile(rf"{_FOLDER}[a-z]+-(\d+)-\w+")
_ABANDONED_AFTER_S = 600
"""Age of an abandoned folder: its process may be alive where we cannot see it, in another container with this folder.
No step that uses such a folder takes as long without writing to it."""


@functools.cache
def _sweep(parent: Path) -> None:
    """Remove the folders in ``parent`` that this user's processes have left there; once in a process.

    Nothing on Windows, which does not say whose they are, and where signal 0 is one that ends a process.
    """
    if not hasattr(os, "geteuid"):
        return
    for path in parent.glob(f"{_FOLDER}*"):
        match = _ABANDONED.fullmatch(path.name)
        try:
            state = path.lstat()
        except OSError:
            continue  # its own process has removed it just now
        mine = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid()
        old = time.time() - state.st_mtime > _ABANDONED_AFTER_S
        if match and mine and old and not _is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True  # somebody else's
    return True


def write_objects(objects: Sequence[bytes], folder: Path) -> list[str]:
    """The object files with the given contents, in ``folder``, for a linker."""
    paths = [folder / f"kernel{index}.o" for index in range(len(objects))]
    for path, content in zip(paths, objects, strict=True):
        path.write_bytes(content)
    return [str(path) for path in paths]


@contextlib.contextmanager
def _temporary_beside(path: Path, private: bool) -> Iterator[Path]:
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    except OSError as error:
        raise ExportError(f"cannot write into {path.parent}: {error.strerror or error}.", _remedy(error)) from error
    os.close(handle)
    temporary = Path(name)
    _TEMPORARY.add(temporary)
    try:
        if not private:
            _give_default_mode(temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        _TEMPORARY.discard(temporary)


def _give_default_mode(path: Path) -> None:
    """mkstemp makes files private to the user; the result should have the mode any other new file has."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remedy(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free some space, or write to another disk"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "choose a folder that you may write to"
    return "check that the folder exists and is writable"
