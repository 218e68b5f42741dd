"""Machine code for a lowered module: kernel by kernel, on all cores, with the cache's code where it has some.

Stock `relax.build` hands all kernels to LLVM as one module, on one core, and leaves making machine code to the first
call. Here every kernel is an object file of its own, made by a thread (TVM releases Python's lock while it lowers and
while LLVM works), and one call of the linker joins them. Measured on two cores, processor time for ResNet-50: 5.5 s by
kernel, 6.2 s as one module; DenseNet-121 23.1 s and 24.1 s; linking takes 0.06 s and 0.14 s.

Kernels are compiled while others are still constructed (`Compiler.start`). Construction, which Python's lock keeps on
one core, is not divided among processes: they would have to send back
TensorIR, and reading ResNet-50's from JSON takes 0.59 s where constructing it takes 0.71 s; a worker also needs 0.9 s
to import TVM. For the same reason the cache keeps machine code and not TensorIR.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_ext._tvm import (
    CPU_PIPELINE,
    RKERNEL_PIPELINE,
    ROCM_PIPELINE,
    Executable,
    GlobalVar,
    IRModule,
    Module,
    PassContext,
    PrimFunc,
    Target,
    Tensor,
    relax,
    structural_equal,
    tvm,
    vm_generate,
    vm_link,
)
from tvm_ext.analysis.launches import is_merged
from tvm_ext.errors import ExportError
from tvm_ext.rammer_runtime.region_table import with_schedules
from tvm_ext.records.build_profile import CodeTimes
from tvm_ext.records.choice import CHOICE
from tvm_ext.records.rammer import RTASK_PLANS, SchedulePlan
from tvm_ext.records.rtask_split import RKERNEL
from tvm_ext.records.serialise import from_json
from tvm_ext.support.files import check_space, temporary_folder, write_objects
from tvm_ext.support.kernel_cache import (
    KERNEL_KEY,
    SEALED,
    CachedKernel,
    KernelCache,
    KernelRecord,
    kernel_key,
    params_of,
)
from tvm_ext.support.limited_process import worker_threads
from tvm_ext.support.shared_library import load_library
from tvm_ext.tir_passes.guard_indices import GuardIndices

from . import host_compiler

OBJECT_BYTES = 4 << 20  # ample for a kernel: the largest of DenseNet-121's take 60 kB


class UnusableCodeError(Exception):
    """Kernels, from the cache or new, cannot be linked or loaded one by one: the module must be built as a whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedCode:
    """An executable, and what it takes to export it: objects of its kernels, and a way to link its bytecode anew."""

    executable: Executable
    times: CodeTimes = field(default_factory=CodeTimes)
    objects: tuple[bytes, ...] = ()
    link_again: Callable[[], Executable] | None = None  # None: the executable itself can be exported


@dataclass(frozen=True, slots=True)
class _Kernel:
    variable: GlobalVar
    func: PrimFunc
    symbol: str
    key: str


@dataclass(frozen=True, slots=True)
class _Compiled:
    code: bytes
    lowering_s: float
    objects_s: float


def can_link() -> bool:
    """Whether this machine has the compiler that joins object files."""
    return tvm.support.cc.get_cc() is not None


class Compiler:
    """Makes kernels' machine code for ``target`` on ``threads`` threads; in the current PassContext where it is one.

    Entered, it has a folder for object files and a pool of threads.
    """

    def __init__(self, target: Target, threads: int) -> None:
        self.target, self.threads = target, threads
        self._stack = contextlib.ExitStack()
        self._started: dict[str, tuple[PrimFunc, Future[_Compiled]]] = {}

    def __enter__(self) -> Compiler:
        current = PassContext.current()
        settings = dict(current.config)
        level, disabled, required = current.opt_level, list(current.disabled_pass), list(current.required_pass)
        self._context = lambda: PassContext(
            opt_level=level, required_pass=required, disabled_pass=disabled, config=settings
        )
        return self

    def __exit__(self, *raised: Any) -> bool | None:
        return self._stack.__exit__(*raised)

    @functools.cached_property
    def _folder(self) -> Path:
        """Where kernels' object files are written, until the compiler is left."""
        try:
            return self._stack.enter_context(temporary_folder("kernels"))
        except OSError as error:
            raise UnusableCodeError(f"an object file cannot be written: {error}") from error

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return self._stack.enter_context(worker_threads(self.threads, "tvm_ext-compile"))

    def start(self, symbol: str, func: PrimFunc) -> None:
        """Compile ``func`` as ``symbol`` from now on: `generate` has the code where the kernel stays as it is."""
        if self.threads > 1:
            func = func.with_attr("global_symbol", symbol)
            self._started[symbol] = func, self._submit(_Kernel(GlobalVar(symbol), func, symbol, ""))

    def generate(
        self, lowered: IRModule, cache: KernelCache, context: str, progress: Callable[[str], None] | None = None
    ) -> GeneratedCode:
        """Compile and link ``lowered`` for the target, which must be a CPU that this process can run code of.

        Raises UnusableCodeError where linking fails or a kernel's cached code does not fit: the caller then has to
        construct again without the cache.
        """
        builder, kernels = vm_generate(lowered)
        pending, codes = _divide(kernels, cache, context)
        compiled, target = self._compile_all(pending, progress), self.target
        for kernel, result in compiled:
            codes[kernel.symbol] = result.code
            _keep(kernel, result.code, cache)
        start = time.perf_counter()
        objects = tuple(codes[symbol] for symbol in sorted(codes))
        library = _load(objects) if objects else _no_kernels(target)
        _check_defined(library, codes)
        times = CodeTimes(
            threads=min(self.threads, max(1, len(pending))),
            compiled=len(pending),
            lowering_s=sum(result.lowering_s for _, result in compiled),
            objects_s=sum(result.objects_s for _, result in compiled),
            link_s=time.perf_counter() - start,
        )
        plans = _plans(lowered)
        return GeneratedCode(
            executable=vm_link(builder, target, with_schedules(library, plans), _constants(lowered)),
            times=times,
            objects=objects,
            link_again=lambda: vm_link(
                vm_generate(lowered)[0], target, with_schedules(_no_kernels(target), plans), _constants(lowered)
            ),
        )

    def _compile_all(
        self, pending: Sequence[_Kernel], progress: Callable[[str], None] | None
    ) -> list[tuple[_Kernel, _Compiled]]:
        """Every kernel with its code. One thread, this one, where there is but one kernel or the context is watched."""
        results = []
        for kernel, result in self._each(pending):
            results.append((kernel, result))
            if progress is not None:
                progress(f"kernel {len(results)} of {len(pending)}: {kernel.symbol}")
        return results

    def _each(self, pending: Sequence[_Kernel]) -> Iterator[tuple[_Kernel, _Compiled]]:
        if self.threads == 1 or (len(pending) < 2 and not self._started):
            path = self._folder / "kernel.o"
            yield from ((kernel, _compile(kernel, self.target, contextlib.nullcontext, path)) for kernel in pending)
            return
        futures = {self._taken(kernel) or self._submit(kernel): kernel for kernel in pending}
        yield from ((futures[future], future.result()) for future in as_completed(futures))

    def _submit(self, kernel: _Kernel) -> Future[_Compiled]:
        handle, name = tempfile.mkstemp(".o", dir=self._folder)
        os.close(handle)
        return self._pool.submit(_compile, kernel, self.target, self._context, Path(name))

    def _taken(self, kernel: _Kernel) -> Future[_Compiled] | None:
        """What was started for ``kernel``, if that is what it became."""
        func, future = self._started.get(kernel.symbol, (None, None))
        return future if func is not None and structural_equal(func, kernel.func) else None


def generate_whole(lowered: IRModule, target: Target) -> GeneratedCode:
    """Stock TVM's way, for GPUs, for other machines' CPUs and where there is no linker."""
    plans = _plans(lowered)
    if plans:
        builder, kernels = vm_generate(lowered)
        library = tvm.tirx.build(kernels, target=target, pipeline=RKERNEL_PIPELINE)
        return GeneratedCode(executable=vm_link(builder, target, with_schedules(library, plans), _constants(lowered)))
    merged = any(is_merged(func) for _, func in lowered.functions_items())
    own = {"llvm": CPU_PIPELINE, "rocm": ROCM_PIPELINE}.get(str(target.kind.name), "default")
    pipeline = RKERNEL_PIPELINE if merged and own == "default" else own
    if pipeline == "default":  # which is stock TVM's; ours guard indices themselves
        lowered = tvm.transform.Sequential([GuardIndices()])(lowered)
    return GeneratedCode(executable=relax.build(lowered, target, relax_pipeline=None, tir_pipeline=pipeline))


def _plans(lowered: IRModule) -> list[SchedulePlan]:
    """The schedules that functions of ``lowered`` call by name."""
    texts = lowered.attrs.get(RTASK_PLANS, ()) if lowered.attrs else ()
    return [from_json(SchedulePlan, str(text)) for text in texts]


def _constants(lowered: IRModule) -> dict[str, Tensor]:
    attributes = dict(lowered.attrs) if lowered.attrs else {}
    return dict(attributes.get("const_name_to_constant", {}))


def _divide(kernels: IRModule, cache: KernelCache, context: str) -> tuple[list[_Kernel], dict[str, bytes]]:
    """The kernels that need compiling, the largest first, and the code of the others by symbol."""
    pending, codes = [], {}
    for variable, func in kernels.functions_items():
        symbol = str(func.attrs["global_symbol"])
        known = func.attrs.get(KERNEL_KEY)
        key = kernel_key(func, symbol, context) if known is None and cache.is_on else str(known)
        entry = cache.found.get(key) if known is not None else (cache.get(key) if cache.is_on else None)
        if entry is not None and entry.record.symbol == symbol:
            codes[symbol] = entry.code
        elif func.attrs.get(SEALED):
            raise UnusableCodeError(f"the code kept for kernel {symbol} bears another name")
        else:
            pending.append(_Kernel(variable, func, symbol, key))
    return pending, codes


def _compile(kernel: _Kernel, target: Target, context: Callable[[], Any], path: Path) -> _Compiled:
    start = time.thread_time()
    with context(), target:
        pipeline = RKERNEL_PIPELINE if kernel.func.attrs.get(RKERNEL) else CPU_PIPELINE
        module = tvm.tirx.build(tvm.IRModule({kernel.variable: kernel.func}), target=target, pipeline=pipeline)
    lowered = time.thread_time()
    code = _object_file(module, path)
    return _Compiled(code, lowered - start, time.thread_time() - lowered)


def _object_file(module: Module, path: Path) -> bytes:
    """The LLVM module's machine code. Room for it is made sure of first: on a full disk LLVM ends the process."""
    try:
        check_space(path.parent, OBJECT_BYTES)
        module.write_to_file(str(path), "o")
        code = path.read_bytes()
        path.unlink()
    except (OSError, ExportError) as error:
        problem = getattr(error, "problem", str(error))
        raise UnusableCodeError(f"an object file cannot be written: {problem}") from error
    return code


def _keep(kernel: _Kernel, code: bytes, cache: KernelCache) -> None:
    """Put the kernel's code into the cache, if the cache can describe the kernel."""
    params = () if kernel.func.attrs.get(RKERNEL) else params_of(kernel.func)  # an rKernel has no callers to check
    if not cache.is_on or params is None:
        return
    choice = str(kernel.func.attrs.get(CHOICE, ""))
    cache.put(kernel.key, CachedKernel(KernelRecord(symbol=kernel.symbol, choice=choice, params=params), code))


def _load(objects: tuple[bytes, ...]) -> Module:
    """The kernels as a module, loaded from a shared library whose file is gone by the time we return."""
    try:
        with temporary_folder("link") as folder:
            path = folder / "kernels.so"
            host_compiler.link_kernels(str(path), write_objects(objects, folder))
            return load_library(path)
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise UnusableCodeError(f"kernels cannot be linked: {reason[0]}") from error


def _check_defined(library: Module, symbols: Iterable[str]) -> None:
    """Raise UnusableCodeError where a kernel is missing, which a linker does not notice: an empty file links."""
    missing = [symbol for symbol in symbols if not library.implements_function(symbol)]
    if missing:
        raise UnusableCodeError(f"the code of kernel {missing[0]} does not define it")


def _no_kernels(target: Target) -> Module:
    """An LLVM module without functions: by it an exported library learns its target."""
    return tvm.tirx.build(tvm.IRModule({}), target=target, pipeline="default")
