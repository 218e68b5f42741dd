"""Row files: a device as JSON, to keep, to share, and to build for on another machine.

A row that `tvm-ext devices cpu --measure` made is kept in the cache folder, and is then the row of this machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path

from tvm_ext import options
from tvm_ext.errors import ExportError, TargetError
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.files import make_own_folder, write_atomically

from .device_facts import with_facts
from .hal import DeviceSpec, Fact

SUFFIX = ".json"
MOST_BYTES = 64 * 1024 * 1024
"""Of a file that is read: a build report, which holds its row, is the longest, and has a few megabytes."""


def is_row_file(name: object) -> bool:
    """Whether ``name`` means a file: no device of the tables has a name that ends like one."""
    return isinstance(name, str) and name.strip().lower().endswith(SUFFIX)


def write_row(path: Path, spec: DeviceSpec) -> None:
    """Write ``spec`` to ``path``, whole or not at all; raises ExportError."""
    write_atomically(path, f"{to_json(spec)}\n".encode())


def read_row(path: Path) -> DeviceSpec:
    """The device in a row file, or the one that a build report (JSON) names as its row.

    Raises TargetError where the file cannot be read, is neither, or has a number that no device can have.
    """
    remedy = "write one by `tvm-ext devices NAME --output FILE`, or pass a build's report as JSON"
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise ValueError("it is no plain file of at most 64 MiB")  # a FIFO would be waited for for ever
        content = json.loads(path.read_text(encoding="utf-8"))
        spec = from_json(DeviceSpec, json.dumps(content.get("row") if "operators" in content else content))
        _check(spec)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise TargetError(f"{path} is no row of a device: {str(error)[:300]}", remedy) from error
    return spec


def _check(spec: DeviceSpec) -> None:
    """Raise ValueError for numbers that are not positive, or that are not those of the facts that give their source."""
    for fact in spec.facts:
        if not _is_plausible(fact):
            raise ValueError(f"{fact.field} is {fact.value}")
    rebuilt = with_facts(spec, ())
    if rebuilt != spec:
        raise ValueError("its fields are not the values of its facts")


def _is_plausible(fact: Fact) -> bool:
    return isinstance(fact.value, str) or (math.isfinite(fact.value) and fact.value > 0)


def keep_row(spec: DeviceSpec, measured: DeviceSpec) -> None:
    """Make ``measured`` the row of the machine ``spec`` (`kept_row`); raises ExportError."""
    path = kept_file(spec)
    try:
        make_own_folder(path.parent)
    except OSError as error:
        raise ExportError(
            f"cannot make the folder {path.parent}: {error.strerror or error}.", "name another by TVM_EXT_CACHE_DIR"
        ) from error
    write_row(path, measured)


def kept_file(spec: DeviceSpec) -> Path:
    """Where the row is kept that was measured on the machine ``spec``, as the operating system and tables have it.

    A folder may be shared by machines: code for the features of one ends the process on another that lacks them.
    """
    sizes = [layer.capacity_bytes for layer in spec.layers]
    features = [pair for pair in spec.target if pair[0] != "num-cores"]
    identity = repr((spec.description, spec.row, sizes, features))
    return options.cache_directory() / f"cpu-{hashlib.sha256(identity.encode()).hexdigest()[:16]}{SUFFIX}"


def kept_row(spec: DeviceSpec) -> DeviceSpec | None:
    """The row that was measured on ``spec``, if any; one that cannot be used is left out with a warning."""
    path = kept_file(spec)
    if not path.exists():
        return None
    try:
        return read_row(path)
    except TargetError as error:
        warnings.warn(f"the measured row is ignored: {error.problem}", RuntimeWarning, stacklevel=2)
        return None


def forget() -> int:
    """Delete the measured rows, so that machines are those of the tables again; answers how many there were."""
    files = list(options.cache_directory().glob(f"cpu-*{SUFFIX}"))
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
