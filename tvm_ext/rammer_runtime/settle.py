"""Whether a build can have schedules of rTasks."""

from __future__ import annotations

from dataclasses import replace

from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import OptionError
from tvm_ext.options import BuildOptions

from . import native


def with_schedules_settled(device: DeviceSpec, options: BuildOptions) -> BuildOptions:
    """``options`` without schedules that cannot be; raises OptionError where they were asked for."""
    if options.enable_rammer is False:
        return options
    reason, remedy = "", "pass 'auto', or leave it out"
    if device.kind not in ("cpu", "cuda", "rocm"):
        reason = f"is for CPUs, CUDA and ROCm, and {device.name} has none of them"
    elif device.clock_ghz is None:
        reason = f"needs to know how long rTasks take, and the device tables have no clock of {device.name}"
    elif device.kind == "cpu" and not native.is_available():
        reason, remedy = "needs the native runtime, which this installation lacks", "install from a wheel, on Linux"
    if reason and options.enable_rammer is True:
        raise OptionError(f"option 'enable_rammer' {reason}.", remedy)
    return replace(options, enable_rammer=False) if reason else options
