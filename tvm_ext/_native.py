"""Finds and loads the plugin's compiled parts.

A source checkout that is not installed has none; everything but what they offer works without them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import tvm_ffi

import tvm_ext

OPTIONS_LIBRARY, RUNTIME_LIBRARY, PROVIDER_LIBRARY = "tvm_ext_options", "tvm_ext_rammer", "tvm_ext_onnxruntime"
WEIGHTS_LIBRARY = "tvm_ext_weights"
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


def outdated(name: str) -> tuple[str, str] | None:
    """What is wrong where library ``name`` was built from other sources than those beside this package, and a remedy.

    That can only be in an editable installation: it takes Python's sources in place, and compiles the others once,
    when it is installed. A wheel has no native sources: nothing to compare with, None.
    """
    path, sources = library_path(name), _source_folder()
    if path is None or not sources.is_dir():
        return None
    built_from = _source_digests(path)
    if built_from is None:
        why = "it does not say from which it was"
    else:
        changed = [source for source, digest in built_from.items() if _digest(sources / source) != digest]
        if not changed:
            return None
        why = f"other since: {', '.join(changed)}"
    return f"{path} was not built from the sources in {sources} ({why})", "compile it anew: pip install --editable ."


def _source_folder() -> Path:
    return Path(__file__).absolute().parent / "csrc"


def _source_digests(path: Path) -> dict[str, str] | None:
    """Path below ``csrc`` -> SHA-256 of the sources that the library was built from; None where it does not say."""
    try:
        text = ctypes.c_char.in_dll(ctypes.CDLL(str(path)), "tvm_ext_source_digests")
    except (OSError, ValueError):  # it does not load, of which `import tvm` has warned; it has no such symbol
        return None
    lines = ctypes.string_at(ctypes.addressof(text)).decode().splitlines()
    return {source: digest for source, _, digest in (line.partition(" ") for line in lines)}


def _digest(path: Path) -> str | None:
    """Of a file's content; None where there is no such file."""
    import hashlib

    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
