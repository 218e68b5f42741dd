"""Runs the OpenCL code of TensorIR functions on this machine's CPU, through pyopencl and an OpenCL driver for CPUs.

The wheel of TVM has no OpenCL runtime, so that its host functions cannot launch anything; here they are read instead:
which kernels a function launches, in what order, with which buffers and sizes. The driver then compiles the very source
that a GPU's driver would get. Two come from PyPI: PoCL, and Intel's, which also serves AMD processors, among them those
that are younger than the LLVM 14 in PoCL's package; the first that compiles a trial kernel is taken.

What a pass proves: addresses, predicates, vector accesses and values of the generated code, and barriers that order a
write before a read. What it does not: a missing barrier at the end of a loop (PoCL separates the iterations of a loop
that holds a barrier by barriers of its own), limits of a GPU (CPU drivers take thousands of threads a block), the order
of asynchronous copies (they are plain ones here).

Every buffer lies between guards that are compared after each launch: what is written beyond one is a MemoryGuardError.

Needs ``pip install tvm-ext[opencl]``; `why_not` says what is missing.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tvm

from tvm_ext._tvm import (
    AllocBuffer,
    Buffer,
    Call,
    DeclBuffer,
    Expr,
    IRModule,
    PassContext,
    PrimFunc,
    Target,
    Var,
    structural_walk,
    tirx,
)
from tvm_ext.analysis.launches import AfterSplit
from tvm_ext.errors import CompileError, IllegalRewrite, UnsupportedEnvironmentError
from tvm_ext.support.arrays import Array
from tvm_ext.toolchains.tir_pipelines import enable_opencl_math
from tvm_ext.verify.threads_as_loops import check_inputs, poison

from .guarded_memory import MemoryGuardError

_DRIVERS_VARIABLE = "OCL_ICD_VENDORS"
"""Where OpenCL's loader looks for drivers."""

_REMEDY = "pip install tvm-ext[opencl]"
_INTEL_LIBRARIES = ("libintlc.so.5", "libirng.so", "libimf.so", "libsvml.so")
GUARD_BYTES = 4096
"""On each side of every buffer: a multiple of what OpenCL devices want buffers in buffers to begin at."""

GUARD_BYTE = 0xC3

_AXES = "xyz"
_TRIAL = "__kernel void trial(__global float* x) { x[get_global_id(0)] = 1.0f; }"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel launch: its name, what it is passed (indices of buffers), its grid and block in threads."""

    kernel: str
    buffers: tuple[int, ...]
    blocks: tuple[int, int, int]
    threads: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenClFunction:
    """A function as the OpenCL kernels that it launches in order.

    The first ``parameter_count`` buffers are the function's parameters, the others workspaces between the launches;
    ``shapes`` and ``dtypes`` are theirs.
    """

    name: str
    parameter_count: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    launches: tuple[Launch, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenClProgram:
    """OpenCL C for all functions of a module."""

    source: str
    functions: Mapping[str, OpenClFunction]


@cache
def find_device() -> Any:
    """The first OpenCL device here that compiles a trial kernel; raises UnsupportedEnvironmentError with reasons."""
    if importlib.util.find_spec("pyopencl") is None:
        raise UnsupportedEnvironmentError("OpenCL cannot be run here: pyopencl is missing.", _REMEDY)
    offer_intel_driver()
    import pyopencl

    problems = []
    try:
        platforms = pyopencl.get_platforms()
    except (pyopencl.Error, RuntimeError) as error:
        raise UnsupportedEnvironmentError(f"OpenCL cannot be run here: no driver ({error}).", _REMEDY) from error
    for device in (device for platform in platforms for device in platform.get_devices()):
        problem = _refusal(device)
        if problem is None:
            return device
        problems.append(f"{device.platform.name}: {problem}")
    raise UnsupportedEnvironmentError(f"OpenCL cannot be run here: {'; '.join(problems) or 'no device'}.", _REMEDY)


def _refusal(device: Any) -> str | None:
    """Why ``device`` cannot compile a trial kernel, or None where it can."""
    import pyopencl

    try:
        _build(pyopencl.Context([device]), _TRIAL)
    except (pyopencl.Error, RuntimeError) as error:
        return str(error).strip().splitlines()[-1]
    return None


def why_not() -> str | None:
    """None where OpenCL can be run here, else what is missing."""
    try:
        find_device()
    except UnsupportedEnvironmentError as error:
        return str(error)
    return None


def offer_intel_driver() -> None:
    """Make Intel's CPU driver, where its package is installed, one of the drivers that OpenCL's loader finds.

    Its ``.icd`` file names a folder of another installation, and its libraries expect those of its compiler on the
    library path: they are loaded beforehand. Without effect once pyopencl has been asked for platforms.
    """
    try:
        files = importlib.metadata.files("intel-opencl-rt") or []
    except importlib.metadata.PackageNotFoundError:
        return
    driver = next((Path(str(f.locate())).resolve() for f in files if f.name == "libintelocl.so"), None)
    if driver is None or not driver.exists():
        return
    try:
        for name in _INTEL_LIBRARIES:
            ctypes.CDLL(str(driver.parent / name), mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return  # without intel-cmplr-lib-rt the driver does not load; PoCL may serve
    folder = Path(tempfile.mkdtemp(prefix=f"tvm_ext-icd-{os.getpid()}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "intel.icd").write_text(f"{driver}\n", encoding="utf-8")
    os.environ.setdefault(_DRIVERS_VARIABLE, str(folder))  # unless the user chose a place


OFFSET = -1
"""In `Launch.buffers`: how far into its memory a tensor begins, as stock TVM's scatters ask; ours begin at 0."""


def compile_opencl(module: IRModule | PrimFunc) -> OpenClProgram:
    """The OpenCL of every function of ``module`` (an IRModule of thread-bound PrimFuncs, or one such function).

    Raises IllegalRewrite for a function that does more on the host than launch kernels of fixed sizes one by one.
    """
    enable_opencl_math()
    if isinstance(module, PrimFunc):
        module = tvm.IRModule({"main": module.with_attr("global_symbol", "main")})
    split = AfterSplit()
    context = PassContext.current()
    with PassContext(opt_level=context.opt_level, config=dict(context.config), instruments=[split.instrument()]):
        library = tvm.compile(module, target=Target({"kind": "opencl"}, {"kind": "llvm"}))
    assert split.module is not None
    hosts = {variable.name_hint: split.module[variable.name_hint] for variable, _ in module.functions_items()}
    return OpenClProgram(
        source="\n".join(str(imported.inspect_source()) for imported in library.mod.imports),
        functions=MappingProxyType({name: _read_host(name, host) for name, host in hosts.items()}),
    )


def _read_host(name: str, host: PrimFunc) -> OpenClFunction:
    """The launches of a host function: calls of ``tirx.call_ffi_kernel`` on the data of buffers.

    FlattenBuffer declares a flat view of each parameter: a call's ``A_1.data`` leads back to parameter ``A``.
    """
    buffers: list[Buffer] = list(host.params)
    views: list[tuple[Var, Expr]] = []
    calls: list[Call] = []
    structural_walk(
        host.body,
        [
            (AllocBuffer, lambda node: buffers.append(node.buffer)),
            (DeclBuffer, lambda node: views.append((node.buffer, node.data))),
            (Call, calls.append),
        ],
        order="pre",
    )

    def index_of(data: Expr) -> int:
        variable = data.args[0] if isinstance(data, Call) else data
        for position, buffer in enumerate(buffers):
            if buffer.same_as(variable):
                return position
        source = next((source for view, source in views if view.same_as(variable)), None)
        return OFFSET if source is None else index_of(source)

    def launch(call: Call) -> Launch:
        tags = [str(tag) for tag in call.attrs.launch_params]
        passed = list(call.args[1:])
        data, extents = passed[: len(passed) - len(tags)], passed[len(passed) - len(tags) :]
        if not all(isinstance(extent, tirx.IntImm) for extent in extents):
            raise IllegalRewrite(f"function {name} computes on the host how many threads a kernel has")
        sizes = {tag: int(extent) for tag, extent in zip(tags, extents, strict=True)}
        return Launch(
            kernel=str(call.args[0].value),
            buffers=tuple(map(index_of, data)),
            blocks=_triple(sizes, "blockIdx"),
            threads=_triple(sizes, "threadIdx"),
        )

    if not any(call.op.name == "tirx.call_ffi_kernel" for call in calls):
        raise IllegalRewrite(f"function {name} launches no kernel: it was not scheduled for a GPU")
    return OpenClFunction(
        name=name,
        parameter_count=len(host.params),
        shapes=tuple(map(_scalar_shape, buffers)),
        dtypes=tuple(_lanes(buffer)[0] for buffer in buffers),
        launches=tuple(launch(call) for call in calls if call.op.name == "tirx.call_ffi_kernel"),
    )


def _lanes(buffer: Buffer) -> tuple[str, int]:
    """The scalar type of a buffer's elements and how many make one: stock TVM calls some workspaces "float32x4"."""
    scalar, _, length = str(buffer.ty.dtype).partition("x")
    return scalar, int(length or 1)


def _scalar_shape(buffer: Buffer) -> tuple[int, ...]:
    if not all(isinstance(size, tirx.IntImm) for size in buffer.ty.shape):
        raise IllegalRewrite(f"the host computes the size of workspace {buffer.name}")
    shape, length = tuple(int(size) for size in buffer.ty.shape), _lanes(buffer)[1]
    return shape if length == 1 else (*shape, length)


def _triple(sizes: Mapping[str, int], kind: str) -> tuple[int, int, int]:
    x, y, z = (sizes.get(f"{kind}.{axis}", 1) for axis in _AXES)
    return x, y, z


def _build(context: Any, source: str) -> Any:
    """The compiled program. Drivers that print anything ("Device build done") are not worth a warning each time."""
    import pyopencl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyopencl.CompilerWarning)
        return pyopencl.Program(context, source).build(cache_dir=False)


class OpenClDevice:
    """The device with a queue, and one program's kernels.

    Raises UnsupportedEnvironmentError where there is no device, CompileError where its compiler refuses the program.
    """

    def __init__(self, program: OpenClProgram) -> None:
        device = find_device()
        import pyopencl

        self.program, self._cl = program, pyopencl
        self.context = pyopencl.Context([device])
        self.queue = pyopencl.CommandQueue(self.context)
        self._guarded: dict[int, Any] = {}  # what a buffer and its guards lie in, by the buffer's handle
        try:
            self._built = _build(self.context, program.source)
        except pyopencl.Error as error:
            problem = f"the OpenCL compiler refuses the kernels: {str(error).strip()}"
            raise CompileError(problem, "look at the program's `source`") from error

    def buffer(self, array: Array) -> Any:
        """A device buffer that holds a copy of ``array``, between guards that `call` looks at.

        OpenCL has no empty buffers: that of an empty array is the first byte of the guard behind.
        """
        content = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        guard = np.full(GUARD_BYTES, GUARD_BYTE, np.uint8)
        flags = self._cl.mem_flags.READ_WRITE | self._cl.mem_flags.COPY_HOST_PTR
        whole = self._cl.Buffer(self.context, flags, hostbuf=np.concatenate([guard, content, guard]))
        inner = whole.get_sub_region(GUARD_BYTES, max(1, content.size))
        self._guarded[inner.int_ptr] = whole
        return inner

    def read(self, buffer: Any, shape: Sequence[int], dtype: str) -> Array:
        result = np.empty(tuple(shape), dtype)
        if result.size:
            self._cl.enqueue_copy(self.queue, result, buffer)
        return result

    def call(self, name: str, buffers: Sequence[Any]) -> None:
        """Launch the kernels of function ``name`` on device ``buffers``, one for each parameter."""
        function = self.program.functions[name]
        assert len(buffers) == function.parameter_count, name
        spaces = [
            self.buffer(poison(shape, dtype))
            for shape, dtype in zip(function.shapes[len(buffers) :], function.dtypes[len(buffers) :], strict=True)
        ]
        everything = [*buffers, *spaces]
        for launch in function.launches:
            kernel = self._cl.Kernel(self._built, launch.kernel)
            grid = tuple(b * t for b, t in zip(launch.blocks, launch.threads, strict=True))
            given = [np.int64(0) if index == OFFSET else everything[index] for index in launch.buffers]
            kernel(self.queue, grid, launch.threads, *given)
            self._check_guards(launch, everything)

    def _check_guards(self, launch: Launch, buffers: Sequence[Any]) -> None:
        """Raises MemoryGuardError where ``launch`` wrote beyond one of its buffers."""
        self.queue.finish()
        guard = np.empty(GUARD_BYTES, np.uint8)
        for position in launch.buffers:
            whole = self._guarded[buffers[position].int_ptr]
            for offset, side in ((0, "before"), (whole.size - GUARD_BYTES, "behind")):
                self._cl.enqueue_copy(self.queue, guard, whole, src_offset=offset)
                if (guard != GUARD_BYTE).any():
                    raise MemoryGuardError(f"kernel {launch.kernel} writes {side} its buffer {position}.")


def run_opencl(func: PrimFunc, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a thread-bound ``func`` whose first parameters are ``inputs``; what they hold before is poison.

    Raises InputError where the inputs do not fit the parameters, UnsupportedEnvironmentError without a driver.
    """
    program = compile_opencl(func)
    (function,) = program.functions.values()
    check_inputs(function.name, function.shapes, function.dtypes, inputs)
    device = OpenClDevice(program)
    rest = range(len(inputs), function.parameter_count)
    arrays = [*inputs, *(poison(function.shapes[i], function.dtypes[i]) for i in rest)]
    buffers = [device.buffer(array) for array in arrays]
    device.call(function.name, buffers)
    return [device.read(buffers[i], function.shapes[i], function.dtypes[i]) for i in rest]
