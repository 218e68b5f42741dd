"""Finds and loads the plugin's compiled parts.

A source checkout that is not installed has none; everything but what they offer works without them.
"""

from __future__ import annotations

from pathlib import Path

import tvm_ffi

import tvm_ext

_SUFFIXES = (".so", ".dylib", ".dll")
_loaded: dict[str, object] = {}


def library_path(name: str) -> Path | None:
    """The compiled library ``name``, or None where this installation has none.

    An editable installation has two folders for the package (sources; compiled parts), hence the search of its path.
    """
    for folder in tvm_ext.__path__:
        for suffix in _SUFFIXES:
            candidate = Path(folder).absolute() / "lib" / f"lib{name}{suffix}"
            if candidate.is_file():
                return candidate
    return None


def load(name: str) -> bool:
    """Load library ``name`` once; False where there is none. Raises OSError or RuntimeError where it does not load."""
    if name not in _loaded:
        path = library_path(name)
        if path is None:
            return False
        _loaded[name] = tvm_ffi.load_module(str(path))
    return True


def can_load(name: str) -> bool:
    """`load`; False also where the library does not load, of which `import tvm` has warned."""
    try:
        return load(name)
    except (OSError, RuntimeError):
        return False


def is_loaded(name: str) -> bool:
    return name in _loaded
