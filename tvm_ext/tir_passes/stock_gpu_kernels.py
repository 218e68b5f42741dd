"""The pass that leaves GPU kernels to stock TVM's schedules."""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, copy_module, module_pass
from tvm_ext.devices.hal import DeviceSpec

from .emit.schedule_stock_gpu import schedule_by_stock
from .plan.form import unscheduled, with_choice


@module_pass(opt_level=0, name="tvm_ext.StockGpuKernels")
class StockGpuKernels:
    """Schedule every unscheduled PrimFunc by stock TVM's dlight: what ``enable_roller=False`` means on a GPU."""

    def __init__(self, device: DeviceSpec) -> None:
        self.device = device

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in unscheduled(mod):
            result[gv] = with_choice(*schedule_by_stock(func, gv.name_hint, self.device, "enable_roller=False"))
        return result
