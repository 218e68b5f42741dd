"""The passes `AutoPipeline` (detect and plan) and `InjectPipelines` (transform and lower), for any GPU schedule.

mod = tvm.transform.Sequential([AutoPipeline("nvidia-a100"), InjectPipelines("nvidia-a100")])(mod)
library = tvm.compile(mod, target)
"""

from __future__ import annotations

from tvm_ext._tvm import IRModule, PassContext, PrimFunc, Target, copy_module, functions_of, module_pass
from tvm_ext.analysis.predicates import is_thread_bound
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.errors import InputError
from tvm_ext.records.choice import CHOICE, KernelChoice
from tvm_ext.records.pipelines import PIPELINE_PLAN, PipelinePlan
from tvm_ext.records.serialise import from_json, record_of, to_json

from .plan import PipeliningMode, Wishes
from .route import PIPELINED, inject_pipelines, plan_pipelines, recorded


@module_pass(opt_level=0, name="tvm_ext.AutoPipeline")
class AutoPipeline:
    """Find what can be loaded ahead of its use in every GPU function, and choose how far (ALCOP §2, §4).

    The plan becomes attribute ``tvm_ext.pipeline_plan``; bodies stay as they are. CPU functions, functions that have a
    plan and kernels that somebody has pipelined already are left alone.

    * ``device``: a device's name, a target, a `DeviceSpec`; None: the function's ``target`` attribute or the current
      target.
    * ``mode``: ``"full"``; ``"multistage"`` without registers; ``"double"`` with two versions of shared memory only;
      ``"none"``: the ablations of §5.1.
    * ``shared_stages``, ``register_stages``: versions, 2 to 8 and 1 to 4; None: the model's choice. Annotation
      ``tvm_ext.pipeline_stages`` of a block or an allocation says it for one buffer.
    * ``always``: at least two versions wherever that is legal, even where the model predicts no gain.
    * ``bulk_copies``: load whole tiles by bulk copies and mbarriers instead of cp.async, on devices of compute
      capability 9.0 and later, where that is legal.
    * ``replace_stock``: drop stock TVM's pipeline annotations (dlight's, MetaSchedule's), which otherwise keep a
      function as it is.
    * ``wishes``: all of these but the device at once, instead.

    Raises InputError for annotations that contradict each other, a mode or a number that does not exist, a missing
    target.
    """

    def __init__(
        self,
        device: str | DeviceSpec | None = None,
        mode: PipeliningMode = "full",
        shared_stages: int | None = None,
        register_stages: int | None = None,
        always: bool = False,
        bulk_copies: bool = False,
        replace_stock: bool = False,
        wishes: Wishes | None = None,
    ) -> None:
        _check_count("shared_stages", shared_stages, 1, 8)
        _check_count("register_stages", register_stages, 1, 4)
        self.device = device
        self.wishes = wishes or Wishes(
            mode=mode, shared_stages=shared_stages, register_stages=register_stages, always=always,
            bulk_copies=bulk_copies, replace_stock=replace_stock,
        )  # fmt: skip

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in functions_of(mod).items():
            if is_thread_bound(func) and _attribute(func, PIPELINE_PLAN, PIPELINED) is None:
                choice = record_of(func, CHOICE, KernelChoice)  # None for kernels from elsewhere
                planned = choice.gpu if choice is not None else ()
                plan = plan_pipelines(func, _device_of(func, self.device), self.wishes, planned)
                result[gv] = func.with_attr(PIPELINE_PLAN, to_json(plan))
        return result


@module_pass(opt_level=0, name="tvm_ext.InjectPipelines")
class InjectPipelines:
    """Carry out the plans of `AutoPipeline` (ALCOP §3): loops that load tiles some iterations before they use them.

    Functions become loops over flat buffers, with attribute ``tvm_ext.pipelined``. ``device`` as for `AutoPipeline`.

    Raises InputError where a plan does not fit its function: the function was changed in between.
    """

    def __init__(self, device: str | DeviceSpec | None = None) -> None:
        self.device = device

    def transform_module(self, mod: IRModule, _ctx: PassContext) -> IRModule:
        result = copy_module(mod)
        for gv, func in functions_of(mod).items():
            text = _attribute(func, PIPELINE_PLAN)
            if text is not None:
                result[gv] = _with_plan(func, from_json(PipelinePlan, text), _device_of(func, self.device))
        return result


def _with_plan(func: PrimFunc, plan: PipelinePlan, device: DeviceSpec) -> PrimFunc:
    """``func`` with ``plan`` carried out, its record brought up to date where construction left one."""
    choice = record_of(func, CHOICE, KernelChoice)
    if choice is None:
        return inject_pipelines(func, plan, device)
    made = inject_pipelines(func, plan, device, choice.gpu)
    return made.with_attr(CHOICE, to_json(recorded(choice, made, plan)))


# --- functions and devices ----------------------------------------------------------------------------------------


def _attribute(func: PrimFunc, *names: str) -> str | None:
    attributes = func.attrs or {}
    return next((str(attributes[name]) for name in names if name in attributes), None)


def _device_of(func: PrimFunc, device: str | DeviceSpec | None) -> DeviceSpec:
    if isinstance(device, DeviceSpec):
        return device
    target = device
    if target is None and func.attrs and "target" in func.attrs:
        target = func.attrs["target"]
    if target is None:
        target = Target.current(allow_none=True)
    if target is None:
        raise InputError(
            "it is not known which device to pipeline for",
            'name one: AutoPipeline("nvidia-a100"), or run the pass under a target',
        )
    return device_for_target(target)[0]


def _check_count(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
        raise InputError(f"{name} is {value!r}", f"an integer from {least} to {most}, or None")
