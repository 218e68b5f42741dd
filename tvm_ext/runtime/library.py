"""A built model: what `relay.build` returns, what is exported, and what is loaded again."""

from __future__ import annotations

import collections
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import tvm

from tvm_ext.devices.cpu_info import TILES, CpuNeeds, read_cpu_info
from tvm_ext.devices.tile_permission import tile_request
from tvm_ext.errors import ExportError, InputError, TargetError, TvmExtError
from tvm_ext.rammer_runtime import native
from tvm_ext.records import serialise
from tvm_ext.records.build_profile import DeviceCode
from tvm_ext.records.measurement import TrialStore
from tvm_ext.records.nodes import CallSite
from tvm_ext.records.rammer import MeasuredRun
from tvm_ext.records.rtask_times import measurements_of
from tvm_ext.reports.record import TimedCall
from tvm_ext.reports.report import BuildReport
from tvm_ext.support.arrays import Array
from tvm_ext.support.shared_library import load_copy, private_copy
from tvm_ext.support.stderr_filter import CONSTANT_SCOPES, without_lines

from .cuda_runtime import CUDA_LOADER, cuda_is_loaded, load_cuda_runtime
from .cuda_source import own_cuda_compiler
from .export import METADATA_FUNCTION, check_library, export_again, export_executable
from .graph_module import GraphModule, TensorSpec
from .machine import ThreadSafeMachine
from .schedule_times import measured_runs

if TYPE_CHECKING:
    from tvm_ext._tvm import Executable, Module

GPU_KINDS = ("cuda", "rocm", "opencl")
"""Kinds of targets whose kernels run on a GPU."""

_CODE_BYTES_PER_KERNEL = 50_000
"""Ample: ResNet-50's 27 kernels take about a tenth of it. Only used to tell a full disk beforehand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """What travels inside an exported library beside the code."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    report: BuildReport
    cpu: CpuNeeds


class ExportParts(Protocol):
    """What exporting takes where the executable's kernels were linked already: their object files, and an executable
    without them. ``link_again`` is None where the executable itself can be exported.
    """

    @property
    def objects(self) -> tuple[bytes, ...]: ...

    @property
    def link_again(self) -> Callable[[], Any] | None: ...


class Library:
    """A built model with its report.

    ``lib["default"](device)`` gives a `GraphModule`, as old Relay code expects; `vm` the plain Relax VirtualMachine.

    Attributes
    ----------
    inputs, outputs
        `TensorSpec` of each, in order.
    report
        The `BuildReport`; `profile` puts measured times into it.
    cpu
        The `CpuNeeds` of the code.
    entry
        The function of the VirtualMachine that runs the model.
    executable
        TVM's own executable (or the loaded module, for a library that was loaded). Its kernels are linked already, so
        that it cannot be exported by itself.
    """

    def __init__(
        self,
        executable: Executable,
        signature: Signature,
        file: tuple[Path, str] | None = None,
        code: ExportParts | None = None,
        entry: str = "main",
    ) -> None:
        self.executable = executable
        self.entry = entry
        self._code = code
        self.inputs, self.outputs, self.report = signature.inputs, signature.outputs, signature.report
        self.cpu = signature.cpu
        self._file = file
        self._runs_here = False

    @classmethod
    def from_module(cls, module: tvm.runtime.Module, file: tuple[Path, str] | None = None) -> Library:
        """The library behind a module loaded with `tvm.runtime.load_module`; raises ExportError for a foreign one.

        ``file``: where it was, and its digest.
        """
        return cls(module, serialise.from_json(Signature, metadata_of(module)), file)

    def __getitem__(self, name: str) -> Callable[..., GraphModule]:
        if name != "default":
            raise InputError(
                f"the library has no entry {name!r}.",
                'use lib["default"](device), or lib.vm(device) for single functions',
            )
        return lambda device=None: GraphModule(self, device)

    def vm(self, device: tvm.runtime.Device | None = None) -> ThreadSafeMachine:
        """A Relax VirtualMachine over the code, ``lib.vm()["main"](*inputs)``, that several threads may call.

        Each call gives another one, which shares code and, on CPUs, constants: one for each thread is cheap.
        Raises TargetError where this machine's CPU lacks what the code was built for, or the GPU is missing.
        """
        self._check_cpu()
        return ThreadSafeMachine(self.executable, device if device is not None else self._default_device())

    def _check_cpu(self) -> None:
        if self._runs_here:  # reading what the CPU has takes a hundred times as long as making an instance
            return
        host = read_cpu_info()
        unmet = self.cpu.unmet_by(host)
        if unmet:
            raise TargetError(
                f"this library cannot run on this CPU ({host.model}), which {unmet}.",
                "build the model on this machine for target 'llvm', or for what all your machines have, "
                'e.g. {"kind": "llvm", "mcpu": "x86-64-v3"}',
            )
        self._runs_here = True

    def _default_device(self) -> tvm.runtime.Device:
        """The first device of the kind that the library was built for."""
        kind = str(json.loads(self.report.target)["kind"])
        device = tvm.cpu() if kind not in GPU_KINDS else tvm.runtime.device(kind, 0)
        if kind in GPU_KINDS and not device.exist:
            raise TargetError(
                f"this library was built for {self.report.device} (target {kind}), and TVM finds no such device here.",
                "run it on a machine with the device, its driver and a TVM that supports it; "
                "`source()` shows its kernels, `report` how they were made",
            )
        return device

    def source(self) -> str:
        """The source code of its GPU kernels, one module after another; empty for a library for CPUs.

        CUDA C or OpenCL C; for AMD GPUs LLVM's assembly.
        """
        return "\n".join(self._sources(*GPU_KINDS, "hip"))

    def _sources(self, *kinds: str) -> list[str]:
        modules = _modules(getattr(self.executable, "mod", self.executable))
        return [str(module.inspect_source()) for module in modules if module.kind in kinds]

    def export_library(self, path: str | Path, *, architectures: Sequence[str] | None = None) -> None:
        """Write one shared library holding code, constants, report and the description of inputs and outputs.

        Load it with `relay.load`, or without this package with ``tvm.runtime.load_module`` and
        ``tvm.relax.VirtualMachine``. The file appears whole or not at all.

        CUDA kernels are embedded as machine code for ``architectures`` (``("sm_80", "sm_90")``; None: the one that the
        library was built for), whether or not this machine has a GPU; with a warning as source where it has no CUDA
        compiler, which ``architectures=()`` asks for. `report` says which, here and in the file.
        Raises ExportError where it cannot be written, CompileError where the CUDA compiler fails, TargetError where the
        code is not for this kind of processor, whose linker joins it.
        """
        machine = read_cpu_info().machine
        if self.cpu.machine not in ("", machine):
            raise TargetError(
                f"this library was built for {self.cpu.machine}; the linker of this {machine} machine cannot join it.",
                "build and export on a machine of that kind, or link `executable` with a cross compiler: "
                "executable.export_library(path, fcompile=tvm.support.cc.cross_compiler(...))",
            )
        if self._file is not None:
            export_again(self._file[0], path, self._file[1])
            return
        if architectures is None:
            from tvm_ext.toolchains.cuda_export import (
                architecture_of,  # needs TVM's compiler, which a receiver may not have
            )

            built_for = architecture_of(self.report.target)
            architectures = (built_for,) if built_for else ()
        settings = self._compile_sources(architectures)
        signature = Signature(inputs=self.inputs, outputs=self.outputs, report=self.report, cpu=self.cpu)
        metadata = serialise.to_json(signature)
        code_bytes = _CODE_BYTES_PER_KERNEL * (len(self.report.operators) + 1)
        size_bytes = self.report.constant_bytes + code_bytes + len(metadata)
        again = self._code.link_again if self._code is not None else None
        executable, objects = (again(), self._code.objects) if self._code and again else (self.executable, ())
        settings["on_load"] = tile_request() if TILES.intersection(self.cpu.features) else ""
        export_executable(executable, metadata, Path(path), size_bytes, objects, architectures, **settings)

    def _compile_sources(self, architectures: Sequence[str]) -> dict[str, Any]:
        """Machine code for what is CUDA source yet, as settings of `export_executable`; `report` says how it went."""
        if not self._sources("cuda") or cuda_is_loaded():
            return {}
        if not architectures:
            code = self.report.device_code
            self.report = replace(self.report, device_code=code and DeviceCode(language=code.language))
            return {}
        from tvm_ext.toolchains.cuda_export import export_sources

        known, code = export_sources(self._sources("cuda"), architectures)
        self.report = replace(self.report, device_code=code)
        return {"known": known}

    def profile(
        self,
        inputs: Mapping[str, Any] | None = None,
        device: tvm.runtime.Device | None = None,
        repeat: int = 5,
        store: TrialStore | None = None,
    ) -> BuildReport:
        """Measure each operator (median over ``repeat`` runs of its mean over calls), schedules and the whole model.

        ``inputs``, by name, are random (seeded) where left out. Returns the report with the times in, which
        replaces `report`. A ``store`` (`autotune.store.MeasurementStore.for_build`) keeps the times of rTasks, by
        which later builds schedule them.
        """
        module = GraphModule(self, device)
        module.run(**(random_inputs(self.inputs) if inputs is None else inputs))  # a warm-up: pages, thread pool
        runs = [_profile_once(module.vm, self.entry, module.arguments()) for _ in range(repeat)]
        means = [_means(run) for run in runs]
        seconds = {name: statistics.median(run[name] for run in means) for name in means[0]}
        spread = {name: (min(run[name] for run in means), max(run[name] for run in means)) for name in means[0]}
        usual = sorted(runs, key=lambda run: sum(call.seconds for call in run))[len(runs) // 2]
        whole = module.benchmark(number=1, repeat=repeat)
        schedules = self._measured_schedules(module.run, repeat)
        timeline = timed_calls(self.report.sites, usual)
        self.report = self.report.with_measurements(seconds, float(whole.median), schedules, spread, timeline)
        if store is not None and self.report.rammer is not None:
            store.add(measurements_of(self.report.rammer))
        return self.report

    def _measured_schedules(self, run: Callable[[], object], repeat: int) -> dict[str, MeasuredRun]:
        if self.report.rammer is None:
            return {}
        symbols = [region.symbol for region in self.report.rammer.scheduled]
        return measured_runs(_modules(getattr(self.executable, "mod", self.executable)), symbols, run, repeat)


def metadata_of(module: tvm.runtime.Module) -> str:
    """What an exported module says of itself; raises ExportError for a foreign one."""
    function = module.get_function(METADATA_FUNCTION, query_imports=True) if _has_metadata(module) else None
    if function is None:
        raise ExportError(
            "this module was not exported by tvm_ext: it carries no description of its inputs.",
            "use tvm.relax.VirtualMachine for it, or export it with tvm_ext's export_library",
        )
    return str(function())


def load_module(path: str | Path) -> tuple[tvm.runtime.Module, tuple[Path, str]]:
    """The module in a file that `Library.export_library` wrote, and the file with its digest; errors as of `load`."""
    path = Path(path)
    if not path.is_file():
        raise ExportError(f"there is no file {path}.", "check the path")
    native.is_available()  # loads what runs schedules, which the library may hold
    try:
        with private_copy(path) as copy, without_lines(CONSTANT_SCOPES), own_cuda_compiler():
            digest = check_library(copy, path)
            module = _open(copy, path)
    except TvmExtError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ExportError(f"{path} cannot be loaded: {reason}", "export it again, with the same TVM") from error
    return module, (path.absolute(), digest)


def _open(copy: Path, path: Path) -> Module:
    """The module in the ``copy`` of ``path``. TVM's runtime for CUDA is loaded when it turns out to be needed."""
    try:
        return load_copy(copy)
    except RuntimeError as error:
        if CUDA_LOADER not in str(error):
            raise RuntimeError(str(error).replace(str(copy), str(path))) from error
    load_cuda_runtime(f"{path} holds CUDA kernels: ")
    return load_copy(copy)


def random_inputs(specs: Sequence[TensorSpec], seed: int = 0) -> dict[str, Array]:
    """Seeded random values by input name: normal for floats; 0 and 1, always valid indices, for integers."""
    generator = np.random.default_rng(seed)
    return {spec.name: _random(generator, spec) for spec in specs}


def _random(generator: np.random.Generator, spec: TensorSpec) -> Array:
    if spec.shape is None or any(isinstance(size, str) for size in spec.shape):
        raise InputError(f"input {spec} has dimensions that are only known at run time.", "pass a value for it")
    shape = tuple(int(size) for size in spec.shape)
    if "float" in spec.dtype:
        return generator.standard_normal(shape).astype(np.dtype(spec.dtype))
    return generator.integers(0, 2, shape).astype(spec.dtype)


def _modules(module: tvm.runtime.Module) -> list[tvm.runtime.Module]:
    """``module`` and what it imports, and so on."""
    return [module, *(inner for imported in module.imports for inner in _modules(imported))]


def _has_metadata(module: tvm.runtime.Module) -> bool:
    return bool(module.implements_function(METADATA_FUNCTION, query_imports=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _TimedFunction:
    """A call of a function by the VirtualMachine, in seconds since the first."""

    name: str
    start_s: float
    seconds: float


def _profile_once(vm: ThreadSafeMachine, entry: str, arguments: Sequence[Any]) -> list[_TimedFunction]:
    """Every call of a function in one run of ``entry``."""
    found: list[_TimedFunction] = []
    begin, start = time.perf_counter(), [0.0]

    def instrument(_function: Any, name: str, before: bool, _result: Any, *_arguments: Any) -> int:
        if before:
            start[0] = time.perf_counter()
        else:
            seconds = time.perf_counter() - start[0]
            found.append(_TimedFunction(name=name, start_s=start[0] - begin, seconds=seconds))
        return 0  # VMInstrumentReturnKind.NO_OP

    vm.set_instrument(instrument)
    vm[entry](*arguments)
    vm.set_instrument(lambda *_: 0)
    return found


def _means(run: Sequence[_TimedFunction]) -> dict[str, float]:
    """Mean seconds per call of every function."""
    seconds: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for call in run:
        seconds[call.name].append(call.seconds)
    return {name: statistics.mean(times) for name, times in seconds.items()}


def timed_calls(sites: Sequence[CallSite], run: Sequence[_TimedFunction]) -> list[TimedCall]:
    """The calls of kernels in ``run`` at their sites: the VirtualMachine calls a kernel's sites in their order."""
    places: dict[str, list[int]] = {}
    for place, site in enumerate(sites):
        places.setdefault(site.function, []).append(place)
    turns: collections.Counter[str] = collections.Counter()
    found = []
    for call in run:
        if call.name in places:
            place = places[call.name][turns[call.name] % len(places[call.name])]
            turns[call.name] += 1
            found.append(TimedCall(site=place, start_s=call.start_s, seconds=call.seconds))
    return found
