"""The cache of micro-benchmark results: one JSON file per machine, safe against corruption and concurrent processes."""

from __future__ import annotations

import functools
import hashlib
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import filelock

from tvm_ext import _tvm, options
from tvm_ext.errors import ExportError
from tvm_ext.records.serialise import from_json, to_json
from tvm_ext.support.files import write_atomically

from . import microbench
from .cpu_measurement import CpuMeasurement
from .microbench import BenchPlan

SCHEMA = 2  # of the file and of the micro-benchmarks: a change of either makes old files unknown
LOCK_TIMEOUT_S = 120.0
RETRY_AFTER_S = 3600.0
"""Age at which a measurement whose rounds did not agree is taken again: the machine was busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedMeasurement:
    """The content of a cache file; ``key`` is the text that its name is the digest of, ``taken_at_s`` Unix time."""

    schema: int
    key: str
    taken_at_s: float
    measurement: CpuMeasurement

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.taken_at_s)

    @property
    def is_settled(self) -> bool:
        """Whether two rounds of every figure agreed."""
        return self.measurement.rounds > 1 and self.measurement.agrees


def cache_key(plan: BenchPlan, model: str) -> str:
    """What the figures depend on: CPU model, target with features, sizes, threads, TVM's version, our schema.

    The clock that the system reports is left out: it wanders, and is only a guess for the lengths of the runs.
    """
    sizes = [(stream.layer, stream.bytes_per_core) for stream in plan.streams]
    return repr((SCHEMA, str(_tvm.tvm.__version__), model, plan.target, plan.register_bytes, plan.core_count, sizes))


def cache_file(key: str) -> Path:
    """Where the result for ``key`` is kept."""
    return options.cache_directory() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


@functools.cache
def measured(plan: BenchPlan, model: str) -> CpuMeasurement:
    """The figures for ``plan`` on this machine: from the cache, else measured and put there.

    Processes that ask at the same time wait for the first (their measurements would disturb each other). A corrupt file
    is measured anew with a warning, one of a machine that was too busy to agree with itself is measured anew after
    `RETRY_AFTER_S`; where the folder cannot be written, the result lives as long as the process.
    """
    key = cache_key(plan, model)
    path = cache_file(key)
    found = _usable(path, key)
    if found is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
            return _usable(path, key) or _measure_and_write(plan, key, path)
    except (OSError, ExportError, filelock.Timeout) as error:
        _warn(f"the CPU's micro-benchmarks cannot be kept in {path.parent} ({error}); they are run in each process")
        return microbench.measure(plan)


def forget() -> int:
    """Delete the cached measurements, so that the next probe measures anew; answers how many there were."""
    files = list(options.cache_directory().glob("cpu-*.json"))
    for path in files:
        path.unlink(missing_ok=True)
    measured.cache_clear()
    return len(files)


def _measure_and_write(plan: BenchPlan, key: str, path: Path) -> CpuMeasurement:
    measurement = microbench.measure(plan)
    content = to_json(CachedMeasurement(schema=SCHEMA, key=key, taken_at_s=time.time(), measurement=measurement))
    write_atomically(path, content.encode())
    return measurement


def _usable(path: Path, key: str) -> CpuMeasurement | None:
    found = _read(path, key)
    if found is None or (not found.is_settled and found.age_s > RETRY_AFTER_S):
        return None
    return found.measurement


def kept(plan: BenchPlan, model: str) -> CachedMeasurement | None:
    """What the cache has for ``plan``, of whatever age; nothing is measured."""
    key = cache_key(plan, model)
    return _read(cache_file(key), key)


def _read(path: Path, key: str) -> CachedMeasurement | None:
    """The content of ``path``, None (with a warning, unless there is no file) where it cannot be used."""
    try:
        if os.path.lexists(path) and not path.is_file():
            raise OSError("it is no plain file")  # a FIFO would be waited for for ever
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"the cached measurement {path} cannot be read ({error}); it is ignored")
        return None
    try:
        found = from_json(CachedMeasurement, text)
    except (ValueError, AttributeError) as error:
        _warn(f"the cached measurement {path} is corrupt ({error}); it is ignored and measured anew")
        return None
    if found.schema != SCHEMA or found.key != key:
        _warn(f"the cached measurement {path} is of another machine or version; it is ignored and measured anew")
        return None
    return found


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)
