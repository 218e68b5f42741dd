"""What a GPU kernel cannot do whatever its tiles: checked before construction, said with operator, shape and limit."""

from __future__ import annotations

from math import prod

from tvm_ext.analysis.computations import OperatorBody, dtype_of, static_shape
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import max_block_threads
from tvm_ext.errors import IllegalRewrite, TargetError

from .context import KernelContext

INDEX_LIMIT = 2**31
"""Elements that a signed 32-bit index can tell apart. GPUs compute addresses with 32 bits much faster than with 64."""

NARROW_TYPES = ("float16",)
"""Types that a GPU has arithmetic for or has not; bfloat16 is converted in software where hardware lacks it."""


def check_limits(context: KernelContext) -> None:
    """Raise TargetError where the device cannot run the operator; IllegalRewrite where stock TVM may try.

    Stock TVM may try what is too large if ``enable_roller="auto"``.
    """
    _check_types(context.operator, context.device)
    problem = index_limit_passed(context.operator)
    if problem is None:
        return
    if context.options.enable_roller == "auto":
        raise IllegalRewrite(problem)
    raise TargetError(problem, "use a smaller batch, or pass enable_roller='auto' to leave the operator to stock TVM")


def index_limit_passed(operator: OperatorBody) -> str | None:
    """Why a tensor of ``operator`` is too large for 32-bit indices, or None where none is."""
    for buffer in (*operator.params, *(computation.target for computation in operator.computations)):
        shape = static_shape(buffer)
        if prod(shape) > INDEX_LIMIT:
            return (
                f"operator {operator.name}: tensor {buffer.name} of shape {list(shape)} has {prod(shape)} elements, "
                f"more than the {INDEX_LIMIT} that the 32-bit indices of GPU kernels reach."
            )
    return None


def _check_types(operator: OperatorBody, device: DeviceSpec) -> None:
    """Raises TargetError where the device has no arithmetic for a type of the operator."""
    for buffer in operator.params:
        dtype = dtype_of(buffer)
        if dtype in NARROW_TYPES and device.peak_gflops_of(dtype) is None:
            raise TargetError(
                f"operator {operator.name}: tensor {buffer.name} of shape {list(static_shape(buffer))} is {dtype}, "
                f"which {device.name} has no arithmetic for.",
                f"build for a device that has (`tvm-ext devices`), or convert the model to float32 for {device.name}",
            )


def nothing_fits(operator: str, shape: tuple[int, ...], device: DeviceSpec) -> TargetError:
    """The error for an operator whose smallest tile does not fit the device."""
    layers = ", ".join(
        f"{layer.description} {layer.capacity_bytes} bytes" for layer in device.layers if layer.capacity_bytes
    )
    return TargetError(
        f"operator {operator}: no tile of its {list(shape)} loop nest fits {device.name} ({device.register_limit} "
        f"registers of a thread, {max_block_threads(device)} threads of a block, {layers}).",
        "build for a larger device (`tvm-ext devices`), or pass enable_roller='auto' to leave it to stock TVM",
    )
