"""Everything of a batch is compiled before any of it is timed: on a CPU a compiler takes cores from the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TypeAlias

from tvm_ext.autotune.builders import Built, KernelBuilder
from tvm_ext.records.kernel_job import KernelJob

MOST_KEPT = 512
"""Libraries, of some 60 kB each: what is measured again before it is adopted is not compiled again."""

_Key: TypeAlias = "tuple[str, str]"


class BuiltAhead:
    """A builder whose answers are there when a measurer asks: `prepare` waits for ``inner``, on all of its workers."""

    def __init__(self, inner: KernelBuilder) -> None:
        self.inner, self.workers = inner, inner.workers
        self._libraries: dict[_Key, Future[Built]] = {}  # the one that was not used for longest first
        self._references: dict[str, Future[Built]] = {}

    def prepare(self, jobs: Sequence[KernelJob]) -> None:
        """Have all of ``jobs`` built, and what they are compared with."""
        wait([made for job in jobs for made in (self.library(job), *([self.reference(job)] if job.reference else []))])

    def library(self, job: KernelJob) -> Future[Built]:
        key = job.workload.key, job.configuration
        made = self._libraries.pop(key, None) or self.inner.library(job)
        self._libraries[key] = made
        if len(self._libraries) > MOST_KEPT:
            del self._libraries[next(iter(self._libraries))]
        return made

    def reference(self, job: KernelJob) -> Future[Built]:
        if job.reference_key not in self._references:
            self._references[job.reference_key] = self.inner.reference(job)
        return self._references[job.reference_key]

    def end(self) -> None:
        self.inner.end()
