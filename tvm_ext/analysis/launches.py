"""From a scheduled or thread-bound PrimFunc to the device functions that stock TVM generates code from."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm_ext._tvm import (
    Analyzer,
    Buffer,
    Call,
    Expr,
    For,
    ForKind,
    IRModule,
    Node,
    PassContext,
    PassInfo,
    PassInstrument,
    PrimFunc,
    Sequential,
    Stmt,
    Target,
    Var,
    finalize_device_passes,
    pass_instrument,
    s_tir,
    split_host_device_mods,
    tir_pipelines,
    tirx,
)
from tvm_ext.devices.capabilities import ASYNC_COPIES_SINCE, has
from tvm_ext.devices.device_db import TargetLike, device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError
from tvm_ext.records.merged import MERGED

from .computation_exprs import itemsize_bytes
from .computations import substitute
from .device_code import constant_int, op_name, pointer_variable, split_dtype, thread_extents

ASYNC_COPY = "tirx.use_async_copy"
"""The PassContext option by which stock TVM makes cp.async of copies that are marked so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """A buffer in global memory: an argument of the function, or a workspace between its kernels."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * int(itemsize_bytes(self.dtype))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceKernel:
    """One launch: ``function`` is what code generation gets, ``arguments`` name the tensors of its first parameters.

    Further parameters are numbers that the host hands over; in the body stand their values at this launch.
    ``tensors`` are all tensors of the whole PrimFunc (the same for each of its kernels); those in ``workspaces`` live
    between its kernels only. ``extents`` is the launch, thread tag to extent.
    """

    name: str
    function: PrimFunc
    arguments: tuple[str, ...]
    tensors: tuple[GlobalTensor, ...]
    workspaces: tuple[str, ...]
    extents: Mapping[str, int]


class AfterSplit:
    """Keeps the module as it is once host and device are separate functions, and the host still names its buffers."""

    def __init__(self) -> None:
        self.module: IRModule | None = None

    def instrument(self) -> PassInstrument:
        return pass_instrument("AfterSplit", None, self._keep)

    def _keep(self, module: IRModule, info: PassInfo) -> None:
        if str(info.name) == "tirx.SplitHostDevice":
            self.module = module


def lower(
    function: PrimFunc | IRModule, target: TargetLike | DeviceSpec, *, config: Mapping[str, Any] | None = None
) -> tuple[DeviceKernel, ...]:
    """The kernels of ``function`` in the order of their launches, as stock TVM lowers them.

    * ``function``: a PrimFunc with thread bindings (a schedule's, or plain thread-bound loops), or a module with one.
    * ``target``: a stock target with or without a device row (``"cuda"``, a dict), a device's name, or a `DeviceSpec`.
    * ``config``: options of the PassContext besides the current ones; cp.async is on by default where the device has
      it.

    Raises InputError where the module has several functions, or its host code does more than launch kernels in order.
    """
    resolved, device = _target(target)
    module = _module(function)
    options = {**dict(PassContext.current().config), **(config or {})}
    options.pop("testing.immutable_module", None)  # stock TVM's own passes write to what the one before made
    if device is not None and has(device, ASYNC_COPIES_SINCE):
        options.setdefault(ASYNC_COPY, True)
    capture = AfterSplit()
    with resolved, PassContext(config=options, instruments=[capture.instrument()]):
        bound = tirx.transform.BindTarget(resolved.with_host(Target("llvm")))(module)
        pipeline, _, _ = tir_pipelines()["s_tir"]()
        if all(is_merged(func) for _, func in bound.functions_items()):
            pipeline = lower_merged
        _, devices = split_host_device_mods(pipeline(bound))
        kernels = [kernel for part in devices.values() for kernel in finalize_device_passes()(part).functions.items()]
    return _launches(capture.module, {str(gv.name_hint): kernel for gv, kernel in kernels})


def _target(target: TargetLike | DeviceSpec) -> tuple[Target, DeviceSpec | None]:
    if isinstance(target, DeviceSpec):
        target = target.name
    device, resolved = device_for_target(target)
    return resolved, device


def _module(function: PrimFunc | IRModule) -> IRModule:
    if isinstance(function, PrimFunc):
        return IRModule({"main": function.with_attr("global_symbol", "main")})
    count = len(function.functions)
    if count != 1:
        raise InputError(f"the module has {count} functions, the interpreter runs one", "pass the PrimFunc itself")
    return function


def _launches(module: IRModule, kernels: Mapping[str, PrimFunc]) -> tuple[DeviceKernel, ...]:
    (host,) = (f for gv, f in module.functions.items() if str(gv.name_hint) not in kernels)
    reader = _HostReader(host, kernels)
    return tuple(
        DeviceKernel(
            name=name,
            function=function,
            arguments=arguments,
            tensors=tuple(reader.tensors.values()),
            workspaces=tuple(reader.workspaces),
            extents=thread_extents(function),
        )
        for name, function, arguments in reader.launches
    )


def own_name(name: str, taken: Container[str]) -> str:
    """``name``, with as many underscores behind it as keep it apart from ``taken``: parameters may share a name."""
    while name in taken:
        name += "_"
    return name


class _HostReader:
    """Reads a host function that allocates workspaces and launches kernels, and does nothing else.

    Loops and conditions around launches are followed, as their numbers are constants. Stock TVM's sort is of that kind:
    it merges longer and longer runs, a launch for each length. A tensor's first element is where its memory begins.
    """

    def __init__(self, host: PrimFunc, kernels: Mapping[str, PrimFunc]) -> None:
        self.tensors: dict[str, GlobalTensor] = {}
        self.workspaces: list[str] = []
        self.launches: list[tuple[str, PrimFunc, tuple[str, ...]]] = []
        self._kernels = kernels
        self._names: dict[int, str] = {}
        self._kept: list[Node] = []
        self._numbers: list[tuple[Var, Expr]] = []
        for parameter in host.params:
            self._add(parameter)
            offset = parameter.ty.elem_offset
            if isinstance(offset, Var):
                self._numbers.append((offset, tirx.IntImm(str(offset.ty.dtype), 0)))
        self._read(host.body)

    def _add(self, buffer: Buffer) -> str:
        name = own_name(str(buffer.name), self.tensors)
        shape = [constant_int(size, f"the shape of {name}") for size in buffer.ty.shape]
        dtype, lanes = split_dtype(str(buffer.ty.dtype))
        if lanes > 1:  # stock TVM retypes a workspace that is accessed by vectors alone: float32x4[16] is float32[64]
            shape[-1] *= lanes
        self.tensors[name] = GlobalTensor(name=name, shape=tuple(shape), dtype=dtype)
        self._name(buffer, name)
        return name

    def _name(self, variable: Var, name: str) -> None:
        self._names[hash(variable)] = name
        self._kept.append(variable)

    def _read(self, statement: Stmt) -> None:
        kind = type(statement).__name__
        if kind == "SeqStmt":
            for part in statement.seq:
                self._read(part)
        elif kind == "AttrStmt":
            self._read(statement.body)
        elif kind == "AllocBuffer":
            self.workspaces.append(self._add(statement.buffer))
        elif kind == "DeclBuffer":
            self._name(statement.buffer, self._names[hash(pointer_variable(statement.data))])
        elif kind == "Bind":
            self._numbers.append((statement.var, self._number(statement.value)))
        elif kind == "IfThenElse" and (branch := self._branch(statement)) is not None:
            self._read(branch)
        elif kind == "For" and statement.kind == ForKind.SERIAL:
            self._repeat(statement)
        elif kind == "Evaluate":
            self._launch(statement.value)
        elif kind != "IfThenElse":
            raise InputError(
                f"the host code has a {kind} around its launches: {str(statement)[:200]}",
                "a function whose kernels are launched in an order that is known",
            )

    def _number(self, expr: Expr) -> Expr:
        return Analyzer().simplify(substitute(expr, self._numbers))

    def _branch(self, statement: Stmt) -> Stmt | None:
        condition = self._number(statement.condition)
        return statement.then_case if constant_int(condition, "a condition of the host") else statement.else_case

    def _repeat(self, loop: For) -> None:
        first, count = (constant_int(self._number(end), "a loop of the host") for end in (loop.min, loop.extent))
        outside = self._numbers
        for turn in range(first, first + count):
            self._numbers = [*outside, (loop.loop_var, tirx.IntImm(str(loop.loop_var.ty.dtype), turn))]
            self._read(loop.body)
        self._numbers = outside

    def _launch(self, call: Call) -> None:
        if type(call).__name__ != "Call" or op_name(call) not in ("tirx.call_ffi_kernel", "tirx.call_kernel"):
            return
        name = str(call.args[0].value)
        arguments: list[str] = []
        numbers: list[tuple[Var, Expr]] = []
        for parameter, argument in zip(self._kernels[name].params, call.args[1:], strict=False):
            if hasattr(parameter.ty, "element_type"):
                arguments.append(self._names[hash(pointer_variable(argument))])
            else:
                numbers.append((parameter, self._number(argument)))
        self.launches.append((name, _with_numbers(self._kernels[name], numbers), tuple(arguments)))


def _with_numbers(kernel: PrimFunc, numbers: Sequence[tuple[Var, Expr]]) -> PrimFunc:
    if not numbers:
        return kernel
    module = IRModule({"main": kernel.with_body(substitute(kernel.body, numbers))})
    return tirx.transform.StmtSimplify()(module)["main"]


def is_merged(func: Node) -> bool:
    """Whether ``func`` is a PrimFunc that was merged of lowered ones, see `MERGED`."""
    return isinstance(func, PrimFunc) and bool(func.attrs) and MERGED in func.attrs


def lower_merged(module: IRModule) -> IRModule:
    """What is left of stock TVM's pipeline for functions that were merged of lowered ones.

    No two pointers of theirs are said not to meet: what such a one (``__restrict__``) points to, no call changes that
    does not take it, so that its loads could be moved across a wait for another block.
    """
    passes = tirx.transform
    before = [
        passes.StmtSimplify(),
        passes.AnnotateEntryFunc(),
        s_tir.transform.MergeSharedMemoryAllocations(),
        passes.SplitHostDevice(),
    ]
    after = [passes.MakePackedAPI(), passes.FP8StorageLegalize(), passes.BF16StorageLegalize()]
    split = Sequential(before, name="tvm_ext.merged")(module)
    functions = {gv: func.without_attr("tirx.noalias") for gv, func in split.functions_items()}
    return Sequential(after, name="tvm_ext.merged")(IRModule(functions, attrs=split.attrs))
