"""Writing files so that nobody ever sees half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tvm_ext.errors import ExportError


def write_atomically(path: str | Path, content: bytes, *, durable: bool = True) -> None:
    """Replace the file ``path`` by ``content``; raises ExportError, and leaves the old file, where that fails."""
    produce_atomically(path, lambda temporary: temporary.write_bytes(content), durable=durable)


def produce_atomically(path: str | Path, produce: Callable[[Path], object], *, durable: bool = True) -> None:
    """Let ``produce`` write a temporary file beside ``path``, then move it into place once it is on the disk.

    A kill or a full disk at any moment leaves either the old file or the new one under ``path``. The temporary name
    ends in the same suffix (linkers and loaders look at it) and starts with a dot. Without ``durable`` nobody waits for
    the disk: after a power cut the file may be torn, which is for files that carry a checksum and can be made again.

    Raises
    ------
    ExportError
        where the folder is missing or not writable, the disk is full, or ``produce`` fails to write.
    """
    path = Path(path)
    with _temporary_beside(path) as temporary:
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


def write_objects(objects: Sequence[bytes], folder: Path) -> list[str]:
    """The object files with the given contents, in ``folder``, for a linker."""
    paths = [folder / f"kernel{index}.o" for index in range(len(objects))]
    for path, content in zip(paths, objects, strict=True):
        path.write_bytes(content)
    return [str(path) for path in paths]


@contextlib.contextmanager
def _temporary_beside(path: Path) -> Iterator[Path]:
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    except OSError as error:
        raise ExportError(f"cannot write into {path.parent}: {error.strerror or error}.", _remedy(error)) from error
    os.close(handle)
    _give_default_mode(Path(name))
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


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
