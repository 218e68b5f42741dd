"""Everything of a batch is compiled before any of it is timed: on a CPU a compiler takes cores from the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

from tvm_ext.autotune.builders import Built, KernelBuilder
from tvm_ext.records.kernel_job import KernelJob


class BuiltAhead:
    """A builder whose answers are there when a measurer asks: `prepare` waits for ``inner``, on all of its workers."""

    def __init__(self, inner: KernelBuilder) -> None:
        self.inner, self.workers = inner, inner.workers
        self._libraries: dict[KernelJob, Future[Built]] = {}
        self._references: dict[str, Future[Built]] = {}  # by key; each is made once

    def prepare(self, jobs: Sequence[KernelJob]) -> None:
        """Have all of ``jobs`` built, and what they are compared with."""
        for job in jobs:
            self._libraries[job] = self.inner.library(job)
            if job.reference and job.reference_key not in self._references:
                self._references[job.reference_key] = self.inner.reference(job)
        wait([*self._libraries.values(), *self._references.values()])

    def library(self, job: KernelJob) -> Future[Built]:
        made = self._libraries.pop(job, None)
        return self.inner.library(job) if made is None else made

    def reference(self, job: KernelJob) -> Future[Built]:
        made = self._references.get(job.reference_key)
        return self.inner.reference(job) if made is None else made

    def end(self) -> None:
        self.inner.end()
