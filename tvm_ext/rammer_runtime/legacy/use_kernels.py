"""Kernels that a user hands to a build (Rammer, paper §4.1.4): each becomes its operator's function, like any other's.

Behind fusion, which names operators, and before construction, which leaves scheduled functions alone. A CUDA function
is called from a launch of its threads, its text with it; `SplitLaunches` makes rTasks of that launch as of any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from tvm_ext._tvm import (
    ALREADY_SCHEDULED,
    BufferStore,
    Expr,
    For,
    ForKind,
    IRModule,
    PassContext,
    PrimFunc,
    Stmt,
    Target,
    copy_module,
    module_pass,
    nodes_in,
    tirx,
)
from tvm_ext.analysis.computation_exprs import tensor_bytes
from tvm_ext.analysis.computations import dtype_of, substitute
from tvm_ext.analysis.launches import lower
from tvm_ext.analysis.predicates import unbounded_reduction
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite, InputError, suggestion
from tvm_ext.ir.build_ir import allocate, index, sequence
from tvm_ext.ir.simt_ir import launch
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.serialise import to_json

from .convert import ConvertedKernel, Extents, call_task, convert_kernel
from .shared_memory import POOL_ALIGNMENT

_GRID_LIMITS = (2**31 - 1, 65535, 65535)  # CUDA's, of every compute capability since 3.0

_C_TYPES = {
    "float32": ("float",), "float64": ("double",), "float16": ("half", "__half"),
    "bfloat16": ("nv_bfloat16", "__nv_bfloat16"), "bool": ("bool", "signed char"),
    "int8": ("signed char", "int8_t", "char"), "uint8": ("unsigned char", "uint8_t", "uchar"),
    "int16": ("short", "int16_t"), "uint16": ("unsigned short", "uint16_t", "ushort"), "int32": ("int", "int32_t"),
    "uint32": ("unsigned int", "unsigned", "uint32_t", "uint"), "int64": ("int64_t", "long long", "long"),
    "uint64": ("uint64_t", "unsigned long long", "unsigned long"),
}  # fmt: skip
"""What C++ may call elements of each type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyKernel:
    """A ``__global__`` function of CUDA text, and the one launch by which it computes an operator.

    * ``source``, ``function``: the text, and the function's name in it.
    * ``grid``, ``block``: blocks of the launch, and threads of a block: (x, y, z).
    * ``shapes``: of the operator's tensors that it was written for, inputs first, then outputs: what `relay.operators`
      shows.
    * ``order``: the operator's tensor that each pointer parameter takes, by number; None: in the operator's order.
    * ``numbers``: the value of each parameter that is no pointer, by name.
    * ``dynamic_shared_bytes``, ``shared_bytes``, ``whole_warps_return``: as of `convert.convert_kernel`.
    * ``time_us``: what a launch takes by your measurement, for the simulator; None: as long as it takes to move its
      tensors once.
    """

    source: str
    function: str
    grid: Extents
    block: Extents
    shapes: Sequence[Sequence[int]]
    order: Sequence[int] | None = None
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    dynamic_shared_bytes: int = 0
    shared_bytes: int | None = None
    whole_warps_return: bool = False
    time_us: float | None = None


GivenKernels = Mapping[str, LegacyKernel | PrimFunc]
"""Kernels by the names of operators: CUDA text with its launch, or a scheduled or thread-bound TensorIR function."""


@module_pass(opt_level=0, name="tvm_ext.UseLegacyKernels")
class UseLegacyKernels:
    """Replace operators of the module by the kernels that were given for them; every call of one runs it.

    Raises InputError for a name that is no operator's, a kernel whose tensors, types or launch do not fit, and for
    what has no meaning in a persistent kernel (`refusals`), naming the operator.
    """

    def __init__(self, kernels: GivenKernels, device: DeviceSpec) -> None:
        self.kernels, self.device = kernels, device

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        operators = {gv.name_hint: gv for gv, func in mod.functions_items() if isinstance(func, PrimFunc)}
        for name, kernel in self.kernels.items():
            if name not in operators:
                raise InputError(f"kernels= names {name!r}, which is no operator", suggestion(name, operators))
            result[operators[name]] = self._kernel(name, mod[operators[name]], kernel)
        return result

    def _kernel(self, name: str, operator: PrimFunc, kernel: LegacyKernel | PrimFunc) -> PrimFunc:
        if isinstance(kernel, LegacyKernel):
            if self.device.kind != "cuda":
                raise InputError(f"operator {name}: CUDA text for {self.device.name}", "give a TensorIR function")
            body, note = _cuda_body(name, operator, kernel, self.device), f"CUDA function {kernel.function}"
        elif isinstance(kernel, PrimFunc) and self.device.kind != "cpu":
            body, note = _tir_body(name, operator, kernel), "a TensorIR function"
        else:
            what = f"operator {name}: a {type(kernel).__name__} as its kernel on {self.device.name}"
            raise InputError(what, "on GPUs, a LegacyKernel or a PrimFunc; CPUs have constructed kernels alone")
        time_us = kernel.time_us if isinstance(kernel, LegacyKernel) else None
        choice = KernelChoice(
            operator=name,
            path="legacy",
            notes=(f"given by kernels=: {note}",),
            device=self.device.name,
            bytes=sum(map(tensor_bytes, operator.params)),
            expected_s=None if time_us is None else time_us * 1e-6,
        )
        attributes = {CHOICE: to_json(choice), ALREADY_SCHEDULED: True, "tirx.noalias": True, "s_tir": True}
        func = PrimFunc(list(operator.params), body).with_attrs({"global_symbol": name, **attributes})
        _check_launches(name, func, self.device)
        return func


def _shape(tensor: Expr) -> tuple[int, ...]:
    """Of a parameter; IllegalRewrite where it is known at run time only."""
    if any(not hasattr(size, "value") for size in tensor.ty.shape):
        raise IllegalRewrite(f"the shape of {tensor.name} is only known at run time")
    return tuple(int(size) for size in tensor.ty.shape)


def _said(operator: PrimFunc) -> str:
    """The operator's tensors, for an error."""
    return ", ".join(f"{param.name}: {dtype_of(param)}{list(_shape(param))}" for param in operator.params)


def _check_shapes(name: str, operator: PrimFunc, shapes: Sequence[Sequence[int]]) -> None:
    try:
        wanted = [_shape(param) for param in operator.params]
    except IllegalRewrite as refusal:
        raise InputError(f"operator {name}: {refusal.problem}", "kernels= is for shapes that are known") from refusal
    if [tuple(shape) for shape in shapes] != wanted:
        given = ", ".join(str(list(shape)) for shape in shapes)
        raise InputError(f"operator {name}: the kernel is for tensors {given}", f"it has ({_said(operator)})")


# --- TensorIR ---------------------------------------------------------------------------------------------------------
def _tir_body(name: str, operator: PrimFunc, kernel: PrimFunc) -> Stmt:
    """The body of ``kernel`` over the operator's own parameters."""
    _check_shapes(name, operator, [_shape(param) for param in kernel.params])
    for own, given in zip(operator.params, kernel.params, strict=True):
        if dtype_of(own) != dtype_of(given):
            raise InputError(f"operator {name}: {given.name} is {dtype_of(given)}", f"it has ({_said(operator)})")
    if not any(loop.kind == ForKind.THREAD_BINDING for loop in nodes_in(kernel.body, For)):
        what = f"operator {name}: the TensorIR function given for it has no loop that is bound to threads"
        raise InputError(what, "schedule it, as by tvm.s_tir.dlight")
    beyond = unbounded_reduction(kernel)
    if beyond:
        what = f"operator {name}: block {beyond} of the TensorIR function given for it would store beyond its tensor"
        raise InputError(what, "reduce across threads where no condition bounds the results: stock TVM forgets it")
    return substitute(kernel.body, list(zip(kernel.params, operator.params, strict=True)))


def _check_launches(name: str, func: PrimFunc, device: DeviceSpec) -> None:
    """Raise InputError for a launch that the device cannot run."""
    try:
        launches = lower(func.with_attr("global_symbol", "main"), Target.current())
    except InputError as error:
        raise InputError(f"operator {name}: {error.problem}", error.remedy) from error
    for extents in (item.extents for item in launches):
        threads = prod(size for tag, size in extents.items() if tag.startswith("threadIdx"))
        if threads > 1024:
            raise InputError(f"operator {name}: a block of {threads} threads on {device.name}", "1024 at most")


# --- CUDA text --------------------------------------------------------------------------------------------------------
def _cuda_body(name: str, operator: PrimFunc, kernel: LegacyKernel, device: DeviceSpec) -> Stmt:
    """A launch whose blocks are the rTasks of ``kernel``, converted."""
    _check_shapes(name, operator, kernel.shapes)
    if any(size > limit for size, limit in zip(kernel.grid, _GRID_LIMITS, strict=True)):
        raise InputError(f"operator {name}: a grid of {kernel.grid} blocks", f"{_GRID_LIMITS} at most")
    plain = _converted(name, kernel, ())
    places = _places(name, operator, kernel, plain)
    written = _written(operator)
    reads = [parameter for parameter, place in places.items() if place not in written]
    converted = _converted(name, kernel, reads)
    limit = shared_limit_bytes(device)
    if converted.shared_bytes > limit:
        what = f"operator {name}: {kernel.function} takes {converted.shared_bytes} bytes of shared memory a block"
        raise InputError(what, f"{device.name} has {limit}")
    values = [_argument(name, kernel, operator, places, *parameter) for parameter in converted.parameters]
    scope = "shared" if converted.shared_bytes <= static_shared_bytes(device) else "shared.dyn"
    size = [index(max(1, converted.shared_bytes))]
    pool = tirx.decl_buffer(size, "uint8", "legacy_pool", scope=scope, data_alignment=POOL_ALIGNMENT)

    def body(block: Expr, thread: Expr) -> Stmt:
        if not converted.shared_bytes:
            return call_task(converted, values, block, thread, tirx.IntImm("int32", 0))
        # An access pointer, of which TVM knows that all of the pool is used: an element's address would leave one.
        return sequence(allocate(pool), call_task(converted, values, block, thread, pool.access_ptr("rw")))

    return launch(converted.task_count, converted.meeting, body)


def _converted(name: str, kernel: LegacyKernel, reads: Sequence[str]) -> ConvertedKernel:
    try:
        return convert_kernel(
            kernel.source,
            kernel.function,
            grid=kernel.grid,
            block=kernel.block,
            dynamic_shared_bytes=kernel.dynamic_shared_bytes,
            shared_bytes=kernel.shared_bytes,
            whole_warps_return=kernel.whole_warps_return,
            reads=reads,
        )
    except InputError as error:
        raise InputError(f"operator {name}: {error.problem}", error.remedy) from error


def _places(name: str, operator: PrimFunc, kernel: LegacyKernel, converted: ConvertedKernel) -> dict[str, int]:
    """The operator's tensor of each pointer parameter."""
    pointers = [(kind, parameter) for kind, parameter in converted.parameters if "*" in kind]
    order = list(range(len(operator.params))) if kernel.order is None else list(kernel.order)
    if len(order) != len(pointers) or sorted(order) != list(range(len(operator.params))):
        what = f"operator {name}: {kernel.function} takes {len(pointers)} pointers"
        what += "" if kernel.order is None else f", in the order {order}"
        raise InputError(what, f"it has {len(operator.params)} tensors: {_said(operator)}")
    for (kind, parameter), place in zip(pointers, order, strict=True):
        dtype, element = dtype_of(operator.params[place]), _element(kind.replace("*", ""))
        if kind.count("*") != 1 or element not in _C_TYPES.get(dtype, ()):
            what = f"operator {name}: parameter {kind} {parameter} of {kernel.function} for a tensor of {dtype}"
            raise InputError(what, f"a pointer to {' or '.join(_C_TYPES.get(dtype, (dtype,)))}")
    return {parameter: place for (_, parameter), place in zip(pointers, order, strict=True)}


def _element(kind: str) -> str:
    return " ".join(word for word in kind.split() if word not in ("const", "volatile"))


def _written(operator: PrimFunc) -> set[int]:
    """Numbers of the parameters that the operator stores to."""
    stored = {hash(store.buffer) for store in nodes_in(operator.body, BufferStore)}
    return {place for place, param in enumerate(operator.params) if hash(param) in stored}


def _argument(
    name: str, kernel: LegacyKernel, operator: PrimFunc, places: Mapping[str, int], kind: str, parameter: str
) -> Expr:
    if parameter in places:
        tensor = operator.params[places[parameter]]
        return tirx.address_of(tirx.BufferLoad(tensor, [index(0)] * len(tensor.ty.shape)))
    dtype = next((dtype for dtype, names in _C_TYPES.items() if _element(kind) in names), None)
    if dtype is None or parameter not in kernel.numbers:
        what = f"operator {name}: parameter {kind} {parameter} of {kernel.function} has no value"
        raise InputError(what, f"pass numbers={{{parameter!r}: ...}}; a number of C++, a class is none")
    return tirx.const(kernel.numbers[parameter], dtype)
