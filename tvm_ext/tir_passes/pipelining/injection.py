"""A plan carried out: the function's loops with their loads moved ahead, then lowered for the device (ALCOP §3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tvm_ext._tvm import PrimFunc
from tvm_ext.devices.hal import DeviceSpec
from tvm_ext.devices.occupancy import shared_limit_bytes, static_shared_bytes
from tvm_ext.errors import IllegalRewrite, InputError
from tvm_ext.records.pipelines import PIPELINE_PLAN, PipelinedBuffer, PipelinePlan

from .analyse import REGISTER_LEVEL, SHARED_LEVEL, LoadUse, find_load_use, fuses_with
from .function import Function
from .loops import bytes_per_element, rename_apart, scope_of, size_of, to_loops
from .lower import lower_primitives
from .lower_bulk import BulkPipeline, lower_bulk_primitives, with_bulk_copies
from .plan import make_loader, move_functions
from .private_registers import group_loads, ungroup_loads
from .stock_pipelines import without_stock_pipelines
from .transform import LoadedBuffer, Pipeline, Transformer, loaded_buffer
from .versions import version_elements


def grouped_loops(func: PrimFunc) -> PrimFunc:
    """The form that detection and transformation look at."""
    loops = to_loops(func)
    return loops.with_body(group_loads(loops.body))


def by_bulk_copies(function: Function, plan: PipelinePlan, device: DeviceSpec) -> PipelinePlan:
    """``plan`` by bulk copies in the loops where they are legal; its notes say why not, of the others."""
    function = move_functions(function, plan.moved)
    _, bulk, reasons = with_bulk_copies(_pipelines(function, plan, device), function, device)
    return replace(plan, bulk_copies=bool(bulk), notes=(*plan.notes, *reasons))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowering:
    """How the primitives of each pipeline are lowered, by its number."""

    asynchronous: Mapping[int, bool]
    scopes: Mapping[int, str]
    bulk: Mapping[int, BulkPipeline] = field(default_factory=dict)


def with_primitives(
    func: PrimFunc, plan: PipelinePlan, device: DeviceSpec, loops: PrimFunc | None = None
) -> tuple[PrimFunc, Lowering]:
    """``func`` transformed, synchronised by the four primitives, and how they are to be lowered.

    ``loops`` is what `to_loops` made of it, where that is at hand.
    """
    if loops is None:
        loops = grouped_loops(without_stock_pipelines(func) if plan.replaces_stock else func)
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


def lowered(func: PrimFunc, lowering: Lowering) -> PrimFunc:
    """``func`` with its primitives as instructions of the target."""
    body = lower_bulk_primitives(ungroup_loads(func.body), lowering.bulk)
    body = lower_primitives(body, dict(lowering.asynchronous), dict(lowering.scopes))
    return rename_apart(func.with_body(body))


def _pipelines(function: Function, plan: PipelinePlan, device: DeviceSpec) -> list[Pipeline]:
    """One for each loop of shared memory, with the register pipeline that runs on inside it, or beside it."""
    found = [(buffer, _load_use(function, buffer)) for buffer in plan.buffers]
    shared = _by_loop([(planned, use) for planned, use in found if planned.level == SHARED_LEVEL])
    registers = _by_loop([(planned, use) for planned, use in found if planned.level == REGISTER_LEVEL])
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
    pipelines += [_register_pipeline(2 * len(shared) + 1 + position, group) for position, group in enumerate(alone)]
    return pipelines


PlannedLoads = list[tuple[PipelinedBuffer, LoadUse]]


def _load_use(function: Function, planned: PipelinedBuffer) -> LoadUse:
    if planned.name not in function.buffers:
        raise InputError(f"the plan pipelines {planned.name}, which the function does not allocate", "plan it again")
    try:
        return find_load_use(function, planned.name)
    except IllegalRewrite as refusal:
        raise InputError(f"the plan pipelines {planned.name}, but {refusal.problem}", "plan it again") from refusal


def _by_loop(members: PlannedLoads) -> list[PlannedLoads]:
    groups: list[PlannedLoads] = []
    for planned, use in members:
        group = next((g for g in groups if g[0][1].loop.same_as(use.loop)), None)
        if group is None:
            groups.append([(planned, use)])
        else:
            group.append((planned, use))
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
        buffers=tuple(_loaded(planned, use, function, device, scope) for planned, use in members),
        inner=inner,
        entry_barrier=function.may_follow_shared(loop),
    )


def _loaded(
    planned: PipelinedBuffer, use: LoadUse, function: Function, device: DeviceSpec, scope: str | None
) -> LoadedBuffer:
    try:
        loader = make_loader(function, use, device)
    except IllegalRewrite as refusal:
        raise InputError(
            f"the plan pipelines {planned.name}, but {refusal.problem}", "plan it for this device"
        ) from refusal
    return loaded_buffer(use, planned.stages, loader, scope)


def _register_pipeline(number: int, members: PlannedLoads) -> Pipeline:
    return Pipeline(
        number=number,
        loop=members[0][1].loop,
        buffers=tuple(loaded_buffer(use, planned.stages) for planned, use in members),
    )


def _scope_for(function: Function, plan: PipelinePlan, device: DeviceSpec) -> str | None:
    """``"shared.dyn"`` where a kernel's static shared memory would not do; None: as it is."""
    static = static_shared_bytes(device)
    if shared_limit_bytes(device) <= static:
        return None
    versions = {buffer.name: buffer.stages for buffer in plan.buffers}
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
