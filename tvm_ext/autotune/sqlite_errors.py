"""What SQLite says, as errors that name the file and a remedy. (Its error codes are no part of Python 3.10.)"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tvm_ext.errors import DatabaseError

_REMEDIES = (
    (("locked", "busy"), "wait for the other process (`fuser` names it), or use a database of your own"),
    (("readonly", "read-only"), "choose a file that you may write to, or open it for reading"),
    (("full",), "free some space, or move the database to another disk: nothing of this attempt was kept"),
    (
        ("malformed", "corrupt", "disk i/o error", "constraint"),
        "save what is whole with `tvm-ext database export --salvage FILE -o rest.jsonl`, move the file aside, "
        "and bring it back with `tvm-ext database import`",
    ),
    (
        ("not a database",),
        "name another file; if this one was a database, its first page is lost: move it aside, and import an export",
    ),
    (("unable to open",), "check that the file and its folder are there, and that you may write to them"),
)
_OTHERWISE = "please report this, with the file if you can"


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Within it an error of SQLite's, or of the file system, over ``path`` is a DatabaseError."""
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        raise DatabaseError(f"the database {path} cannot be used: {text}.", remedy_of(text)) from error
    except DatabaseError:
        raise
    except OSError as error:
        remedy = "check that the folder is there, and that you may write to it"
        raise DatabaseError(f"the database {path} cannot be used: {error.strerror or error}.", remedy) from error


def remedy_of(text: str) -> str:
    """What to do about SQLite's message ``text``."""
    lower = text.lower()
    return next((remedy for words, remedy in _REMEDIES if any(word in lower for word in words)), _OTHERWISE)
