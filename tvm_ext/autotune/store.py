"""The measurements that a build consults: read-only bases first, then the user's own database.

What was measured here outranks a base's word on the same configuration. A build never fails because of a database: what
is wrong with one becomes a note, and the models decide.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tvm_ext import options
from tvm_ext.errors import DatabaseError, InputError, OptionError
from tvm_ext.records.measurement import MeasuredWorkload, Measurement, Trial, Verdict, verdicts_of

from .database import MeasurementDatabase
from .database_files import read_any
from .refused import RefusedRecord

SHIPPED = Path(__file__).with_name("base")
"""The folder of bases that the package brings: every file in it, JSON lines or databases. There may be none."""


@dataclass(slots=True)
class MeasurementStore:
    """``own`` is None where there is no database to write to; ``bases`` are files, the first outranking the others."""

    own: MeasurementDatabase | None
    bases: Sequence[Path] = ()
    notes: dict[str, str] = field(default_factory=dict)  # by file: each is said once
    _unwritten: dict[str, list[Trial]] = field(default_factory=dict)  # by workload's key, as long as this process lives
    _read: dict[str, list[Trial]] | None = None  # of the bases, by workload's key

    @classmethod
    def for_build(cls, build_options: options.BuildOptions) -> MeasurementStore:
        """What ``build_options.database`` and the environment ask for; without a database where they err."""
        bases = tuple(sorted(path for path in SHIPPED.glob("*") if path.suffix in (".jsonl", ".db")))
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
        own = [*self._unwritten.get(workload.key, ())]
        if self.own is not None:
            try:
                own += self.own.trials(workload)
            except DatabaseError as error:
                self._note(str(self.own.path), str(error))
        return verdicts_of(self._base().get(workload.key, ())) | verdicts_of(own)

    def add(self, measurements: Iterable[Measurement]) -> int:
        """Keep ``measurements``; how many were new. Where they cannot be written this store remembers them."""
        taken = tuple(measurements)
        if self.own is not None:
            try:
                return self.own.add(taken)
            except DatabaseError as error:
                self._note(str(self.own.path), str(error))
        for item in taken:
            self._unwritten.setdefault(item.workload.key, []).append(item.trial)
        return len(taken)

    def _base(self) -> Mapping[str, list[Trial]]:
        """Trials of the bases by workload's key, each of the first base that knows the workload's configuration."""
        if self._read is None:
            self._read = {}
            for path in self.bases:
                self._read_base(path, self._read)
        return self._read

    def _read_base(self, path: Path, found: dict[str, list[Trial]]) -> None:
        before = {(key, trial.configuration) for key, trials in found.items() for trial in trials}
        refused: list[RefusedRecord] = []
        try:
            for item in read_any(path):
                if isinstance(item, RefusedRecord):
                    refused.append(item)
                elif (item.workload.key, item.trial.configuration) not in before:
                    found.setdefault(item.workload.key, []).append(item.trial)
        except (DatabaseError, InputError) as error:
            self._note(str(path), str(error))
        if refused:
            self._note(str(path), f"{len(refused)} records of the base {path} are left out, first {refused[0]}")

    def _note(self, kind: str, text: str) -> None:
        if kind not in self.notes:
            self.notes[kind] = text
            warnings.warn(text, RuntimeWarning, stacklevel=4)
