"""Splits scheduled GPU kernels into rTasks (Rammer, §3.1): each launch an rOperator, its threadblocks the rTasks.

A kernel is lowered here as code generation would lower it, up to device functions: behind stock TVM's ThreadSync, since
bodies of several kernels are put under conditions later, where it can place no barriers any more. Such a function, of
raw pointers, is the rKernel; launches of equal structure share it. What its threads, registers and shared memory are is
known before anything is scheduled. What passes between launches of one kernel is a buffer of the schedule.
"""

from __future__ import annotations

from math import prod

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, Target, module_pass
from tvm_ext.analysis.computation_exprs import itemsize_bytes
from tvm_ext.analysis.computations import dtype_of
from tvm_ext.analysis.launches import ASYNC_COPY, DeviceKernel, lower
from tvm_ext.cost.gpu_rtasks import shortest_s, unplanned_registers
from tvm_ext.cost.virtual_device import virtual_device
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.machine import Machine
from tvm_ext.devices.occupancy import GLOBAL, max_thread_registers
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.ir.launch_writes import written_parameters
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.merged import UNIT_BYTES
from tvm_ext.records.rtask_split import RKERNEL, RTaskSplit, RTaskStep
from tvm_ext.records.rtasks import Need
from tvm_ext.records.serialise import record_of

from .emit.gpu_merged.relocate import check_movable, need_of
from .plan.rkernels import RKernels, check_parameters, with_splits


@module_pass(opt_level=0, name="tvm_ext.SplitLaunches")
class SplitLaunches:
    """Add the rKernels of every scheduled PrimFunc to the module, and tell the function by `RTASKS` of its split.

    The functions themselves stay as they are, for where they are called outside a schedule. Within a target's scope.
    """

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        return with_splits(mod, lambda func, name, kernels: split_launches(func, name, self.device, kernels))


def split_launches(func: PrimFunc, name: str, device: DeviceSpec, kernels: RKernels) -> RTaskSplit:
    """The launches of ``func``, whose rKernels are added to ``kernels``; or why they are none of rTasks."""
    count = len(func.params)
    try:
        if record_of(func, CHOICE, KernelChoice) is None:
            raise IllegalRewrite("a kernel that stock TVM brings scheduled")
        check_parameters(func)
        launches = _lowered(func)
        steps = tuple(
            _step(launch, f"{name}_launch{index}", func, device, kernels) for index, launch in enumerate(launches)
        )
    except (IllegalRewrite, InputError) as refusal:
        return RTaskSplit(param_count=count, refusal=str(refusal))
    if not steps:
        return RTaskSplit(param_count=count, refusal="it computes nothing")
    sizes = {tensor.name: tensor.size_bytes for tensor in launches[0].tensors}
    return RTaskSplit(
        param_count=count,
        steps=steps,
        workspaces=tuple(sizes[space] for space in launches[0].workspaces),
        time_s=_seconds(func, device),
        busy_s=_busy_seconds(func, device),
    )


def _lowered(func: PrimFunc) -> tuple[DeviceKernel, ...]:
    """The launches of ``func``, as a build under the current PassContext lowers them."""
    asynchronous = bool(PassContext.current().config.get(ASYNC_COPY, False))
    return lower(func.with_attr("global_symbol", "main"), Target.current(), config={ASYNC_COPY: asynchronous})


def _step(launch: DeviceKernel, name: str, func: PrimFunc, device: DeviceSpec, kernels: RKernels) -> RTaskStep:
    """A launch as a step, its parameters in the order of the function's."""
    numbers = {tensor.name: number for number, tensor in enumerate(launch.tensors)}
    order = sorted(range(len(launch.arguments)), key=lambda place: numbers[launch.arguments[place]])
    if len({launch.arguments[place] for place in order}) < len(order):
        raise IllegalRewrite("it takes a tensor twice")
    device_func = launch.function
    if len(device_func.params) > len(order):
        raise IllegalRewrite("it takes numbers that are only known at run time")
    kernel = PrimFunc([device_func.params[place] for place in order], device_func.body).with_attr(RKERNEL, True)
    check_movable(kernel)
    need = need_of(kernel)
    written = written_parameters(launch)
    needed = Need(threads=need.threads, registers=_registers(func, device), shared_bytes=need.shared_bytes)
    virtual_device(device, needed)  # raises where no unit has room for a block
    buffers = [numbers[launch.arguments[place]] for place in order]
    return RTaskStep(
        kernel=kernels.name_of(kernel, name),
        iterations=prod(need.grid),
        buffers=tuple(buffers),
        reads=tuple(buffers),  # of what is written, too: no order that would not be there else
        writes=tuple(buffer for buffer in buffers if launch.tensors[buffer].name in written),
        alignments=(UNIT_BYTES,) * len(buffers),
        operations=1.0,
        need=needed,
    )


def _registers(func: PrimFunc, device: DeviceSpec) -> int:
    choice = record_of(func, CHOICE, KernelChoice)
    planned = [plan.register_count for plan in choice.gpu] if choice is not None else []
    most = max(planned, default=unplanned_registers(device))
    return min(most, max_thread_registers(device))  # what is planned beyond, the compiler moves to memory


def _seconds(func: PrimFunc, device: DeviceSpec) -> float:
    """The predicted time without the launch; of stock TVM's kernels, that of moving their tensors once."""
    choice, launch_s = record_of(func, CHOICE, KernelChoice), Machine(device).launch_s
    if choice is not None and choice.expected_s is not None:
        return max(choice.expected_s - launch_s, shortest_s(device))
    if choice is not None and choice.program is not None:
        return max(choice.program.prediction.time_s - launch_s, shortest_s(device))
    return max(_moving_seconds(func, device), shortest_s(device))


def _busy_seconds(func: PrimFunc, device: DeviceSpec) -> float:
    """How long the busiest resource of the device works for ``func``, by the model of its main launch."""
    choice = record_of(func, CHOICE, KernelChoice)
    if choice is None or choice.program is None:
        return _moving_seconds(func, device)
    return choice.program.work_s() / device.unit_count


def _moving_seconds(func: PrimFunc, device: DeviceSpec) -> float:
    moved = sum(itemsize_bytes(dtype_of(param)) * prod(map(int, param.ty.shape)) for param in func.params)
    return moved / Machine(device).rate(GLOBAL)
