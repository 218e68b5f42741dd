"""One tuning run of a model, from its operators to what later builds will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tvm_ext import options as environment
from tvm_ext._tvm import IRModule, Target, tvm
from tvm_ext.autotune.builders import ExecutorBuilder, LocalBuilder, compile_job
from tvm_ext.autotune.job_folder import FolderRunner
from tvm_ext.autotune.measure import Measurer
from tvm_ext.autotune.runners import IsolatedRunner, TrackerFleet
from tvm_ext.autotune.session import TrialHistory, TuningSession
from tvm_ext.autotune.spaces import TuningTask
from tvm_ext.autotune.tracker import Tracker
from tvm_ext.devices.capabilities import capability_text
from tvm_ext.devices.cpu_info import read_cpu_info
from tvm_ext.devices.device_db import cpu_needs
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import IllegalRewrite, UnsupportedEnvironmentError
from tvm_ext.exclusive import EXCLUSIVE
from tvm_ext.options import BuildOptions, usable_core_count
from tvm_ext.records.kernel_job import KernelJob
from tvm_ext.records.measurement import MOST_REASON, Trial
from tvm_ext.records.tuned import TuningRecord, TuningRequest

from .compile_gpu import compile_gpu_job
from .kernels import TunableKernel, TunableModel, job_of, tunable_model

MOST_KEPT = 512
"""Libraries, of some 60 kB each, and references: what is measured again before it is adopted is not compiled again."""


def tune_model(
    operators: IRModule,
    calls: Mapping[str, int],
    device: DeviceSpec,
    target: Target,
    options: BuildOptions,
    store: TrialHistory,
    request: TuningRequest,
    *,
    measurer_of: Callable[[TuningRequest], Measurer] | None = None,
) -> TuningRecord:
    """Search for faster tiles of the kernels of ``operators``; what comes of it is in ``store``.

    Raises UnsupportedEnvironmentError where kernels for ``device`` cannot be measured here. Ctrl-C ends it as an error
    does: with all that was measured in the store. ``measurer_of`` makes what measures; left out: `usual_measurer`.
    """
    require_measurable(device, target, request)
    start = time.monotonic()
    with EXCLUSIVE, target:
        model = tunable_model(operators, calls, device, options)
    if not model.tasks:
        return _session(model, lambda _task, _wanted: (), store, request, start).run()
    with (measurer_of or partial(usual_measurer, device))(request) as measurer:
        measure = KernelMeasure(model, measurer, device, target, options)
        session = _session(model, measure, store, request, start)
        record = session.run()
    return replace(record, untuned=model.untuned, notes=tuple(dict.fromkeys((*record.notes, str(measurer.report)))))


def usual_measurer(device: DeviceSpec, request: TuningRequest) -> Measurer:
    """Processes of this machine, servers behind a tracker or of a folder; raises OptionError for a wrong address.

    On a CPU nothing is compiled while something is timed here; for servers it is, since they have their own cores.
    """
    kind = device.kind
    compiler = compile_job if kind == "cpu" else compile_gpu_job
    if request.jobs is not None:
        return Measurer(LocalBuilder(compiler=compiler), [FolderRunner(request.jobs)])
    if request.tracker is not None:
        fleet = TrackerFleet(Tracker.parse(request.tracker), request.key or kind, kind)
        return Measurer(LocalBuilder(compiler=compiler), fleet)
    builder = LocalBuilder(usable_core_count(), compiler=compiler, most_kept=MOST_KEPT)
    return Measurer(builder, [IsolatedRunner(kind)])


def _session(
    model: TunableModel,
    measure: Callable[[TuningTask, Sequence[str]], Iterator[Trial] | tuple[Trial, ...]],
    store: TrialHistory,
    request: TuningRequest,
    start: float,
) -> TuningSession:
    return TuningSession(
        model.tasks, measure, store, request.budget, seed=request.seed, progress=request.progress, start=start
    )


@dataclass(frozen=True, slots=True)
class KernelMeasure:
    """What a `TuningSession` calls: configurations of a task in, trials out, the constructed kernel in every batch."""

    model: TunableModel
    measurer: Measurer
    device: DeviceSpec
    target: Target
    options: BuildOptions
    constructed: dict[str, KernelJob] = field(default_factory=dict)  # by workload: in every batch of it

    def __call__(self, task: TuningTask, configurations: Sequence[str]) -> Iterator[Trial]:
        kernel = self.model.kernels[task.workload.key]
        first, *others = configurations
        jobs = []
        for configuration in others:
            made = self._job_or_why_not(kernel, configuration)
            if isinstance(made, Trial):
                yield made
            else:
                jobs.append(made)
        if not jobs:
            return
        self.measurer.batch = len(jobs)
        if task.workload.key not in self.constructed:
            self.constructed[task.workload.key] = self._job(kernel, first)
        incumbent, builder = self.constructed[task.workload.key], self.measurer.builder
        if isinstance(builder, ExecutorBuilder):  # on a CPU a compiler takes cores from the kernels that are timed
            builder.prepare([incumbent, *jobs])
        for _, trial in self.measurer.measure(jobs, incumbent=incumbent):
            yield trial

    def _job_or_why_not(self, kernel: TunableKernel, configuration: str) -> KernelJob | Trial:
        try:
            return self._job(kernel, configuration)
        except IllegalRewrite as refusal:
            return Trial(configuration=configuration, outcome="compile_failed", reason=refusal.problem[:MOST_REASON])

    def _job(self, kernel: TunableKernel, configuration: str) -> KernelJob:
        with EXCLUSIVE, self.target:
            return job_of(kernel, configuration, self.device, self.target, self.options)


def require_measurable(device: DeviceSpec, target: Target, request: TuningRequest) -> None:
    """Raise UnsupportedEnvironmentError where times of kernels for ``device`` cannot be taken."""
    if request.tracker is not None or request.jobs is not None:
        return
    if device.kind != "cpu":
        _require_gpu(device)
        return
    named = environment.recorded_cpu()
    if named is not None:
        raise UnsupportedEnvironmentError(
            f"TVM_EXT_CPU lets {named} stand for this machine, whose times would be kept as that CPU's.",
            "unset TVM_EXT_CPU to tune for this machine",
        )
    most = int(tvm.runtime.num_threads())
    if device.unit_count > most:
        raise UnsupportedEnvironmentError(
            f"kernels for {device.unit_count} threads cannot be timed here: this process has {most}.",
            "build with fewer (num_threads), or tune on a machine with as many cores (by --tracker)",
        )
    unmet = cpu_needs(target).unmet_by(read_cpu_info())
    if unmet:
        raise UnsupportedEnvironmentError(
            f"kernels for {device.name} cannot be timed here: this machine {unmet}.",
            "tune on such a machine (by --tracker), and merge its database (tvm-ext database merge)",
        )


def _require_gpu(device: DeviceSpec) -> None:
    """Raise UnsupportedEnvironmentError unless ``device``, or one of its compute capability, is in this machine."""
    here = tvm.runtime.device(device.kind, 0)
    own = capability_text(device)
    if here.exist and str(here.compute_version) in (own, ""):
        return
    found = f"its GPU is a {here.device_name}" if here.exist else f"TVM finds no {device.kind} device"
    raise UnsupportedEnvironmentError(
        f"kernels for {device.name} cannot be timed here: {found}.",
        "tune through a folder that a machine with the GPU serves (jobs, `tvm-ext tune --jobs`), or by --tracker",
    )
