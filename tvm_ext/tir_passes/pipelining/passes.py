"""The passes `AutoPipeline` (detect and plan) and `InjectPipelines` (transform and lower), for any GPU schedule.

mod = tvm.transform.Sequential([AutoPipeline("nvidia-a100"), InjectPipelines("nvidia-a100")])(mod)
library = tvm.compile(mod, target)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tvm_ext._tvm import For, ForKind, PrimFunc, Target, copy_module, module_pass, structural_walk, tirx
from tvm_ext.devices.device_db import device_for_target
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.records.pipelines import PIPELINE_PLAN, PipelinedBuffer, PipelinePlan, PipelineRefusal
from tvm_ext.records.serialise import from_json, to_json

from .analyse import REGISTER_LEVEL, SHARED_LEVEL, LoadUse, find_load_use, fuses_with
from .detect import read_hints
from .function import Function
from .loops import bytes_per_element, rename_apart, scope_of, size_of, to_loops
from .lower import lower_primitives
from .lower_bulk import BulkPipeline, lower_bulk_primitives, with_bulk_copies
from .plan import PipeliningMode, Wishes, decide, make_loader, move_functions
from .private_registers import group_loads, ungroup_loads
from .stock_pipelines import already_pipelined, without_stock_pipelines
from .transform import LoadedBuffer, Pipeline, Transformer, loaded_buffer
from .versions import version_elements

PIPELINED = "tvm_ext.pipelined"
"""PrimFunc attribute of a transformed function: the `PipelinePlan` that was carried out, as JSON."""


@module_pass(opt_level=0, name="tvm_ext.AutoPipeline")
class AutoPipeline:
    """Find what can be loaded ahead of its use in every GPU function, and choose how far (ALCOP §2, §4).

    The plan becomes attribute ``tvm_ext.pipeline_plan``; bodies stay as they are. CPU functions, functions that have a
    plan and kernels that somebody has pipelined already are left alone.

    Parameters
    ----------
    device
        A device's name, a target, a `DeviceSpec`; None: the function's ``target`` attribute or the current target.
    mode
        ``"full"``; ``"multistage"`` without registers; ``"double"`` with two versions of shared memory only;
        ``"none"``: the ablations of §5.1.
    shared_stages, register_stages
        Versions, 2 to 8 and 1 to 4; None: the model's choice. Annotation ``tvm_ext.pipeline_stages`` of a block or an
        allocation says it for one buffer.
    always
        At least two versions wherever that is legal, even where the model predicts no gain.
    replace_stock
        Drop stock TVM's pipeline annotations (dlight's, MetaSchedule's), which otherwise keep a function as it is.
    bulk_copies
        Load whole tiles by bulk copies and mbarriers instead of cp.async, on devices of compute capability 9.0 and
        later, where that is legal.
    replace_stock
        Drop stock TVM's pipeline annotations (dlight's, MetaSchedule's), which otherwise keep a function as it is.

    Raises
    ------
    InputError
        for annotations that contradict each other, a mode or a number that does not exist, a missing target.
    """

    def __init__(
        self,
        device: Any = None,
        mode: PipeliningMode = "full",
        shared_stages: int | None = None,
        register_stages: int | None = None,
        always: bool = False,
        bulk_copies: bool = False,
        replace_stock: bool = False,
    ) -> None:
        _check_count("shared_stages", shared_stages, 1, 8)
        _check_count("register_stages", register_stages, 1, 4)
        self.device = device
        self.wishes = Wishes(
            mode=mode, shared_stages=shared_stages, register_stages=register_stages, always=always,
            bulk_copies=bulk_copies, replace_stock=replace_stock,
        )  # fmt: skip

    def transform_module(self, mod: Any, _ctx: Any) -> Any:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            if not isinstance(func, PrimFunc) or not _is_for_gpu(func):
                continue
            if _attribute(func, PIPELINE_PLAN, PIPELINED) is None:
                plan = plan_pipelines(func, _device_of(func, self.device), self.wishes)
                result[gv] = func.with_attr(PIPELINE_PLAN, to_json(plan))
        return result


@module_pass(opt_level=0, name="tvm_ext.InjectPipelines")
class InjectPipelines:
    """Carry out the plans of `AutoPipeline` (ALCOP §3): loops that load tiles some iterations before they use them.

    Functions become loops over flat buffers, with attribute ``tvm_ext.pipelined``. ``device`` as for `AutoPipeline`.

    Raises
    ------
    InputError
        where a plan does not fit its function: the function was changed in between.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def transform_module(self, mod: Any, _ctx: Any) -> Any:
        result = copy_module(mod)
        for gv, func in mod.functions_items():
            text = _attribute(func, PIPELINE_PLAN) if isinstance(func, PrimFunc) else None
            if text is not None:
                plan = from_json(PipelinePlan, text)
                result[gv] = inject_pipelines(func, plan, _device_of(func, self.device))
        return result


def plan_pipelines(func: Any, device: DeviceSpec, wishes: Wishes | None = None) -> PipelinePlan:
    """The plan for one thread-bound PrimFunc, scheduled or not; raises InputError as `AutoPipeline` does."""
    return _planned(func, device, wishes or Wishes())[0]


def pipelined(func: Any, device: DeviceSpec, wishes: Wishes) -> tuple[Any, PipelinePlan]:
    """Both passes at once for one function, which is lowered to loops but once."""
    plan, loops = _planned(func, device, wishes)
    return _injected(func, plan, device, loops), plan


def _planned(func: Any, device: DeviceSpec, wishes: Wishes) -> tuple[PipelinePlan, Any]:
    """The plan, and the function as loops, where it got so far."""
    hints = read_hints(func)
    replaces = False
    done = already_pipelined(func)
    if done is not None and wishes.replace_stock and wishes.mode != "none":
        func, replaces = without_stock_pipelines(func), True
        done = already_pipelined(func)
    if done is not None:
        if hints:
            raise InputError(
                f"{done}, and tvm_ext.pipeline_stages asks for another pipeline of {', '.join(hints)}",
                "remove one of the two, or pass replace_stock=True",
            )
        refusal = PipelineRefusal(buffer="*", scope="", rule="already pipelined", reason=f"{done}: left as it is")
        return PipelinePlan(refusals=(refusal,)), None
    if hints:
        wishes = replace(wishes, by_buffer=hints)
    loops = _grouped_loops(func)
    plan = replace(decide(Function(loops), device, wishes), replaces_stock=replaces)
    if wishes.bulk_copies and plan.buffers:
        plan = _by_bulk_copies(Function(loops), plan, device)
    return plan, loops


def _grouped_loops(func: Any) -> Any:
    """The form that detection and transformation look at."""
    loops = to_loops(func)
    return loops.with_body(group_loads(loops.body))


def _by_bulk_copies(function: Function, plan: PipelinePlan, device: DeviceSpec) -> PipelinePlan:
    """``plan`` by bulk copies in the loops where they are legal; its notes say why not, of the others."""
    function = move_functions(function, plan.moved)
    _, bulk, reasons = with_bulk_copies(_pipelines(function, plan, device), function, device)
    return replace(plan, bulk_copies=bool(bulk), notes=(*plan.notes, *reasons))


def inject_pipelines(func: Any, plan: PipelinePlan, device: DeviceSpec) -> Any:
    """``func`` with ``plan`` carried out for ``device``; unchanged but for its attributes where nothing is planned."""
    return _injected(func, plan, device, None)


def _injected(func: Any, plan: PipelinePlan, device: DeviceSpec, loops: Any) -> Any:
    if not plan.buffers:
        return func.without_attr(PIPELINE_PLAN).with_attr(PIPELINED, to_json(plan))
    staged, lowering = with_primitives(func, plan, device, loops)
    return lowered(staged, lowering).with_attr(PIPELINED, to_json(plan))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How the primitives of each pipeline are lowered, by its number."""

    asynchronous: Mapping[int, bool]
    scopes: Mapping[int, str]
    bulk: Mapping[int, BulkPipeline] = field(default_factory=dict)


def with_primitives(func: Any, plan: PipelinePlan, device: DeviceSpec, loops: Any = None) -> tuple[Any, Lowering]:
    """``func`` transformed, synchronised by the four primitives, and how they are to be lowered.

    ``loops`` is what `to_loops` made of it, where that is at hand.
    """
    if loops is None:
        loops = _grouped_loops(without_stock_pipelines(func) if plan.replaces_stock else func)
    function = move_functions(Function(loops), plan.moved)
    pipelines = _pipelines(function, plan, device)
    bulk: dict[int, BulkPipeline] = {}
    if plan.bulk_copies:
        pipelines, bulk, _ = with_bulk_copies(pipelines, function, device)
    body = Transformer(pipelines, unroll_hint=device.kind != "rocm").rewrite(function.body)
    staged = function.func.with_body(body).without_attr(PIPELINE_PLAN)
    shared = [p for p in pipelines if p.buffers[0].loader is not None]
    lowering = Lowering(
        asynchronous={p.number: not any(s.loader is not None and s.loader.is_late for s in p.buffers) for p in shared},
        scopes={p.number: str(p.buffers[0].versions.new.ty.storage_scope) for p in shared},
        bulk=bulk,
    )
    return staged, lowering


def lowered(func: Any, lowering: Lowering) -> Any:
    """``func`` with its primitives as instructions of the target."""
    body = lower_bulk_primitives(ungroup_loads(func.body), lowering.bulk)
    body = lower_primitives(body, dict(lowering.asynchronous), dict(lowering.scopes))
    return rename_apart(func.with_body(body))


# --- from the plan to pipelines -----------------------------------------------------------------------------------
def _pipelines(function: Function, plan: PipelinePlan, device: DeviceSpec) -> list[Pipeline]:
    """One for each loop of shared memory, with the register pipeline that runs on inside it, or beside it."""
    found = [(item, _load_use(function, item)) for item in plan.buffers]
    shared = _by_loop([(item, use) for item, use in found if item.level == SHARED_LEVEL])
    registers = _by_loop([(item, use) for item, use in found if item.level == REGISTER_LEVEL])
    scope = _scope_for(function, plan, device)
    pipelines: list[Pipeline] = []
    fused: list[PlannedLoads] = []
    for members in shared:
        outer = [use for _, use in members]
        inner = next((g for g in registers if fuses_with([use for _, use in g], outer, function) is None), None)
        inner_pipeline = None
        if inner is not None:
            fused.append(inner)
            inner_pipeline = _register_pipeline(len(shared) + len(fused), inner)
        pipelines.append(_shared_pipeline(len(pipelines), members, inner_pipeline, function, device, scope))
    alone = [group for group in registers if not any(group is other for other in fused)]
    pipelines += [_register_pipeline(2 * len(shared) + 1 + place, group) for place, group in enumerate(alone)]
    return pipelines


PlannedLoads = list[tuple[PipelinedBuffer, LoadUse]]


def _load_use(function: Function, item: PipelinedBuffer) -> LoadUse:
    if item.name not in function.buffers:
        raise InputError(f"the plan pipelines {item.name}, which the function does not allocate", "plan it again")
    try:
        return find_load_use(function, item.name)
    except IllegalRewrite as refusal:
        raise InputError(f"the plan pipelines {item.name}, but {refusal.problem}", "plan it again") from refusal


def _by_loop(members: PlannedLoads) -> list[PlannedLoads]:
    groups: list[PlannedLoads] = []
    for item, use in members:
        group = next((g for g in groups if g[0][1].loop.same_as(use.loop)), None)
        if group is None:
            groups.append([(item, use)])
        else:
            group.append((item, use))
    return groups


def _shared_pipeline(
    number: int,
    members: PlannedLoads,
    inner: Pipeline | None,
    function: Function,
    device: DeviceSpec,
    scope: str | None,
) -> Pipeline:
    loop = members[0][1].loop
    return Pipeline(
        number=number,
        loop=loop,
        buffers=tuple(_loaded(item, use, function, device, scope) for item, use in members),
        inner=inner,
        entry_barrier=function.may_follow_shared(loop),
    )


def _loaded(
    item: PipelinedBuffer, use: LoadUse, function: Function, device: DeviceSpec, scope: str | None
) -> LoadedBuffer:
    try:
        loader = make_loader(function, use, device)
    except IllegalRewrite as refusal:
        raise InputError(
            f"the plan pipelines {item.name}, but {refusal.problem}", "plan it for this device"
        ) from refusal
    return loaded_buffer(use, item.stages, loader, scope)


def _register_pipeline(number: int, members: PlannedLoads) -> Pipeline:
    return Pipeline(
        number=number, loop=members[0][1].loop, buffers=tuple(loaded_buffer(use, item.stages) for item, use in members)
    )


def _scope_for(function: Function, plan: PipelinePlan, device: DeviceSpec) -> str | None:
    """``"shared.dyn"`` where a kernel's static shared memory would not do; None: as it is."""
    static = static_shared_bytes(device)
    if shared_limit_bytes(device) <= static:
        return None
    versions = {item.name: item.stages for item in plan.buffers}
    for launch in function.launches or [function.body]:
        total = 0
        for name, allocation in function.buffers.items():
            buffer = allocation.buffer
            if scope_of(buffer) == "shared" and function.is_in(launch, allocation):
                elements = version_elements(buffer) * versions[name] if name in versions else size_of(buffer) or 0
                total += elements * bytes_per_element(str(buffer.ty.dtype))
        if total > static:
            return "shared.dyn"
    return None


# --- functions and devices ----------------------------------------------------------------------------------------
def _is_for_gpu(func: Any) -> bool:
    found: list[bool] = []

    def loop(node: Any) -> None:
        if node.kind == ForKind.THREAD_BINDING:
            found.append(True)

    def attribute(node: Any) -> None:
        if node.attr_key == "thread_extent":
            found.append(True)

    structural_walk(func.body, [(For, loop), (tirx.AttrStmt, attribute)], order="pre")
    return bool(found)


def _attribute(func: Any, *names: str) -> str | None:
    attributes = func.attrs or {}
    return next((str(attributes[name]) for name in names if name in attributes), None)


def _device_of(func: Any, device: Any) -> DeviceSpec:
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
    return device_for_target(target, measure=False)[0]


def _check_count(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most):
        raise InputError(f"{name} is {value!r}", f"an integer from {least} to {most}, or None")
