"""The measurements that a build consults: read-only bases first, then the user's own database.

What was measured here outranks a base's word on the same configuration. A build never fails because of a database: what
is wrong with one becomes a note, and the models decide.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvm_ext import options
from tvm_ext.errors import DatabaseError, InputError, OptionError
from tvm_ext.options import BuildOptions
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, RefusedRecord, Trial, Verdict, verdicts_of
from tvm_ext.records.rtask_times import RTaskTimes, times_of

from .database import MeasurementDatabase
from .database_files import read_any

SUFFIXES = (".jsonl", ".db", ".base")
SHIPPED = Path(__file__).with_name("base")
"""The folder of bases that the package brings: files of `SUFFIXES`. There may be none."""


@dataclass(slots=True)
class MeasurementStore:
    """``own`` is None where there is no database to write to; ``bases`` are files, the first outranking the others."""

    own: MeasurementDatabase | None
    bases: Sequence[Path] = ()
    notes: dict[str, str] = field(default_factory=dict)  # by file: each is said once
    _unwritten: list[Measurement] = field(default_factory=list)  # until they can be written, or this process ends
    _read: dict[str, list[Trial]] | None = None  # of the bases, by workload's key
    _known: dict[str, MeasuredWorkload] = field(default_factory=dict)  # the bases' workloads

    @classmethod
    def for_build(cls, build_options: options.BuildOptions) -> MeasurementStore:
        """What ``build_options.database`` and the environment ask for; without a database where they err."""
        bases = tuple(sorted(path for path in SHIPPED.glob("*") if path.suffix in SUFFIXES))
        try:
            path = options.database_file(build_options.database)
        except OptionError as error:
            store = cls(None, bases)
            store._note("database", f"no database of measurements: {error.problem}")
            return store
        if path is None:
            return cls(None, ())
        writable = not path.exists() or os.access(path, os.W_OK)
        return cls(MeasurementDatabase(path, read_only=not writable), bases)

    def verdicts(self, workload: MeasuredWorkload) -> Mapping[str, Verdict]:
        """What is known of ``workload``, by configuration."""
        return verdicts_of(self._base().get(workload.key, ())) | verdicts_of(self._own(workload))

    def trials(self, workload: MeasuredWorkload) -> tuple[Trial, ...]:
        """All that is known of ``workload``; of a configuration that was measured here, nothing from the bases."""
        own = self._own(workload)
        here = {trial.configuration for trial in own}
        # The constructed kernel is what others were measured beside: without it a base's batch says nothing.
        beside = (trial for trial in self._base().get(workload.key, ()))
        kept = [trial for trial in beside if trial.configuration not in here or trial.origin.endswith(".0")]
        return (*kept, *own)

    def workloads(self, kinds: Container[str]) -> Mapping[str, MeasuredWorkload]:
        """Those of ``kinds`` that something is known of, by key."""
        self._base()
        found = dict(self._known)
        if self.own is not None:
            try:
                found |= self.own.workloads()
            except DatabaseError as error:
                self._note(str(self.own.path), str(error))
        found |= {item.workload.key: item.workload for item in self._unwritten}
        return {key: workload for key, workload in found.items() if workload.kind in kinds}

    def close(self) -> None:
        """Close this thread's connection; the next call opens another."""
        if self.own is not None:
            self.own.close()

    def _own(self, workload: MeasuredWorkload) -> list[Trial]:
        own = [item.trial for item in self._unwritten if item.workload == workload]
        if self.own is not None:
            try:
                own += self.own.trials(workload)
            except DatabaseError as error:
                self._note(str(self.own.path), str(error))
        return own

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Keep ``measurements``; how many were new. What cannot be written now is, with those that come later."""
        taken = tuple(measurements)
        if self.own is not None:
            try:
                new = self.own.add((*self._unwritten, *taken)) - len(self._unwritten)
            except DatabaseError as error:
                self._note(str(self.own.path), str(error))
            else:
                self._unwritten.clear()
                return max(0, new)
        self._unwritten += taken
        return len(taken)

    def _base(self) -> Mapping[str, list[Trial]]:
        """Trials of the bases by workload's key, each of the first base that knows the workload's configuration."""
        if self._read is None:
            self._read = {}
            for path in self.bases:
                self._read_base(path, self._read)
        return self._read

    def _read_base(self, path: Path, found: dict[str, list[Trial]]) -> None:
        try:
            state = path.stat()
            base, refused = _records_of(path, state.st_mtime_ns, state.st_size)
        except (DatabaseError, InputError, OSError) as error:
            self._note(str(path), str(error))
            return
        for key, (workload, trials) in base.items():
            before = {trial.configuration for trial in found.get(key, ())}
            if new := [trial for trial in trials if trial.configuration not in before]:
                found.setdefault(key, []).extend(new)
                self._known[key] = workload
        if refused:
            self._note(str(path), f"{len(refused)} records of the base {path} are left out, first {refused[0]}")

    def _note(self, kind: str, text: str) -> None:
        if kind not in self.notes:
            self.notes[kind] = text
            warnings.warn(text, RuntimeWarning, stacklevel=4)


BaseRecords = Mapping[str, tuple[MeasuredWorkload, list[Trial]]]
"""A base's workloads and their trials, by the workload's key."""


@functools.lru_cache(maxsize=8)  # a choice: above the bases that one process consults
def _records_of(path: Path, _modified_ns: int, _size: int) -> tuple[BaseRecords, tuple[RefusedRecord, ...]]:
    """What the file of this name, time and size holds; parsed once a process, not by each build."""
    found: dict[str, tuple[MeasuredWorkload, list[Trial]]] = {}
    refused: list[RefusedRecord] = []
    for item in read_any(path):
        if isinstance(item, RefusedRecord):
            refused.append(item)
        else:
            found.setdefault(item.workload.key, (item.workload, []))[1].append(item.trial)
    return found, tuple(refused)


# --- What the store of measurements knows of rTasks, for the schedules of a build -------------------------------------
def known_rtask_times(options: BuildOptions, workloads: Mapping[str, MeasuredWorkload]) -> RTaskTimes:
    """Times of the rKernels that ``workloads`` names, of the database and the bases that ``options`` name."""
    store = MeasurementStore.for_build(options)
    try:
        return times_of(store, workloads)
    finally:
        store.close()
